"""Fixtures that more than one folder of tests uses."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import re
import signal
import threading
from collections.abc import Generator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from hypothesis import HealthCheck, settings

# A shell that starts the tests in the background lets them ignore interrupts, and so every process of theirs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Every run tries the same few examples; `make fuzz` goes looking for new ones.
settings.register_profile("quick", max_examples=100, deadline=None, derandomize=True)
settings.register_profile(
    "long",
    max_examples=int(os.environ.get("EXAMPLES", "10000")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("quick")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave out of every garbage collection what stays until the end: modules, families and tests.

    What comes later mostly stays too, so that the rest is gone through more seldom than Python would.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 10)
        gc.enable()


COMMIT = "0123456789abcdef0123456789abcdef01234567"


class LoopbackHub:
    """A Hugging Face hub of local folders, as much of it as huggingface_hub asks for.

    Attributes:
        repos: repository id to folder; "main" and the commit are its revisions.
        gated: repositories that answer 403.
        ranges: False makes the server send whole files, as some mirrors do.
        sent: bytes of file content sent so far.
    """

    def __init__(self) -> None:
        self.repos: dict[str, Path] = {}
        self.gated: set[str] = set()
        self.ranges = True
        self.sent = 0
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None:
                """Stay silent."""

            def do_GET(self) -> None:
                hub._answer(self, body=True)

            def do_HEAD(self) -> None:
                hub._answer(self, body=False)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering; the address refuses connections from then on."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, request: BaseHTTPRequestHandler, body: bool) -> None:
        path = unquote(urlsplit(request.path).path)
        api = re.fullmatch(r"/api/models/(.+?)(?:/(revision|tree)/([^/]+))?", path)
        file = re.fullmatch(r"/(.+?)/resolve/([^/]+)/(.+)", path)
        repo, revision = (api[1], api[3]) if api else (file[1], file[2]) if file else ("", None)
        if repo in self.gated:
            self._send(request, 403, {"X-Error-Code": "GatedRepo"}, b"", body)
        elif repo not in self.repos:
            self._send(request, 404, {"X-Error-Code": "RepoNotFound"}, b"", body)
        elif revision not in (None, "main", COMMIT):
            self._send(request, 404, {"X-Error-Code": "RevisionNotFound"}, b"", body)
        elif api:
            self._send(request, 200, {}, json.dumps(self._listing(repo, api[2] == "tree")).encode(), body)
        else:
            self._send_file(request, self.repos[repo] / file[3], body)

    def _listing(self, repo: str, tree: bool) -> object:
        folder = self.repos[repo]
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        names = [path.relative_to(folder).as_posix() for path in files]
        if tree:
            return [
                {"type": "file", "path": name, "size": path.stat().st_size, "oid": _etag(path)}
                for name, path in zip(names, files, strict=True)
            ]
        return {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}

    def _send_file(self, request: BaseHTTPRequestHandler, path: Path, body: bool) -> None:
        if not path.is_file():
            self._send(request, 404, {"X-Error-Code": "EntryNotFound"}, b"", body)
            return
        content = path.read_bytes()
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_etag(path)}"', "Accept-Ranges": "bytes"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
        status = 200
        if wanted and self.ranges:
            begin, end = int(wanted[1]), min(int(wanted[2] or len(content)) + 1, len(content))
            if begin >= len(content):
                self._send(request, 416, {"Content-Range": f"bytes */{len(content)}"}, b"", body)
                return
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
            content, status = content[begin:end], 206
        self._send(request, status, headers, content, body)
        self.sent += len(content) if body else 0

    def _send(
        self,
        request: BaseHTTPRequestHandler,
        status: int,
        headers: dict[str, str],
        content: bytes,
        body: bool,
    ) -> None:
        request.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            request.send_header(name, value)
        request.end_headers()
        if body:
            try:
                request.wfile.write(content)
            except ConnectionError:
                # A reader that has seen enough of a file hangs up.
                request.close_connection = True


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LoopbackHub]:
    """A hub on loopback which huggingface_hub takes for the real one, here and in child processes."""
    from huggingface_hub import close_session, constants

    server = LoopbackHub()
    cache = str(tmp_path / "hub_cache")
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, server.endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", cache)
    monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
    monkeypatch.setenv("HF_HUB_CACHE", cache)
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    close_session()
    yield server
    server.close()
    close_session()

"""Checkpoints on the Hugging Face hub: download one, or look into it without downloading.

huggingface_hub is imported inside the functions, so that everything local works and starts without it.
``HF_ENDPOINT``, ``HF_TOKEN``, ``HF_HUB_CACHE`` and ``HF_HUB_OFFLINE`` act as they do in that library.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from mlx_experts.registry.checkpoint.checkpoint import MAX_JSON_BYTES, Checkpoint
from mlx_experts.registry.checkpoint.other_formats import other_file
from mlx_experts.registry.checkpoint.safetensors_header import (
    LENGTH_BYTES,
    Header,
    header_length,
    parse_header,
)
from mlx_experts.registry.errors import CheckpointError, SettingError

# Nothing that Python could run, nothing from a sub-folder (other formats of the same weights live there).
_SMALL_FILES = ("*.json", "*.jsonl", "*.jinja", "*.txt", "*.model", "*.tiktoken")
_IGNORED = ("*/*", "*.py", "*.pyc")

# Said where the hub fails: most who meet it have mistyped a folder.
_NO_FOLDER = "No folder here has this name. Give one, or connect to the network and try again."

_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Most headers are shorter, so that one request is enough.
_FIRST_BYTES = 128 * 1024
_TIMEOUT_S = 30
_PARALLEL_REQUESTS = 8


def resolve_path(path_or_repo: Path | str, revision: str | None = None) -> Path:
    """The local folder of a checkpoint, downloaded to the hub's cache first where need be.

    Args:
        path_or_repo: a folder, or a repository id such as ``mlx-community/Qwen3-30B-A3B-4bit``.
        revision: branch, tag or commit of the repository.

    Raises:
        CheckpointError: there is no such folder or repository, or it cannot be downloaded.
    """
    return local_folder(path_or_repo) or _download(str(path_or_repo), revision)


def local_folder(path_or_repo: Path | str) -> Path | None:
    """The folder that is meant, or None where only a repository of the hub can be.

    Raises:
        CheckpointError: it is a file, or a path to nothing.
    """
    if not isinstance(path_or_repo, str | Path):
        raise SettingError(
            "a checkpoint is named by a folder or by the id of a repository",
            expected="a string or a pathlib.Path",
            found=f"{type(path_or_repo).__name__}: {path_or_repo!r}"[:80],
        )
    path, text = Path(path_or_repo).expanduser(), str(path_or_repo)
    if not text.strip():
        raise SettingError(
            "a checkpoint's name is empty", expected="a folder or a repository id", found=repr(text)
        )
    if path.is_dir():
        return path
    if path.exists():
        other = other_file(path.name)
        raise CheckpointError(
            "A checkpoint is a folder, not a file." if other is None else f"This is {other.what}.",
            where=text,
            expected="the folder that holds config.json",
            hint=f"Give {path.resolve().parent}" if other is None else other.hint,
        )
    if "://" in text:
        raise CheckpointError(
            "A checkpoint is not named by an address.",
            where=text,
            expected="a folder, or a repository id such as owner/name",
        )
    if isinstance(path_or_repo, Path) or _looks_local(text):
        raise CheckpointError(
            "The checkpoint's folder does not exist.",
            where=text,
            expected="a folder with config.json and *.safetensors",
        )
    return None


def remote_checkpoint(repo_id: str, revision: str | None = None) -> Checkpoint:
    """What a hub repository holds, from its config, its index and ranged reads of its tensor files.

    Raises:
        CheckpointError: the hub cannot be reached, has no such repository or revision, or the checkpoint is
            not sound.
    """
    return Checkpoint.read(HubSource(repo_id, revision), None)


def _looks_local(text: str) -> bool:
    return text.startswith((".", "/", "~")) or "\\" in text or text.count("/") > 1


def _download(repo_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    folder = Path()
    # Some repositories hold the same weights under a second name, so that all *.safetensors is a last resort.
    for weights in ("model*.safetensors", "*.safetensors"):
        with hub_errors(repo_id, revision):
            folder = Path(
                snapshot_download(
                    repo_id,
                    revision=revision,
                    allow_patterns=[*_SMALL_FILES, weights],
                    ignore_patterns=list(_IGNORED),
                )
            )
        if any(folder.glob("*.safetensors")):
            break
    return folder


class HubSource:
    """The files of a hub repository at one commit, read in ranges and never stored."""

    def __init__(self, repo_id: str, revision: str | None = None) -> None:
        from huggingface_hub import HfApi

        self._repo_id = repo_id
        with hub_errors(repo_id, revision):
            info = HfApi().model_info(repo_id, revision=revision, timeout=_TIMEOUT_S)
        # The commit is fixed here, so that a push between two requests cannot mix two versions.
        self._revision = info.sha or revision or "main"
        self._names = {file.rfilename for file in info.siblings or () if "/" not in file.rfilename}

    def where(self, name: str) -> str:
        return f"hf://{self._repo_id}/{name}"

    def names(self) -> Collection[str]:
        return self._names

    def read(self, name: str) -> bytes:
        raw, size = self._range(name, 0, MAX_JSON_BYTES)
        if size > MAX_JSON_BYTES:
            raise CheckpointError(
                "A JSON file is too long.", where=self.where(name), expected=f"at most {MAX_JSON_BYTES} bytes"
            )
        return raw

    def headers(self, names: Sequence[str]) -> list[Header]:
        with ThreadPoolExecutor(_PARALLEL_REQUESTS) as pool:
            return list(pool.map(self._header, names))

    def _header(self, name: str) -> Header:
        where = self.where(name)
        start, file_bytes = self._range(name, 0, _FIRST_BYTES)
        length = header_length(start, file_bytes, where)
        have = len(start)
        if have < LENGTH_BYTES + length:
            start += self._range(name, have, LENGTH_BYTES + length - have)[0]
        return parse_header(start[LENGTH_BYTES : LENGTH_BYTES + length], file_bytes, where, length=length)

    def _range(self, name: str, begin: int, count: int) -> tuple[bytes, int]:
        """At most ``count`` bytes of a file from ``begin``, and the size of the whole file."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

        url = hf_hub_url(self._repo_id, name, revision=self._revision)
        # A compressed answer would have neither the file's bytes nor its size.
        wanted = {"Range": f"bytes={begin}-{begin + count - 1}", "Accept-Encoding": "identity"}
        headers = {**build_hf_headers(), **wanted}
        with (
            hub_errors(self._repo_id, self._revision),
            http_stream_backoff("GET", url, headers=headers, timeout=_TIMEOUT_S, max_retries=2) as response,
        ):
            if response.status_code == 416 and begin == 0:
                return b"", 0
            hf_raise_for_status(response)
            partial = response.status_code == 206
            if begin and not partial:
                raise CheckpointError(
                    "The hub does not serve parts of files.",
                    where=self.where(name),
                    expected="206 Partial Content",
                    found=f"status {response.status_code}",
                    hint="Download the checkpoint and inspect the folder.",
                )
            total = (
                response.headers.get("Content-Range", "").rpartition("/")[2]
                if partial
                else response.headers.get("Content-Length", "")
            )
            if not total.isdecimal():
                raise CheckpointError("The hub does not say how long a file is.", where=self.where(name))
            body = bytearray()
            # An answer may be longer than asked for; the rest of a 5 GB shard is not fetched for nothing.
            for chunk in response.iter_bytes():
                body += chunk
                if len(body) >= count:
                    break
        return bytes(body[:count]), int(total)


@contextmanager
def hub_errors(repo_id: str, revision: str | None) -> Iterator[None]:
    """Turn what huggingface_hub raises into a CheckpointError that says what to do."""
    from huggingface_hub import errors

    where = f"{repo_id} at {revision}" if revision else repo_id
    # The hub's own error derives from its HTTP client's base error, whichever client it uses.
    transport_error = cast(type[Exception], errors.HfHubHTTPError.__mro__[1])
    try:
        yield
    except errors.HFValidationError as error:
        raise CheckpointError(
            "This is neither a folder nor a repository id.",
            where=where,
            expected="a folder that exists, or owner/name",
            found=str(error).splitlines()[0],
        ) from None
    except errors.GatedRepoError:
        raise CheckpointError(
            "The hub repository is gated.",
            where=where,
            hint="Accept its terms on its page, then run `hf auth login`.",
        ) from None
    except errors.RepositoryNotFoundError:
        raise CheckpointError(
            "There is no such folder and no such hub repository.",
            where=where,
            hint="Check the spelling; for a private repository run `hf auth login`.",
        ) from None
    except errors.RevisionNotFoundError:
        raise CheckpointError("The hub repository has no such revision.", where=where) from None
    except errors.OfflineModeIsEnabled:
        raise CheckpointError(
            "The hub is switched off.", where=where, hint="Unset HF_HUB_OFFLINE, or give a local folder."
        ) from None
    except errors.LocalEntryNotFoundError as error:
        raise CheckpointError(
            "The hub cannot be reached and its cache does not hold the whole checkpoint.",
            where=where,
            found=_first_line(error),
            hint=_NO_FOLDER,
        ) from None
    except (transport_error, errors.XetDownloadError) as error:
        raise CheckpointError(
            "The hub did not answer as it should.", where=where, found=_first_line(error), hint=_NO_FOLDER
        ) from None
    except OSError as error:
        full = error.errno in _FULL_DISK
        raise CheckpointError(
            "There is no room on the disk for the checkpoint." if full else "The download cannot be stored.",
            where=str(error.filename or where),
            found=error.strerror or _first_line(error),
            hint="Free some space or set HF_HUB_CACHE to another disk, then try again: a download resumes."
            if full
            else "",
        ) from None


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)

"""mlx-lm's server on this package's engine: what its generating thread does between start and answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx_lm
import pytest
from dense_checkpoint import DEMO, write_dense

from mlx_experts import generate, load, trace
from mlx_experts.engine.loading import warm_up as warming
from mlx_experts.engine.tools.mlx_lm_tools import run_tool
from mlx_experts.registry.errors import CheckpointError

PROMPT = "A mixture-of-experts model"
Ask = Callable[..., str]


def text_of(path: Path) -> str:
    """What a checkpoint answers without a server."""
    return generate(*load(path), PROMPT, max_tokens=6)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Runs the server with its thread that generates, asked here in the place of its HTTP door."""
    server = import_module("mlx_lm.server")

    def run(arguments: list[str], use: Callable[[Ask, list[str]], None]) -> list[str]:
        told: list[str] = []

        def asking(host: str, port: int, generator: Any, *rest: Any) -> None:
            def ask(prompt: str = PROMPT, model: str = "default_model", tokens: int = 6) -> str:
                request = server.CompletionRequest("text", prompt, [], None, None)
                settings = server.GenerationArguments(
                    model=server.ModelDescription(model, "default_model", None),
                    sampling=server.SamplingArguments(0.0, 1.0, 0, 0.0, 0.0, 0.1),
                    logits=server.LogitsProcessorArguments(None, 0.0, 20, 0.0, 20, 0.0, 20),
                    stop_words=[],
                    max_tokens=tokens,
                    num_draft_tokens=3,
                    logprobs=False,
                    top_logprobs=-1,
                    seed=None,
                    chat_template_kwargs=None,
                )
                _, answer = generator.generate(request, settings)
                return "".join(each.text for each in answer)

            try:
                use(ask, told)
                assert generator.is_healthy
            finally:
                generator.stop_and_join()

        monkeypatch.setattr(server, "_run_http_server", asking)
        run_tool("server", arguments, tell=told.append)
        return told

    return run


@pytest.mark.report("T6")
def test_the_first_completion_finds_its_kernels_warm(
    serve: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every path and number of rows that it takes has run before it, and the log says so."""
    seen: dict[str, set[tuple[str, str]]] = {}

    def runs() -> set[tuple[str, str]]:
        return {(row.path, row.rows) for row in trace.snapshot()}

    def forget() -> None:
        seen.setdefault("warming", runs())
        type(trace).reset(trace)

    want = text_of(DEMO)

    def use(ask: Ask, told: list[str]) -> None:
        assert ask() == want
        assert told[-1].startswith("ready: warmed up in ")
        seen["first"] = runs()

    monkeypatch.setattr(warming.trace, "reset", forget, raising=False)
    told = serve(["--model", str(DEMO), "--port", "0"], use)
    progress = [text for text in told if text.startswith("warming up: ")]
    assert [text.split()[2] for text in progress] == ["1", "2", "4", "8"]
    assert ("fused", "1") in seen["first"]
    assert seen["first"] <= seen["warming"]


@pytest.mark.report("T2")
def test_a_dense_draft_model_and_a_request_for_a_dense_model_are_served(
    serve: Callable[..., list[str]], tmp_path: Path
) -> None:
    """mlx-lm's server alone lost its generating thread to the first."""
    dense = str(write_dense(tmp_path / "dense"))
    want, dense_text = text_of(DEMO), mlx_lm.generate(*mlx_lm.load(dense), PROMPT, max_tokens=6)

    def use(ask: Ask, told: list[str]) -> None:
        assert ask() == want
        assert ask(model=dense) == dense_text
        assert ask() == want

    told = serve(["--model", str(DEMO), "--draft-model", dense, "--port", "0"], use)
    assert sum("a dense model" in text for text in told) >= 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_server_whose_first_model_cannot_be_loaded_ends_and_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """mlx-lm's listens on, without its thread of generation."""
    server = import_module("mlx_lm.server")
    before = server.ModelProvider.load_default

    def listens(host: str, port: int, generator: Any) -> None:
        try:
            for _ in range(600):
                time.sleep(0.1)
        except KeyboardInterrupt:
            generator.stop_and_join()
            return
        raise AssertionError("nobody ended it")

    monkeypatch.setattr(server, "_run_http_server", listens)
    arguments = ["--model", str(DEMO), "--adapter-path", str(tmp_path / "adapters"), "--port", "0"]
    with pytest.raises(CheckpointError, match="no folder of adapters"):
        run_tool("server", arguments, tell=lambda text: None)
    assert server.ModelProvider.load_default is before


def test_a_request_for_a_model_that_is_refused_fails_alone(
    serve: Callable[..., list[str]], tmp_path: Path
) -> None:
    odd = write_dense(tmp_path / "odd", model_type="strange", architectures=["X"], num_experts=4)

    def use(ask: Ask, told: list[str]) -> None:
        want = ask()
        with pytest.raises(Exception, match="has experts"):
            ask(model=str(odd))
        assert ask() == want

    serve(["--model", str(DEMO), "--port", "0"], use)

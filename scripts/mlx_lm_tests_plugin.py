"""A pytest plugin for mlx-lm's own tests: builds this package's models there, and records what passed.

``MLX_LM_TESTS_ENGINE`` is ``mlx_lm`` or ``mlx_experts``; ``MLX_LM_TESTS_RESULTS`` names the results' file.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pkgutil
from pathlib import Path
from typing import Any

import mlx_lm.models
import pytest

OURS = os.environ["MLX_LM_TESTS_ENGINE"] == "mlx_experts"
RESULTS: dict[str, str] = {}
DETAILS: dict[str, str] = {}


def _plain(value: Any) -> Any:
    """Arguments of mlx-lm as the config that they were read from."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {key: _plain(each) for key, each in vars(value).items() if each is not None}
    return {key: _plain(each) for key, each in value.items()} if isinstance(value, dict) else value


def _model_of(theirs: type) -> Any:
    """A stand-in for mlx-lm's class that gives this package's model where a family fits the arguments."""

    def build(args: Any) -> Any:
        from mlx_experts.engine.models.factory import build as build_ours
        from mlx_experts.engine.models.known_families import catalog
        from mlx_experts.engine.models.model import ModelArgs
        from mlx_experts.registry.errors import UnknownFamilyError

        config = _plain(args)
        try:
            catalog().resolve(config)
        except UnknownFamilyError:
            return theirs(args)
        model = build_ours(ModelArgs.from_dict(config))
        model.eval()
        return model

    return build


class _Original:
    """A module of mlx-lm with the class that it had before, for families on mlx-lm's own model."""

    def __init__(self, module: Any) -> None:
        vars(self).update(_module=module, Model=module.Model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)


def _give_ours() -> None:
    from mlx_experts.engine.loading.doors import Doors, open_doors
    from mlx_experts.engine.models.known_families import catalog
    from mlx_experts.engine.models.mlx_lm_backbone import backbone_class

    for name in catalog().names():
        backbone = catalog().load(name).backbone
        if backbone is not None:
            made = backbone_class(backbone.module)
            made.source = _Original(made.source)
    known = {model_type for each in catalog().entries.values() for model_type in each.model_types}
    found = [each.name for each in pkgutil.iter_modules(mlx_lm.models.__path__) if each.name in known]
    # All before the first is changed: some are subclasses of others.
    for source in [importlib.import_module(f"mlx_lm.models.{name}") for name in found]:
        names = vars(source)
        if "Model" in names and "ModelArgs" in names and isinstance(names["Model"], type):
            source.Model = _model_of(names["Model"])
    doors = open_doors(Doors(tell=lambda text: None))
    doors.__enter__()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Open the doors before any test module is imported."""
    if OURS:
        _give_ours()


def pytest_runtest_logreport(report: Any) -> None:
    """Keep the worst outcome of a test, and of each of its subtests."""
    name = report.nodeid
    context = getattr(report, "context", None)
    if context is not None:
        words = ", ".join(f"{key}={value}" for key, value in (context.kwargs or {}).items())
        name = f"{name} [{context.msg or words}]"
    elif report.when != "call" and report.outcome == "passed":
        return
    if RESULTS.get(name) != "failed":
        RESULTS[name] = report.outcome
        if report.outcome == "failed":
            DETAILS[name] = str(report.longrepr).strip().splitlines()[-1][:300] if report.longrepr else ""


def pytest_sessionfinish() -> None:
    """Write the results."""
    results = {name: {"outcome": each, "says": DETAILS.get(name, "")} for name, each in RESULTS.items()}
    Path(os.environ["MLX_LM_TESTS_RESULTS"]).write_text(json.dumps(results, indent=1))

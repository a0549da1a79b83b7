"""The public surface is what it says, and grows by decision only."""

from __future__ import annotations

import inspect

import pytest

import mlx_experts

PUBLIC = [
    "__version__",
    "adopt",
    "batch_generate",
    "errors",
    "generate",
    "get_model_classes",
    "inspect",
    "load",
    "load_model",
    "record_routing",
    "save_model",
    "stream_generate",
    "trace",
]


def test_all_is_sorted_complete_and_as_decided() -> None:
    assert mlx_experts.__all__ == sorted(mlx_experts.__all__) == PUBLIC
    assert dir(mlx_experts) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    value = getattr(mlx_experts, name)
    assert inspect.getdoc(value)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        _ = mlx_experts.lode

"""What is declared as not supported, and what a user is told of it."""

from __future__ import annotations

import pytest

from mlx_experts.registry.catalog.catalog import Catalog
from mlx_experts.registry.catalog.unsupported import unsupported
from mlx_experts.registry.errors import RegistryError

# Words of the reasons that stand for "cannot be a text model that decodes token by token".
NOT_A_DECODER = ("denois", "diffusion", "encoder-decoder", "classifier", "vision backbone", "no experts")
OTHER = {"doge", "qwen3_5"}


@pytest.mark.parametrize("model_type", sorted(unsupported()))
def test_a_user_is_told_the_reason(model_type: str) -> None:
    with pytest.raises(RegistryError) as told:
        Catalog().for_config({"model_type": model_type, "architectures": ["NobodyForCausalLM"]})
    assert unsupported()[model_type] in str(told.value)


def test_nothing_is_declared_that_could_be_described() -> None:
    reasons = {name: reason for name, reason in unsupported().items() if name not in OTHER}
    assert [n for n, r in reasons.items() if not any(word in r for word in NOT_A_DECODER)] == []


def test_no_family_is_declared_too() -> None:
    catalog = Catalog()
    described = {name for family in catalog.names() for name in catalog.load(family).model_types} | set(
        catalog.names()
    )
    assert described & set(unsupported()) == set()

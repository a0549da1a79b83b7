"""What the kinds of decoder layers read is there, or the family file is refused."""

from __future__ import annotations

import pytest

from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.registry.errors import RegistryError, SpecError
from mlx_experts.registry.resolve.tiny_config import tiny_config

BY_KIND = {catalog().load(name).block.kind: name for name in sorted(catalog().names())}
WITH_NORMS = ("adjunct_experts", "dense_residual", "normed_residual", "normed_stream")


def build(kind: str, **changes: object) -> None:
    family = catalog().load(BY_KIND[kind])
    block = family.block.model_copy(update=changes)
    build_tiny(family.model_copy(update={"block": block}), tiny_config(family))


@pytest.mark.parametrize("norm", ["pre_mixer", "pre_mlp"])
@pytest.mark.parametrize("kind", WITH_NORMS)
def test_a_norm_that_a_kind_reads_is_demanded(kind: str, norm: str) -> None:
    with pytest.raises(SpecError, match=rf"of the kind '{kind}' lacks(?s:.*)no {norm}"):
        build(kind, **{norm: None})


@pytest.mark.parametrize("kind", WITH_NORMS)
def test_branches_of_such_a_kind_are_not_parallel(kind: str) -> None:
    with pytest.raises(RegistryError, match="parallel"):
        build(kind, parallel=True)


def test_options_of_a_second_half_need_an_attention_that_takes_options() -> None:
    family = catalog().load(BY_KIND["shortcut"])
    usual = catalog().load("qwen3_moe").attention
    options = {**family.block.options, "second": {"bias": True}}
    block = family.block.model_copy(update={"options": options})
    changed = family.model_copy(update={"block": block, "attention": usual})
    with pytest.raises(SpecError, match="its attention takes none"):
        build_tiny(changed, tiny_config(changed))

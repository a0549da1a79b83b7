"""What the kinds of decoder layers read is there, or the family file is refused."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_experts.engine.kernels import activations
from mlx_experts.engine.layers.mixers.relative import RelativeAttention
from mlx_experts.engine.layers.mlp import MLP
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.registry.errors import ConfigError, RegistryError, SpecError
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


@pytest.mark.parametrize("kind", [*WITH_NORMS, "early_router", "parallel_moe", "shortcut"])
def test_branches_of_such_a_kind_are_not_parallel(kind: str) -> None:
    with pytest.raises(SpecError, match=rf"of the kind '{kind}'(?s:.*)found: +parallel: true"):
        build(kind, parallel=True)


def test_branches_around_a_residual_form_are_not_parallel() -> None:
    """Each branch reads the stream and is written to it, whatever norms there are."""
    with pytest.raises(SpecError, match=r"of the kind 'residual'(?s:.*)found: +parallel: true"):
        build("residual", parallel=True)


def test_every_kind_of_a_family_is_tried_with_parallel_branches() -> None:
    assert set(BY_KIND) - {"standard"} == {
        *WITH_NORMS,
        "early_router",
        "parallel_moe",
        "residual",
        "shortcut",
    }


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("longest", 1, "so there are none"),
        ("streams", 1, "not as many streams"),
        ("boundary", [], "boundary"),
    ],
)
def test_ngrams_that_cannot_be_added_to_the_streams_are_refused(
    key: str, value: object, message: str
) -> None:
    family = catalog().load("qwen4_exp")
    options = family.block.options
    inject = {**options["inject"], "options": {**options["inject"]["options"], key: value}}
    block = family.block.model_copy(update={"options": {**options, "inject": inject}})
    changed = family.model_copy(update={"block": block})
    with pytest.raises(RegistryError, match=message):
        build_tiny(changed, tiny_config(changed))


def test_options_of_a_second_half_need_an_attention_that_takes_options() -> None:
    family = catalog().load(BY_KIND["shortcut"])
    usual = catalog().load("qwen3_moe").attention
    options = {**family.block.options, "second": {"bias": True}}
    block = family.block.model_copy(update={"options": options})
    changed = family.model_copy(update={"block": block, "attention": usual})
    with pytest.raises(SpecError, match="its attention takes none"):
        build_tiny(changed, tiny_config(changed))


def test_inputs_that_come_apart_meet_no_norm_and_a_mixer_that_takes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    family = catalog().load("inkling2")
    block = family.block.model_copy(update={"pre_mixer": "input_layernorm"})
    changed = family.model_copy(update={"block": block})
    with pytest.raises(SpecError, match=r"come apart(?s:.*)a norm before it"):
        build_tiny(changed, tiny_config(changed))
    monkeypatch.setattr(RelativeAttention, "takes_three", False)
    with pytest.raises(SpecError, match=r"come apart(?s:.*)RelativeAttention"):
        build_tiny(family, tiny_config(family))


def test_a_module_stands_in_no_array() -> None:
    family = catalog().load("qwen3_moe")
    block = family.block.model_copy(update={"post_mixer": "input_layernorm.weight.norm"})
    changed = family.model_copy(update={"block": block})
    with pytest.raises(SpecError, match=r"holds none(?s:.*)weight as a module"):
        build_tiny(changed, tiny_config(changed))


def test_a_gated_norm_may_stand_below_a_module() -> None:
    family = catalog().load("axk2")
    block = family.block.model_copy(update={"pre_mixer": "norms.before"})
    changed = family.model_copy(update={"block": block})
    model = build_tiny(changed, tiny_config(changed))
    assert np.isfinite(np.array(model(mx.array([[1, 2, 3]])).astype(mx.float32))).all()


def test_a_dense_mlp_without_a_width_is_refused() -> None:
    with pytest.raises(ConfigError, match="a dense MLP has no inner width"):
        MLP(64, 0, activations.make("swiglu"))

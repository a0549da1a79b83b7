"""Prediction heads, towers and pruned layers: what the text model lacks is dropped by a declared rule."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.inspect import inspect_checkpoint
from mlx_experts.registry.checkpoint.checkpoint import Checkpoint
from mlx_experts.registry.errors import ConfigError, TensorError
from mlx_experts.registry.resolve.planner import resolve
from mlx_experts.registry.resolve.tiny_config import tiny_config
from mlx_experts.registry.spec.checkpoint import PerExpert

FAMILIES = [name for name in catalog().names() if catalog().load(name).backbone is None]
PAST_THE_END = [name for name in FAMILIES if catalog().load(name).checkpoint.ignore_extra_layers]
HEADS = [
    (name, rule) for name in FAMILIES for rule in catalog().load(name).checkpoint.ignore if "mtp" in rule
]
# The text tree as transformers 5, transformers 4 with MLX's tools, and text-only exports spell it.
SPELLINGS = {
    "outer": ("model.language_model.", "lm_head."),
    "inner": ("language_model.model.", "language_model.lm_head."),
}
# Nobody writes these.
UNUSED = {("llama4", "outer"), ("step3p5", "inner")}
TOWERS = {
    "aria": ("vision_tower", "model.vision_tower", "multi_modal_projector"),
    "ernie4_5_vl_moe": ("vision_tower", "model.vision_tower", "model.resampler_model"),
    "gemma4": ("vision_tower", "model.vision_tower", "model.audio_tower", "embed_vision", "embed_audio"),
    "glm4v_moe": ("vision_tower", "model.visual"),
    "kimi_k25": ("vision_tower", "model.vision_tower", "mm_projector", "model.multi_modal_projector"),
    "llama4": ("vision_model", "model.vision_model", "multi_modal_projector"),
    "minimax_m3_vl": ("vision_tower", "model.vision_tower", "multi_modal_projector", "patch_merge_mlp"),
    "mistral3": ("vision_tower", "model.vision_tower", "multi_modal_projector"),
    "qwen3_5_moe": ("vision_tower", "visual", "model.visual"),
    "qwen3_omni_moe": ("vision_tower", "thinker.visual", "thinker.audio_tower", "talker", "code2wav"),
    "qwen3_vl_moe": ("vision_tower", "visual", "model.visual"),
    "step3p5": ("vision_model", "model.vision_model", "model.multi_modal_projector"),
}


def prefix_of(model: Any) -> str:
    names = model.plan.family.names
    return f"{names.wrapper}.{names.root}.".removeprefix(".")


def spelled(model: Any, tensors: dict[str, mx.array], spelling: str) -> dict[str, mx.array]:
    """The text model's tensors with its tree and its head under other prefixes."""
    tree, head = SPELLINGS[spelling]
    names = model.plan.family.names
    old_head = f"{names.wrapper}.{model.plan.head.path}.".removeprefix(".")
    result = {}
    for name, value in tensors.items():
        for old, new in ((prefix_of(model), tree), (old_head, head)):
            if name.startswith(old):
                name = new + name.removeprefix(old)
                break
        result[name] = value
    return result


def one_by_one(lab: Any, model: Any) -> dict[str, mx.array]:
    """Tensors of the last layer, its experts in another layout than the trunk's where the family has one."""
    last = f"{model.converter.layers}.{model.plan.sizes.num_layers - 1}."
    params = lab.parameters(model)
    index = next((i for i, e in enumerate(model.converter.spec.experts) if isinstance(e, PerExpert)), None)
    stack = model.converter.stack(model.plan.sizes.num_layers - 1)
    if index is None or stack is None:
        return {n: v for n, v in params.items() if n.startswith(last)}
    layout = model.converter.spec.experts[index]
    own = {n: v for n, v in params.items() if n.startswith(last) and not n.startswith(stack.container)}
    whole = params[f"{stack.module(-1)}.weight"]
    for e in range(stack.experts):
        own[f"{last}{layout.path}.{e}.{layout.projections[-1]}.weight"] = whole[e]
    return own


@pytest.mark.report("LAY-20")
@pytest.mark.parametrize("name", PAST_THE_END)
def test_layers_past_the_last_one_are_dropped_and_counted_in_every_spelling(name: str, lab: Any) -> None:
    """The trunk is stacked, the head one by one and incomplete; neither disturbs the other."""
    model, _ = lab.tiny(name)
    last, prefix = model.plan.sizes.num_layers - 1, prefix_of(model)
    head = {n.replace(f".{last}.", f".{last + 1}.", 1): v for n, v in one_by_one(lab, model).items()}
    wrapped = prefix.count(".") > 1
    for spelling in [None, *(SPELLINGS if wrapped else ())]:
        extra = head if spelling is None else spelled(model, head, spelling)
        carried = model.convert({**lab.parameters(model), **extra})
        assert lab.same(carried.tensors, lab.parameters(model)) == [], spelling
        assert sum(carried.ignored.values()) == len(head)
        assert any("past the last layer" in rule for rule in carried.ignored)


@pytest.mark.report("LAY-20")
@pytest.mark.parametrize(("name", "rule"), HEADS)
def test_prediction_heads_are_dropped_by_their_declared_rule(name: str, rule: str, lab: Any) -> None:
    model, _ = lab.tiny(name)
    base = rule.replace("*", "")
    base = f"model.{base.strip('.')}" if rule.startswith("*") else base.rstrip(".")
    # Planes that fit no format, as of a head that was packed otherwise than the trunk.
    head = {
        f"{base}.layers.0.mlp.experts.{e}.{leaf}": mx.zeros((3, 5), dtype=mx.uint32)
        for e in range(4)
        for leaf in ("gate_proj.weight", "gate_proj.scales")
    }
    carried = model.convert({**lab.parameters(model), **head})
    assert lab.same(carried.tensors, lab.parameters(model)) == []
    assert carried.ignored[rule] == len(head)


@pytest.mark.report("LAY-20")
@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_next", "mimo_v2_flash", "qwen3_5_moe"])
def test_a_head_that_is_announced_and_absent_is_no_error(name: str, lab: Any, tmp_path: Path) -> None:
    model, config = lab.tiny(name)
    config |= {"num_nextn_predict_layers": 1, "mtp_num_hidden_layers": 1}
    loaded, _, report = lab.load(lab.write(tmp_path, lab.parameters(model), config))
    assert lab.distance(lab.logits(loaded), lab.logits(model)) < 1e-6
    assert report.ignored == {}


@pytest.mark.report("LAY-20")
def test_a_quantised_trunk_loads_beside_a_head_in_another_format_and_says_what_was_dropped(
    lab: Any, tmp_path: Path
) -> None:
    model, config = lab.tiny("qwen3_5_moe")
    stored, values = lab.pack(lab.parameters(model), 4, 32)
    fp8 = {f"mtp.layers.0.mlp.experts.{e}.up_proj.weight": mx.zeros((64, 64), mx.uint8) for e in range(8)}
    head, _ = lab.pack({f"mtp.layers.0.{n}.weight": mx.ones((64, 64)) for n in ("a", "b")}, 2, 64)
    config["quantization"] = {
        "group_size": 32,
        "bits": 4,
        "mtp.layers.0.a": {"group_size": 64, "bits": 2},
    }
    folder = lab.write(tmp_path / "packed", {**stored, **head, **fp8}, config)
    loaded, _, report = lab.load(folder)
    del config["quantization"]
    truth, _, _ = lab.load(lab.write(tmp_path / "plain", values, config))
    assert lab.distance(lab.logits(loaded), lab.logits(truth)) < 1e-4
    assert report.ignored == {"mtp*": len(head) + len(fp8)}
    assert report.notices == []
    assert {str(found) for found in report.formats.values()} == {"affine 4-bit group 32"}
    foretold = inspect_checkpoint(Checkpoint.open(folder))
    assert foretold.loadable
    assert foretold.ignored == report.ignored


@pytest.mark.report("DRP-07")
@pytest.mark.parametrize(
    ("name", "spelling"), [(n, s) for n in TOWERS for s in SPELLINGS if (n, s) not in UNUSED]
)
def test_towers_are_dropped_by_name_and_wrappers_stay_with_the_text(
    name: str, spelling: str, lab: Any
) -> None:
    model, _ = lab.tiny(name)
    towers = {f"{t}.blocks.0.attn.qkv.weight": mx.ones((6, 2)) for t in TOWERS[name]}
    disk = {**spelled(model, lab.parameters(model), spelling), **towers}
    carried = model.convert(disk)
    odd = lab.same(carried.tensors, lab.parameters(model))
    # The originals' zero-centred norms are read as such.
    centred = model.plan.family.norm.offset == "load" and spelling == "outer"
    assert [n for n in odd if not (centred and "norm" in n)] == []
    assert sum(carried.ignored.values()) == len(towers)


@pytest.mark.report("DRP-07")
@pytest.mark.parametrize("name", TOWERS)
def test_a_tower_that_no_rule_knows_is_refused_under_its_own_name(
    name: str, lab: Any, tmp_path: Path
) -> None:
    model, config = lab.tiny(name)
    strange = "model.odd_tower.blocks.0.attn.qkv.weight"
    folder = lab.write(tmp_path, {**lab.parameters(model), strange: mx.ones((6, 2))}, config)
    with pytest.raises(TensorError) as caught:
        lab.load(folder)
    assert strange in caught.value.found


def layered(name: str) -> tuple[dict[str, Any], list[int]]:
    """A tiny config with two experts less in every second layer, and how many the MoE layers then have."""
    family = catalog().load(name)
    config = deepcopy(tiny_config(family))
    moe = resolve(family, config).moe_layers
    at = next((config[key] for key in family.text_keys if key in config), config)
    # A key for each layer states what it has already; the list stands under the key for all of them.
    key = next(key for key in family.config.num_experts.keys if "{layer}" not in key)
    if key != family.config.num_experts.keys[0]:
        stated = [block.pop(key) for block in at["block_configs"] if key in block]
        at[key] = max(stated)
    *parents, leaf = key.split(".")
    for parent in parents:
        at = at[parent]
    whole = at[leaf]
    count = len(resolve(family, config).layers)
    at[leaf] = [(whole - 2 * (i % 2)) if i in moe else 0 for i in range(count)]
    return config, [at[leaf][i] for i in moe]


@pytest.mark.report("LAY-22")
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_takes_a_number_of_experts_for_each_layer(name: str) -> None:
    config, want = layered(name)
    plan = resolve(catalog().load(name), config)
    assert [plan.layers[i].sizes.num_experts for i in plan.moe_layers] == want


@pytest.mark.report("LAY-22")
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "nemotron_h"])
def test_pruned_layers_load_in_every_layout_and_run(name: str, lab: Any, tmp_path: Path) -> None:
    config, want = layered(name)
    model, config = lab.tiny(name, config)
    for index, layout in enumerate(model.converter.spec.experts):
        if getattr(layout, "packed", None):
            continue
        disk = model.converter.export(lab.parameters(model), index)
        loaded, _, _ = lab.load(lab.write(tmp_path / str(index), disk, config))
        assert lab.distance(lab.logits(loaded), lab.logits(model)) < 1e-6
        stacks = [
            lab.parameters(loaded)[f"{loaded.converter.stack(i).module(-1)}.weight"]
            for i in model.plan.moe_layers
        ]
        assert [stack.shape[0] for stack in stacks] == want


@pytest.mark.report("LAY-22")
def test_a_router_with_other_rows_than_its_stack_is_refused(lab: Any, tmp_path: Path) -> None:
    """The config says four experts; one layer was pruned to two, or only its router was."""
    model, config = lab.tiny("mixtral", {"num_local_experts": 4})
    pruned, _ = lab.tiny("mixtral", {"num_local_experts": [4, 2, 4, 4]})
    for index in (0, 1):
        disk = pruned.converter.export(lab.parameters(pruned), index)
        with pytest.raises(TensorError) as caught:
            lab.load(lab.write(tmp_path / str(index), disk, config))
        assert "layers.1." in str(caught.value)
    params = lab.parameters(model)
    gate = "model.layers.1.block_sparse_moe.gate.weight"
    with pytest.raises(TensorError, match=r"expected \[4, 64\], found \[2, 64\]"):
        lab.load(lab.write(tmp_path / "gate", {**params, gate: params[gate][:2]}, config))


@pytest.mark.report("LAY-22")
@pytest.mark.parametrize(("experts", "what"), [([4, 1, 4, 4], "pick that many"), ([4, 0, 4, 4], "has none")])
def test_a_layer_left_with_too_few_experts_is_refused(experts: list[int], what: str, lab: Any) -> None:
    with pytest.raises(ConfigError, match=what):
        lab.tiny("mixtral", {"num_local_experts": experts})

"""Puts this package's MoE block in the place of mlx-lm's, with the very layers that were there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear, SwitchMLP
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear

from mlx_experts.engine.layers.moe import MoE
from mlx_experts.engine.models.base import LanguageModel
from mlx_experts.engine.models.decoder import layer_path
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.registry.errors import RegistryError, SettingError
from mlx_experts.registry.resolve.planner import LayerPlan, Plan, resolve

# Layers that compute the same wherever they stand; adapters wrap them.
_LAYERS = (nn.Linear, nn.QuantizedLinear, SwitchLinear, QuantizedSwitchLinear, nn.RMSNorm)
_ADAPTED = (LoRALinear, LoRASwitchLinear, DoRALinear)


class Unfit(Exception):
    """Why a block cannot be replaced, in words."""


@dataclass
class Adoption:
    """What :func:`adopt` did.

    Args:
        family: the family that the model was taken for.
        replaced: module paths of the blocks that are this package's now.
        kept: module paths of the blocks that stayed mlx-lm's, and why.
    """

    family: str
    replaced: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.family}: {len(self.replaced)} MoE blocks replaced, {len(self.kept)} kept"]
        return "\n".join(lines + [f"  {path}: {reason}" for path, reason in self.kept.items()])


def adopt(
    model: nn.Module,
    *,
    config: Mapping[str, Any] | None = None,
    fused: bool | None = None,
    families: tuple[Path, ...] = (),
) -> Adoption:
    """Replace the MoE blocks of a model that mlx-lm loaded, so that single tokens run fused.

    Weights are shared, not copied, and parameter paths stay as they are. A block whose parameters are not
    those that the family describes is left alone. Adopt a model before it is compiled, and after adapters
    are loaded; a model that is spread over several machines is left alone.

    Args:
        model: a model of mlx-lm; changed in place.
        config: its config.json; the model's own arguments when None.
        fused: True or False to force or forbid the fused path; None for the policy.
        families: further folders with family files.

    Returns:
        What was replaced and what was kept, with the reasons.

    Raises:
        SettingError: the model is this package's own already, or does not say what it was built from.
        UnknownFamilyError: no family describes it.
        ConfigError: its config holds a value that cannot be.
    """
    if isinstance(model, LanguageModel):
        raise SettingError("this package built the model; its MoE blocks need no replacing")
    settings = dict(config) if config is not None else _config_of(model)
    family = catalog(*families).for_config(settings)
    plan = resolve(family, settings)
    report = Adoption(family.family)
    modules = dict(model.named_modules())
    for i in plan.moe_layers:
        layer = plan.layers[i]
        path = block_path(layer, plan)
        try:
            if family.backbone is not None and family.backbone.kept is not None:
                raise Unfit(family.backbone.kept)
            put_in_place(modules, path, take_over(modules.get(path), _alone(layer), path, fused))
        except (Unfit, RegistryError) as reason:
            report.kept[path] = str(reason).splitlines()[0]
        else:
            report.replaced.append(path)
    _note_others(model, report)
    return report


def block_path(layer: LayerPlan, plan: Plan) -> str:
    """Module path of a layer's MoE block; the layer's own where its parts lie in the layer."""
    assert layer.moe is not None
    return f"{layer_path(layer, plan)}.{layer.moe.path}".rstrip(".")


def put_in_place(modules: Mapping[str, nn.Module], path: str, block: nn.Module) -> None:
    """Put ``block`` at ``path``, by the modules of the model as ``named_modules`` gives them."""
    parent, _, leaf = path.rpartition(".")
    modules[parent][leaf] = block


def take_over(block: nn.Module | None, layer: LayerPlan, path: str, fused: bool | None) -> MoE:
    """This package's block with the layers and arrays of mlx-lm's block.

    Args:
        block: mlx-lm's block, or None where there is none at the path.
        layer: the plan of its decoder layer.
        path: its module path.

    Raises:
        Unfit: its parameters are not those that the plan describes.
        ConfigError: the plan describes a block that cannot be.
    """
    if block is None:
        raise Unfit("the model has no module there")
    if isinstance(block, MoE):
        raise Unfit("the block is this package's already")
    if vars(block).get("sharding_group") is not None:
        raise Unfit("the block is spread over several machines")
    if layer.moe is not None and not layer.moe.path:
        raise Unfit("the experts are parts of the decoder layer and not a block of their own")
    ours = MoE(layer, path, fused)
    share(block, ours)
    more = set(_names(block)) - set(_names(ours))
    if more:
        raise Unfit(f"the block has {', '.join(sorted(more)[:3])}, which the family does not describe")
    ours.train(block.training)
    return ours


def share(source: nn.Module, target: nn.Module, at: str = "") -> None:
    """Give ``target`` the layers and arrays of ``source`` at the same paths.

    Raises:
        Unfit: one is missing, or of another shape.
    """
    for name, value in list(target.items()):
        path = f"{at}.{name}".lstrip(".")
        if name.startswith("_") or (isinstance(value, nn.Module) and not _names(value)):
            # No parameters, as MLX counts them.
            continue
        if name not in source:
            raise Unfit(f"the block has no '{path}', which the family describes")
        other = source[name]
        if isinstance(value, mx.array):
            if not isinstance(other, mx.array) or other.shape != value.shape:
                raise Unfit(f"'{path}' is not of the shape {list(value.shape)} that the config says")
            target[name] = other
        elif isinstance(other, _ADAPTED):
            target[name] = other
        elif isinstance(value, _LAYERS) and isinstance(other, _LAYERS):
            if _shape(other) != _shape(value) or ("bias" in other) != ("bias" in value):
                raise Unfit(f"'{path}' is not of the shape {list(_shape(value))} that the config says")
            target[name] = other
        else:
            share(other, value, path)


def _names(module: nn.Module) -> list[str]:
    return [name for name, _ in tree_flatten(module.parameters())]


def _shape(module: nn.Module) -> tuple[int, ...]:
    """Shape of a layer's weight before it was quantised."""
    weight: mx.array = module["weight"]
    if "scales" not in module:
        return tuple(weight.shape)
    return (*weight.shape[:-1], module["scales"].shape[-1] * module.group_size)


def _alone(layer: LayerPlan) -> LayerPlan:
    """A plan without the shared expert that lives in the decoder layer, which mlx-lm's layer adds itself."""
    moe = layer.moe
    if moe is None or moe.shared is None or not moe.shared.path.startswith("../"):
        return layer
    return dataclasses.replace(layer, moe=moe.model_copy(update={"shared": None}))


def _config_of(model: nn.Module) -> dict[str, Any]:
    """The config that mlx-lm's model was built from, as far as its arguments hold it."""
    args = vars(model).get("args")
    if not dataclasses.is_dataclass(args) or isinstance(args, type):
        raise SettingError(
            "the model does not say what it was built from",
            where=type(model).__name__,
            expected="a model of mlx-lm, which keeps its arguments as `args`",
            hint="pass its config.json as `config=`",
        )
    return _plain(args)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {key: _plain(each) for key, each in vars(value).items() if each is not None}
    return {key: _plain(each) for key, each in value.items()} if isinstance(value, dict) else value


def _note_others(model: nn.Module, report: Adoption) -> None:
    """Expert containers that no described block holds."""
    known = (*report.replaced, *report.kept)
    for path, module in model.named_modules():
        if isinstance(module, SwitchGLU | SwitchMLP) and not any(path.startswith(f"{k}.") for k in known):
            report.kept[path] = "the family describes no experts there"

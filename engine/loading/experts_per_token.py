"""The number of experts that a token picks, as a setting of whoever runs the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_experts.registry.errors import SettingError
from mlx_experts.registry.resolve.config_keys import keys_of, put_key
from mlx_experts.registry.resolve.planner import Plan, resolve
from mlx_experts.registry.spec.family import Family


def with_experts_per_token(family: Family, config: Mapping[str, Any], count: int) -> dict[str, Any]:
    """A config whose tokens pick ``count`` experts.

    Raises:
        SettingError: there are fewer experts, none is to be picked, or the family has a fixed number.
    """
    plan = resolve(family, config)
    most = min((plan.layers[i].sizes.num_experts for i in plan.moe_layers), default=0)
    if not 1 <= count <= most:
        raise SettingError(
            "the experts of a token are more than the model has"
            if count > most
            else "a token needs an expert",
            where="experts_per_token",
            expected=f"from 1 to {most}",
            found=str(count),
        )
    keys = keys_of(family.config.top_k)
    if not keys:
        raise SettingError(
            f"a token of {family.family} always picks {family.config.top_k} experts",
            where="experts_per_token",
        )
    # A config that leaves the number to its family's default gets the key itself.
    return put_key(config, keys, count) or {**config, keys[0]: count}


def changed_top_k(family: Family, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """A notice where a token picks another number of experts than its checkpoint says."""
    was, now = _numbers(resolve(family, before)), _numbers(resolve(family, after))
    if was == now:
        return []
    return [f"a token picks {now} experts; the checkpoint was made for {was}"]


def _numbers(plan: Plan) -> str:
    counts = sorted({plan.layers[i].sizes.top_k for i in plan.moe_layers})
    return " or ".join(map(str, counts)) or "no"

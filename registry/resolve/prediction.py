"""Adds a prediction layer to a plan: the layer past the last one, built as the family's others are."""

from __future__ import annotations

import dataclasses

from mlx_experts.registry.catalog.catalog import mixers
from mlx_experts.registry.errors import ConfigError
from mlx_experts.registry.resolve.plan import Plan
from mlx_experts.registry.resolve.planner import plan_layer
from mlx_experts.registry.resolve.resolver import Resolver


def add_prediction_layer(plan: Plan) -> Plan:
    """The plan with its first prediction layer as a last decoder layer, which forward passes leave out.

    Raises:
        ConfigError: the family describes none, or the config says that the checkpoint has none.
    """
    family = plan.family
    if family.mtp is None:
        raise ConfigError(
            "the family describes no prediction layers",
            where=f"{family.family}.yaml",
            expected="an `mtp` section",
            hint="load the model without mtp",
        )
    resolver = Resolver(family.family, plan.config)
    spec = resolver.spec(family.mtp, 0, "mtp")
    if not spec.layers:
        raise ConfigError(
            "the checkpoint has no prediction layers",
            where="config.json",
            expected=f"{family.mtp.layers}, above 0",
            found="0",
            hint="load the model without mtp",
        )
    like = [layer for layer in plan.layers if spec.type in (None, layer.type)]
    if not like:
        raise ConfigError(
            "no layer is of the type of the prediction layer",
            where="config.json",
            expected=str(spec.type),
            found=", ".join(sorted({layer.type for layer in plan.layers})),
        )
    count, model = plan.sizes.num_layers, like[-1]
    if spec.mlp not in (None, model.mlp):
        model = plan_layer(family, resolver, model.index, model.type, spec.mlp == "moe", mixers(family))
    sizes = dataclasses.replace(model.sizes, num_layers=count + 1)
    extra = dataclasses.replace(model, index=count, sizes=sizes)
    return dataclasses.replace(
        plan,
        layers=(*plan.layers, extra),
        sizes=dataclasses.replace(plan.sizes, num_layers=count + 1),
        prediction=spec,
    )

"""An expert activation with all its forms: MLX's, a scalar for the CPU's kernel, C for the GPU's.

Without `scalar` or `c` the fused kernels of that device decline, and the trace says so.
"""

from typing import Any

import mlx.core as mx

from mlx_experts.engine.kernels.activations import ExpertActivation
from mlx_experts.plugins.hookspecs import hookimpl

FAMILY = """
family: example_activation
architectures: [ExampleActivationForCausalLM]
reference: examples/plugins/register_activations.py
attention: {rope: half}
moe:
  router: {score: softmax, renormalize: true}
  experts: {activation: gated_square}
head: {tied: false}
"""


def gated_square(g: mx.array, u: mx.array, alpha: float, limit: float) -> mx.array:
    return mx.square(mx.maximum(g, 0.0)) * u


def gated_square_scalar(g: float, u: float, alpha: float, limit: float) -> float:
    return g * g * u if g > 0.0 else 0.0


@hookimpl
def register_activations() -> dict[str, Any]:
    form = "(me_max(g, 0.0f) * me_max(g, 0.0f) * u)"
    row = ExpertActivation("gated_square", True, gated_square, gated_square_scalar, form)
    return {"gated_square": row}

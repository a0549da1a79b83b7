"""Plain operations in the place of mlx-lm's Metal kernels, for a family on mlx-lm's own model.

The names are those of mlx-lm's module. Here the builtin set is taken over, and one function counts its calls.
"""

from typing import Any

from mlx_experts.plugins.builtin import plain_muse_spark
from mlx_experts.plugins.hookspecs import hookimpl

FAMILY = """
family: example_fallbacks
extends: muse_spark
model_types: [example_fallbacks]
architectures: [ExampleFallbacksForCausalLM]
reference: examples/plugins/register_fallbacks.py
backbone: {fallbacks: counted_muse_spark}
"""

calls = 0


def counted_routing(*arguments: Any, **options: Any) -> Any:
    global calls
    calls += 1
    return plain_muse_spark.expert_routing(*arguments, **options)


@hookimpl
def register_fallbacks() -> dict[str, Any]:
    (theirs,) = plain_muse_spark.register_fallbacks().values()
    return {"counted_muse_spark": {**theirs, "expert_routing": counted_routing}}

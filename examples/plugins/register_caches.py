"""A prompt cache in the place of the one that mlx-lm's model makes, for a family on mlx-lm's own model.

A cache can be saved and loaded where it has a `state`, its class has a `from_state`, and mlx-lm finds the
class by its name in its own module of caches. The builtin one for compressed groups has both.
"""

from typing import Any

from mlx_experts.plugins.builtin.compressed_groups import CompressedGroupsCache
from mlx_experts.plugins.hookspecs import hookimpl

FAMILY = """
family: example_caches
extends: deepseek_v41
model_types: [example_caches]
architectures: [ExampleCachesForCausalLM]
reference: examples/plugins/register_caches.py
backbone: {cache: my_groups}
"""

made = 0


def my_groups(theirs: Any) -> CompressedGroupsCache:
    global made
    made += 1
    return CompressedGroupsCache.instead_of(theirs)


@hookimpl
def register_caches() -> dict[str, Any]:
    return {"my_groups": my_groups}

"""What stands around all layers: their output is added to what the first of them read.

A frame belongs to a `block.kind`, so this one comes with a layer of the same name, here the usual one.
`begin` makes the stream, `run` calls the layers, `end` makes hidden states of the stream.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from mlx_experts.engine.layers.residual.base import ResidualForm
from mlx_experts.engine.models.decoder import DecoderLayer
from mlx_experts.plugins.hookspecs import hookimpl

FAMILY = """
family: example_frame
architectures: [ExampleFrameForCausalLM]
reference: examples/plugins/register_frames.py
attention: {rope: half}
block: {kind: skipped}
moe:
  router: {score: softmax, renormalize: true}
head: {tied: false}
"""


class Skip(ResidualForm):
    def run(self, decoder: Any, count: int, stream: mx.array, step: Callable[[int, Any, int], Any]) -> Any:
        return stream + super().run(decoder, count, stream, step)

    def end(self, decoder: Any, stream: mx.array) -> mx.array:
        return stream


@hookimpl
def register_frames() -> dict[str, Any]:
    return {"skipped": lambda plan: Skip()}


@hookimpl
def register_blocks() -> dict[str, Any]:
    return {"skipped": DecoderLayer}

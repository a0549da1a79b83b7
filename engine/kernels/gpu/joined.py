"""Many arrays in one: MLX's host takes about a microsecond for each input of a launch, at every token.

The modules get views of the joined array in place of their own, so that the weights are held once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_experts.engine.kernels.gpu.source import Launch

# Bytes: each array begins at a multiple of it, as an array of its own does.
_ALIGNED = 256
_WORD = 4
# MLX's CUDA build keeps arrays of up to 8 bytes where the host sees them.
_ORIGIN_WORDS = 4
# MLX counts the values of an array in 32 bits.
_MOST_WORDS = 2**31 - 1
_TYPES = {
    mx.bfloat16: "__nv_bfloat16",
    mx.float16: "__half",
    mx.float32: "float",
    mx.uint32: "unsigned int",
    mx.uint8: "uint8_t",
}


@dataclass(frozen=True, eq=False)
class Joined:
    """Arrays that lie in one.

    Args:
        whole: uint32, all of their bytes.
        origin: its first words. A launch is given no more and finds the rest behind them: MLX submits what
            it has encoded once the values that launches read are many, which it does after every launch
            that is given an array of 6 GB.
        begins: of each array in 32-bit words, by its id.
        parts: the arrays, which keeps their ids theirs.
    """

    whole: mx.array
    origin: mx.array
    begins: Mapping[int, int]
    parts: Sequence[mx.array]

    @classmethod
    def of(cls, places: Sequence[tuple[dict[str, Any], str]], more: Sequence[mx.array] = ()) -> Joined | None:
        """Join the arrays at these places (a module and a name), and put views there.

        The values of ``more`` lie behind them, and are found by those arrays.
        Arrays of a type that kernels do not read stay apart. Nothing is done where fewer than two are left or
        where they would be too long for one array.
        """
        found = [(holder, name, holder[name]) for holder, name in places]
        found = [(h, n, a) for h, n, a in found if a.dtype in _TYPES and a.size]
        arrays = [*(a for _, _, a in found), *more]
        words = [-(-a.nbytes // _ALIGNED) * (_ALIGNED // _WORD) for a in arrays]
        if len(found) < 2 or sum(words) > _MOST_WORDS:
            return None
        whole = mx.concatenate([_words(a, count) for a, count in zip(arrays, words, strict=True)])
        mx.eval(whole)
        begins, parts, at = {}, [], 0
        for (holder, name, array), count in zip(found, words[: len(found)], strict=True):
            part = whole[at : at + count].view(array.dtype)[: array.size].reshape(array.shape)
            parts.append(part)
            begins[id(part)] = at
            # Not through the module: the values are the same, so nothing has to be bound anew.
            dict.__setitem__(holder, name, part)
            at += count
        for array, count in zip(more, words[len(found) :], strict=True):
            parts.append(array)
            begins[id(array)] = at
            at += count
        origin = whole[:_ORIGIN_WORDS]
        mx.eval(parts, origin)
        return cls(whole, origin, begins, parts)


def _words(array: mx.array, count: int) -> mx.array:
    """The bytes of an array as so many 32-bit words, the last ones zero."""
    row = array.reshape(-1)
    missing = count * _WORD // array.dtype.size - array.size
    if missing:
        row = mx.concatenate([row, mx.zeros((missing,), row.dtype)])
    return row.view(mx.uint32)


def leaves_of(*modules: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """The places of all arrays in MLX's own leaves under some modules, each once.

    What a module of this package holds itself stays as it is: its writes are counted.
    """
    seen: set[int] = set()
    places = []
    for module in modules:
        for _, leaf in module.named_modules():
            if id(leaf) in seen or not type(leaf).__module__.startswith(("mlx.", "mlx_lm.")):
                continue
            seen.add(id(leaf))
            places += [(leaf, name) for name, value in leaf.items() if isinstance(value, mx.array)]
    return places


def reading(
    launch: Launch, held: Mapping[str, mx.array | None], joined: Sequence[Joined]
) -> tuple[Launch, dict[str, mx.array | None]]:
    """A launch that finds its arrays in joined ones, and its inputs by name.

    Args:
        held: every input of the launch; None for those that a call gives.
    """
    inputs, finds = dict(held), ""
    for number, each in enumerate(joined):
        named = [
            (name, array) for name, array in held.items() if array is not None and id(array) in each.begins
        ]
        if len(named) < 2:
            continue
        whole = f"me_joined{number}"
        inputs[whole] = each.origin
        for name, array in named:
            del inputs[name]
            kind = _TYPES[array.dtype]
            place = f"{whole} + int64_t({each.begins[id(array)]})"
            finds += f"const {kind}* const {name} = reinterpret_cast<const {kind}*>({place});\n"
    return replace(launch, inputs=tuple(inputs), source=finds + launch.source), inputs

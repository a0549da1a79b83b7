"""A decoder's whole way for one token: its pieces, tried once, and merged between the cache writes.

The first token runs every piece in plain MLX and beside it with this package's kernels; what disagrees is
left to plain MLX. From the second token on each stretch between two caches is one compiled function.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

from mlx_experts.engine.dispatch.trace import TraceKey, trace
from mlx_experts.engine.kernels.gpu.joined import Joined, leaves_of
from mlx_experts.engine.kernels.gpu.pieces.packed import Value, filled, viewed
from mlx_experts.engine.kernels.request import Decline, Device
from mlx_experts.engine.layers.attention import Attention
from mlx_experts.engine.layers.base_mixer import RecurrentMixer
from mlx_experts.engine.layers.decode import around_attention, around_latent
from mlx_experts.engine.layers.decode.around_attention import AroundAttention
from mlx_experts.engine.layers.decode.around_experts import AroundExperts, AroundMLP
from mlx_experts.engine.layers.decode.around_latent import AroundLatents
from mlx_experts.engine.layers.decode.around_recurrence import AroundRecurrence, memory_names
from mlx_experts.engine.layers.decode.branch import MixerBranch, add
from mlx_experts.engine.layers.decode.layer_parts import LayerParts
from mlx_experts.engine.layers.decode.matrices import on_gpu
from mlx_experts.engine.layers.decode.output_head import OutputHead
from mlx_experts.engine.layers.decode.steps import TRIED, Call, Merged, Pure, Run, Step, Values
from mlx_experts.engine.layers.decode.watched import Watched
from mlx_experts.engine.layers.forward_context import ForwardState
from mlx_experts.engine.layers.mixers.mla import LatentAttention
from mlx_experts.engine.layers.mlp import MLP
from mlx_experts.engine.layers.moe import MoE

# As in dispatch.verify: room for roundings; a wrong kernel is off by about the length of the output.
_BOUNDS = {mx.float32: 1e-2, mx.bfloat16: 5e-2, mx.float16: 5e-2}

_NO_KERNEL = Decline("kernel", "one", "none", "It is plain MLX.")


@dataclass(frozen=True, eq=False)
class LayerOfPieces:
    """A layer of the decoder.

    Args:
        name: its module path, for the trace.
        whole: the layer as it is, ``(x, state, cache)``.
        parts: what it calls, or why it runs as it is.
    """

    name: str
    whole: Callable[..., mx.array]
    parts: LayerParts | Decline


class TokenPieces:
    """One token's row through all layers and the final norm.

    Args:
        layers: in their order.
        norm: the final norm, or None.
        device: that the token runs on.
        dtype: of the row.
        compiled: whether MLX compiles what lies between the calls.
    """

    def __init__(
        self,
        layers: Sequence[LayerOfPieces],
        norm: nn.Module | None,
        device: Device,
        dtype: mx.Dtype,
        compiled: bool = True,
    ) -> None:
        self._device, self._dtype, self._compiled = device, dtype, compiled
        # Layers with attention, and what their position is called.
        self._positions: list[tuple[int, str]] = []
        # Names of the memory of each recurrent mixer, by its layer.
        self._memory: dict[int, tuple[str, ...]] = {}
        self._steps: list[Step] = []
        self._layer_of: dict[int, list[int]] = {}
        self._notes: dict[int, str] = {}
        self._seen: set[int] = set()
        self.joined: list[Joined] = []
        added: float | None = None
        for at, layer in enumerate(layers):
            begin = len(self._steps)
            added = self._add(at, layer, added)
            self._layer_of[at] = list(range(begin, len(self._steps)))
        self._names = [layer.name for layer in layers]
        # What the modules held before is free now.
        if self._seen:
            mx.clear_cache()
        kept = [] if norm is None else [norm]
        self._steps.append(self._last(kept, added))
        # What the head reads, the head, and whether the layers are in the trace.
        self._norm, self._added = norm, added
        self._head: OutputHead | None = None
        self._counted = False
        self._run: Merged | None = None

    def _pure(
        self, name: str, reads: Sequence[str], writes: Sequence[str], modules: Sequence[Any], run: Any
    ) -> None:
        self._steps.append(Pure.of(name, reads, writes, Watched(*modules), run, lambda: _NO_KERNEL))

    def _last(self, kept: Sequence[nn.Module], added: float | None) -> Pure:
        def finish(modules: Sequence[Any], x: mx.array, *rest: mx.array) -> tuple[mx.array, ...]:
            x = add(x, rest, added)
            return (modules[0](x) if modules else x,)

        reads = ("x",) if added is None else ("x", "b")
        return Pure.of("norm", reads, ("h",), Watched(*kept), finish, lambda: _NO_KERNEL)

    def _give(self, head: OutputHead) -> None:
        """From now on the last step makes the logits of this head; where a token ran, all is tried again."""
        if self._head is not None:
            self._steps.pop()
        if self._run is not None:
            # What was changed meanwhile is known to the merged steps alone.
            self._steps = [step.again() if isinstance(step, Pure) else step for step in self._steps]
        self._head, self._run = head, None
        norm, added, device, dtype = self._norm, self._added, self._device, self._dtype

        def plain(modules: Sequence[Any], h: mx.array, *rest: mx.array) -> tuple[mx.array, ...]:
            return (head(h),)

        def prepare() -> Run | Decline:
            return on_gpu(device) or head.prepare(norm, added, device, dtype)

        reads = ("h", "x") if added is None else ("h", "x", "b")
        watched = Watched(*([] if norm is None else [norm]), *head.modules)
        self._steps.append(Pure.of("head", reads, ("logits",), watched, plain, prepare))

    def _settle(self, added: float | None) -> None:
        if added is not None:
            self._pure("sum", ("x", "b"), ("x",), (), lambda modules, x, *b: (add(x, b, added),))

    def _normed(self, norm: nn.Module | None, added: float | None) -> None:
        """``n``, what a call reads that is no piece; and the stream, where a branch was not yet added."""

        def normed(modules: Sequence[Any], x: mx.array, *rest: mx.array) -> tuple[mx.array, ...]:
            x = add(x, rest, added)
            n = modules[0](x) if modules else x
            return (n,) if added is None else (x, n)

        branch, stream = ((), ()) if added is None else (("b",), ("x",))
        self._pure("norm", ("x", *branch), (*stream, "n"), [] if norm is None else [norm], normed)

    def _after(self, norm: nn.Module | None) -> None:
        if norm is not None:
            self._pure("norm", ("b",), ("b",), [norm], lambda modules, b: (modules[0](b),))

    def _joined(self, *modules: Any, more: Sequence[mx.array] = ()) -> list[Joined]:
        """The arrays of some modules and others in one, on the device whose host counts inputs."""
        if self._device != "cuda":
            return []
        places = [p for p in leaves_of(*filter(None, modules)) if id(p[0]) not in self._seen]
        self._seen |= {id(leaf) for leaf, _ in places}
        joined = Joined.of(places, more)
        if joined is None:
            return []
        self.joined.append(joined)
        return [joined]

    def _add(self, at: int, layer: LayerOfPieces, added: float | None) -> float | None:
        """The steps of a layer; the factor on a branch that the next step is to add, or None."""
        parts, device, dtype = layer.parts, self._device, self._dtype
        zeroed = False
        if isinstance(parts, Decline):
            self._settle(added)
            self._notes[at] = f"as it is, {parts}"

            def whole(values: Values, state: ForwardState, caches: Sequence[Any]) -> None:
                values["x"] = layer.whole(values["x"], state, caches[at])

            self._steps.append(Call(("x",), ("x",), whole))
            return None
        if parts.mixer is not None:
            mixer = parts.mixer
            kind = _around(mixer)
            if not isinstance(kind, Decline):
                joined = self._joined(mixer, parts.pre_mixer, more=_frequencies(mixer))
                zeroed = device == "cuda" and type(parts.mlp) is MoE
                branch = MixerBranch(
                    at, parts.pre_mixer, mixer, parts.post_mixer, parts.factor, added, joined, zeroed
                )
                self._steps += kind(branch).steps(device, dtype)
                if isinstance(mixer, RecurrentMixer):
                    self._memory[at] = memory_names(at, mixer)
                else:
                    self._positions.append((at, f"p{at}"))
                added = None
            else:
                self._normed(parts.pre_mixer, added)
                self._notes[at] = f"the mixer as it is, {kind}"

                def mix(values: Values, state: ForwardState, caches: Sequence[Any]) -> None:
                    values["b"] = mixer(values["n"], state, caches[at])

                self._steps.append(Call(("n",), ("b",), mix))
                self._after(parts.post_mixer)
                added = parts.factor
        if parts.mlp is None:
            return added
        after = [norm for norm in (parts.output_norm, parts.post_mlp) if norm is not None]
        made: Sequence[Step] | Decline
        in_files = isinstance(parts.mlp, MoE) and parts.mlp.slots is not None
        joined = [] if in_files else self._joined(parts.mlp, parts.shared, parts.pre_mlp)
        if type(parts.mlp) is MLP and parts.shared is None:
            made = AroundMLP(parts.pre_mlp, parts.mlp, after, added, joined).steps(device, dtype)
        elif type(parts.mlp) is MoE:
            blocks = AroundExperts(parts.pre_mlp, parts.mlp, after, parts.shared, added, joined, zeroed)
            made = blocks.steps(device, dtype)
        else:
            made = Decline("block", "experts or a dense MLP", type(parts.mlp).__name__, "It runs as it is.")
        if isinstance(made, Decline):
            self._notes[at] = "; ".join(filter(None, (self._notes.get(at), f"the MLP as it is, {made}")))
            self._normed(parts.pre_mlp, added)
            feed = parts.feed
            assert feed is not None

            def run(values: Values, state: ForwardState, caches: Sequence[Any]) -> None:
                values["b"] = feed(values["n"])

            self._steps.append(Call(("n",), ("b",), run))
            self._after(parts.post_mlp)
        else:
            self._steps += made
        return parts.factor

    def takes(self, caches: Sequence[Any]) -> bool:
        """Whether every attention has a cache, and every recurrent mixer a memory of one whole sequence."""
        kept = [caches[at] for at, _ in self._positions]
        return None not in kept and all(_remembers(caches[at]) for at in self._memory)

    def __call__(
        self, x: mx.array, state: ForwardState, caches: Sequence[Any], head: OutputHead | None = None
    ) -> mx.array:
        """A row ``[1, 1, D]`` to the normed row that a head reads; each cache is extended by the token.

        Args:
            head: the result is its logits ``[1, 1, V]`` instead.
        """
        if head is not None and head is not self._head:
            self._give(head)
        # Masks ask for the shape of a row, which any row has.
        values: Values = {"x": x, "row": x}
        offset = position = None
        for at, name in self._positions:
            found = caches[at].offset
            # Layers differ where one has a cache that another has not; most have one offset.
            if position is None or found.__class__ is not int or found != offset:
                position = state.position(found)
                offset = found if found.__class__ is int else None
            values[name] = position
        for at, names in self._memory.items():
            values.update(zip(names, caches[at].cache, strict=True))
        if self._run is None:
            self._first(values, state, caches)
        else:
            self._run(values, state, caches)
        for at, names in self._memory.items():
            caches[at].cache = [values[name] for name in names]
            caches[at].advance(1)
        made: mx.array = values["h" if head is None else "logits"]
        return made

    def _first(self, values: Values, state: ForwardState, caches: Sequence[Any]) -> None:
        """Run each piece in both forms, keep the plain form's results, and merge the steps."""
        tried: list[tuple[int, mx.array]] = []
        # Plain values in arrays packed as launches leave them, so that each launch is tried as it will run.
        left: dict[str, Value] = {}
        for at, step in enumerate(self._steps):
            for name in step.writes if isinstance(step, Call) else ():
                left.pop(name, None)
            if isinstance(step, Call):
                step.run(values, state, caches)
                continue
            modules, inputs = step.watched.modules, [values[name] for name in step.reads]
            made = step.plain(modules, *inputs)
            packed: Sequence[Value] = made
            if not isinstance(step.fused, Decline):
                got = step.fused(modules, *(left.get(name, values[name]) for name in step.reads))
                tried.append((at, _distance(step, got, made)))
                packed = filled(got, made)
            left.update(zip(step.writes, packed, strict=True))
            for tally in step.tallies:
                tally.add()
            values.update(zip(step.writes, made, strict=True))
        if tried:
            found: Any = mx.stack([distance for _, distance in tried]).tolist()
            for (at, _), distance in zip(tried, found, strict=True):
                self._judge(at, distance)
        if not self._counted:
            self._count()
        last = ["h"]
        if self._head is not None:
            last.append("logits")
            step = self._steps[-1]
            assert isinstance(step, Pure)
            self._tally(-1, self._head.name, _words(step, self._device))
        kept = [name for names in self._memory.values() for name in names]
        self._run = Merged(self._steps, (*last, *kept), self._compiled)

    def _judge(self, at: int, distance: float) -> None:
        step, bound = self._steps[at], _BOUNDS.get(self._dtype, 5e-2)
        assert isinstance(step, Pure)
        if step.name == "router and experts":
            bound = 0.5  # a near tie may be decided otherwise after another rounding
        if distance <= bound:
            return
        found = f"a relative distance of {distance:.1e} to plain MLX"
        warnings.warn(
            f"The kernel of the piece '{step.name}' computes something else on this machine ({found}); "
            "plain MLX is used instead. Please report what `registry check --device` prints.",
            RuntimeWarning,
            stacklevel=2,
        )
        declined = Decline(TRIED, f"at most {bound:.0e}", found, "Report it.")
        self._steps[at] = replace(step, fused=declined)

    def _count(self) -> None:
        """Give each layer's last piece a tally that says which pieces run and why one does not."""
        for at, places in self._layer_of.items():
            if not places:
                continue
            pieces = [step for i in places if isinstance(step := self._steps[i], Pure)]
            words = [_words(step, self._device) for step in pieces if step.name not in ("norm", "sum")]
            note = "; ".join(filter(None, (*words, self._notes.get(at))))
            self._tally(places[-1], self._names[at], note)
        self._counted = True

    def _tally(self, at: int, name: str, note: str) -> None:
        tally = trace.piece_tally(TraceKey(name, "compiled", "1", self._device), note)
        step = self._steps[at]
        self._steps[at] = replace(step, tallies=(*step.tallies, tally))


def _around(mixer: Any) -> Callable[..., AroundAttention | AroundLatents | AroundRecurrence] | Decline:
    """What makes the pieces around a mixer, or why it runs as it is."""
    if isinstance(mixer, RecurrentMixer):
        return AroundRecurrence
    if type(mixer) is LatentAttention:
        return around_latent.eligible(mixer) or AroundLatents
    return around_attention.eligible(mixer) or AroundAttention


def _frequencies(mixer: Any) -> list[mx.array]:
    """What a mixer's rotation reads, where no length changes it."""
    rope = mixer._rope if isinstance(mixer, Attention | LatentAttention) else None
    return [] if rope is None or rope.fixed is None else [rope.fixed.inverse]


def _remembers(cache: Any) -> bool:
    """Whether a cache holds all its arrays and nothing of its row is padding."""
    if type(cache) is not ArraysCache or cache.lengths is not None or cache.left_padding is not None:
        return False
    return all(array is not None for array in cache.cache)


def _words(step: Pure, device: Device) -> str:
    if isinstance(step.fused, Decline):
        return f"{step.name}: plain MLX, {step.fused}"
    return f"{step.name}: {device}"


def _distance(step: Pure, got: Sequence[Value], want: Sequence[mx.array]) -> mx.array:
    """The largest relative distance of an output."""
    apart = []
    for value, w in zip(got, want, strict=True):
        g, w = viewed(value).astype(mx.float32), w.astype(mx.float32)
        apart.append(mx.linalg.norm((g - w).flatten()) / mx.maximum(mx.linalg.norm(w.flatten()), 1e-20))
    return mx.max(mx.stack(apart))

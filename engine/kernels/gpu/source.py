"""Kernel text: reads the files beside this one and puts a launch together for CUDA or Metal.

The warp-per-row bodies are the same text on both; a back-end adds its prelude and the line that says which
lane of which warp of which group it is. What a body does is fixed by the names defined before it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

import mlx.core as mx

from mlx_experts.engine.kernels.activations import lookup
from mlx_experts.engine.kernels.expert_weights import ExpertWeights, Stack
from mlx_experts.engine.kernels.request import Activation, KernelRequest, Projection

WARP = 32
_SUFFIXES = {"weight": "w", "scales": "s", "biases": "b", "bias": "c", "global_scale": "g"}
_FORMATS = {"affine": 0, "mxfp4": 1, "mxfp8": 2, "nvfp4": 3}
_PLAIN = {"bfloat16": 4, "float16": 5, "float32": 6}
# A global scale is the tensor's largest magnitude; 448 and 6 are the largest e4m3 and e2m1 values.
NVFP4_UNIT = 1.0 / (448.0 * 6.0)

KernelMaker = Callable[..., Any]  # MLX types what both of its makers return as object.


@dataclass(frozen=True)
class Backend:
    """What differs between CUDA and Metal.

    Args:
        prelude: the file that defines the names used by the shared bodies.
        opening: statements that declare ``lane``, ``warp`` and ``group``.
        maker: MLX's function for kernels of this kind.
        groups: the thread groups in the grid, as an expression.
    """

    prelude: str
    opening: str
    maker: KernelMaker
    groups: str


@dataclass(frozen=True)
class Launch:
    """One kernel, ready to be made: text, arrays by name, and size.

    Args:
        groups: thread groups (blocks) in the grid for one token.
        warps: warps (SIMD groups) in each.
        shared: bytes of dynamic shared memory in each (CUDA only).
    """

    label: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    header: str
    source: str
    groups: int
    warps: int
    shared: int = 0

    def name(self, dtypes: Sequence[mx.Dtype]) -> str:
        """A name for these input and output dtypes.

        MLX keeps compiled CUDA kernels on disk by name alone, so the name must change with the text.
        """
        text = "\0".join([self.header, self.source, *self.inputs, *map(str, dtypes)])
        return f"{self.label}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def make(
        self,
        backend: Backend,
        dtypes: Sequence[mx.Dtype],
        shapes: Sequence[tuple[int, ...]],
        tokens: int = 1,
        **options: Any,
    ) -> Callable[[Sequence[mx.array]], list[mx.array]]:
        """The launch as a function of its input arrays.

        Args:
            dtypes: of the inputs, then of the outputs.
            shapes: of the outputs.
            tokens: token rows of a call; more than one only for a launch that was made for many.
            options: more arguments of MLX's kernel call, for tests: ``verbose``, ``init_value``.
        """
        how = {"shared_memory": self.shared} if self.shared else {}
        kernel = backend.maker(
            name=self.name(dtypes),
            input_names=list(self.inputs),
            output_names=list(self.outputs),
            source=self.source,
            header=self.header,
            **how,
        )
        threads = self.warps * WARP
        call = dict(
            grid=(tokens * self.groups * threads, 1, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=list(shapes),
            output_dtypes=list(dtypes[len(self.inputs) :]),
            **options,
        )
        return lambda arrays: kernel(inputs=arrays, **call)


@lru_cache
def text(name: str) -> str:
    """A kernel file without its comments: MLX copies the text at every call."""
    raw = files(__package__).joinpath(name).read_text(encoding="utf-8")
    lines = (re.sub(r"\s*//.*", "", line).strip() for line in raw.splitlines())
    return "\n".join(line for line in lines if line) + "\n"


def bounded(warps: int, blocks: int = 0) -> str:
    """CUDA's launch bounds, by way of the word that MLX writes before a kernel's name.

    Without them the compiler may take more registers than a block of this size has.

    Args:
        blocks: that a multiprocessor should hold at once; 0 leaves it to the compiler.
    """
    limits = f"{warps * WARP}, {blocks}" if blocks else f"{warps * WARP}"
    bounds = f"__attribute__((global)) __attribute__((launch_bounds({limits})))"
    return f"#undef __global__\n#define __global__ {bounds}\n"


def defines(values: Mapping[str, object]) -> str:
    """``#define ME_NAME value`` for each entry."""
    return "".join(f"#define ME_{name} {value}\n" for name, value in values.items())


def activation_text(activation: Activation) -> str | None:
    """``me_activation(g, u)`` in C, or None when the activation has no C form."""
    expression = lookup(activation.name).c
    if expression is None:
        return None
    alpha, limit = float(activation.alpha), float(activation.limit)
    return (
        "ME_INLINE float me_activation(float g, float u) {\n"
        f"const float alpha = {alpha!r}f, limit = {limit!r}f;\n"
        f"(void)g, (void)u, (void)alpha, (void)limit;\nreturn {expression};\n}}\n"
    )


def array_names(part: str, stack: Stack) -> dict[str, mx.array]:
    """The arrays of one stack by the name that kernel text uses for them."""
    held = {suffix: getattr(stack, field) for field, suffix in _SUFFIXES.items()}
    return {f"{part}_{suffix}": array for suffix, array in held.items() if array is not None}


def format_number(projection: Projection) -> int:
    """The number that ``rows.h`` knows a format by."""
    return _FORMATS[projection.format] if projection.format != "plain" else _PLAIN[projection.dtype]


def pick(part: str, suffix: str, shared: bool) -> str:
    """An array of a part: where there is a shared expert, its own for rows that are ``own``."""
    return f"(own ? shared_{part}_{suffix} : {part}_{suffix})" if shared else f"{part}_{suffix}"


def bias_text(part: str, projection: Projection, value: str, index: str, shared: bool = False) -> str:
    """``value`` with the global scale and the bias of the row at an index, as a C expression."""
    if projection.global_scale:
        value = f"{value} * ({pick(part, 'g', shared)}[e] * {NVFP4_UNIT!r}f)"
    return f"({value} + me_value({pick(part, 'c', shared)}[{index}]))" if projection.bias else f"({value})"


def chunk_width(*projections: Projection | None) -> int:
    """How many weights a lane takes at once: 32 fill whole words in every packed format, 8 are 16 bytes."""
    held = [p for p in projections if p is not None]
    return 8 if all(p.format == "plain" for p in held) else 32


def _dot(part: str, p: Projection, at: str = "at", shared: bool = False) -> str:
    """A chunk of a row times ``v``, as a call of ``me_dot``."""
    words = f"(ME_DEVICE const me_uint*){pick(part, 'w', shared)} + {at} * {p.cols * p.bits // 32}"
    scales = "(ME_DEVICE const uint8_t*)0"
    if p.group_size:
        scales = f"{pick(part, 's', shared)} + {at} * {p.cols // p.group_size}"
    biases = scales
    if p.format == "affine":
        biases = f"{pick(part, 'b', shared)} + {at} * {p.cols // p.group_size}"
    return f"me_dot<{format_number(p)}, {p.bits}, {p.group_size}>({words}, {scales}, {biases}, c, v, sum)"


def add_down_bias(request: KernelRequest) -> str:
    """Adds the scored biases of output row ``row`` to ``sum``, or nothing."""
    if not request.down.bias:
        return ""
    bias = "me_value(down_c[int64_t(indices[k]) * ME_H + row])"
    shared = f" sum += {share_text(request)} * me_value(shared_down_c[row]);" if request.shared else ""
    return f"for (int k = 0; k < ME_K; ++k) sum += weights[k] * {bias};{shared}"


def shared_width(request: KernelRequest) -> int:
    """Width of the shared expert that the launches add; 0 without one."""
    return request.shared.expert.expert_width if request.shared else 0


def is_weighed(request: KernelRequest) -> bool:
    """Whether the shared expert has a gate of its own."""
    return request.shared is not None and request.shared.gate is not None


def share_text(request: KernelRequest) -> str:
    """What weighs the shared expert, in launch B."""
    return "act[ME_WEIGH_AT]" if is_weighed(request) else "1.0f"


def shared_settings(experts: ExpertWeights, request: KernelRequest, values: int) -> dict[str, object]:
    """Names that both launches have for the shared expert.

    Args:
        values: float32 words of act before the one that weighs it.
    """
    up = experts.shared.expert.up if experts.shared else None
    return {
        "ROUTED": request.top_k * request.expert_width,
        "SHARED": shared_width(request),
        "UP_FIRST": up.first if up else 0,
        "WEIGHED": int(is_weighed(request)),
        "WEIGH_AT": values,
        "LEAVE(i, v)": "act[i] = v",
    }


def pitch(words: int, request: KernelRequest) -> int:
    """Float32 words of act from one token's to the next: whole vectors of 16 bytes."""
    return -(-(words + is_weighed(request)) // 4) * 4


def opening(backend: Backend, many: bool) -> str:
    """What a body begins with; MLX declares Metal's attributes only where the body itself names them."""
    return backend.opening + (f"const int all_groups = int({backend.groups});\n" if many else "")


def token_settings(request: KernelRequest, words: int, groups: int, many: bool) -> dict[str, object]:
    """Names by which a launch finds its token.

    Args:
        words: float32 words of act a token, without the one that weighs the shared expert.
        groups: thread groups a token.
        many: whether there may be more than one token.
    """
    tokens = f"(all_groups / {groups})" if many else "1"
    return {"TOKENS": tokens, "PITCH": pitch(words, request)}


def weigh_text(request: KernelRequest) -> str:
    """The definitions of the row that weighs the shared expert, for launch A; empty without one."""
    if request.shared is None or request.shared.gate is None:
        return ""
    gate = request.shared.gate
    settings = {
        "WEIGH_CHUNK": chunk_width(gate),
        "DOT_WEIGH": _dot("share", gate),
        "END_WEIGH": bias_text("share", gate, "g", "at"),
        "WEIGH": text("weigh.h").replace("\n", " "),
    }
    return defines(settings)


def up_arrays(experts: ExpertWeights) -> dict[str, mx.array]:
    """What launch A reads beside the token, by name."""
    named = array_names("gate", experts.gate) if experts.gate else {}
    named |= array_names("up", experts.up)
    if experts.shared is not None:
        expert = experts.shared.expert
        named |= array_names("shared_gate", expert.gate) if expert.gate else {}
        named |= array_names("shared_up", expert.up)
        named |= array_names("share", experts.shared.gate) if experts.shared.gate else {}
    return named


def down_arrays(experts: ExpertWeights) -> dict[str, mx.array]:
    """What launch B reads beside ``act`` and the token, by name."""
    named = array_names("down", experts.down)
    if experts.shared is not None:
        named |= array_names("shared_down", experts.shared.expert.down)
    return named


def row_values(request: KernelRequest) -> int:
    """Values of act: every expert's, then the shared expert's."""
    return request.top_k * request.expert_width + shared_width(request)


def rows_up(
    backend: Backend, experts: ExpertWeights, request: KernelRequest, warps: int = 8, *, many: bool = False
) -> Launch:
    """Launch A, a warp a row. Inputs ``x, indices`` and the arrays; output ``act`` ``[K * F]`` float32.

    A shared expert's values follow, and then the number that weighs it.
    """
    gate, up, shared = request.gate, request.up, request.shared is not None
    rows = row_values(request)
    groups = -(-(rows + is_weighed(request)) // warps)
    settings = defines(
        {
            "H": request.input_width,
            "F": request.expert_width,
            "K": request.top_k,
            "WARPS": warps,
            "CHUNK": chunk_width(gate, up),
            "DOT_GATE": _dot("gate", gate, "at", shared) if gate else "0.0f",
            "DOT_UP": _dot("up", up, "up_at", shared),
            "END_GATE": bias_text("gate", gate, "g", "at", shared) if gate else "g",
            "END_UP": bias_text("up", up, "u", "up_at", shared),
            **shared_settings(experts, request, rows),
            **token_settings(request, rows, groups, many),
        }
    )
    return Launch(
        label="experts_up",
        inputs=("x", "indices", *up_arrays(experts)),
        outputs=("act",),
        header=text(backend.prelude)
        + settings
        + weigh_text(request)
        + text("rows.h")
        + (activation_text(request.activation) or ""),
        source=opening(backend, many) + text("rows_up.h"),
        groups=groups,
        warps=warps,
    )


def rows_down(
    backend: Backend,
    experts: ExpertWeights,
    request: KernelRequest,
    warps: int = 8,
    rows: int = 2,
    *,
    many: bool = False,
) -> Launch:
    """Launch B, a warp for ``rows`` outputs. Inputs ``act, indices, weights``, the arrays; output ``y``."""
    down = request.down
    shared = request.shared.expert.down if request.shared else None
    groups = -(-down.rows // (warps * rows))
    factor = f" * ({{}}_g[e] * {NVFP4_UNIT!r}f)" if down.global_scale else ""
    settings = defines(
        {
            "H": down.rows,
            "F": request.expert_width,
            "K": request.top_k,
            "WARPS": warps,
            "ROWS": rows,
            "CHUNK": chunk_width(down),
            "SCORE": "weights[k]" + factor.format("down"),
            "DOT_DOWN": _dot("down", down),
            "SHARE": share_text(request) + factor.format("shared_down") if shared else "0.0f",
            "DOT_SHARED": _dot("shared_down", shared) if shared else "0.0f",
            "ADD_BIAS": add_down_bias(request),
            **shared_settings(experts, request, row_values(request)),
            **token_settings(request, row_values(request), groups, many),
        }
    )
    return Launch(
        label="experts_down",
        inputs=("act", "indices", "weights", *down_arrays(experts)),
        outputs=("y",),
        header=text(backend.prelude) + settings + text("rows.h"),
        source=opening(backend, many) + text("rows_down.h"),
        groups=groups,
        warps=warps,
    )

"""Dense MLPs: the layers without experts, and shared experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import mlx.core as mx
import mlx.nn as nn

from mlx_experts.engine.kernels import activations
from mlx_experts.engine.kernels.request import Activation
from mlx_experts.engine.layers.module_tree import find, place
from mlx_experts.engine.layers.tensor_parallel import Cuts
from mlx_experts.engine.layers.versioned import VersionedModule
from mlx_experts.registry.errors import ConfigError
from mlx_experts.registry.spec.family import ActivationSpec


def activation_of(spec: ActivationSpec, glu: bool = True) -> Activation:
    """The activation that a resolved section names.

    Args:
        glu: whether there is a gate that a function of one argument can apply to.
    """
    return activations.make(spec.name, float(spec.alpha), float(spec.limit), glu)


class MLP(VersionedModule):
    """``down(act(gate(x), up(x)))``, or ``down(act(up(x)))`` for an ungated activation.

    Args:
        dims: input and output width.
        width: inner width.
        activation: the activation, which says whether there is a gate.
        bias: biases on all projections.
        names: leaves of gate, up and down.
        fused: gate and up are one matrix, gate rows first, under the gate's name.
        scale: leaf of a learned factor on the output, or None.

    Raises:
        ConfigError: there is no inner width.
    """

    def __init__(
        self,
        dims: int,
        width: int,
        activation: Activation,
        *,
        bias: bool = False,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        fused: bool = False,
        scale: str | None = None,
    ) -> None:
        super().__init__()
        if width < 1:
            raise ConfigError(
                "a dense MLP has no inner width",
                where="config.json or the family file",
                expected="`config.dense_width`, or a `width` where the MLP is stated",
                found=str(width),
            )
        self._activation, self._names, self._fused, self._scale = activation, names, fused, scale
        if scale is not None:
            self[scale] = mx.ones((1,))
        gate, up, down = names
        if fused:
            place(self, gate, nn.Linear(dims, 2 * width, bias=bias))
        else:
            if activation.gated:
                place(self, gate, nn.Linear(dims, width, bias=bias))
            place(self, up, nn.Linear(dims, width, bias=bias))
        place(self, down, nn.Linear(width, dims, bias=bias))

    @property
    def activation(self) -> Activation:
        """The activation between the projections."""
        return self._activation

    @property
    def scaled(self) -> bool:
        """Whether a learned factor multiplies the output."""
        return self._scale is not None

    @property
    def joined(self) -> bool:
        """Whether gate and up are one matrix."""
        return self._fused

    def projections(self) -> dict[str, nn.Module]:
        """The projections as they are now: ``gate`` (when gated) and ``up``, or ``gate_up``, and ``down``."""
        gate, up, down = self._names
        first = {"gate_up": gate} if self._fused else {"gate": gate} if self._activation.gated else {}
        paths = first if self._fused else {**first, "up": up}
        return {part: find(self, path) for part, path in {**paths, "down": down}.items()}

    def bind(self) -> Callable[[mx.array], mx.array]:
        """The call as one function, with the projections that are there now."""
        run, leaf = self._bind_projections(), self._scale
        # The factor may stand in float32 beside narrow matrices.
        return run if leaf is None else lambda x: (run(x) * self[leaf]).astype(x.dtype)

    def _bind_projections(self) -> Callable[[mx.array], mx.array]:
        parts, activate = self.projections(), partial(activations.apply, self._activation)
        down, up, gate = parts["down"], parts.get("up"), parts.get("gate")
        if self._fused:
            gate_up = parts["gate_up"]
            return lambda x: down(activate(*mx.split(gate_up(x), 2, axis=-1)))
        assert up is not None
        if gate is None:
            return lambda x: down(activate(None, up(x)))
        return lambda x: down(activate(gate(x), up(x)))

    def __call__(self, x: mx.array) -> mx.array:
        """``x`` [..., D] to [..., D]."""
        return self.steps()(x)

    def cuts(self) -> Cuts:
        """Each rank keeps a part of the inner width."""
        gate, up, down = self._names
        into = (gate,) if self._fused else (gate, up) if self._activation.gated else (up,)
        return Cuts(rows=dict.fromkeys(into, 2 if self._fused else 1), columns=(down,))

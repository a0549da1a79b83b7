"""Norm, routing and experts in three launches, each of which reads what the one before wrote."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlx_experts.engine.kernels import naive
from mlx_experts.engine.kernels.gpu import cuda
from mlx_experts.engine.kernels.gpu.launch_pair import FusedPair, arrays_of
from mlx_experts.engine.kernels.gpu.pieces import routed_experts, routing, truth
from mlx_experts.engine.kernels.gpu.pieces.row_product import Norm
from mlx_experts.engine.kernels.router_kernel import RouterSteps


def test_experts_read_what_the_routing_launch_wrote(build_case, case_type, make_matrix, host_cuda):
    built = build_case(case_type(experts=9, top_k=3), "cuda")
    norm = Norm((1 + 0.3 * mx.random.normal((256,))).astype(mx.bfloat16), 1e-6)
    matrix = make_matrix(256, 9, ("affine", 8, 64))
    route = routing.build(matrix, norm, RouterSteps(9, 3, normalise="sum"), cuda.BACKEND, mx.bfloat16)
    x = mx.random.normal((1, 1, 256)).astype(mx.bfloat16)
    arrays = route.arrays(x, routing.zeros(x))
    (routed,) = map(mx.array, host_cuda.run(cuda.BACKEND, route.launch, arrays, route.memory()))
    _, normed, chosen, share = route.views([routed])

    pair = FusedPair(
        cuda.BACKEND,
        built.experts,
        mx.bfloat16,
        plan=lambda k: cuda.launches(built.experts, built.request, (9, 0)),
    )
    held, plan = arrays_of(built.experts), pair.plan(3)
    up, down = (routed_experts.after_routing(launch, route) for launch in (plan.up, plan.down))
    inputs = [held.get(name, routed) for name in up.inputs]
    (act,) = host_cuda.run(cuda.BACKEND, up, inputs, [((plan.words,), mx.float32)])
    inputs = [{"me_routed": routed, "act": mx.array(act)}.get(name, held.get(name)) for name in down.inputs]
    (y,) = host_cuda.run(cuda.BACKEND, down, inputs, [((256,), mx.bfloat16)])
    want = np.array(naive.experts_in_float32(built.experts, normed, chosen, share)).reshape(-1)
    assert truth.distance(y, want) < 5e-3

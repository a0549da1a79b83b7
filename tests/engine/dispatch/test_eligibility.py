"""Every gate rule accepts and declines; no device is needed."""

from dataclasses import replace

import pytest

from mlx_experts.engine.dispatch import eligibility
from mlx_experts.engine.dispatch.policy import WIDTH_BOUND, Bounds, Policy
from mlx_experts.engine.kernels import activations
from mlx_experts.engine.kernels.request import (
    Accept,
    Activation,
    Decline,
    KernelRequest,
    Projection,
    SharedRequest,
)

H, F = 128, 256
PARTS = ("gate", "up", "down")


def projection(rows, cols, **changes):
    return replace(Projection("affine", 4, 64, rows, cols, "bfloat16"), **changes)


GOOD = KernelRequest(
    rows=1,
    top_k=8,
    num_experts=64,
    gate=projection(F, H),
    up=projection(F, H),
    down=projection(H, F),
    activation=activations.make("swiglu"),
    dtype="bfloat16",
    device="cpu",
)


def stacks(**changes):
    """The asked_for with a change to all three projections."""
    return replace(
        GOOD,
        gate=replace(GOOD.gate, **changes),
        up=replace(GOOD.up, **changes),
        down=replace(GOOD.down, **changes),
    )


PLAIN = {"format": "plain", "bits": 16, "group_size": 0}
ACCEPTED = {
    "one row": GOOD,
    "one expert": replace(GOOD, top_k=1, num_experts=1),
    "32 experts": replace(GOOD, top_k=32),
    "float16": replace(GOOD, dtype="float16"),
    "float32": replace(GOOD, dtype="float32"),
    "float16 scales": stacks(dtype="float16"),
    "mixed bits": replace(GOOD, down=replace(GOOD.down, bits=6)),
    "mxfp4": stacks(format="mxfp4", group_size=32, dtype="uint8"),
    "mxfp8": stacks(format="mxfp8", bits=8, group_size=32, dtype="uint8"),
    "nvfp4 with global scale": stacks(format="nvfp4", group_size=16, dtype="uint8", global_scale=True),
    "plain": stacks(**PLAIN),
    "a prompt": replace(GOOD, rows=4096),
    "plain float32": stacks(format="plain", bits=32, group_size=0, dtype="float32"),
    "biases": stacks(bias=True),
    "ungated": replace(GOOD, gate=None, activation=activations.make("relu2")),
    "clamped": replace(GOOD, activation=activations.make("swiglu_oai", 1.702, 7.0)),
    **{f"{b} bits": stacks(bits=b) for b in (2, 3, 4, 5, 6, 8)},
    **{f"groups of {g}": stacks(group_size=g) for g in (32, 64, 128)},
}

DECLINED = {
    "adapted": replace(GOOD, adapted=True),
    "training": replace(GOOD, training=True),
    "rows": replace(GOOD, rows=0),
    "dtype": replace(GOOD, dtype="float64"),
    "top_k": replace(GOOD, top_k=33),
    "activation": replace(GOOD, activation=Activation("unheard_of")),
    "shapes": replace(GOOD, down=projection(H, F + 64)),
    "format": stacks(format="nf4"),
    "group_size": stacks(group_size=16),
    "scale_dtype": stacks(dtype="uint8"),
    "global_scale": stacks(global_scale=True),
    "widths": replace(GOOD, up=projection(F, H + 32), gate=projection(F, H + 32), down=projection(H + 32, F)),
}
MORE_DECLINED = [
    ("rows", replace(GOOD, rows=17, device="metal")),
    ("top_k", replace(GOOD, top_k=0)),
    ("activation", replace(GOOD, gate=None)),
    ("activation", replace(GOOD, activation=replace(GOOD.activation, gated=False))),
    ("activation", replace(GOOD, activation=activations.make("relu2"))),
    ("shapes", replace(GOOD, gate=projection(F + 64, H))),
    ("shapes", replace(GOOD, down=projection(2 * H, F))),
    ("format", stacks(bits=1)),
    ("format", stacks(format="mxfp4", bits=8, group_size=32, dtype="uint8")),
    ("format", replace(GOOD, down=replace(GOOD.down, bits=7))),
    ("format", stacks(format="plain", bits=64, group_size=0, dtype="float32")),
    ("group_size", stacks(format="nvfp4", group_size=32, dtype="uint8")),
    ("scale_dtype", stacks(format="mxfp4", group_size=32, dtype="float16")),
]


@pytest.mark.parametrize("asked_for", ACCEPTED.values(), ids=ACCEPTED)
def test_gate_accepts(asked_for):
    assert eligibility.check(asked_for, Policy()) == Accept("cpu")


@pytest.mark.parametrize(
    ("rule", "asked_for"), [*DECLINED.items(), *MORE_DECLINED], ids=lambda v: v if isinstance(v, str) else ""
)
def test_gate_declines(rule, asked_for):
    verdict = eligibility.check(asked_for, Policy())
    assert isinstance(verdict, Decline)
    assert verdict.rule == rule
    assert verdict.wanted
    assert verdict.got
    assert verdict.hint


def test_every_rule_has_a_declining_case():
    covered = {*DECLINED, "switch", "width_bound"}
    assert {rule.__name__.lstrip("_") for rule in eligibility.RULES} == covered


@pytest.mark.parametrize(("rows", "accepted"), [(0, False), (1, True), (4, True), (5, False)])
def test_several_rows_up_to_the_bound_of_the_storage(rows, accepted):
    policy = Policy(measured={GOOD.up.storage: Bounds(max_rows=4)}, otherwise=Bounds(max_rows=16))
    verdict = eligibility.check(replace(GOOD, device="cuda", rows=rows), policy)
    assert isinstance(verdict, Accept) is accepted
    if isinstance(verdict, Decline):
        assert (verdict.rule, verdict.wanted) == ("rows", "1 to 4")


def test_a_device_takes_no_more_rows_than_its_kernel():
    policy = Policy(otherwise=Bounds(max_rows=64))
    assert isinstance(eligibility.check(replace(GOOD, device="cuda", rows=16), policy), Accept)
    assert isinstance(eligibility.check(replace(GOOD, device="cuda", rows=17), policy), Decline)


@pytest.mark.parametrize(
    ("change", "start", "rule"),
    [
        (dict(), 17, None),
        (dict(), 33, "rows"),
        (dict(), None, "rows"),
        (dict(adapted=True), 17, "adapted"),
        (dict(training=True), 17, "training"),
        (dict(dtype="float64"), 17, "dtype"),
        (dict(up=replace(GOOD.up, group_size=16)), 17, "group_size"),
    ],
)
def test_the_path_for_many_rows_starts_where_it_pays(change, start, rule):
    request = replace(GOOD, rows=20, device="cuda", **change)
    verdict = eligibility.check_many(request, Policy(otherwise=Bounds(many_from=start), max_width=0))
    assert (verdict.rule if isinstance(verdict, Decline) else None) == rule


def test_the_switch_declines_and_says_who_set_it():
    verdict = eligibility.check(GOOD, Policy(enabled=False, switched_by="fused=False"))
    assert isinstance(verdict, Decline)
    assert verdict.rule == "switch"
    assert "fused=False" in verdict.hint


@pytest.mark.parametrize(("bound", "accepted"), [(None, True), (F, True), (F - 1, False), (0, False)])
def test_the_width_bound_includes_its_own_value(bound, accepted):
    verdict = eligibility.check(GOOD, Policy(max_width=bound))
    assert isinstance(verdict, Accept) is accepted
    if isinstance(verdict, Decline):
        assert verdict.rule == "width_bound"
        assert WIDTH_BOUND in verdict.hint


FORMS = {"scalar": {"cpu"}, "c": {"cuda", "metal"}}


@pytest.mark.parametrize("form", FORMS)
def test_an_activation_without_the_form_a_kernel_needs_is_declined(monkeypatch, form):
    monkeypatch.setattr(activations, "_TABLE", dict(activations._TABLE))
    forms = {"scalar": lambda g, u, a, b: g * u, "c": "g*u"}
    activations.register(
        activations.ExpertActivation("product", True, lambda g, u, a, b: g * u, **{form: forms[form]})
    )
    for device, limits in eligibility.LIMITS.items():
        asked_for = replace(GOOD, activation=activations.make("product"), device=device)
        verdict = eligibility.check(asked_for, Policy())
        if device in FORMS[form]:
            assert verdict == Accept(device)
        else:
            assert isinstance(verdict, Decline)
            assert (verdict.rule, verdict.wanted) == ("activation", f"a {limits.form} form")


@pytest.mark.parametrize("device", ["cuda", "metal"])
def test_gpu_kernels_decline_plain_widths_that_are_no_whole_step(device):
    odd = replace(
        GOOD,
        device=device,
        gate=projection(F, 100, **PLAIN),
        up=projection(F, 100, **PLAIN),
        down=projection(100, F, **PLAIN),
    )
    verdict = eligibility.check(odd, Policy())
    assert isinstance(verdict, Decline)
    assert verdict.rule == "widths"
    assert eligibility.check(replace(odd, device="cpu"), Policy()) == Accept("cpu")


def shared(weigh=None, **changes):
    """A shared expert of twice the width, picked once."""
    expert = replace(
        GOOD,
        top_k=1,
        num_experts=1,
        gate=projection(2 * F, H),
        up=projection(2 * F, H),
        down=projection(H, 2 * F),
    )
    return SharedRequest(replace(expert, **changes), weigh)


SIX = {"gate": projection(F, H, bits=6), "up": projection(F, H, bits=6), "down": projection(H, F, bits=6)}
SHARED_ACCEPTED = {
    "as stored": shared(),
    "weighed": shared(weigh=projection(1, H, bits=8)),
    "weighed by a plain row": shared(weigh=projection(1, H, format="plain", bits=16, group_size=0)),
}
SHARED_DECLINED = {
    "adapted": (None, "shared"),
    "another activation": (shared(activation=activations.make("swiglu_oai", 1.702, 7.0)), "shared"),
    "another input": (
        shared(gate=projection(F, 2 * H), up=projection(F, 2 * H), down=projection(2 * H, F)),
        "shared",
    ),
    "a gate of two rows": (shared(weigh=projection(2, H)), "shared"),
    "a gate in an unknown format": (shared(weigh=projection(1, H, format="ternary")), "format"),
    "an unknown format": (shared(up=projection(2 * F, H, bits=7)), "format"),
}


def expert_request(device, shared_request):
    """The shared asked_for as this device would be asked."""
    if shared_request is None:
        return None
    return replace(shared_request, expert=replace(shared_request.expert, device=device))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("asked_for", SHARED_ACCEPTED.values(), ids=SHARED_ACCEPTED)
def test_a_shared_expert_is_accepted(asked_for, device):
    routed = replace(GOOD, device=device)
    assert eligibility.check_shared(routed, expert_request(device, asked_for), Policy()) == Accept(device)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("asked_for", "rule"), SHARED_DECLINED.values(), ids=SHARED_DECLINED)
def test_a_shared_expert_is_declined(asked_for, rule, device):
    verdict = eligibility.check_shared(
        replace(GOOD, device=device), expert_request(device, asked_for), Policy()
    )
    assert isinstance(verdict, Decline)
    assert verdict.rule == rule
    assert verdict.hint


BIASED = {
    "gate": projection(2 * F, H, bias=True),
    "up": projection(2 * F, H, bias=True),
    "down": projection(H, 2 * F, bias=True),
}


@pytest.mark.parametrize("changes", [SIX, BIASED], ids=["bits", "biases"])
def test_a_shared_expert_of_other_storage_is_taken_by_the_cpu_alone(changes):
    assert eligibility.check_shared(GOOD, shared(**changes), Policy()) == Accept("cpu")
    verdict = eligibility.check_shared(
        replace(GOOD, device="cuda"), expert_request("cuda", shared(**changes)), Policy()
    )
    assert isinstance(verdict, Decline)
    assert "storage" in verdict.wanted


def test_a_shared_expert_without_the_global_scales_of_the_routed_ones_is_of_other_storage():
    nvfp4 = {"format": "nvfp4", "group_size": 16, "dtype": "uint8"}
    routed = replace(stacks(**nvfp4, global_scale=True), device="cuda")
    beside = replace(routed, **{part: replace(getattr(routed, part), global_scale=False) for part in PARTS})
    verdict = eligibility.check_shared(routed, SharedRequest(beside, None), Policy())
    assert isinstance(verdict, Decline)
    assert "storage" in verdict.wanted


def test_a_shared_expert_is_left_apart_where_nobody_has_measured():
    verdict = eligibility.check_shared(
        replace(GOOD, device="metal"), expert_request("metal", shared()), Policy()
    )
    assert isinstance(verdict, Decline)
    assert "metal" in verdict.got


def test_the_bound_on_widths_is_not_asked_of_a_shared_expert():
    assert eligibility.check_shared(GOOD, shared(), Policy(max_width=F)) == Accept("cpu")

"""The settings mean exactly what the documentation says."""

import os
from importlib.resources import files
from typing import Any
from unittest import mock

import pytest

from mlx_experts.engine.dispatch.policy import SWITCH, WIDTH_BOUND, Bounds, Policy, Tuned, resolve
from mlx_experts.engine.loading.checkpoint_loader import load_checkpoint
from mlx_experts.registry.checkpoint.checkpoint import Checkpoint
from mlx_experts.registry.errors import SettingError


def under(environment: dict[str, str], *args: Any, **options: Any) -> Policy:
    """The policy under these variables and no others of this package."""
    others = {k: v for k, v in os.environ.items() if k not in (SWITCH, WIDTH_BOUND)}
    with mock.patch.dict(os.environ, {**others, **environment}, clear=True):
        return resolve(*args, **options)


@pytest.mark.parametrize("text", ["0", "false", "off", "no", " OFF ", "False", "nO\n"])
def test_these_texts_switch_fused_off(text):
    policy = under({SWITCH: text}, "cpu")
    assert not policy.enabled
    assert SWITCH in policy.switched_by


@pytest.mark.parametrize("text", ["", " ", "1", "true", "on", "yes", "disabled", "00", "-1"])
def test_anything_else_leaves_it_on(text):
    assert under({SWITCH: text}, "cpu").enabled


STORED = ["affine 4-bit g64"]


def width(policy: Policy, *storages: str) -> int | None:
    return policy.bounds(storages or STORED).max_width


def test_unset_leaves_it_on_and_unbounded_except_on_metal():
    assert under({}, "cpu").bounds(STORED) == Bounds(None, None, None)
    assert under({}, "cuda").bounds(STORED) == Bounds(None, 1, None)
    metal = under({}, "metal")
    assert (metal.enabled, metal.bounds(STORED)) == (True, Bounds(4096, 1, None))


@pytest.mark.parametrize(
    ("argument", "text", "enabled"), [(True, "0", True), (False, "1", False), (None, "0", False)]
)
def test_the_argument_wins_over_the_environment(argument, text, enabled):
    assert under({SWITCH: text}, "cpu", argument).enabled is enabled


def test_the_bound_is_read_from_the_environment_before_the_tuned_one():
    tuned = Tuned({STORED[0]: Bounds(2048)})
    assert width(under({}, "metal", tuned=tuned)) == 2048
    assert width(under({}, "metal", tuned=Tuned({STORED[0]: Bounds()}))) is None
    assert width(under({WIDTH_BOUND: " 1408 "}, "metal", tuned=tuned)) == 1408
    assert width(under({WIDTH_BOUND: "0"}, "cuda")) == 0
    assert width(under({WIDTH_BOUND: ""}, "metal", tuned=tuned)) == 2048


def test_a_storage_has_its_own_bounds_and_the_narrowest_of_several_hold():
    tuned = Tuned({"mxfp4 4-bit g32": Bounds(1024, 4, 65), "affine 8-bit g64": Bounds(None, 8, 33)})
    policy = under({}, "cuda", tuned=tuned)
    assert policy.bounds(["mxfp4 4-bit g32"]) == Bounds(1024, 4, 65)
    assert policy.bounds(["mxfp4 4-bit g32", "affine 8-bit g64"]) == Bounds(1024, 4, 65)
    assert policy.bounds(["affine 8-bit g64", "plain 16-bit"]) == Bounds(None, 1, None)
    never = under({}, "cuda", tuned=Tuned({"plain 16-bit": Bounds(None, 16, None)}))
    assert never.bounds(["plain 16-bit", "affine 8-bit g64"]).many_from is None


@pytest.mark.parametrize("text", ["4k", "-1", "1.5", "none", "0x10", "²", "1 2"])
def test_a_bound_that_cannot_be_read_is_an_error(text):
    with pytest.raises(SettingError, match=WIDTH_BOUND):
        under({WIDTH_BOUND: text}, "cpu")


def test_a_bound_that_is_no_number_is_refused_before_anything_is_loaded(monkeypatch):
    monkeypatch.setenv(WIDTH_BOUND, "wide")
    demo = Checkpoint.open(str(files("mlx_experts").joinpath("demo")))
    with pytest.raises(SettingError, match=WIDTH_BOUND):
        load_checkpoint(demo)

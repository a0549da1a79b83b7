"""Writes into modules are noticed, wherever MLX makes them, and calls use what is there now."""

import copy
import pickle

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.tuner.lora import LoRALinear

from mlx_experts.engine.layers.versioned import Holder, VersionedModule
from mlx_experts.engine.models.known_families import catalog
from mlx_experts.engine.tools.family_check import build_tiny
from mlx_experts.registry.resolve.tiny_config import tiny_config

IDS = mx.array([[1, 2, 3]])


class Leaf(VersionedModule):
    """Binds its matrix once."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0
        self.proj = nn.Linear(4, 4)
        self.inner = Holder()

    def bind(self):
        self.__dict__["made"] = self.made + 1
        return self.proj

    def __call__(self, x):
        return self.steps()(x)


def tiny(name: str):
    family = catalog().load(name)
    model = build_tiny(family, tiny_config(family))
    model.eval()
    return model


def test_steps_are_bound_once_for_many_calls() -> None:
    leaf = Leaf()
    for _ in range(3):
        leaf(mx.ones((4,)))
    assert leaf.made == 1


CHANGES = ["setattr", "setitem", "update_modules", "quantise", "train", "below", "delete"]


@pytest.mark.parametrize("change", CHANGES)
def test_every_kind_of_write_makes_the_next_call_bind(change: str) -> None:
    above, leaf = Holder(), Leaf()
    above.leaf = leaf
    leaf.inner.array = mx.zeros((2,))
    leaf(mx.ones((4,)))
    before = above.version
    match change:
        case "setattr":
            leaf.proj = nn.Linear(4, 4)
        case "setitem":
            leaf["proj"] = nn.Linear(4, 4)
        case "update_modules":
            above.update_modules({"leaf": {"proj": LoRALinear.from_base(leaf.proj)}})
        case "quantise":
            leaf.proj = nn.Linear(64, 64)
            nn.quantize(above, 64, 4)
        case "train":
            above.eval()
        case "below":
            above.update({"leaf": {"inner": {"array": mx.ones((2,))}}})
        case "delete":
            del leaf.inner
    assert above.version > before
    wanted = leaf.proj
    assert leaf.steps() is wanted
    assert leaf.made == 2


def test_a_write_in_a_part_that_was_taken_over_counts_in_both_places() -> None:
    first, second, part = Holder(), Holder(), Leaf()
    first.part = second.part = part
    before = first.version, second.version
    part.proj = nn.Linear(4, 4)
    assert (first.version, second.version) > before
    assert first.version > before[0]
    assert second.version > before[1]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_uses_its_own_parts(duplicate) -> None:
    above = Holder()
    above.leaf = Leaf()
    x = mx.ones((4,))
    y = above.leaf(x)
    twin = duplicate(above)
    assert mx.array_equal(twin.leaf(x), y)
    twin.leaf.proj = nn.Linear(4, 4)
    assert not mx.array_equal(twin.leaf(x), y)
    assert mx.array_equal(above.leaf(x), y)


NAMES = ["qwen3_moe", "deepseek_v3", "gpt_oss", "cohere2_moe", "gemma4_text", "nemotron_h", "longcat_flash"]


@pytest.mark.parametrize("name", NAMES)
def test_a_model_computes_with_weights_written_after_its_first_call(name: str) -> None:
    """The twin, which has not run before, gives the truth."""
    model, fresh = tiny(name), tiny(name)
    fresh.update(model.parameters())
    fresh = copy.deepcopy(fresh)
    mx.eval(model(IDS), model(IDS[:, :1]))
    doubled = tree_map(lambda value: value * 2 + 0.01, model.parameters())
    model.update(doubled)
    fresh.update(doubled)
    for ids in (IDS, IDS[:, :1]):
        assert mx.array_equal(model(ids), fresh(ids), equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_put_in_any_place_is_called(name: str) -> None:
    model = tiny(name)
    mx.eval(model(IDS[:, :1]))
    places = [path for path, module in model.named_modules() if type(module) is nn.Linear]
    called = set()

    class Noted(LoRALinear):
        def __call__(self, x):
            called.add(self.place)
            return super().__call__(x)

    modules = dict(model.named_modules())
    for path in places:
        adapted = Noted.from_base(modules[path])
        adapted.__class__ = Noted
        adapted.place = path
        parent, _, leaf = path.rpartition(".")
        modules[parent][leaf] = adapted
    mx.eval(model(IDS[:, :1]))
    assert called == set(places)


def test_bound_steps_hold_no_parameter_of_their_own() -> None:
    model = tiny("qwen3_moe")
    names = [name for name, _ in tree_flatten(model.parameters())]
    mx.eval(model(IDS))
    assert [name for name, _ in tree_flatten(model.parameters())] == names


@pytest.mark.parametrize("name", NAMES)
def test_modules_are_those_that_mlx_finds_in_its_order(name: str) -> None:
    model = tiny(name)
    model.extra = {"listed": [nn.Linear(2, 2), [nn.Linear(2, 2)], mx.zeros(1)], "array": mx.zeros(1)}
    found: list[tuple[str, nn.Module]] = []
    nn.Module.apply_to_modules(model, lambda path, module: found.append((path, module)))
    assert [path for path, _ in model.named_modules()] == [path for path, _ in found]
    assert all(a is b for a, (_, b) in zip(model.modules(), found, strict=True))

"""Words of a config that the engine takes in its own sense, and tensors of which only a part is wanted."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_experts.engine.kernels import activations
from mlx_experts.engine.weights.conversion_ops import PickOperation, make_operation
from mlx_experts.engine.weights.tensor_tree import Tree
from mlx_experts.registry.spec.checkpoint import PickOp

TREE = Tree({}, 2, {})


@pytest.mark.parametrize(
    ("word", "glu", "name"),
    [
        ("silu", True, "swiglu"),
        ("swish", True, "swiglu"),
        ("gelu", True, "geglu"),
        ("gelu_pytorch_tanh", True, "geglu_tanh"),
        ("gelu", False, "gelu"),
        ("gelu_pytorch_tanh", False, "gelu_tanh"),
        ("relu2", True, "relu2"),
        ("swiglu_oai", True, "swiglu_oai"),
    ],
)
def test_function_of_one_argument_is_the_one_on_the_gate_of_a_glu(word: str, glu: bool, name: str) -> None:
    assert activations.make(word, glu=glu).name == name


def operation(**stated: object) -> PickOperation:
    source, target = "layers.{layer}.gate.weight", "layers.{layer}.router.weight"
    declared = PickOp.model_validate({"pick": source, "to": target, **stated})
    made = make_operation(declared, lambda value: value, lambda name: None)
    assert isinstance(made, PickOperation)
    return made


def test_matrix_is_turned_there_and_back() -> None:
    value = mx.arange(6).reshape(2, 3)
    tensors = {"layers.1.gate.weight": value}
    assert operation(transposed=True).forward(tensors, TREE)
    assert tensors["layers.1.router.weight"].tolist() == value.T.tolist()
    operation(transposed=True).backward(tensors, TREE)
    assert tensors["layers.1.gate.weight"].tolist() == value.tolist()


def test_one_row_is_taken_and_found_again() -> None:
    tensors = {"layers.0.gate.weight": mx.arange(6).reshape(2, 3)}
    pick = operation(row=1)
    assert pick.forward(tensors, TREE)
    assert tensors["layers.0.router.weight"].tolist() == [3, 4, 5]
    pick.backward(tensors, TREE)
    assert pick.forward(tensors, TREE)
    assert tensors["layers.0.router.weight"].tolist() == [3, 4, 5]


def test_nothing_is_picked_where_nothing_is() -> None:
    assert not operation().forward({}, TREE)

"""The public shapes are complete, well formed and storable."""

import pytest

from mlx_experts.registry.catalog.public_shapes import select, shapes
from mlx_experts.registry.errors import SettingError


def test_every_family_has_one_shape_in_order_of_name():
    names = [s.family for s in shapes()]
    assert names == sorted(names)
    assert len(set(names)) == len(names) >= 40


@pytest.mark.parametrize("shape", shapes(), ids=lambda s: s.family)
def test_a_shape_can_be_stored_in_groups_and_names_its_source(shape):
    assert shape.hidden % 32 == 0
    assert shape.width % 32 == 0
    assert 1 <= shape.top_k <= min(32, shape.experts)
    assert shape.checkpoint


def test_families_are_selected_by_name_and_unknown_ones_are_errors():
    assert [s.width for s in select(["mixtral", "qwen3_moe"])] == [14336, 768]
    assert len(select([])) == len(shapes())
    with pytest.raises(SettingError, match="mixtral"):
        select(["mixtrall"])

"""Names of parts of fused parameters, and what follows from them."""

import pytest

from samestep.groups.param_groups import name_matches
from samestep.layout.fused_rows import (
    FusedRows,
    are_apart,
    in_order,
    parts_apart,
    rows_in,
    whole_name,
)

KEYS = FusedRows("a.qkv.weight", 16, 24)


def test_a_name_says_which_rows_a_part_has():
    assert str(KEYS) == "a.qkv.weight[16:24]"
    assert rows_in("a.qkv.weight[16:24]") == KEYS
    assert KEYS.rows == 8
    assert whole_name("a.qkv.weight[16:24]") == whole_name("a.qkv.weight") == "a.qkv.weight"


@pytest.mark.parametrize("name", ["a.qkv.weight", "param_groups[0][3]", "a[b:c]", "[0:4]"])
def test_other_names_are_of_no_part(name):
    assert rows_in(name) is None
    assert whole_name(name) == name


def test_patterns_mean_parts_by_their_own_name_and_by_that_of_the_whole():
    assert name_matches("a.qkv.weight[16:24]", "*.qkv.weight")
    assert name_matches("a.qkv.weight[16:24]", "a.qkv.weight[16:24]")
    assert name_matches("a.qkv.weight[16:24]", "*qkv*")
    assert not name_matches("a.qkv.weight[16:24]", "a.qkv.weight[0:16]")
    assert not name_matches("a.qkv.weight[16:24]", "*.out.weight")


def test_sizes_of_the_whole_are_cut_to_a_part():
    assert KEYS.own_splits((16, 8, 8), 32) == (8,)
    assert KEYS.own_splits((4,) * 8, 32) == (4, 4)
    for sizes in ((32,), (20, 4, 8), (16, 8), (16, 8, 8, 8), ()):
        with pytest.raises(ValueError, match="is rows 16 to 24 of 32, and split_sizes"):
            KEYS.own_splits(sizes, 32)


def test_parts_come_in_the_order_of_their_rows():
    names = ["w[16:24]", "w[0:16]", "w[24:100]"]
    assert [part.start for part in in_order(names)] == [0, 16, 24]
    with pytest.raises(ValueError, match="rows 0 to 16 of 'w' are missing"):
        in_order(["w[16:24]", "w[24:100]"])
    with pytest.raises(ValueError, match="rows 16 to 24 of 'w' are missing"):
        in_order(["w[0:16]", "w[24:100]"])


def test_parts_are_apart_while_asked_for():
    assert not are_apart()
    with parts_apart():
        assert are_apart()
    assert not are_apart()

"""Who holds what of a tensor in one program for several devices; needs no XLA."""

import pytest

from samestep.xla.tiling import Tiling, parse


def test_words_of_xla():
    assert parse("", 2) is None
    assert parse("{replicated}", 2) is None
    assert parse("{devices=[4,1]0,1,2,3}", 2) == Tiling((4, 1), (0, 1, 2, 3))
    copies = parse("{devices=[2,1,2]0,2,1,3 last_tile_dim_replicate}", 2)
    assert copies == Tiling((2, 1), (0, 2, 1, 3))
    assert copies.copies == 2


def test_devices_told_as_an_order_of_axes():
    assert parse("{devices=[2,2]<=[4]}", 2) == Tiling((2, 2), (0, 1, 2, 3))
    turned = parse("{devices=[2,1,2]<=[2,2]T(1,0) last_tile_dim_replicate}", 2)
    assert turned == Tiling((2, 1), (0, 2, 1, 3))


def test_what_is_not_known_is_refused():
    with pytest.raises(NotImplementedError, match="maximal"):
        parse("{maximal device=0}", 2)


def test_copies_divide_a_tile():
    whole = Tiling((1, 1), (0, 1, 2, 3))
    assert whole.without_copies((8, 6)) == Tiling((4, 1), (0, 1, 2, 3))
    # 6 rows over 4 devices would leave one empty: columns take less room.
    assert whole.without_copies((6, 8)) == Tiling((1, 4), (0, 1, 2, 3))
    # Tiles of rows on {0, 1} and {2, 3}: the first quarter of rows is device 0's, the last 3's.
    rows = Tiling((2, 1), (0, 1, 2, 3))
    assert rows.without_copies((8, 6)) == Tiling((4, 1), (0, 1, 2, 3))
    # Of tiles of columns, rows are divided if that pads less: device 1 has the first columns'
    # second half of rows.
    columns = Tiling((1, 2), (0, 1, 2, 3))
    assert columns.without_copies((8, 6)) == Tiling((2, 2), (0, 2, 1, 3))


def test_without_copies_there_is_nothing_to_divide():
    parts = Tiling((4, 1), (0, 1, 2, 3))
    assert parts.without_copies((8, 6)) == parts
    assert Tiling((), (0, 1)).without_copies(()) == Tiling((), (0, 1))

"""What lies in no hole lies behind everything."""

from __future__ import annotations

import pytest

from megatrain.planner.cost.compiled import Alive, Lifetime, extent

FOUR, TWO = Lifetime(0, 1, 1, 2), Lifetime(0, 3, 0, 2)  # bytes with two sequences: 4, 2


@pytest.mark.parametrize(
    ("later", "bytes_"),
    [
        ([3], 4 + 2),  # in the hole of the first
        ([3, 1], 4 + 2),
        ([5], 4 + 2 + 5),  # no hole holds it
        ([2, 3], 4 + 2 + 3),  # two are left of the hole
    ],
)
def test_a_piece_takes_the_smallest_hole_that_holds_it(later, bytes_):
    pieces = [FOUR, TWO, *(Lifetime(2, 3, 0, size) for size in later)]
    assert extent(pieces, 2) == bytes_


def test_holes_that_touch_are_one_and_the_last_one_grows():
    first = [Lifetime(0, 0, 0, 3), Lifetime(0, 0, 0, 3), Lifetime(0, 2, 0, 1)]
    assert extent([*first, Lifetime(1, 2, 0, 6)], 1) == 7
    assert extent([*first[:2], Lifetime(1, 2, 0, 9)], 1) == 9


def test_the_order_that_needs_least_is_taken_with_its_holes():
    tight = (FOUR, Lifetime(2, 3, 0, 5))  # 5 alive, in 5
    loose = (FOUR, TWO, Lifetime(2, 3, 0, 5))  # 7 alive, in 11
    assert [Alive((order,)).peak(2) for order in (tight, loose)] == [5, 7]
    assert [Alive((order,)).holes(2) for order in (tight, loose)] == [0, 4]
    assert Alive((tight, loose)).peak(2) == 5
    assert Alive((tight, loose)).holes(2) == 0

"""Cutting a block: nothing lost, nothing doubled, the order kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ray_lance_stream.cluster.cuts import halves, rows_of
from ray_lance_stream.request import Ranges


@st.composite
def ranges(draw: st.DrawFn) -> Ranges:
    num_splits, first = draw(st.integers(1, 6)), draw(st.integers(0, 3))
    start = draw(st.integers(0, 4))
    apart = draw(
        st.dictionaries(st.integers(first, first + num_splits - 1), st.tuples(st.integers(0, 9), st.integers(0, 9)))
    )
    return Ranges(
        first_split=first,
        num_splits=num_splits,
        start=start,
        stop=start + draw(st.integers(0, 9)),
        overrides=tuple((split, a, a + n) for split, (a, n) in sorted(apart.items())),
    )


def rows(of: Ranges) -> list[tuple[int, int]]:
    splits, positions = of.places()
    return list(zip(splits.tolist(), positions.tolist(), strict=True))


def singles(of: Ranges) -> list[Ranges]:
    pair = halves(of)
    return [of] if pair is None else [single for half in pair for single in singles(half)]


@given(ranges())
def test_halves_are_the_whole_in_its_order(whole: Ranges) -> None:
    assert rows_of(whole) == len(rows(whole))
    pair = halves(whole)
    if pair is None:
        assert rows_of(whole) <= 1
    else:
        first, second = pair
        assert rows(first) + rows(second) == rows(whole)
        assert min(rows_of(first), rows_of(second)) > 0


@given(ranges())
def test_cutting_on_ends_at_single_rows(whole: Ranges) -> None:
    parts = singles(whole)
    assert [row for part in parts for row in rows(part)] == rows(whole)
    assert all(rows_of(part) <= 1 for part in parts)

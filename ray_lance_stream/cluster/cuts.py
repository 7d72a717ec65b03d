"""Cutting a block's ranges in two, without changing the canonical order of its rows."""

from __future__ import annotations

from ray_lance_stream.request import Ranges


def rows_of(ranges: Ranges) -> int:
    """Returns the number of rows of a block."""
    if not ranges.overrides:
        return max(0, ranges.stop - ranges.start) * ranges.num_splits
    return sum(max(0, stop - start) for start, stop in _bounds(ranges))


def halves(ranges: Ranges) -> tuple[Ranges, Ranges] | None:
    """Returns two parts whose rows, one after the other, are those of ``ranges``; None for a single row.

    Cycles are told apart first, then the splits of a cycle.
    """
    bounds = _bounds(ranges)
    turns = max((stop - start for start, stop in bounds), default=0)
    if turns > 1:
        cut = turns // 2
        middles = [max(start, min(stop, start + cut)) for start, stop in bounds]
        early = [(start, middle) for (start, _), middle in zip(bounds, middles, strict=True)]
        late = [(middle, stop) for (_, stop), middle in zip(bounds, middles, strict=True)]
        return _ranges(ranges.first_split, early), _ranges(ranges.first_split, late)
    present = [index for index, (start, stop) in enumerate(bounds) if stop > start]
    if len(present) < 2:
        return None
    cut = present[len(present) // 2]
    return _ranges(ranges.first_split, bounds[:cut]), _ranges(ranges.first_split + cut, bounds[cut:])


def _bounds(ranges: Ranges) -> list[tuple[int, int]]:
    """(start, stop) of every split."""
    bounds = [(ranges.start, ranges.stop)] * ranges.num_splits
    for split, start, stop in ranges.overrides:
        bounds[split - ranges.first_split] = (start, stop)
    return bounds


def _ranges(first_split: int, bounds: list[tuple[int, int]]) -> Ranges:
    start, stop = bounds[0]
    apart = ((first_split + i, *bound) for i, bound in enumerate(bounds) if bound != bounds[0])
    return Ranges(first_split=first_split, num_splits=len(bounds), start=start, stop=stop, overrides=tuple(apart))

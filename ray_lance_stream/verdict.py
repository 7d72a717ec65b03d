"""What the numbers of a run come to, in words: is data the limit, what of it, and what would help. No clock, no Ray.

Between two batches a rank trains, and while one rank waits for data the others wait for it in their communication. So
the rank that waits most says by how much data slows the run down, and without that wait the run would be faster in the
proportion 1 / (1 - its share): that is the demand. A prefetcher that needs b busy seconds for a row serves 1 / b rows a
second, so the demand times b is how many prefetchers are kept busy all the time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Final

from ray_lance_stream.stats import SILENT_S, PrefetcherStats, RankStats

_WAITS: Final = 0.05  # of the time: less is not worth anybody's work
_MOST_BUSY: Final = 0.8  # of a prefetcher's time: above it blocks queue, as they do not come evenly
# A reader asks for one block more while that fits, and a block takes up to a third of its budget: above is full.
_FULL: Final = 0.6
_APART: Final = 2.0  # how many times slower than the others one prefetcher is, to be named
_RANK_APART: Final = 3.0  # how many times as long as the others one rank waits, to be named
_MOST_SHARE: Final = 0.95  # of waiting: beyond it the trainers' own time is too short to be measured, so "at least"
_NOTHING_YET: Final = "nothing is known yet: no trainer has asked for data lately"


def stream_verdict(ranks: Sequence[RankStats], prefetchers: Sequence[PrefetcherStats]) -> str:
    """Returns one sentence on a run.

    Args:
        ranks: Its training workers.
        prefetchers: Its pool.
    """
    rows_per_s = sum(rank.rows_per_s for rank in ranks)  # of all that ask, replicas of several ranks included
    if not ranks:
        return _NOTHING_YET
    silent_s = min(rank.silent_s for rank in ranks)
    if silent_s > SILENT_S:
        since = f"for {silent_s:.0f} s" if math.isfinite(silent_s) else "lately"
        return f"no worker has been heard of {since}: Ray Train is starting them again, or they all hang"
    if not rows_per_s and not any(rank.waiting_s for rank in ranks):
        return _NOTHING_YET
    waits = max(rank.wait_share for rank in ranks)
    if waits < _WAITS:
        return f"trainers wait {_percent(waits)} for data: it is not the limit"
    said = f"trainers wait {_percent(waits)} for data"
    working = [p for p in prefetchers if p.state in ("building", "idle")]
    if not working:
        return f"{said}: no prefetcher works; {_not_working(prefetchers)}"
    if not rows_per_s:
        return f"{said}: no batch has come lately; {_being_built(working)}"
    if (slow := _slow_prefetcher(working)) is not None:
        return f"{said}; {slow}"
    busy = sum(p.busy_share for p in working) / len(working)
    if busy >= _MOST_BUSY:
        return f"{said}; {_building(rows_per_s, waits, working)}"
    if (slow := _slow_rank(ranks)) is not None:
        return f"{said}; {slow}"
    held, budget = sum(rank.buffered_bytes for rank in ranks), sum(rank.budget_bytes for rank in ranks)
    if budget and held >= _FULL * budget:
        return (
            f"{said}; the trainers' budget of bytes is the limit: it is full while the prefetchers are busy only "
            f"{_percent(busy)} of the time; raise PrefetchConfig(max_buffer_bytes=...)"
        )
    return (
        f"{said}; the prefetchers are busy only {_percent(busy)} of the time{_most_of_it(working)}: batches are late "
        "at the start of an epoch, on the network, or in the conversion on the trainers; have more of them made ahead "
        "(iter_torch_batches(prefetch_batches=...)), or make epochs longer"
    )


def rank_verdict(*, batches: int, wait_s: float, train_s: float, buffered_bytes: int, budget_bytes: int) -> str:
    """Returns one sentence on what one worker saw since it began.

    Args:
        batches: Batches handed out.
        wait_s: Seconds of waiting.
        train_s: Seconds of training.
        buffered_bytes: What it holds or has asked for.
        budget_bytes: How much that may be.
    """
    total_s = wait_s + train_s
    if not batches or not train_s:
        return "nothing is known yet: fewer than two batches were asked for"
    share = wait_s / total_s
    if share < _WAITS:
        return f"this worker waits {_percent(share)} for data: it is not the limit"
    said = f"this worker waits {_percent(share)} for data"
    if budget_bytes and buffered_bytes < _FULL * budget_bytes:
        return (
            f"{said}, and its budget of bytes is not used up: the end of an epoch is near, or batches are made slowly"
        )
    return f"{said}, and has asked for as much as its budget allows: prefetchers or the budget are the limit"


def prefetchers_needed(rows_per_s: float, wait_share: float, busy_s_per_row: float) -> int:
    """Returns how many prefetchers hide the waiting.

    Args:
        rows_per_s: What is delivered now.
        wait_share: The part of the time the slowest trainer waits.
        busy_s_per_row: Time a prefetcher takes for a row.
    """
    demand = rows_per_s / (1 - min(wait_share, _MOST_SHARE))
    return max(1, math.ceil(demand * busy_s_per_row / _MOST_BUSY - 1e-9))


def _building(rows_per_s: float, waits: float, working: Sequence[PrefetcherStats]) -> str:
    building = [p for p in working if p.busy_s_per_row]
    if not building:
        return "the prefetchers build their first blocks"
    weights = [p.busy_share / p.busy_s_per_row for p in building]  # rows a second of each
    per_row = sum(p.busy_share for p in building) / sum(weights)
    take = sum(p.take_share * weight for p, weight in zip(building, weights, strict=True)) / sum(weights)
    what = "storage" if take >= 0.5 else "the transform"
    more = prefetchers_needed(rows_per_s, waits, per_row) - len(working)
    if more <= 0:
        return f"{what} is the limit, though {len(working)} prefetchers should do: their nodes or blocks are uneven"
    least = "at least " if waits > _MOST_SHARE else ""
    return f"{what} is the limit; {least}{more} more prefetcher{'s' * (more > 1)} would hide it, given cores for them"


def _being_built(working: Sequence[PrefetcherStats]) -> str:
    """Says what a wait is for in which nothing has come: a block's storage or transform, or not the prefetchers."""
    blocks = sum(p.building for p in working)
    if not blocks:
        return "no block is being built either: where each rank waits, status and the workers' logs say"
    one = "1 block is" if blocks == 1 else f"{blocks} blocks are"
    return f"{one} being built: the first ones of a slow transform take long, or the storage does not answer"


def _most_of_it(working: Sequence[PrefetcherStats]) -> str:
    """Says what makes blocks late that few prefetchers have to build."""
    busy = [p for p in working if p.busy_share > _WAITS]
    if not busy:
        return ""
    take = sum(p.take_share * p.busy_share for p in busy) / sum(p.busy_share for p in busy)
    return f" ({'mostly with reading' if take >= 0.5 else 'mostly in the transform'})"


def _slow_prefetcher(working: Sequence[PrefetcherStats]) -> str | None:
    building = sorted((p for p in working if p.busy_s_per_row), key=lambda p: p.busy_s_per_row)
    if len(building) < 2:
        return None
    slow, others = building[-1], median(p.busy_s_per_row for p in building[:-1])
    if slow.busy_s_per_row < _APART * others:
        return None
    return (
        f"prefetcher {slow.index} takes {slow.busy_s_per_row / others:.1f} times as long for a row as the others: "
        f"look at its node {slow.node[:8]}"
    )


def _slow_rank(ranks: Sequence[RankStats]) -> str | None:
    if len(ranks) < 2:
        return None
    *others, slow = sorted(ranks, key=lambda rank: rank.wait_share)
    usual = median(rank.wait_share for rank in others)
    if usual >= _WAITS or slow.wait_share < _RANK_APART * usual:
        return None
    return (
        f"rank {slow.rank} alone does, the others {_percent(usual)}: look at its node {slow.node[:8]}, whose network "
        "or cores may be busy"
    )


def _not_working(prefetchers: Sequence[PrefetcherStats]) -> str:
    states = sorted({p.state for p in prefetchers})
    return f"{len(prefetchers)} {' or '.join(states)}" if states else "there is none"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"

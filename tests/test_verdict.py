"""verdict.py: numbers in, a sentence out."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ray_lance_stream.stats import PrefetcherStats, RankStats
from ray_lance_stream.verdict import prefetchers_needed, rank_verdict, stream_verdict

MIB = 2**20


def rank(number: int = 0, **numbers: Any) -> RankStats:
    full: dict[str, Any] = {"rows_per_s": 500.0, "buffered_bytes": 50 * MIB, "budget_bytes": 64 * MIB, "node": "a" * 56}
    return RankStats(rank=number, dp_rank=number, **(full | numbers))


def prefetcher(index: int = 0, **numbers: Any) -> PrefetcherStats:
    """One that is always busy, and does 500 rows a second: two at a time, 1 ms reading and 3 ms of transform."""
    busy: dict[str, Any] = {"busy_share": 1.0, "busy_s_per_row": 0.002, "take_share": 0.25, "node": "b" * 56}
    return PrefetcherStats(index=index, **({"state": "building"} | busy | numbers))


TWO = (prefetcher(0), prefetcher(1))
IDLE = (prefetcher(0, busy_share=0.3), prefetcher(1, busy_share=0.3))


@pytest.mark.parametrize(
    ("ranks", "prefetchers", "said"),
    [
        pytest.param((), (), "nothing is known yet", id="no rank"),
        pytest.param(
            (rank(silent_s=12.0), rank(1, silent_s=9.0)), TWO, "no worker has been heard of for 9 s", id="gone"
        ),
        pytest.param((rank(silent_s=math.inf),), TWO, "no worker has been heard of lately", id="unheard"),
        pytest.param((rank(rows_per_s=0.0),), TWO, "nothing is known yet", id="no batch was asked for"),
        pytest.param(
            (rank(wait_share=0.02), rank(1)), TWO, "trainers wait 2 % for data: it is not the limit", id="little"
        ),
        # 1,000 rows a second with half of the time lost: 2,000 are wanted, 4 prefetchers' work, 5 at 80 %.
        pytest.param(
            (rank(wait_share=0.5), rank(1, wait_share=0.5)),
            TWO,
            "trainers wait 50 % for data; the transform is the limit; 3 more prefetchers would hide it",
            id="transform",
        ),
        pytest.param(
            (rank(wait_share=0.2), rank(1, wait_share=0.1)),
            (prefetcher(take_share=0.9), prefetcher(1, take_share=0.7)),
            "trainers wait 20 % for data; storage is the limit; 2 more prefetchers would hide it",
            id="storage",
        ),
        pytest.param(
            (rank(wait_share=0.99), rank(1, wait_share=0.99)),
            TWO,
            "at least 48 more prefetchers",
            id="nothing but waiting",
        ),
        pytest.param(
            (rank(wait_share=0.3), rank(1, wait_share=0.25)),
            IDLE,
            "budget of bytes is the limit: it is full",
            id="budget",
        ),
        pytest.param(
            (rank(wait_share=0.3, buffered_bytes=MIB), rank(1, wait_share=0.25, buffered_bytes=MIB)),
            IDLE,
            "the prefetchers are busy only 30 % of the time (mostly in the transform): batches are late",
            id="neither",
        ),
        pytest.param(
            (rank(0), rank(1, wait_share=0.4), rank(2, wait_share=0.01)),
            IDLE,
            "rank 1 alone does, the others 0 %: look at its node aaaaaaaa",
            id="a slow rank",
        ),
        pytest.param(
            (rank(wait_share=0.4),),
            (*TWO, prefetcher(2, busy_s_per_row=0.01)),
            "prefetcher 2 takes 5.0 times as long for a row as the others: look at its node bbbbbbbb",
            id="a slow prefetcher",
        ),
        pytest.param(
            (rank(wait_share=1.0, rows_per_s=0.0, waiting_s=40.0),),
            (prefetcher(state="starting"), prefetcher(1, state="cannot start")),
            "no prefetcher works; 2 cannot start or starting",
            id="no pool",
        ),
        pytest.param(
            (rank(wait_share=1.0, rows_per_s=0.0, waiting_s=40.0),),
            TWO,
            "no batch has come lately; no block is being built either",
            id="stuck",
        ),
        pytest.param(
            (rank(wait_share=1.0, rows_per_s=0.0, waiting_s=40.0),),
            (prefetcher(building=1), prefetcher(1)),
            "no batch has come lately; 1 block is being built",
            id="a first block",
        ),
        pytest.param(
            (rank(wait_share=0.1),),
            (prefetcher(busy_s_per_row=0.0, busy_share=0.9),),
            "the prefetchers build their first blocks",
            id="first blocks",
        ),
        pytest.param((rank(wait_share=0.06),), (*TWO, prefetcher(2)), "though 3 prefetchers should do", id="enough"),
    ],
)
def test_a_run(ranks: tuple[RankStats, ...], prefetchers: tuple[PrefetcherStats, ...], said: str) -> None:
    assert said in stream_verdict(ranks, prefetchers)


@pytest.mark.parametrize(
    ("rows_per_s", "wait_share", "busy_s_per_row", "needed"),
    [(1000, 0.0, 0.0008, 1), (1000, 0.5, 0.0008, 2), (1000, 0.5, 0.00081, 3), (0, 0.5, 0.1, 1), (1, 1.0, 0.8, 20)],
)
def test_prefetchers_needed(rows_per_s: float, wait_share: float, busy_s_per_row: float, needed: int) -> None:
    assert prefetchers_needed(rows_per_s, wait_share, busy_s_per_row) == needed


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ({"batches": 1, "wait_s": 3.0, "train_s": 0.0}, "nothing is known yet"),
        ({"wait_s": 1.0, "train_s": 99.0}, "this worker waits 1 % for data: it is not the limit"),
        ({"wait_s": 1.0, "train_s": 3.0}, "this worker waits 25 % for data, and has asked for as much as its budget"),
        ({"wait_s": 1.0, "train_s": 3.0, "buffered_bytes": 1}, "25 % for data, and its budget of bytes is not used up"),
    ],
)
def test_a_rank(numbers: dict[str, Any], said: str) -> None:
    assert said in rank_verdict(**({"batches": 9, "buffered_bytes": MIB, "budget_bytes": MIB} | numbers))

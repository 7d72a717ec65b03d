"""The two implementations, and how the tests ask them for rows."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import lancedb.streaming

import ray_lance_stream

State = dict[str, Any]
OpenTable = Callable[[int], Any]
SPLITS = 4


@dataclass(frozen=True)
class Side:
    """One implementation of the two classes."""

    name: str
    dataset: Any
    loader: Any

    def open(self, table: Any, world_size: int = 1, state: State | None = None, **options: Any) -> list[Any]:
        """Returns the datasets of all ranks, of 4 splits unless told otherwise, at a state if one is given."""
        settings: dict[str, Any] = {"num_splits": SPLITS, "world_size": world_size} | options
        datasets = [self.dataset(table, rank=rank, **settings) for rank in range(world_size)]
        for dataset in datasets:
            if state is not None:
                dataset.load_state_dict(saved(state))
        return datasets

    def one(self, table: Any, state: State | None = None, **options: Any) -> Any:
        """Returns the dataset of a single rank."""
        return self.open(table, 1, state, **options)[0]

    def some(self, count: int) -> list[int]:
        """Returns which of so many places to try: all of ours, a few of LanceDB's, whose start is slow."""
        return list(range(count)) if self.name == "ours" else sorted({0, 1, count // 3, count // 2, count - 1})


LANCEDB = Side("lancedb", lancedb.streaming.StreamingDataset, lancedb.streaming.StreamingDataLoader)


OURS = Side("ours", ray_lance_stream.StreamingDataset, ray_lance_stream.StreamingDataLoader)


def saved(state: State) -> State:
    """Returns a state as it comes back from a file."""
    loaded: State = json.loads(json.dumps(state))
    return loaded


def ids(rows: Iterable[Any], count: int | None = None) -> list[int]:
    """Takes the next ``count`` rows, or all there are, and returns their ids."""
    return [row["id"] for row in itertools.islice(rows, count)]


def batch_ids(batches: Iterable[Any], count: int | None = None) -> list[list[int]]:
    """Takes the next ``count`` batches of a loader and returns the ids in each."""
    return [batch["id"].tolist() for batch in itertools.islice(batches, count)]


def flat(batches: Iterable[Iterable[int]]) -> list[int]:
    """Returns the items of all batches in one list."""
    return list(itertools.chain.from_iterable(batches))


def owned_counts(world_size: int, num_splits: int = SPLITS) -> list[int]:
    """Splits of each rank."""
    return [(r + 1) * num_splits // world_size - r * num_splits // world_size for r in range(world_size)]


def canonical(shares: Sequence[Sequence[int]], num_splits: int = SPLITS) -> list[int]:
    """Brings what the ranks took into the one order: of every cycle first rank 0's rows, then rank 1's, and so on."""
    order: list[int] = []
    widths = owned_counts(len(shares), num_splits)
    cycles = {len(share) / width for share, width in zip(shares, widths, strict=True)}
    assert len(cycles) == 1, f"the ranks took different numbers of cycles: {cycles}"
    for cycle in range(int(cycles.pop())):
        for share, width in zip(shares, widths, strict=True):
            order += share[cycle * width : (cycle + 1) * width]
    return order


def take_cycles(datasets: Sequence[Any], cycles: int | None = None, num_splits: int = SPLITS) -> list[int]:
    """Advances every rank by some cycles, or to the end, and returns the ids in the one order."""
    widths = owned_counts(len(datasets), num_splits)
    shares = [ids(d, None if cycles is None else cycles * w) for d, w in zip(datasets, widths, strict=True)]
    return canonical(shares, num_splits)


def merged(side: Side, datasets: Sequence[Any]) -> State:
    """The state of all ranks together."""
    state: State = side.dataset.merge_state_dicts([saved(dataset.state_dict()) for dataset in datasets])
    return state


def counts(state: State) -> list[int]:
    """Rows consumed of each split."""
    samples: list[int] = state["samples_consumed_per_split"]
    return samples

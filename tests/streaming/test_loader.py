"""The loader: batches of a standard DataLoader, and a state that covers them exactly."""

from __future__ import annotations

import gc
import itertools
import logging
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from streaming.sides import LANCEDB, OpenTable, Side, batch_ids, canonical, counts, ids, saved

PLAIN = ["id", "small", "half", "flag", "text", "raw", "pair", "vector", "nested"]
Pair = namedtuple("Pair", "id text")


class Rows(IterableDataset[Any]):
    """Rows in memory."""

    def __init__(self, rows: list[Any]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rows)


def assert_same(found: Any, expected: Any) -> None:
    """Equal in structure, types and values, tensors included."""
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, list | tuple):
        for a, b in itertools.zip_longest(found, expected):
            assert_same(a, b)
    else:
        assert found == expected


# --- batches -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 4, 5, 16, 100, None])
def test_batches_are_those_of_a_standard_loader(side: Side, rich: Any, batch_size: int | None) -> None:
    """Numbers of all kinds, strings, bytes, lists, dicts; full and short batches, and single rows."""
    loader = side.loader(side.one(rich, columns=PLAIN), batch_size=batch_size)
    expected = DataLoader(Rows(list(LANCEDB.one(rich, columns=PLAIN))), batch_size=batch_size)
    assert_same(list(loader), list(expected))


@pytest.mark.parametrize(
    "transform",
    [
        lambda batch: [(row["id"], row["text"]) for row in batch.to_pylist()],
        lambda batch: [Pair(row["id"], row["text"]) for row in batch.to_pylist()],
        lambda batch: torch.tensor(batch["id"].to_pylist(), dtype=torch.float16),
        lambda batch: batch["half"].to_numpy(),
        lambda batch: [{"deep": [row["vector"], {"id": row["id"]}]} for row in batch.to_pylist()],
    ],
    ids=["tuples", "named tuples", "tensors", "numpy scalars", "nested"],
)
def test_rows_of_any_kind_are_collated_as_torch_does(side: Side, rich: Any, transform: Any) -> None:
    loader = side.loader(side.one(rich, transform=transform), batch_size=4)
    expected = DataLoader(Rows(list(LANCEDB.one(rich, transform=transform))), batch_size=4)
    assert_same(list(loader), list(expected))


@pytest.mark.parametrize(("column", "kind"), [("missing", TypeError), ("ragged", RuntimeError)])
def test_what_torch_cannot_collate_fails_as_there(side: Side, rich: Any, column: str, kind: type[Exception]) -> None:
    loader = side.loader(side.one(rich, columns=["id", column], shuffle=False), batch_size=8)
    rows = list(LANCEDB.one(rich, columns=["id", column], shuffle=False))
    with pytest.raises(kind) as expected:
        list(DataLoader(Rows(rows), batch_size=8))
    with pytest.raises(kind) as raised:
        list(loader)
    assert str(raised.value) == str(expected.value)


def test_a_collate_fn_gets_the_rows(side: Side, table_of: OpenTable) -> None:
    seen: list[list[int]] = []

    def collate(rows: list[dict[str, Any]]) -> int:
        seen.append([row["id"] for row in rows])
        return len(rows)

    loader = side.loader(side.one(table_of(24), shuffle=False), batch_size=10, collate_fn=collate)
    assert list(loader) == [10, 10, 4]
    assert [i for batch in seen for i in batch] == ids(LANCEDB.one(table_of(24), shuffle=False))


def test_a_standard_loader_in_process_will_do_too(side: Side, table_of: OpenTable) -> None:
    dataset = side.one(table_of(24), shuffle=False)
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=4)
    assert batch_ids(loader, 2) == [[0, 6, 12, 18], [1, 7, 13, 19]]
    assert counts(dataset.state_dict()) == [2, 2, 2, 2]


# --- state -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [3, 4, 8, None])
def test_the_state_covers_the_batches_handed_out(side: Side, table_of: OpenTable, batch_size: int | None) -> None:
    expected = ids(LANCEDB.one(table_of(24)))
    dataset = side.one(table_of(24))
    states = [saved(dataset.state_dict())]
    sizes = []
    for batch in side.loader(dataset, batch_size=batch_size):
        sizes.append(batch["id"].numel() if batch_size else 1)
        states.append(saved(dataset.state_dict()))
    for number in side.some(len(states)):
        taken = sum(sizes[:number])
        assert sum(counts(states[number])) == taken
        resumed = side.loader(side.one(table_of(24), states[number]), batch_size=24)
        assert sum(batch_ids(resumed), []) == expected[taken:]


def test_the_loader_has_the_datasets_state(ours: Side, table_of: OpenTable) -> None:
    loader = ours.loader(ours.one(table_of(24), shuffle=False), batch_size=4)
    batch_ids(loader, 2)
    state = saved(loader.state_dict())
    assert state == loader.dataset.state_dict()
    other = ours.loader(ours.one(table_of(24), shuffle=False), batch_size=4)
    other.load_state_dict(state)
    assert batch_ids(other, 1) == [[2, 8, 14, 20]]


class FailsAt:
    """A collate function that fails the first time it meets this id."""

    def __init__(self, bad: int, error: BaseException) -> None:
        self._bad, self.error = bad, error
        self.failures = 0

    def __call__(self, rows: list[dict[str, Any]]) -> list[int]:
        if self._bad in [row["id"] for row in rows] and not self.failures:
            self.failures += 1
            raise self.error
        return [row["id"] for row in rows]


@pytest.mark.parametrize("bad", [0, 13, 23])
@pytest.mark.parametrize("batch_size", [3, 4, 7])
@pytest.mark.parametrize("error", [ArithmeticError("bad"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_batch_that_fails_is_not_consumed(
    ours: Side, table_of: OpenTable, bad: int, batch_size: int, error: BaseException
) -> None:
    """Rows of the failed batch come again, also those of the last, short one."""
    dataset = ours.one(table_of(24), shuffle=False)
    collate = FailsAt(bad, error)
    loader = ours.loader(dataset, batch_size=batch_size, collate_fn=collate)
    expected = ids(LANCEDB.one(table_of(24), shuffle=False))
    taken: list[int] = []
    iterator = iter(loader)
    with pytest.raises(type(error)):
        for batch in iterator:
            taken += batch
            before = dataset.state_dict()
    if taken:
        assert dataset.state_dict() == before
    assert sum(counts(dataset.state_dict())) == len(taken)
    with pytest.raises(RuntimeError, match="ended with a failure"):
        next(iterator)  # or a loop that swallows errors would take it for the end of the epoch
    assert ids(ours.one(table_of(24), dataset.state_dict(), shuffle=False)) == expected[len(taken) :]
    assert taken + sum(loader, []) == expected
    assert collate.failures == 1


def test_a_row_that_fails_gives_its_batch_back(ours: Side, table_of: OpenTable) -> None:
    """Three rows of the batch have been read when the fourth one's transform fails."""
    bad = {19}

    def transform(batch: Any) -> Any:
        if bad & set(batch["id"].to_pylist()):
            raise ArithmeticError("bad")
        return batch.to_pylist()

    dataset = ours.one(table_of(24), shuffle=False, transform=transform, read_batch_size=1)
    loader = ours.loader(dataset, batch_size=4)
    taken: list[int] = []
    with pytest.raises(Exception, match="bad"):
        for batch in loader:
            taken += batch["id"].tolist()
    assert taken in ([], [0, 6, 12, 18])
    assert sum(counts(dataset.state_dict())) == len(taken)
    bad.clear()
    assert taken + sum(batch_ids(loader), []) == ids(LANCEDB.one(table_of(24), shuffle=False))


def test_stop_iteration_in_collate_fn_is_no_end(side: Side, table_of: OpenTable) -> None:
    loader = side.loader(side.one(table_of(24)), batch_size=4, collate_fn=FailsAt(3, StopIteration()))
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(loader)


# --- one iterator at a time --------------------------------------------------------------------------


def test_one_iterator_at_a_time(side: Side, table_of: OpenTable) -> None:
    dataset = side.one(table_of(24), shuffle=False)
    loader = side.loader(dataset, batch_size=4)
    first = iter(loader)
    assert batch_ids(first, 1) == [[0, 6, 12, 18]]
    for other in (loader, side.loader(dataset, batch_size=2), dataset):
        with pytest.raises(RuntimeError, match="concurrent"):
            next(iter(other))
    assert batch_ids(first, 1) == [[1, 7, 13, 19]]  # undisturbed
    assert counts(dataset.state_dict()) == [2, 2, 2, 2]


@pytest.mark.parametrize("how", ["exhaust", "break", "delete", "close", "shut down"])
def test_an_iterator_that_is_done_makes_way(ours: Side, table_of: OpenTable, how: str) -> None:
    dataset = ours.one(table_of(24), shuffle=False)
    loader = ours.loader(dataset, batch_size=4)
    iterator: Any = iter(loader)
    rest = [[2, 8, 14, 20], [3, 9, 15, 21]]
    if how == "exhaust":
        assert len(list(iterator)) == 6
        assert next(iterator, None) is None
        rest = [[0, 6, 12, 18], [1, 7, 13, 19]]  # the next epoch's, unshuffled like the first
    else:
        batch_ids(iterator, 2)
    if how == "close":
        iterator.close()
        iterator.close()
    elif how == "shut down":
        iterator._shutdown_workers()
    if how in ("close", "shut down"):
        assert next(iterator, None) is None
    elif how != "exhaust":
        del iterator
        gc.collect()
    if how == "break":
        for _ in loader:
            break
        rest = [[3, 9, 15, 21], [4, 10, 16, 22]]
    assert batch_ids(loader, 2) == rest


# --- arguments ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True},
        {"sampler": [0, 1]},
        {"batch_sampler": [[0, 1]]},
        {"in_order": False},
        {"persistent_workers": True, "num_workers": 2},
        {"drop_last": True},
        {"num_workers": -1},
        {"batch_size": 0},
        {"timeout": -1},
        {"prefetch_factor": 2},
        {"multiprocessing_context": "spawn"},
    ],
    ids=str,
)
def test_arguments_that_cannot_work(side: Side, table_of: OpenTable, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        side.loader(side.one(table_of(24)), **options)


def test_a_dataset_of_another_kind(side: Side, table_of: OpenTable) -> None:
    class Changed(side.dataset):  # type: ignore[misc, name-defined]
        def __iter__(self) -> Any:
            return iter(())

    class Named(side.dataset):  # type: ignore[misc, name-defined]
        pass

    for dataset in (Rows([]), [1, 2], Changed(table_of(24))):
        with pytest.raises(TypeError, match="StreamingDataset"):
            side.loader(dataset)
    assert len(list(side.loader(Named(table_of(24)), batch_size=8))) == 3


def test_classes_of_the_two_libraries_are_not_mixed(ours: Side, table_of: OpenTable) -> None:
    with pytest.raises(TypeError, match=r"lancedb\.streaming\.StreamingDataset"):
        ours.loader(LANCEDB.one(table_of(24)))


def test_there_is_no_length(side: Side, table_of: OpenTable) -> None:
    with pytest.raises(TypeError):
        len(side.loader(side.one(table_of(24))))


def test_arguments_without_a_use_are_named(ours: Side, table_of: OpenTable, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="ray_lance_stream"):
        loader = ours.loader(ours.one(table_of(24), shuffle=False), batch_size=4, timeout=5)
    assert "timeout" in caplog.text
    assert len(list(loader)) == 6


@pytest.mark.parametrize("world_size", [3, 5, 6])
def test_ranks_that_own_unequally_many_splits(ours: Side, table_of: OpenTable, world_size: int) -> None:
    """Batches of whole cycles are accepted; of others the error says which sizes would be."""
    splits = 8
    datasets = ours.open(table_of(211), world_size, num_splits=splits)
    shares = []
    for dataset in datasets:
        owned = len(dataset.owned_splits)
        if owned > 1:
            for size in (owned * 2 - 1, owned * 2 + 1, 1, None):
                with pytest.raises(ValueError, match=f"such as .*{owned * 2 if size and size > 1 else owned}"):
                    ours.loader(dataset, batch_size=size)
        shares.append(batch_ids(ours.loader(dataset, batch_size=2 * owned)))
    assert len({len(share) for share in shares}) == 1
    found = canonical([sum(share, []) for share in shares], splits)
    assert found == ids(LANCEDB.one(table_of(211), num_splits=splits))

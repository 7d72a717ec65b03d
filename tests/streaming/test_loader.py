"""The loader's state covers exactly the batches it handed out; one iterator at a time."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest

from ray_lance_stream.errors import StreamClosedError
from streaming.sides import LANCEDB, OpenTable, Side, batch_ids, counts, flat, ids, saved

pytestmark = pytest.mark.thorough

# --- state -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [3, 4, None])
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
        assert flat(batch_ids(resumed)) == expected[taken:]


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


@pytest.mark.parametrize(
    ("bad", "batch_size", "error"),
    [
        pytest.param(0, 4, ArithmeticError("bad"), id="first"),
        pytest.param(13, 4, ArithmeticError("bad"), id="in whole cycles"),
        pytest.param(13, 3, ArithmeticError("bad"), id="within cycles"),
        pytest.param(13, 7, KeyboardInterrupt(), id="interrupt"),
        pytest.param(23, 4, ArithmeticError("bad"), id="last"),
        pytest.param(23, 3, ArithmeticError("bad"), id="last, within the last cycle"),
        pytest.param(23, 7, ArithmeticError("bad"), id="last and short"),
    ],
)
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
    assert taken + flat(loader) == expected
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
    assert taken + flat(batch_ids(loader)) == ids(LANCEDB.one(table_of(24), shuffle=False))


@pytest.mark.parametrize("fails", [False, True])
def test_a_state_that_is_loaded_within_a_batch_is_kept(ours: Side, table_of: OpenTable, fails: bool) -> None:
    dataset = ours.one(table_of(24), shuffle=False)
    states = [saved(dataset.state_dict())]

    def collate(rows: list[Any]) -> list[int]:
        if len(states) == 2:
            dataset.load_state_dict(states.pop())
            if fails:
                raise ArithmeticError
        return [row["id"] for row in rows]

    loader = ours.loader(dataset, batch_size=4, collate_fn=collate)
    batches = iter(loader)
    first = next(batches)
    second = next(batches)
    states.append(states[0])
    with pytest.raises(ArithmeticError if fails else StreamClosedError):
        next(batches)
    assert dataset.state_dict() == states[0]
    assert list(itertools.islice(loader, 2)) == [first, second]


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

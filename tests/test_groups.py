"""Ranks that skip different rows agree on the end of an epoch: real processes in a ``torch.distributed`` group."""

from __future__ import annotations

import functools
import importlib
import itertools
import multiprocessing
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from ray_lance_stream import ConfigError, LanceStream, StreamingDataLoader, StreamingDataset, groupagreement
from ray_lance_stream.gathering import gather_state_dict

if TYPE_CHECKING:
    from conftest import Tables

pytestmark = pytest.mark.slow
ROWS, SPLITS, CYCLES = 211, 4, 4  # four cycles a step
# Without shuffling split s holds rows 52 * s and on. Half of split 0 and a tenth of split 2 fail: 26 cycles are left,
# the last step has two.
BAD = frozenset([*range(0, 52, 2), *range(104, 156, 10)])
LOST_AFTER_S = 3.0
Outcome = Any


def fail_on(bad: frozenset[int], batch: pa.RecordBatch) -> Any:
    if found := bad & set(batch["id"].to_pylist()):
        raise ValueError(f"bad rows {sorted(found)}")
    return {"id": batch["id"]}


def rows_without(bad: frozenset[int], batch: pa.RecordBatch) -> list[Any]:
    fail_on(bad, batch)
    return batch.select(["id"]).to_pylist()


def open_stream(uri: str, bad: frozenset[int] = BAD, **options: Any) -> LanceStream:
    settings: dict[str, Any] = {
        "num_splits": SPLITS,
        "global_batch_size": SPLITS * CYCLES,
        "shuffle": False,
        "transform": functools.partial(fail_on, bad),
        "on_transform_error": "skip",
    }
    return LanceStream(uri, "t", **settings | options)


def open_dataset(uri: str, rank: int, size: int, bad: frozenset[int] = BAD, **options: Any) -> StreamingDataset:
    import lancedb

    settings: dict[str, Any] = {
        "num_splits": SPLITS,
        "shuffle": False,
        "rank": rank,
        "world_size": size,
        "transform": functools.partial(rows_without, bad),
        "on_transform_error": "skip",
    }
    return StreamingDataset(lancedb.connect(uri).open_table("t"), **settings | options)


class Rank:
    """A process as a rank of a group: of all processes, or of the first two."""

    def __init__(self, rank: int, size: int, uri: str, group: Any) -> None:
        self.rank, self.size, self.uri, self.group = rank, size, uri, group
        self.states: Any = None  # of the stream and the dataset, as they were saved

    def open(self, stream: LanceStream) -> Any:
        """Opens this rank's shard."""
        return stream.open(rank=self.rank, world_size=self.size, coordinator=self.group)

    def dataset(self, bad: frozenset[int] = BAD, **options: Any) -> StreamingDataset:
        """Opens this rank's dataset."""
        return open_dataset(self.uri, self.rank, self.size, bad, **{"coordinator": self.group} | options)

    def synchronise(self) -> None:
        """What a trainer does in every step, on the same group: all gradients are added up."""
        import torch
        from torch import distributed

        ones = torch.ones(1)
        distributed.all_reduce(ones, group=None if self.group == "world" else self.group)
        assert ones.item() == self.size

    def steps(self, stream: LanceStream, epochs: int = 1, **options: Any) -> list[list[int]]:
        """Trains on a stream; returns the ids of every step."""
        found = []
        with self.open(stream) as shard:
            for _ in range(epochs):
                for batch in shard.iter_batches(**options):
                    self.synchronise()
                    found.append(batch["id"].tolist())
        return found


def train(rank: Rank) -> Outcome:
    return rank.steps(open_stream(rank.uri), epochs=2, prefetch_batches=2)


def train_and_drop_last(rank: Rank) -> Outcome:
    return rank.steps(open_stream(rank.uri, drop_last=True), epochs=2)


def read_rows(rank: Rank) -> Outcome:
    dataset = rank.dataset()
    return [[row["id"] for row in dataset] for _ in range(2)]


def load_batches(rank: Rank) -> Outcome:
    dataset = rank.dataset()
    found = []
    for batch in StreamingDataLoader(dataset, batch_size=CYCLES * len(dataset.owned_splits)):
        rank.synchronise()
        found.append(batch["id"].tolist())
    return found


def leave_and_go_on(rank: Rank) -> Outcome:
    """Loops are left, each rank having made another number of batches ahead, and begun again; twice."""
    found = []
    with rank.open(open_stream(rank.uri)) as shard:
        for steps in (2, 3, None):
            for batch in itertools.islice(shard.iter_batches(prefetch_batches=1 + 2 * rank.rank), steps):
                found.append(batch["id"].tolist())
            rank.synchronise()  # waits for whoever has not left the loop
    return found


def fail_once_outside(rank: Rank) -> Outcome:
    """One rank's collate_fn fails once; it asks for the batch again, of which the others learn nothing."""
    failed = rank.rank != 1

    def collate(rows: list[Any]) -> list[int]:
        nonlocal failed
        if not failed and rows[0]["id"] >= 60:
            failed = True
            raise ArithmeticError("once")
        return [row["id"] for row in rows]

    dataset = rank.dataset()
    loader = StreamingDataLoader(dataset, batch_size=CYCLES * len(dataset.owned_splits), collate_fn=collate)
    found, batches = [], iter(loader)
    while True:
        try:
            found.append(next(batches))
        except StopIteration:
            return found
        except ArithmeticError:
            batches = iter(loader)


def save_in_the_middle(rank: Rank) -> Outcome:
    with rank.open(open_stream(rank.uri)) as shard:
        for _ in itertools.islice(shard.iter_batches(), 3):
            pass
        dataset = rank.dataset()
        for _ in itertools.islice(dataset, 3 * CYCLES * len(dataset.owned_splits)):
            pass
        return gather_state_dict(shard.state_dict()), gather_state_dict(dataset)


def resume(rank: Rank) -> Outcome:
    of_stream, of_dataset = rank.states
    steps = rank.steps(open_stream(rank.uri, resume_from=of_stream))
    dataset = rank.dataset()
    dataset.load_state_dict(of_dataset)
    return steps, [row["id"] for row in dataset]


def one_fails(rank: Rank) -> Outcome:
    """A row of split 0, rank 0's, fails with an error that is not tolerated; the process lives on."""
    tolerated = functools.partial(_not, "[21]")
    dataset = rank.dataset(frozenset({21, 60}), on_transform_error=tolerated)
    return _until_error(lambda: [row["id"] for row in dataset], ValueError)


def _not(text: str, error: Exception) -> bool:
    return text not in str(error)


def one_leaves(rank: Rank) -> Outcome:
    """An error of the training loop ends one rank's loop, not its process."""
    with rank.open(open_stream(rank.uri)) as shard:
        for _ in shard.iter_batches():
            if rank.rank == 1 and shard.step == 2:
                raise ArithmeticError("in the loop")


def one_dies(rank: Rank) -> Outcome:
    """The last rank is killed; it has no time to say so."""
    return _read_on(rank, victim=rank.size - 1)


def the_first_dies(rank: Rank) -> Outcome:
    """And with it the store of the group."""
    return _read_on(rank, victim=0)


def _read_on(rank: Rank, victim: int) -> Outcome:
    dataset = rank.dataset()
    for row in dataset:
        if rank.rank == victim and row["id"] % 52 > 20:
            os.kill(os.getpid(), signal.SIGKILL)


def gather_without_the_dead(rank: Rank) -> Outcome:
    """After ``one_dies``: whoever gathers learns of it as well."""
    return gather_state_dict(rank.dataset(coordinator=None))


def _until_error(action: Callable[[], Outcome], *kinds: type[Exception]) -> Outcome:
    try:
        return action()
    except kinds as error:
        return f"{type(error).__name__}: {error}"


Scenario = Callable[[Rank], Outcome]
BOTH: list[Scenario] = [train, read_rows, load_batches, leave_and_go_on, fail_once_outside, one_leaves]
LAST: list[tuple[Scenario, int]] = [(one_dies, 3), (gather_without_the_dead, 3), (the_first_dies, 2)]
PLAN: list[tuple[Scenario, int]] = [
    *((scenario, size) for size in (3, 2) for scenario in BOTH),
    (train_and_drop_last, 3),
    (save_in_the_middle, 3),
    (resume, 2),
    (one_fails, 3),
    *LAST,
]


def take_part(rank: int, port: int, uri: str, path: str) -> None:
    """What a process does: one scenario after the other. What it got, and how long it took, goes to a file."""
    from torch import distributed

    from ray_lance_stream import groupagreement

    setattr(groupagreement, "_LOST_AFTER_S", LOST_AFTER_S)  # noqa: B010  (constants)
    setattr(groupagreement, "_BEAT_S", LOST_AFTER_S / 10)  # noqa: B010
    method = f"tcp://127.0.0.1:{port}"
    distributed.init_process_group("gloo", init_method=method, rank=rank, world_size=3, timeout=timedelta(seconds=60))
    two = distributed.new_group([0, 1])
    if rank == 2:
        with pytest.raises(ConfigError, match="coordinator is not valid"):  # it is not in that group
            open_stream(uri).open(rank=0, world_size=2, coordinator=two)
    states: Any = None
    for scenario, size in PLAN:
        if rank < size:
            seat = Rank(rank, size, uri, "world" if size == 3 else two)
            seat.states = states
            began = time.monotonic()
            outcome = _until_error(functools.partial(scenario, seat), Exception)
            took_s = time.monotonic() - began
            Path(f"{path}/{scenario.__name__} {rank} of {size}").write_bytes(pickle.dumps((outcome, took_s)))
            if scenario is save_in_the_middle:
                states = outcome
        if (scenario, size) not in LAST:
            distributed.barrier()


class Found:
    """What the ranks of one group wrote down."""

    def __init__(self, size: int, path: Path) -> None:
        self.size, self._path = size, path

    def of(self, scenario: Scenario, rank: int) -> tuple[Outcome, float]:
        """What one process got, and after how many seconds."""
        found: tuple[Outcome, float] = pickle.loads(
            Path(f"{self._path}/{scenario.__name__} {rank} of {self.size}").read_bytes()
        )
        return found

    def all_of(self, scenario: Scenario) -> list[Outcome]:
        """What every process got."""
        return [self.of(scenario, rank)[0] for rank in range(self.size)]


@pytest.fixture(scope="module")
def run(tables: Tables, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs three processes to their end; where they wrote down what they found."""
    path = tmp_path_factory.mktemp("groups")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    arguments = (port, tables.uri(ROWS), str(path))
    processes = [context.Process(target=take_part, args=(rank, *arguments)) for rank in range(3)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 240
    try:
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        assert not [rank for rank, process in enumerate(processes) if process.is_alive()], "some rank hangs"
    finally:
        for process in processes:
            process.kill()
    return path


@pytest.fixture(scope="module")
def three(run: Path) -> Found:
    """The group of all."""
    return Found(3, run)


@pytest.fixture(scope="module")
def two(run: Path) -> Found:
    """The group of two of the processes."""
    return Found(2, run)


@pytest.fixture(params=["two", "three"])
def found(request: pytest.FixtureRequest) -> Found:
    """One group after the other."""
    group: Found = request.getfixturevalue(request.param)
    return group


def together(shares: list[list[int]]) -> list[int]:
    """Puts what ranks got in the same steps into the one order."""
    widths = [(r + 1) * SPLITS // len(shares) - r * SPLITS // len(shares) for r in range(len(shares))]
    (cycles,) = {len(share) / width for share, width in zip(shares, widths, strict=True)}
    parts = zip(shares, widths, strict=True)
    cut = [[share[c * width : (c + 1) * width] for c in range(int(cycles))] for share, width in parts]
    return list(itertools.chain(*(row for cycle in zip(*cut, strict=True) for row in cycle)))


def global_batches(found: Found, scenario: Scenario) -> list[list[int]]:
    """The steps of all ranks, of which every rank has equally many."""
    return [together(list(shares)) for shares in zip(*found.all_of(scenario), strict=True)]


def alone(tables: Tables, epochs: int = 1, **options: Any) -> list[list[int]]:
    """The steps of a single rank."""
    with open_stream(tables.uri(ROWS), **options).open() as shard:
        return [batch["id"].tolist() for _ in range(epochs) for batch in shard.iter_batches()]


def test_streams_give_the_steps_of_a_single_rank(tables: Tables, found: Found) -> None:
    steps = alone(tables, epochs=2)
    assert [len(step) for step in steps] == ([16] * 6 + [8]) * 2
    assert global_batches(found, train) == steps


def test_a_last_step_that_is_dropped(tables: Tables, three: Found) -> None:
    steps = alone(tables, epochs=2, drop_last=True)
    assert [len(step) for step in steps] == [16] * 12
    assert global_batches(three, train_and_drop_last) == steps


def test_datasets_and_loaders_end_at_the_same_step(tables: Tables, found: Found) -> None:
    dataset = open_dataset(tables.uri(ROWS), 0, 1)
    epochs = [[row["id"] for row in dataset] for _ in range(2)]
    assert len(epochs[0]) == 26 * SPLITS
    assert global_batches(found, read_rows) == epochs
    assert list(itertools.chain(*global_batches(found, load_batches))) == epochs[0]
    assert {len(batches) for batches in found.all_of(load_batches)} == {7}


def test_loops_that_are_left_and_begun_again(tables: Tables, found: Found) -> None:
    assert global_batches(found, leave_and_go_on) == alone(tables)


def test_a_rank_that_asks_for_a_batch_again(tables: Tables, found: Found) -> None:
    rows = [row["id"] for row in open_dataset(tables.uri(ROWS), 0, 1)]
    assert list(itertools.chain(*global_batches(found, fail_once_outside))) == rows


def test_two_ranks_go_on_where_three_were(tables: Tables, three: Found, two: Found) -> None:
    states = three.all_of(save_in_the_middle)
    assert states == [states[0]] * 3
    of_stream, of_dataset = states[0]
    assert of_stream["positions_consumed_per_split"] == [24, 12, 14, 12]
    assert of_dataset["positions_consumed_per_split"] == of_stream["positions_consumed_per_split"]
    steps, rows = zip(*two.all_of(resume), strict=True)
    rest = alone(tables)[3:]
    assert [together(list(shares)) for shares in zip(*steps, strict=True)] == rest
    assert together(list(rows)) == list(itertools.chain(*rest))


def test_a_rank_that_fails_ends_the_waiting_of_the_others(three: Found) -> None:
    assert "ValueError: bad rows [21]" in three.of(one_fails, 0)[0]
    for rank in (1, 2):
        outcome, took_s = three.of(one_fails, rank)
        assert outcome.startswith("LockstepError: rank 0 is missing at epoch 0, cycle 0")
        assert "bad rows [21]" in outcome
        assert took_s < 30


def test_a_rank_that_leaves_its_loop(found: Found) -> None:
    assert found.of(one_leaves, 1)[0] == "ArithmeticError: in the loop"
    for rank in {0, 2} & set(range(found.size)):
        outcome, took_s = found.of(one_leaves, rank)
        assert outcome.startswith("LockstepError: rank 1 is missing at epoch 0, cycle ")
        assert "closed the stream" in outcome
        assert took_s < 30


def test_a_rank_that_dies(two: Found, three: Found) -> None:
    for rank in (0, 1):
        outcome, took_s = three.of(one_dies, rank)
        assert outcome.startswith("LockstepError: rank 2 is missing at epoch 0, cycle ")
        assert "no sign of life" in outcome
        assert took_s < 30
        outcome, took_s = three.of(gather_without_the_dead, rank)
        assert outcome.startswith("LockstepError: not every process took part")
        assert took_s < 65  # the group's timeout
    outcome, took_s = two.of(the_first_dies, 1)
    assert outcome.startswith("LockstepError: the store of the process group does not answer")
    assert took_s < 30


@pytest.mark.parametrize("ranks", [[0, 1], [1, 2]])
def test_agreements_leave_few_notes_in_the_store(ranks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there were; also of a group that rank 0 is not in."""
    distributed: Any = importlib.import_module("torch.distributed")  # whose types do not name its stores
    store, group, local = distributed.HashStore(), object(), threading.local()
    monkeypatch.setattr(distributed, "get_rank", lambda: local.rank)
    monkeypatch.setattr(distributed, "get_process_group_ranks", lambda _: ranks)
    monkeypatch.setattr(groupagreement, "_store_of", lambda name: distributed.PrefixStore(name, store))
    both = threading.Barrier(2)

    def agree(rank: int) -> list[tuple[int, int]]:
        local.rank = rank
        agreement, found = groupagreement.GroupAgreement(group), []
        for cycle in range(200):
            least = agreement.least(0, cycle, cycle + rank, threading.Event())
            both.wait(60)
            found.append((least, store.num_keys()))
            both.wait(60)
        agreement.close()
        return found

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(agree, ranks)
    assert [least for least, _ in first] == [least for least, _ in second] == [c + ranks[0] for c in range(200)]
    assert max(keys for _, keys in first) <= first[1][1] + 1


def test_without_a_group(tables: Tables) -> None:
    with pytest.raises(ConfigError, match="init_process_group"):
        open_stream(tables.uri(ROWS)).open(rank=0, world_size=2, coordinator="world")
    with pytest.raises(ConfigError, match="init_process_group"):
        open_dataset(tables.uri(ROWS), 0, 2, coordinator="world")
    with pytest.raises(ConfigError, match="coordinator is not valid"):
        open_dataset(tables.uri(ROWS), 0, 2, coordinator="nccl")


def test_a_group_too_small(tables: Tables, tmp_path: Path) -> None:
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match="1 processes, world_size=2"):
            open_dataset(tables.uri(ROWS), 0, 2, coordinator="world")
        dataset = open_dataset(tables.uri(ROWS), 0, 1, coordinator="world")
        rows = iter(dataset)
        next(rows)
        with pytest.raises(TypeError, match="member of the group"):
            pickle.dumps(dataset)
    finally:
        distributed.destroy_process_group()
    with pytest.raises(ConfigError, match="has been destroyed"):
        list(rows)

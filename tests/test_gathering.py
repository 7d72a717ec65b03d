"""States of several ranks, gathered over torch.distributed by real processes, or through one file per rank."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ray_lance_stream import (
    ConfigError,
    LanceStream,
    LanceStreamError,
    MissingStateError,
    StateError,
    StateMismatchError,
    merge_state_dicts,
)
from ray_lance_stream.gathering import StateSource, gather_state_dict, load_rank_states, save_rank_state

pytestmark = pytest.mark.thorough

if TYPE_CHECKING:
    from conftest import Tables  # not imported: the processes that are started need no Lance

RANKS = 3
State = dict[str, Any]


class Rank:
    """A rank that knows its seat, as a dataset does, and has this state or this error."""

    def __init__(self, rank: int, world_size: int, state: State | Exception) -> None:
        self.rank, self.world_size, self._state = rank, world_size, state

    def state_dict(self) -> State:
        if isinstance(self._state, Exception):
            raise self._state
        return self._state


class OddError(Exception):
    """An exception that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("odd")
        self.held = lambda: None


def state_after(stream: LanceStream, steps: int, rank: int = 0, world_size: int = 1) -> State:
    """The state a replica has after so many steps of a new stream."""
    with stream.open(rank=rank, world_size=world_size) as shard:
        batches = iter(shard.iter_batches())
        for _ in range(steps):
            next(batches)
        return shard.state_dict()


def mid_cycle(state: State, owned: range, more: int) -> State:
    """The state of a rank that has taken ``more`` rows of the next cycle from its own splits."""
    changed: State = json.loads(json.dumps(state))
    for split in list(owned)[:more]:
        changed["samples_consumed_per_split"][split] += 1
        changed["positions_consumed_per_split"][split] += 1
    return changed


# --- torch.distributed -------------------------------------------------------------------------------


def sources(rank: int, tables: Tables) -> dict[str, StateSource]:
    """What one process passes to gather_state_dict, by scenario."""
    stream = tables.stream()
    with stream.open(rank=rank, world_size=RANKS) as shard:
        owned = shard.replica.owned_splits(4)
    two = state_after(stream, 2, rank, RANKS)
    return {
        "states": two,
        "seats": Rank(rank, RANKS, two),
        "inside a cycle": Rank(rank, RANKS, mid_cycle(two, owned, more=rank % 2)),
        "different steps": state_after(stream, 1 + rank // 2, rank, RANKS),
        "other data": state_after(tables.stream(shuffle_seed=7 + rank % 2), 2, rank, RANKS),
        "one has none": Rank(rank, RANKS, StateError("no state inside a batch") if rank == 2 else two),
        "an error that does not travel": Rank(rank, RANKS, two),  # raised in the process itself
        "not a state": Rank(rank, RANKS, {"epoch": 1} if rank == 1 else two),
        "a rank too few": Rank(rank, RANKS + 1, two),
        "the same rank twice": Rank(min(rank, 1), RANKS, two),
    }


def take_part(rank: int, scenarios: list[dict[str, StateSource]], pair: list[State], directory: str) -> None:
    """What every process does: gathers in all scenarios, and writes down what it got."""
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=RANKS)
    two_of_three = distributed.new_group([0, 1])
    found: dict[str, Any] = {}
    try:
        for name, source in scenarios[rank].items():
            if name == "an error that does not travel" and rank == 0:
                source = Rank(rank, RANKS, OddError())
            try:
                found[name] = gather_state_dict(source)
            except LanceStreamError as error:
                found[name] = error
        if rank < 2:
            found["a group"] = gather_state_dict(Rank(rank, 2, pair[rank]), group=two_of_three)
    finally:
        distributed.destroy_process_group()
    Path(f"{directory}/{rank}.pickle").write_bytes(pickle.dumps(found))


@pytest.fixture(scope="module")
def gathered(tables: Tables, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process got, by scenario."""
    from torch.multiprocessing import spawn  # type: ignore[attr-defined]

    directory = str(tmp_path_factory.mktemp("gathered"))
    scenarios = [sources(rank, tables) for rank in range(RANKS)]
    pair = [state_after(tables.stream(), 3, rank, 2) for rank in range(2)]
    spawn(take_part, args=(scenarios, pair, directory), nprocs=RANKS)  # type: ignore[no-untyped-call]
    return [pickle.loads(Path(f"{directory}/{rank}.pickle").read_bytes()) for rank in range(RANKS)]


def shown(outcome: State | Exception) -> tuple[str, str]:
    return type(outcome).__name__, str(outcome)


def test_every_rank_gets_the_same_state(gathered: list[dict[str, Any]], tables: Tables) -> None:
    expected = state_after(tables.stream(), 2)
    for name in ("states", "seats"):
        assert [found[name] for found in gathered] == [expected] * RANKS
    assert [found["a group"] for found in gathered[:2]] == [state_after(tables.stream(), 3)] * 2


def test_rows_taken_inside_a_cycle_are_kept(gathered: list[dict[str, Any]]) -> None:
    """Ranks own splits 0, 1 and 2-3; the second has taken one row more than whole cycles."""
    for found in gathered:
        assert found["inside a cycle"]["samples_consumed_per_split"] == [4, 5, 4, 4]


@pytest.mark.parametrize(
    ("scenario", "kind", "said"),
    [
        ("different steps", StateError, "state 0: 2, state 1: 2, state 2: 4"),
        ("other data", StateMismatchError, "shuffle_seed differs"),
        ("one has none", StateError, "process 2: no state inside a batch"),
        ("an error that does not travel", StateError, "process 0: OddError: odd"),
        ("not a state", StateError, "this is not a stream state"),
        ("a rank too few", StateError, "rank 0 of 4, rank 1 of 4, rank 2 of 4"),
        ("the same rank twice", StateError, "rank 1 of 3, rank 1 of 3"),
    ],
)
def test_every_rank_gets_the_same_error(
    gathered: list[dict[str, Any]], scenario: str, kind: type[Exception], said: str
) -> None:
    outcomes = [found[scenario] for found in gathered]
    assert {shown(outcome) for outcome in outcomes} == {shown(outcomes[0])}
    assert type(outcomes[0]) is kind
    assert said in str(outcomes[0])


def test_a_single_rank_needs_no_process_group(tables: Tables) -> None:
    state = state_after(tables.stream(), 2)
    assert gather_state_dict(Rank(0, 1, state)) == state
    with pytest.raises(ConfigError, match="not initialised"):
        gather_state_dict(Rank(0, 2, state))
    with pytest.raises(ConfigError, match="not initialised"):
        gather_state_dict(state)  # does not say how many ranks there are


# --- files -------------------------------------------------------------------------------------------


def save_all(directory: Path, states: Mapping[int, State], world_size: int | None = None) -> None:
    for rank, state in states.items():
        save_rank_state(state, directory, rank, world_size=world_size)


def test_files_of_all_ranks_make_one_state(tables: Tables, tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "step 2"
    for rank in (2, 0, 1):
        save_rank_state(Rank(rank, 3, state_after(tables.stream(), 2, rank, 3)), directory)
    merged = load_rank_states(directory)
    assert merged == state_after(tables.stream(), 2)
    with tables.stream().open(rank=1, world_size=2) as shard:
        shard.load_state_dict(merged)
        assert shard.step == 2
    assert len(os.listdir(directory)) == 3  # no part of a file is left


def test_datasets_and_loaders_know_their_rank(tables: Tables, tmp_path: Path) -> None:
    """Two ranks save, one by its dataset and one by its loader; three go on."""
    import lancedb

    from ray_lance_stream import StreamingDataLoader, StreamingDataset

    table = lancedb.connect(tables.uri(50)).open_table("t")

    def rank_of(rank: int, world_size: int) -> StreamingDataset:
        return StreamingDataset(table, num_splits=6, shuffle=False, rank=rank, world_size=world_size)

    datasets = [rank_of(rank, 2) for rank in range(2)]
    loaders = [StreamingDataLoader(dataset, batch_size=6) for dataset in datasets]
    taken = [row for loader in loaders for row in next(iter(loader))["id"].tolist()]
    save_rank_state(datasets[0], tmp_path)
    save_rank_state(loaders[1], tmp_path)
    state = load_rank_states(tmp_path)
    assert state["samples_consumed_per_split"] == [2] * 6
    for rank in range(3):
        dataset = rank_of(rank, 3)
        dataset.load_state_dict(state)
        taken += [row["id"] for row in dataset]
    assert sorted(taken) == list(range(48))
    alone = rank_of(0, 1)
    assert gather_state_dict(StreamingDataLoader(alone)) == alone.state_dict()


def test_more_than_ten_ranks(tables: Tables, tmp_path: Path) -> None:
    stream = tables.stream(num_splits=12, global_batch_size=12)
    states = [state_after(stream, 1, rank, 12) for rank in range(12)]
    save_all(tmp_path, dict(enumerate(states)))
    assert load_rank_states(tmp_path) == merge_state_dicts(states)


@pytest.mark.parametrize(
    ("saves", "said"),
    [
        pytest.param([(3, (0, 1))], "rank 0 of 3, rank 1 of 3", id="the last is missing"),
        pytest.param([(3, (0, 2))], "rank 0 of 3, rank 2 of 3", id="one between is missing"),
        pytest.param([(None, (0, 2))], "rank 0, rank 2", id="a gap"),
        pytest.param([(3, (0, 1, 2)), (2, (0, 1))], "rank 0 of 2, rank 1 of 2, rank 2 of 3", id="of a larger run"),
    ],
)
def test_files_that_are_not_one_save(
    tables: Tables, tmp_path: Path, saves: list[tuple[int | None, tuple[int, ...]]], said: str
) -> None:
    state = state_after(tables.stream(), 2)
    for world_size, ranks in saves:
        save_all(tmp_path, dict.fromkeys(ranks, state), world_size)
    with pytest.raises(StateError, match="not those of one save") as raised:
        load_rank_states(tmp_path)
    assert said in str(raised.value)


def test_files_that_do_not_fit_together(tables: Tables, tmp_path: Path) -> None:
    stream = tables.stream()
    save_all(tmp_path / "steps", {0: state_after(stream, 1), 1: state_after(stream, 2)}, 2)
    with pytest.raises(StateError, match="different numbers of cycles"):
        load_rank_states(tmp_path / "steps")
    other = state_after(tables.stream(filter="id < 40"), 2)
    save_all(tmp_path / "data", {0: state_after(stream, 2), 1: other}, 2)
    with pytest.raises(StateMismatchError) as raised:
        load_rank_states(tmp_path / "data")
    assert raised.value.field == "filter"


def test_a_file_cut_short_is_named(tables: Tables, tmp_path: Path) -> None:
    save_all(tmp_path, dict.fromkeys((0, 1), state_after(tables.stream(), 2)), 2)
    victim = next(path for path in tmp_path.iterdir() if "00001" in path.name)
    victim.write_bytes(victim.read_bytes()[:-20])
    with pytest.raises(StateError, match=victim.name):
        load_rank_states(tmp_path)


def test_a_checkpoint_of_another_kind(tables: Tables, tmp_path: Path) -> None:
    from ray_lance_stream.checkpoint import locate, write_streams
    from ray_lance_stream.state import StreamState

    write_streams(*locate(tmp_path), {"train": StreamState.from_dict(state_after(tables.stream(), 2))})
    with pytest.raises(StateError, match="not those of one save"):
        load_rank_states(tmp_path)


def test_nothing_saved(tmp_path: Path) -> None:
    with pytest.raises(MissingStateError, match="save_rank_state"):
        load_rank_states(tmp_path)
    with pytest.raises(MissingStateError):
        load_rank_states(tmp_path / "nowhere")


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (True, 2), (None, 2), ("0", None)])
def test_a_rank_that_cannot_be(tables: Tables, tmp_path: Path, rank: Any, world_size: int | None) -> None:
    with pytest.raises(ConfigError, match="rank is not valid"):
        save_rank_state(state_after(tables.stream(), 1), tmp_path, rank, world_size=world_size)
    assert not list(tmp_path.iterdir())


def test_a_state_that_is_none_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(StateError):
        save_rank_state({"epoch": 1}, tmp_path, 0)
    with pytest.raises(StateError, match="inside a batch"):
        save_rank_state(Rank(0, 1, StateError("no state inside a batch")), tmp_path)
    assert not list(tmp_path.iterdir())

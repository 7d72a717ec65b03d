"""Arguments of the wrong kind: each is refused where it is passed, by name, with an error that travels."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa
import pytest
from conftest import Tables

from ray_lance_stream import ConfigError, LanceStream, PrefetchConfig, StateError, StreamingDataset, TransformError
from ray_lance_stream.gathering import load_rank_states, save_rank_state
from ray_lance_stream.state import merge_state_dicts
from streaming.sides import LANCEDB, OpenTable, Side, ids

WORKER = SimpleNamespace(id=0, num_workers=1)


def travels(error: BaseException) -> bool:
    again = pickle.loads(pickle.dumps(error))
    return type(again) is type(error) and str(again) == str(error)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"connection_factory": 5}, "connection_factory is not valid"),
        ({"allow_changes": 5}, "allow_changes is not valid"),
        ({"allow_changes": None}, "allow_changes is not valid"),
        ({"allow_changes": [5]}, "allow_changes is not valid"),
        ({"worker_info_override": object}, "worker_info_override is not valid"),
        ({"worker_info_override": SimpleNamespace(id=0, num_workers=0)}, "worker_info_override is not valid"),
        ({"worker_info_override": SimpleNamespace(id=2, num_workers=2)}, "worker_info_override is not valid"),
        ({"worker_info_override": SimpleNamespace(id=-1, num_workers=2)}, "worker_info_override is not valid"),
        ({"prefetch": 5}, "prefetch is not valid.*type int.*prefetch=PrefetchConfig"),
        ({"prefetch": 0}, "prefetch is not valid"),
        ({"order": ""}, "order is unknown"),
        ({"order": 5}, "order is unknown"),
        ({"pack_sequences": 10**12, "eos_id": 0, "pad_id": 0, "blocks_per_epoch": 1}, "pack_sequences is not valid"),
        ({"shuffle": 2}, "shuffle is not valid"),
        ({"shuffle": 1.0}, "shuffle is not valid"),
        ({"num_splits": True}, "num_splits is not valid"),
        ({"num_splits": np.float64(4)}, "num_splits is not valid"),
        ({"shuffle_seed": np.int64(-1)}, "shuffle_seed is not valid"),
    ],
    ids=str,
)
def test_arguments_of_a_dataset(ours: Side, table_of: OpenTable, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        ours.dataset(table_of(24), **options)
    assert travels(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"table": 5}, "the table's name is not valid"),
        ({"table": ""}, "the table's name is not valid"),
        ({"storage_options": 5}, "storage_options are not valid.*type int"),
        ({"storage_options": {"secret": 12345}}, "storage_options are not valid"),
        ({"allow_changes": 5}, "allow_changes is not valid"),
        ({"allow_changes": None}, "allow_changes is not valid"),
        ({"drop_last": 1}, "drop_last is not valid.*Expected: True or False. Remedy: pass one, or leave it out"),
        ({"prefetch": 5}, "prefetch is not valid.*prefetch=PrefetchConfig"),
        ({"order": ""}, "order is unknown"),
        ({"uri": None, "connection_factory": 5}, "connection_factory is not valid"),
        ({"uri": None, "connection_factory": str}, "does not give access"),
    ],
    ids=str,
)
def test_arguments_of_a_stream(tables: Tables, options: dict[str, Any], message: str) -> None:
    settings: dict[str, Any] = {"uri": tables.uri(24), "table": "t", "num_splits": 2, "global_batch_size": 4}
    with pytest.raises(ConfigError, match=message) as caught:
        LanceStream(**settings | options)
    assert travels(caught.value) and "12345" not in str(caught.value)


def test_a_factory_that_opens_nothing_is_named(ours: Side, table_of: OpenTable) -> None:
    with pytest.raises(ConfigError, match="does not give access"):
        next(iter(ours.one(table_of(24), connection_factory=lambda _: None)))
    with pytest.raises(ConfigError, match=r"cannot be opened.*TypeError.*check connection_factory"):
        next(iter(ours.one(table_of(24), connection_factory=lambda: None)))


def test_a_worker_info_of_its_own_is_taken(ours: Side, table_of: OpenTable) -> None:
    assert ids(ours.one(table_of(24), worker_info_override=WORKER)) == ids(ours.one(table_of(24)))


def test_integers_of_any_kind_are_integers(side: Side, table_of: OpenTable) -> None:
    plain = side.open(table_of(24), 2, shuffle_seed=3, epoch=1)[1]
    settings = {"num_splits": 4, "rank": 1, "world_size": 2, "shuffle_seed": 3, "epoch": 1}
    as_numpy: dict[str, Any] = {name: np.int64(value) for name, value in settings.items()}
    dataset = side.dataset(table_of(24), shuffle=1, **as_numpy)
    assert ids(dataset, 5) == ids(plain, 5)
    if side.name == "ours":
        state = dataset.state_dict()
        assert {type(state[key]) for key in ("shuffle_seed", "num_splits", "epoch")} == {int}
        assert state["provenance"]["shuffle"] is True


def test_a_stream_takes_integers_of_any_kind(tables: Tables) -> None:
    numbers: dict[str, Any] = {"num_splits": 2, "global_batch_size": 4, "shuffle_seed": 3, "version": 2}
    as_numpy: dict[str, Any] = {name: np.int32(value) for name, value in numbers.items()}
    stream = LanceStream(tables.uri(24), "t", **as_numpy)
    assert stream.config.order.num_splits == 2 and type(stream.config.global_batch_size) is int
    assert stream.config.prefetch == PrefetchConfig()


def test_states_with_integers_of_any_kind(side: Side, table_of: OpenTable) -> None:
    dataset = side.one(table_of(24))
    ids(dataset, 8)
    state = dataset.state_dict()
    rest = ids(dataset)
    for name in ("epoch", "num_splits", "shuffle_seed"):
        state[name] = np.int64(state[name])
    for name in ("samples_consumed_per_split", "positions_consumed_per_split"):
        state[name] = [np.int64(count) for count in state[name]]
    for reader in (LANCEDB, side):
        again = reader.dataset(table_of(24), num_splits=4)
        again.load_state_dict(state)
        assert ids(again) == rest


def test_a_state_of_the_old_form_counts_once_for_all_splits(side: Side, table_of: OpenTable) -> None:
    theirs = LANCEDB.one(table_of(24))
    ids(theirs, 8)
    state = theirs.state_dict()
    state["samples_consumed_per_split"] = 2
    del state["positions_consumed_per_split"]
    again = side.dataset(table_of(24), num_splits=4)
    again.load_state_dict(state)
    assert ids(again) == ids(theirs)


def plan(row_ids: list[Any], split_ids: list[Any], kind: Any = None, **metadata: str) -> pa.Table:
    table = pa.table({"row_id": pa.array(row_ids, kind or pa.uint64()), "split_id": pa.array(split_ids, kind)})
    return table.replace_schema_metadata(metadata)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (plan([1, 2], [0, 2**40]), "splits 0 to 1099511627776, some of which have none"),
        (plan([1, 2], [0, 2**64 - 1], pa.uint64()), "splits 0 to 18446744073709551615"),
        (plan([1, 2], [0, -1]), "splits -1 to 0"),
        (plan([-1, 2], [0, 0], pa.int64()), "row_id -1"),
        (plan([1], [0], base_version="x"), "base_version b'x'"),
        (plan([1], [0], base_version="0"), "base_version b'0'"),
        (plan([1, 99], [0, 0]), r"plan names rows that are not in table.*1 of 2 row ids, e.g. 99"),
    ],
    ids=range(7),
)
def test_plans_are_checked_where_they_are_passed(
    ours: Side, tables: Tables, table_of: OpenTable, bad: pa.Table, message: str
) -> None:
    for build in (
        lambda: ours.dataset(table_of(24), plan=bad),
        lambda: LanceStream(tables.uri(24), "t", num_splits=1, global_batch_size=1, plan=bad),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            build()
        assert travels(caught.value)


@pytest.mark.parametrize("num_splits", [1.0, True, "1"], ids=str)
def test_a_number_of_splits_beside_a_plan_is_a_number(ours: Side, table_of: OpenTable, num_splits: Any) -> None:
    with pytest.raises(ConfigError, match="num_splits is not valid"):
        ours.dataset(table_of(24), plan=plan([5, 4, 3], [0, 0, 0]), num_splits=num_splits)
    assert ids(ours.dataset(table_of(24), plan=plan([5, 4, 3], [0, 0, 0]), num_splits=np.int8(1)))


@pytest.mark.parametrize("states", [None, 5, {}, "states"], ids=str)
def test_what_is_no_list_of_states(states: Any) -> None:
    with pytest.raises(StateError, match="this is no list of states to merge") as caught:
        merge_state_dicts(states)
    assert travels(caught.value)


def test_states_come_from_any_iterable(ours: Side, table_of: OpenTable) -> None:
    state = ours.one(table_of(24)).state_dict()
    assert merge_state_dicts(iter([state, state])) == state  # type: ignore[arg-type]


def test_states_of_ranks_need_a_state_and_a_directory(
    ours: Side, table_of: OpenTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dataset: StreamingDataset = ours.one(table_of(24))
    with pytest.raises(StateError, match=r"this has no state.*type int"):
        save_rank_state(5, tmp_path / "states", 0)  # type: ignore[arg-type]
    directories: tuple[Any, ...] = (5, "", " ", None)
    for directory in directories:
        for use in (lambda to: save_rank_state(dataset, to), load_rank_states):
            with pytest.raises(ConfigError, match="directory is not valid") as caught:
                use(directory)
            assert travels(caught.value)
    assert not list(tmp_path.iterdir())
    save_rank_state(dataset, tmp_path / "states", np.int64(0))  # type: ignore[arg-type]
    assert load_rank_states("states") == dataset.state_dict()


def test_columns_that_lance_cannot_read(ours: Side, tmp_path: Path) -> None:
    table = lancedb.connect(str(tmp_path)).create_table("t", pa.table({"id": [1, 2], "back`tick": [1, 2]}))
    with pytest.raises(ConfigError, match=r"columns that Lance can write and cannot read.*back`tick") as caught:
        ours.dataset(table)
    assert travels(caught.value)


@pytest.mark.parametrize("output", [None, 5, 0.5])
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_outputs_that_are_no_rows(ours: Side, table_of: OpenTable, output: Any, policy: str) -> None:
    """LanceDB's class says what Python does of them, and skips every row without a word if rows may be skipped."""
    dataset = ours.dataset(table_of(24), transform=lambda _: output, on_transform_error=policy)
    with pytest.raises(TransformError, match=f"transform .*lambda.* it is no rows. Found: {output}, a "):
        ids(dataset)

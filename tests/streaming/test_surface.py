"""Parameters, properties and errors of the dataset: those of ``lancedb.streaming``, so that it may be swapped."""

from __future__ import annotations

import inspect
import pickle
import warnings
from pathlib import Path
from typing import Any

import lancedb
import pytest
from conftest import Tables

from streaming.sides import LANCEDB, OpenTable, Side, ids, saved

COUNTERS = (
    "bytes_loaded",
    "unscanned_rows",
    "consumed_rows",
    "rows_skipped",
    "raw_queue_depth",
    "prefetch_queue_depth",
)
TIMES = ("fetch_time", "transform_time")


def test_every_parameter_is_there_with_its_default(ours: Side) -> None:
    if "pack_sequences" not in inspect.signature(ours.dataset.__init__).parameters:
        pytest.skip("not built yet")
    for name in ("dataset", "loader"):
        theirs = inspect.signature(getattr(LANCEDB, name).__init__).parameters
        mine = inspect.signature(getattr(ours, name).__init__).parameters
        for key, parameter in theirs.items():
            if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                assert mine[key].kind == parameter.kind
                assert mine[key].default == parameter.default
    mine = inspect.signature(ours.loader.__init__).parameters
    for key, parameter in inspect.signature(__import__("torch").utils.data.DataLoader.__init__).parameters.items():
        assert (mine[key].kind, mine[key].default) == (parameter.kind, parameter.default)


def test_every_public_name_is_there(ours: Side) -> None:
    for name in ("dataset", "loader"):
        theirs = {key for key in vars(getattr(LANCEDB, name)) if not key.startswith("_")}
        assert theirs <= set(dir(getattr(ours, name)))


def test_the_package_exports_both_classes(ours: Side) -> None:
    import ray_lance_stream

    assert ray_lance_stream.StreamingDataset is ours.dataset
    assert ray_lance_stream.StreamingDataLoader is ours.loader


def test_counters_before_within_and_after_an_epoch(side: Side, table_of: OpenTable) -> None:
    dataset = side.one(table_of(211), read_batch_size=8)
    assert [getattr(dataset, name) for name in COUNTERS] == [0] * len(COUNTERS)
    assert [getattr(dataset, name) for name in TIMES] == [0, 0]
    iterator = iter(dataset)
    ids(iterator, 100)
    assert dataset.consumed_rows == 100
    assert dataset.bytes_loaded > 0
    assert 0 <= dataset.unscanned_rows <= 108
    assert dataset.fetch_time > 0
    assert 0 <= dataset.prefetch_queue_depth <= 108
    assert 0 <= dataset.raw_queue_depth <= 108
    ids(iterator)
    assert dataset.consumed_rows == 208
    assert dataset.unscanned_rows == dataset.prefetch_queue_depth == dataset.raw_queue_depth == 0
    if side.name == "ours":  # LanceDB's threads overwrite each other's sums
        assert dataset.bytes_loaded >= 208 * (8 + 24)
    assert dataset.rows_skipped == 0
    assert dataset.transform_time >= 0
    for name in TIMES:
        assert isinstance(getattr(dataset, name), float)


def test_a_projection_loads_less(side: Side, table_of: OpenTable) -> None:
    everything, only_ids = side.one(table_of(211)), side.one(table_of(211), columns=["id"])
    assert ids(everything) == ids(only_ids)
    if side.name == "ours":  # LanceDB's threads overwrite each other's sums
        assert 208 * 8 <= only_ids.bytes_loaded < everything.bytes_loaded / 2


@pytest.mark.parametrize(
    "options",
    [
        {"world_size": 5},
        {"io_queue_depth": 0},
        {"prefetch_batches": 0},
        {"transform_parallelism": 0},
        {"transform_queue_depth": 0},
        {"filter": "nothing = 1"},
        {"num_splits": 25},
    ],
    ids=str,
)
def test_what_is_refused_at_once(side: Side, table_of: OpenTable, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):  # the messages differ
        side.dataset(table_of(24), **{"num_splits": 4} | options)


@pytest.mark.parametrize("columns", [["nothing"], []], ids=["unknown", "none"])
def test_columns_that_are_not_there(side: Side, table_of: OpenTable, columns: list[str]) -> None:
    """LanceDB says so with the first row."""
    with pytest.raises(ValueError):  # the messages differ
        next(iter(side.one(table_of(24), columns=columns)))


def test_the_old_name_of_the_queue_depth(
    side: Side, table_of: OpenTable, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if side.name == "ours":
        monkeypatch.setattr("ray_lance_stream.dataset._told", set())  # says it once in a process
    with caplog.at_level("WARNING"):
        dataset = side.one(table_of(24), prefetch_batches=2)
    assert "prefetch_batches" in caplog.text
    assert len(ids(dataset)) == 24


def test_one_iterator_at_a_time(side: Side, table_of: OpenTable) -> None:
    dataset = side.one(table_of(24), shuffle=False)
    first = iter(dataset)
    assert next(first)["id"] == 0
    with pytest.raises(RuntimeError, match="concurrent"):
        next(iter(dataset))
    assert next(first)["id"] == 6
    del first
    assert ids(dataset, 2) == [12, 18]


def test_there_is_no_length(side: Side, table_of: OpenTable) -> None:
    with pytest.raises(TypeError):
        len(side.one(table_of(24)))


def test_a_connection_factory_opens_the_table(ours: Side, tables: Tables) -> None:
    dataset = ours.one(tables_open(tables.uri(24)), connection_factory=Opens(tables.uri(24)))
    taken = ids(dataset, 7)
    copy = pickle.loads(pickle.dumps(dataset))
    assert taken + ids(copy) == ids(LANCEDB.one(tables_open(tables.uri(24))))


def tables_open(uri: str) -> Any:
    return lancedb.connect(uri).open_table("t")


class Opens:
    """A factory that can be pickled."""

    def __init__(self, uri: str) -> None:
        self._uri = uri

    def __call__(self, name: str) -> Any:
        return lancedb.connect(self._uri).open_table(name)


def test_a_copy_goes_on_where_the_original_stood(ours: Side, table_of: OpenTable) -> None:
    """And the two are independent from then on."""
    dataset = ours.one(table_of(24))
    iterator = iter(dataset)
    taken = ids(iterator, 9)
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy.state_dict() == dataset.state_dict()
    assert taken + ids(copy) == taken + ids(iterator) == ids(LANCEDB.one(table_of(24)))


def test_a_table_in_memory(side: Side, table_of: OpenTable) -> None:
    """It has no place that another process could open, but here it can be read."""
    table = lancedb.connect("memory://").create_table("t", table_of(24).to_arrow())
    assert ids(side.one(table)) == ids(LANCEDB.one(table_of(24)))


def test_a_table_that_is_checked_out(side: Side, tables: Tables) -> None:
    """The version the user chose is read, not the latest."""
    uri, table = tables.own(24)
    version = table.version
    expected = ids(LANCEDB.one(table))
    table.delete("id > 3")
    old = lancedb.connect(uri).open_table("t")
    old.checkout(version)
    assert ids(side.one(old)) == expected


@pytest.mark.usefixtures("no_threads_left")
def test_nothing_is_left_behind(ours: Side, table_of: OpenTable) -> None:
    for count in (None, 3):
        ids(ours.one(table_of(211)), count)


def test_no_warning_without_a_reason(ours: Side, table_of: OpenTable, caplog: pytest.LogCaptureFixture) -> None:
    with warnings.catch_warnings(), caplog.at_level("WARNING", logger="ray_lance_stream"):
        warnings.simplefilter("error")
        dataset = ours.one(table_of(24))
        list(ours.loader(dataset, batch_size=4))
        ours.one(table_of(24)).load_state_dict(saved(dataset.state_dict()))
    assert caplog.text == ""


def test_a_table_of_another_kind(ours: Side, tmp_path: Path) -> None:
    for table in (None, "t", lancedb.connect(str(tmp_path)), [1, 2]):
        with pytest.raises((TypeError, ValueError), match="table"):
            ours.dataset(table)

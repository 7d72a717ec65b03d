"""table.py against real LanceDB tables on disk, and against brute force over ``to_table()``."""

from __future__ import annotations

import datetime
import pickle
import shutil
import tempfile
import threading
import traceback
import urllib.request
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lance
import lancedb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lance import blob
from lance.dataset import serialize_row_addrs
from lance.file import LanceFileWriter
from lance.fragment import DataFile, DeletionFile, FragmentMetadata
from moto.server import ThreadedMotoServer

from ray_lance_stream import table as table_module
from ray_lance_stream.block import BlockBuilder, BlockRecipe
from ray_lance_stream.errors import ConfigError, LanceStreamError, TableVersionError
from ray_lance_stream.location import TableRef
from ray_lance_stream.plan import OrderSpec, PlanSpec
from ray_lance_stream.readable import ReadableTable
from ray_lance_stream.request import Ranges
from ray_lance_stream.rownumbers import fingerprint
from ray_lance_stream.table import PinnedTable

SECRET = "hush-hush-secret"


def rows_from(start: int, count: int) -> pa.Table:
    ids = np.arange(start, start + count)
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(ids, 4).astype(np.float32)), 4)
    return pa.table({"id": ids, "text": [f"t{i}" for i in ids], "vector": vectors})


def write(root: Path, data: pa.Table, name: str = "t", **options: Any) -> TableRef:
    lance.write_dataset(data, str(root / f"{name}.lance"), mode="create", **options)
    return TableRef(uri=str(root), name=name)


def handle(ref: TableRef) -> Any:
    return lancedb.connect(str(ref.uri)).open_table(ref.name)


def no_table(_: str) -> Any:
    return object()


def ints(*rows: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(rows, dtype=np.int64)


def clean_up(ref: TableRef) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        handle(ref).optimize(cleanup_older_than=datetime.timedelta(0), delete_unverified=True)


# --- opening -----------------------------------------------------------------------------------------


def test_a_ref_needs_exactly_one_way_to_open() -> None:
    with pytest.raises(ConfigError, match="neither"):
        TableRef(name="t")
    with pytest.raises(ConfigError, match="both"):
        TableRef(name="t", uri="/db", connection_factory=no_table)
    with pytest.raises(ConfigError, match="storage_options have no effect"):
        TableRef(name="t", storage_options={"a": "b"}, connection_factory=no_table)


def test_a_ref_pickles_hashes_and_hides_its_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    ref = TableRef(uri="db", name="t", storage_options={"aws_secret_access_key": SECRET})
    again = pickle.loads(pickle.dumps(ref))
    assert again == ref and hash(again) == hash(ref)
    assert ref.uri == str(tmp_path / "db")  # another process has another working directory
    assert SECRET not in repr(ref) and "aws_secret_access_key" in repr(ref)
    assert TableRef(uri="s3://bucket/db", name="t").uri == "s3://bucket/db"


def test_missing_database_and_table(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        TableRef(uri=str(tmp_path / "nowhere"), name="t").open()
    assert not (tmp_path / "nowhere").exists()
    write(tmp_path, rows_from(0, 3), "images")
    with pytest.raises(ConfigError, match=r"'image'.*images.*did you mean 'images'"):
        TableRef(uri=str(tmp_path), name="image").open()


@pytest.mark.thorough
def test_errors_show_no_secrets(tmp_path: Path) -> None:
    options = {"aws_secret_access_key": SECRET, "aws_endpoint": f"http://127.0.0.1:9/{SECRET}"}
    options |= {"allow_http": "true", "aws_region": "us-east-1", "client_max_retries": "0"}
    options |= {"aws_access_key_id": "access-key-id"}
    with pytest.raises(ConfigError, match="cannot be opened") as caught:
        TableRef(uri="s3://some-bucket/db", name="t", storage_options=options).open()
    shown = "".join(traceback.format_exception(caught.value))
    assert SECRET not in shown and "access-key-id" not in shown and "***" in shown
    ref = TableRef(uri=write(tmp_path, rows_from(0, 3)).uri, name="t", storage_options={"token": SECRET})
    with pytest.raises(ConfigError) as caught:
        ref.open().matching_rows(f"id = '{SECRET}' +")
    assert SECRET not in str(caught.value.args[0]).split("Found", 1)[1]


def test_object_storage_gets_the_options() -> None:
    # A bucket of its own: all servers of one process share what they hold.
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        options = {"aws_endpoint": f"http://{host}:{port}", "allow_http": "true", "aws_region": "us-east-1"}
        options |= {"aws_access_key_id": "access-key-id", "aws_secret_access_key": SECRET}
        urllib.request.urlopen(urllib.request.Request(f"{options['aws_endpoint']}/bucket-of-tables", method="PUT"))
        database = lancedb.connect("s3://bucket-of-tables/db", storage_options=options)
        database.create_table("t", rows_from(0, 50)).delete("id % 3 = 0")
        ref = TableRef(uri="s3://bucket-of-tables/db", name="t", storage_options=options)
        assert ref.open().take(ints(4, 1), ["id"])["id"].to_pylist() == [7, 2]
        with pytest.raises(ConfigError, match="table 'u' does not exist"):
            TableRef(uri="s3://bucket-of-tables/db", name="u", storage_options=options).open()
        with pytest.raises(TableVersionError, match="versions 1-2"):
            ref.open(9)
    finally:
        server.stop()


def test_connection_factory(tmp_path: Path) -> None:
    ref = write(tmp_path, rows_from(0, 10))
    handle(ref).add(rows_from(10, 10))
    database = lancedb.connect(str(tmp_path))
    assert TableRef(name="t", connection_factory=database.open_table).open().num_rows == 20
    assert TableRef(name="t", connection_factory=database.open_table).open(1).num_rows == 10
    with pytest.raises(ConfigError, match="'u' cannot be opened"):
        TableRef(name="u", connection_factory=database.open_table).open()


def test_tables_without_lance_files_are_refused() -> None:
    def remote(_: str) -> Any:
        class Remote:
            def to_lance(self) -> None:
                raise NotImplementedError

        return Remote()

    for factory in (remote, no_table):
        with pytest.raises(ConfigError, match="does not give access"):
            TableRef(name="t", connection_factory=factory).open()
    with pytest.raises(ConfigError, match="Remedy: pass connection_factory="):
        TableRef(name="t", uri="db://cloud").open()


def test_opening_reads_no_data(tmp_path: Path) -> None:
    ref = write(tmp_path, rows_from(0, 100), max_rows_per_file=10)
    handle(ref).delete("id % 3 = 0")
    dataset = lance.dataset(str(tmp_path / "t.lance"))
    dataset.io_stats_incremental()
    table = PinnedTable(dataset, ref)
    assert (table.num_rows, len(table.identity.fingerprint)) == (66, 32)
    assert dataset.io_stats_incremental().read_iops == 0


# --- versions and identity ---------------------------------------------------------------------------


def test_a_missing_version_is_named_with_those_that_exist(tmp_path: Path) -> None:
    ref = write(tmp_path, rows_from(0, 10))
    for start in (10, 20, 30):
        handle(ref).add(rows_from(start, 10))
    for version in (99, 0, -1):
        with pytest.raises(TableVersionError, match=rf"version {version} of table 't'.*versions 1-4\b"):
            ref.open(version)
    clean_up(ref)
    with pytest.raises(TableVersionError, match=r"cleaned up, or the table was dropped and created anew"):
        ref.open(2)


def test_a_version_that_vanishes_while_open(tmp_path: Path) -> None:
    ref = write(tmp_path, rows_from(0, 10))
    table = ref.open()
    handle(ref).delete("id < 5")  # enough for the clean-up to rewrite the file
    clean_up(ref)
    with pytest.raises(TableVersionError, match="version 1 of table 't'"):
        table.take(ints(1), None)
    lancedb.connect(str(tmp_path)).drop_table("t")
    write(tmp_path, rows_from(0, 10))
    with pytest.raises(TableVersionError, match="created anew"):  # version 1 is there, but another one
        table.take(ints(1), None)


def test_what_is_not_found_for_a_moment_is_no_vanished_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = write(tmp_path, rows_from(0, 10)).open()

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError("Generic S3 error: host not found")

    with monkeypatch.context() as patch:
        patch.setattr(lance.LanceDataset, "take", fail)
        with pytest.raises(OSError, match="host not found"):
            table.take(ints(1), None)
        patch.setattr(table_module, "present_versions", lambda _: None)
        with pytest.raises(OSError, match="host not found"):
            table.take(ints(1), None)
    assert table.take(ints(1), ["id"])["id"].to_pylist() == [1]


def test_errors_of_the_storage_reach_the_consumer_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = write(tmp_path, rows_from(0, 10))
    ref = TableRef(uri=plain.uri, name="t", storage_options={"aws_secret_access_key": SECRET})
    builder = BlockBuilder(BlockRecipe(table=ref))
    spec = PlanSpec(table=plain.open().identity, order=OrderSpec(num_splits=2), epoch=0)
    plan, _ = builder.open_plan(spec)

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(f"403 for key {SECRET}")

    monkeypatch.setattr(lance.LanceDataset, "take", fail)
    ranges = Ranges(first_split=0, num_splits=2, start=0, stop=1)
    for use in (lambda: builder.open_plan(spec), lambda: builder.build(plan, ranges, lambda rows: rows)):
        with pytest.raises(OSError, match=r"403 for key \*\*\*") as caught:
            use()
        assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_fingerprint_follows_the_data_not_the_place(tmp_path: Path) -> None:
    home, copied, moved = tmp_path / "home", tmp_path / "copied", tmp_path / "moved"
    home.mkdir()
    ref = write(home, rows_from(0, 30), max_rows_per_file=10)
    original = ref.open().identity
    assert ref.open().identity == original
    shutil.copytree(home, copied)
    assert TableRef(uri=str(copied), name="t").open().identity == original
    copied.rename(moved)
    assert TableRef(uri=str(moved), name="t").open().identity == original
    lance.dataset(str(home / "t.lance")).shallow_clone(str(home / "clone.lance"), 1)
    assert TableRef(uri=str(home), name="clone").open().identity == original

    lancedb.connect(str(home)).drop_table("t")
    again = write(home, rows_from(0, 30), max_rows_per_file=10).open().identity
    assert again.version == original.version and again.fingerprint != original.fingerprint


def test_every_change_of_what_is_read_changes_the_fingerprint_of_the_new_version_only(tmp_path: Path) -> None:
    ref = write(tmp_path, rows_from(0, 30), max_rows_per_file=10)
    path = str(tmp_path / "t.lance")

    changes: list[Callable[[], Any]] = [
        lambda: handle(ref).add(rows_from(30, 5)),
        lambda: handle(ref).delete("id % 7 = 0"),
        lambda: handle(ref).delete("id % 11 = 1"),
        lambda: handle(ref).update(where="id = 2", values={"text": "new"}),
        lambda: handle(ref).merge_insert("id").when_matched_update_all().execute(rows_from(4, 2)),
        lambda: lance.dataset(path).add_columns({"double": "id * 2"}),
        lambda: lance.dataset(path).add_columns(pa.schema([pa.field("empty", pa.int32())])),
        lambda: lance.dataset(path).alter_columns({"path": "double", "name": "twice"}),
        lambda: lance.dataset(path).drop_columns(["twice"]),
        lambda: handle(ref).optimize(),
    ]
    seen = {1: ref.open().identity.fingerprint}
    for change in changes:
        change()
        table = ref.open()
        assert table.identity.fingerprint not in seen.values()
        seen[table.version] = table.identity.fingerprint
    assert {version: ref.open(version).identity.fingerprint for version in seen} == seen


def test_overlays_count(tmp_path: Path) -> None:
    ref, path, name = (
        write(tmp_path, rows_from(0, 10)),
        str(tmp_path / "t.lance"),
        f"{uuid.uuid4().hex}.lance",
    )
    dataset = lance.dataset(path)
    with LanceFileWriter(f"{path}/data/{name}", rows_from(0, 1).select(["id"]).schema, version="2.2") as file:
        file.write_batch(pa.table({"id": [500]}))
    cells = lance.LanceOperation.DataOverlayFile(DataFile.create(dataset, name), [1])
    operation = lance.LanceOperation.DataOverlay([lance.LanceOperation.DataOverlayGroup(0, [cells])])
    changed = PinnedTable(lance.LanceDataset.commit(dataset, operation, read_version=1), ref)
    assert changed.identity.fingerprint != PinnedTable(dataset, ref).identity.fingerprint
    assert changed.take(ints(1, 0), ["id"])["id"].to_pylist() == [500, 0]
    np.testing.assert_array_equal(changed.matching_rows("id >= 9"), ints(1, 9))


def test_fingerprint_is_pinned() -> None:
    fragment = FragmentMetadata(
        id=3,
        files=[DataFile("a.lance", fields=[0, 1], column_indices=[0, 1])],
        physical_rows=10,
        deletion_file=DeletionFile(2, 77, "array", 4, None),
    )
    schema = pa.table({"x": pa.array([], pa.int64()), "y": pa.array([], pa.string())}).schema
    fields = lance.schema.LanceSchema.from_pyarrow(schema).fields()
    # sha256 of [1,[[0,"x",[]],[1,"y",[]]],[[3,10,[["a.lance",[0,1],[0,1]]],[2,77,4],[]]]]
    assert fingerprint([fragment], fields) == "fc182309b462c6a5ba1a24cee829cfe6"


# --- reading rows ------------------------------------------------------------------------------------


def assert_takes(table: ReadableTable, truth: pa.Table, rows: Any, columns: list[str] | None = None) -> None:
    taken = table.take(rows, columns)
    expected = truth.select(columns or truth.column_names).take(pa.array(rows, pa.int64()))
    assert taken.schema == expected.schema
    assert taken.to_pylist() == expected.to_pylist()
    assert all(column.num_chunks == 1 for column in taken.columns)


@pytest.fixture(params=["plain", "deleted", "stable", "stable deleted"])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> ReadableTable:
    """40 rows in 4 fragments, with and without deletions and stable row ids."""
    stable = "stable" in request.param
    ref = write(tmp_path, rows_from(0, 40), max_rows_per_file=10, enable_stable_row_ids=stable)
    if "deleted" in request.param:
        handle(ref).delete("id in (0, 9, 10, 25, 26) or id >= 38")
    return ref.open()


def truth_of(table: ReadableTable) -> pa.Table:
    assert isinstance(table, PinnedTable)
    data: pa.Table = table._dataset.to_table()
    return data


@pytest.mark.parametrize("columns", [None, ["id"], ["vector", "id"]])
def test_take_keeps_order_and_repeats(table: ReadableTable, columns: list[str] | None) -> None:
    truth, last = truth_of(table), table.num_rows - 1
    assert table.num_rows == truth.num_rows and table.schema == truth.schema
    for rows in (np.arange(last + 1), ints(last, 0, 17, 17, 0, 9), ints(2, 5, 30), ints(4), ints()):
        assert_takes(table, truth, rows, columns)


def test_take_refuses_what_is_not_there(table: ReadableTable) -> None:
    with pytest.raises(ConfigError, match=r"'vectr'.*id, text, vector.*did you mean 'vector'"):
        table.take(ints(0), ["id", "vectr"])
    for columns in ([], ["id", "id"]):
        with pytest.raises(ConfigError, match="columns are empty or named twice"):
            table.take(ints(0), columns)
    for rows in (ints(table.num_rows), ints(0, -1)):
        with pytest.raises(ConfigError, match=f"0 to {table.num_rows - 1}"):
            table.take(rows, None)


def test_nested_columns(tmp_path: Path) -> None:
    struct = [None if i % 3 == 0 else {"x": i, "deep": {"z": str(i)}} for i in range(20)]
    ref = write(tmp_path, pa.table({"id": range(20), "s": struct}), max_rows_per_file=7)
    handle(ref).delete("id = 1")
    table = ref.open()
    taken = table.take(ints(2, 1, 2), ["s.deep.z", "id", "s.x"])
    assert taken.to_pydict() == {"s.deep.z": [None, "2", None], "id": [3, 2, 3], "s.x": [None, 2, None]}
    assert table.take(ints(), ["s.x"]).schema.names == ["s.x"]
    with pytest.raises(ConfigError, match=r"did you mean 's\.x'"):
        table.take(ints(0), ["s.xx"])


def test_threads_share_one_table(tmp_path: Path) -> None:
    ref = write(tmp_path, rows_from(0, 2000), max_rows_per_file=100)
    handle(ref).delete("id % 7 = 0")
    table = ref.open()
    ids = truth_of(table)["id"].to_numpy()
    failed: list[BaseException] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(10):
                rows = rng.integers(0, table.num_rows, 300)
                np.testing.assert_array_equal(table.take(rows, ["id"])["id"].to_numpy(), ids[rows])
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed


# --- filters -----------------------------------------------------------------------------------------


def test_matching_rows(table: ReadableTable) -> None:
    ids = truth_of(table)["id"].to_numpy()
    rows = table.matching_rows("id % 4 = 1 and text != 't5'")
    np.testing.assert_array_equal(rows, np.flatnonzero((ids % 4 == 1) & (ids != 5)))
    assert rows.dtype == np.int64
    nothing = table.matching_rows("id > 1000")
    assert nothing.shape == (0,) and nothing.dtype == np.int64
    for bad in ("idd > 3", "id >", "", "id + 1", "10 / (id - 8) > 2"):
        with pytest.raises(ConfigError, match="does not work on table 't'"):
            table.matching_rows(bad)


def test_matching_rows_through_an_index_that_lags_behind(tmp_path: Path) -> None:
    shuffled = rows_from(0, 200).take(np.random.default_rng(0).permutation(200))
    ref = write(tmp_path, shuffled, max_rows_per_file=40)
    handle(ref).create_scalar_index("id")
    handle(ref).add(rows_from(200, 50))
    handle(ref).delete("id % 9 = 0")
    table = ref.open()
    ids = truth_of(table)["id"].to_numpy()
    rows = table.matching_rows("id between 20 and 230")
    np.testing.assert_array_equal(rows, np.flatnonzero((ids >= 20) & (ids <= 230)))


def test_fragment_ids_that_do_not_ascend(tmp_path: Path) -> None:
    ref = write(tmp_path, rows_from(0, 10))
    handle(ref).add(rows_from(10, 10))
    handle(ref).add(rows_from(20, 200))
    handle(ref).delete("id in (3, 15, 30, 31)")
    lance.dataset(str(tmp_path / "t.lance")).optimize.compact_files(
        target_rows_per_fragment=100, materialize_deletions=False
    )
    handle(ref).delete("id in (7, 99)")
    table = ref.open()
    truth = truth_of(table)
    assert_takes(table, truth, np.arange(table.num_rows)[::-1])
    np.testing.assert_array_equal(table.matching_rows("id % 5 = 0"), np.flatnonzero(truth["id"].to_numpy() % 5 == 0))


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 30)),
        st.tuples(st.just("delete"), st.integers(2, 9)),
        st.tuples(st.just("update"), st.integers(2, 9)),
        st.tuples(st.just("compact"), st.booleans()),
    ),
    max_size=6,
)


@pytest.mark.thorough
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(operations=OPERATIONS, stable=st.booleans(), data=st.data())
def test_row_numbers_equal_brute_force(operations: list[tuple[str, int]], stable: bool, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as root:
        ref = write(Path(root), rows_from(0, 25), max_rows_per_file=8, enable_stable_row_ids=stable)
        count = 25
        for kind, value in operations:
            target = handle(ref)
            if kind == "add":
                target.add(rows_from(count, value))
                count += value
            elif kind == "delete":
                target.delete(f"id % {value} = 1 and id > {count // 3}")
            elif kind == "update":
                target.update(where=f"id % {value} = 0", values={"text": f"u{value}"})
            else:
                lance.dataset(f"{root}/t.lance").optimize.compact_files(
                    target_rows_per_fragment=20, materialize_deletions=bool(value)
                )
        table = ref.open()
        truth = truth_of(table)
        ids = truth["id"].to_numpy()
        assert table.num_rows == len(ids)
        modulus = data.draw(st.integers(1, 6))
        matching = table.matching_rows(f"id % {modulus} = 0")
        np.testing.assert_array_equal(matching, np.flatnonzero(ids % modulus == 0))
        rows = data.draw(st.lists(st.integers(0, len(ids) - 1), max_size=40))
        assert_takes(table, truth, ints(*rows))
        assert_takes(table, truth, np.arange(len(ids)))


# --- blobs -------------------------------------------------------------------------------------------

VALUES = [None if i % 7 == 0 else b"" if i % 5 == 0 else bytes([i]) * (i * 60) for i in range(60)]


def blob_table(kind: str) -> pa.Table:
    old = {"lance-encoding:blob": "true"}
    column: pa.Array[Any] = blob.blob_array(VALUES) if kind == "v2" else pa.array(VALUES, pa.large_binary())
    named = blob.blob_field("b") if kind == "v2" else pa.field("b", pa.large_binary(), metadata=old)
    nested = pa.StructArray.from_arrays([column, pa.array(range(60))], fields=[named, pa.field("n", pa.int64())])
    fields = [pa.field("id", pa.int64()), named, pa.field("s", nested.type)]
    return pa.Table.from_arrays([pa.array(range(60)), column, nested], schema=pa.schema(fields))


@pytest.fixture(params=[("v1", "2.0"), ("v1", "2.1"), ("v2", "2.2")], ids=lambda p: f"{p[0]}-{p[1]}")
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[TableRef, pa.Table]]:
    kind, version = request.param
    data = blob_table(kind)
    data = data if version != "2.0" else data.drop_columns("s")
    yield write(tmp_path, data, data_storage_version=version, max_rows_per_file=25), data


@pytest.mark.parametrize("deleted", [False, True])
def test_blobs_come_as_bytes(blobs: tuple[TableRef, pa.Table], deleted: bool) -> None:
    ref, data = blobs
    if deleted:
        lance.dataset(f"{ref.uri}/t.lance").delete("id in (3, 24, 25, 50)")
    kept = [i for i in range(60) if not deleted or i not in (3, 24, 25, 50)]
    table = ref.open()
    assert table.schema.field("b").type == pa.large_binary()
    rows = ints(30, 0, 7, 5, 5, 51, 1)
    values = [VALUES[kept[row]] for row in rows]
    taken = table.take(rows, None)
    assert taken.schema == table.schema and taken["b"].num_chunks == 1
    assert taken["b"].to_pylist() == values and taken["id"].to_pylist() == [kept[row] for row in rows]
    assert table.take(rows, ["b"])["b"].to_pylist() == values
    assert table.take(np.sort(rows), ["b", "id"]).column_names == ["b", "id"]
    assert table.take(ints(), ["b"]).schema.field("b").type == pa.large_binary()
    if "s" in data.column_names:
        assert pc.struct_field(taken["s"], "b").to_pylist() == values
        assert table.take(rows, ["s.b", "s.n"])["s.b"].to_pylist() == values
        assert table.take(rows, ["s.n"])["s.n"].to_pylist() == [kept[row] for row in rows]


def test_blobs_with_stable_row_ids(tmp_path: Path) -> None:
    ref = write(tmp_path, blob_table("v1"), max_rows_per_file=25, enable_stable_row_ids=True)
    dataset = lance.dataset(str(tmp_path / "t.lance"))
    dataset.delete("id % 10 = 3")
    kept = [i for i in range(60) if i % 10 != 3]
    rows = ints(40, 2, 2, 11)
    assert ref.open().take(rows, ["b"])["b"].to_pylist() == [VALUES[kept[row]] for row in rows]


def test_a_short_read_is_an_error(blobs: tuple[TableRef, pa.Table], monkeypatch: pytest.MonkeyPatch) -> None:
    table = blobs[0].open()
    monkeypatch.setattr("ray_lance_stream.table.serialize_row_addrs", lambda _: serialize_row_addrs([1]))
    with pytest.raises(LanceStreamError, match="did not read"):
        table.take(ints(1, 2), ["b"])

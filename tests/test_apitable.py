"""Tables without Lance files, in memory and on a server: they give what the same table on disk gives."""

from __future__ import annotations

import functools
import logging
import multiprocessing
import pickle
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lancedb
import lancedb.streaming
import numpy as np
import pyarrow as pa
import pytest
import ray
from conftest import rows_from
from lancedb.permutation import permutation_builder
from ray import cloudpickle
from remote_server import RemoteServer, open_remote, serving

from ray_lance_stream import ConfigError, LanceStream, StreamingDataset, TableVersionError
from ray_lance_stream.apitable import ApiTable
from ray_lance_stream.location import TableRef
from ray_lance_stream.table import PinnedTable

pytestmark = pytest.mark.thorough

API_KEY = "sk_never-to-be-seen"
LAST = 3  # the version that `grow` leaves


def make_rows(start: int, count: int) -> pa.Table:
    """Rows with a struct beside the columns of ``rows_from``."""
    ids = range(start, start + count)
    inner = pa.array([None if i % 7 == 0 else {"a": i, "b": f"b{i}"} for i in ids])
    return rows_from(start, count).append_column("inner", inner)


def grow(database: Any) -> Any:
    """Makes table "t": ids 0 to 39 in two fragments, three of them deleted; versions 1 to 3."""
    table = database.create_table("t", make_rows(0, 15))
    table.add(make_rows(15, 25))
    table.delete("id in (3, 15, 20)")
    return table


def grown_in_memory(_: str) -> Any:
    """A connection factory: every process makes the table anew."""
    return grow(lancedb.connect("memory://"))


def one_fragment(_: str) -> Any:
    return lancedb.connect("memory://").create_table("t", make_rows(0, 37))


def open_local(path: str, name: str) -> Any:
    return lancedb.connect(path).open_table(name)


def shipped(value: Any) -> Any:
    return cloudpickle.loads(cloudpickle.dumps(value))  # type: ignore[no-untyped-call]


@dataclass
class Home:
    """The same table everywhere: on disk, in memory, and on a server that serves the one on disk."""

    path: str
    on_disk: Any
    in_memory: Any
    server: RemoteServer

    def remote(self) -> Any:
        return open_remote(self.server.url, API_KEY, "t")

    def table(self, kind: str) -> Any:
        return self.in_memory if kind == "memory" else self.remote()

    def ref(self, kind: str) -> TableRef:
        """Returns a reference of a kind: "memory", "remote", "factory", or one of them "shipped"."""
        place, *how = kind.split()
        if place == "factory":
            ref = TableRef(name="t", connection_factory=functools.partial(open_remote, self.server.url, API_KEY))
        else:
            ref = TableRef.of(self.table(place))
        return shipped(ref.located(ref.open())) if how else ref


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    path = str(tmp_path / "db")
    on_disk = grow(lancedb.connect(path))
    with serving(path, API_KEY) as server:
        yield Home(path, on_disk, grown_in_memory("t"), server)


KINDS = ["memory", "memory shipped", "remote", "remote shipped", "factory shipped"]


@pytest.fixture(params=KINDS)
def ref(request: pytest.FixtureRequest, home: Home) -> TableRef:
    return home.ref(request.param)


def truth_of(home: Home) -> PinnedTable:
    table = TableRef(uri=home.path, name="t").open(LAST)
    assert isinstance(table, PinnedTable)
    return table


# --- one version -------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [None, ["id"], ["x", "id"], ["inner.b", "text", "inner"]])
def test_takes_what_the_table_on_disk_takes(home: Home, ref: TableRef, columns: list[str] | None) -> None:
    truth, table = truth_of(home), ref.open()
    assert isinstance(table, ApiTable)
    assert (table.version, table.num_rows, table.schema) == (LAST, 37, truth.schema)
    for rows in (np.arange(37), np.array([36, 0, 17, 17, 0, 9]), np.array([2, 5, 30]), np.array([], np.int64)):
        taken = table.take(rows, columns)
        assert taken.equals(truth.take(rows, columns))
        assert all(column.num_chunks == 1 for column in taken.columns if len(rows))


def test_finds_what_the_table_on_disk_finds(home: Home, ref: TableRef) -> None:
    truth, table = truth_of(home), ref.open()
    for condition in ("id % 3 = 0", "id < 0", "id >= 12 and text != 'row 13'", "inner.a > 30"):
        table.check_filter(condition)
        found = table.matching_rows(condition)
        assert found.dtype == np.int64
        assert found.tolist() == truth.matching_rows(condition).tolist()
        assert table.count_rows(condition) == len(found)
    ids = home.on_disk.search().select(["_rowid"]).to_arrow().column("_rowid").to_numpy()[::-1]
    assert table.numbers_of(ids).tolist() == truth.numbers_of(ids).tolist() == list(range(37))[::-1]


def test_refuses_what_is_not_there(ref: TableRef) -> None:
    table = ref.open()
    with pytest.raises(ConfigError, match=r"columns do not exist in table 't', version 3.*did you mean 'text'"):
        table.check_columns(["txt"])
    with pytest.raises(ConfigError, match="named twice"):
        table.take(np.array([0]), ["id", "id"])
    for rows in ([37], [-1], [0.5]):
        with pytest.raises(ConfigError, match="out of range"):
            table.take(np.array(rows), None)
    with pytest.raises(ConfigError, match=r"2 of 3 row ids, e\.g\. 999"):
        table.numbers_of(np.array([999, 0, 1 << 40], np.uint64))
    for ask in (table.check_filter, table.count_rows, table.matching_rows):
        with pytest.raises(ConfigError, match=r"filter 'nope = 1' does not work.*nope.*id, x, text, inner"):
            ask("nope = 1")
    with pytest.raises(ConfigError, match=r"filter 'id % 0 = 1' does not work.*Divide by zero"):
        table.matching_rows("id % 0 = 1")


def test_several_threads_read_at_once(ref: TableRef) -> None:
    table = ref.open()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda row: table.take(np.array([row, 0]), ["id"]), range(37)))
    assert [part["id"][0].as_py() for part in found] == table.take(np.arange(37), ["id"])["id"].to_pylist()
    assert {part["id"][1].as_py() for part in found} == {0}


def test_row_ids_are_fetched_once(home: Home) -> None:
    table = home.ref("remote").open()
    assert not [body for operation, body in home.server.requests if operation == "query"]
    for _ in range(2):
        table.take(np.array([4, 4, 1]), ["id"])
        table.matching_rows("id > 3")
    bodies = [body for operation, body in home.server.requests if operation == "query"]
    assert [body for body in bodies if "filter" not in body] == [bodies[0]]
    assert len(bodies) == 5
    assert {body["version"] for body in bodies} == {LAST}


# --- versions and identity ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["memory", "remote"])
def test_a_version_stays_what_it_is_and_the_users_table_stays_where_it_is(home: Home, kind: str) -> None:
    user = home.table(kind)
    ref = TableRef.of(user)
    first, last = ref.open(1), ref.open()
    assert (first.num_rows, last.num_rows) == (15, 37)
    assert first.identity != last.identity
    assert user.count_rows() == 37
    (home.in_memory if kind == "memory" else home.on_disk).delete("id > 5")
    for table, rows in ((first, 15), (last, 37)):
        assert table.take(np.arange(rows), ["id"])["id"].to_pylist()[-1] == (14 if rows == 15 else 39)
    assert (ref.open().num_rows, ref.open(LAST).identity) == (5, last.identity)
    user.checkout(1)
    assert TableRef.of(user).open().identity == first.identity, "a table checked out counts as the latest"
    with pytest.raises(TableVersionError, match=r"version 17 of table 't'.*Found: versions 1-4"):
        ref.open(17)
    assert user.version == 1


def test_a_copy_of_a_table_in_memory_has_one_version(home: Home) -> None:
    ref = home.ref("memory")
    with pytest.raises(TableVersionError, match="version 1 of table 't' is not in this process's memory"):
        shipped(ref).open(1)
    first = shipped(ref.located(ref.open(1)))
    assert (first.open().version, first.open().num_rows) == (1, 15)
    again = shipped(first)
    assert again.open().identity == ref.open(1).identity
    assert again.open(1).take(np.arange(15), None).equals(ref.open(1).take(np.arange(15), None))


def identity_of(ref: TableRef) -> Any:
    return ref.open().identity


@pytest.mark.slow
def test_identity_is_the_same_in_any_process(home: Home) -> None:
    refs = [home.ref(kind) for kind in ("memory", "remote")]
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        elsewhere = [pool.submit(identity_of, ref).result() for ref in refs]
    assert elsewhere == [identity_of(ref) for ref in refs]
    assert identity_of(home.ref("factory")) == elsewhere[1]
    # The same rows in the same versions are the same table; other rows are not.
    assert identity_of(TableRef(name="t", connection_factory=grown_in_memory)) == elsewhere[0]
    other = lancedb.connect("memory://").create_table("t", make_rows(0, 37))
    same = lancedb.connect("memory://").create_table("u", make_rows(0, 37))
    changed = lancedb.connect("memory://").create_table("t", make_rows(1, 37))
    assert identity_of(TableRef.of(other)) == identity_of(TableRef.of(same)) != identity_of(TableRef.of(changed))


def test_a_remote_table_created_anew_is_another_one(home: Home) -> None:
    ref = home.ref("remote")
    before = ref.open()
    assert ref.open().identity == before.identity
    grow_again = lancedb.connect(home.path)
    grow_again.drop_table("t")
    grow(grow_again)
    assert ref.open().version == before.version
    assert ref.open().identity != before.identity


# --- streams -----------------------------------------------------------------------------------------

ORDERS: list[dict[str, Any]] = [
    {},
    {"filter": "id % 5 != 0"},
    {"shuffle": False},
    {"shuffle_clump_size": 3, "epoch": 2},
]


def ids_of(dataset: Any) -> list[int]:
    return [row["id"] for row in dataset]


@pytest.mark.parametrize("options", ORDERS)
def test_the_order_is_that_of_lancedb(home: Home, options: dict[str, Any]) -> None:
    """Of a table in memory with deletions LanceDB's class reads other rows than planned: there disk is the truth."""
    settings: dict[str, Any] = {"num_splits": 4, "shuffle_seed": 3} | options
    simple = one_fragment("t")
    assert list(StreamingDataset(simple, **settings)) == list(lancedb.streaming.StreamingDataset(simple, **settings))
    theirs = list(lancedb.streaming.StreamingDataset(home.remote(), **settings))
    assert list(StreamingDataset(home.remote(), **settings)) == theirs
    assert theirs == list(lancedb.streaming.StreamingDataset(home.on_disk, **settings))
    dataset = StreamingDataset(home.in_memory, **settings)
    assert list(shipped(dataset)) == theirs
    assert list(dataset) == theirs


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memory", "remote"])
def test_resumes_anywhere(home: Home, kind: str) -> None:
    """Here, in a copy, and in a process of its own; after rows were written, too."""
    user = home.table(kind)
    make = functools.partial(StreamingDataset, num_splits=4, shuffle_seed=3)
    whole = ids_of(make(user))
    dataset = make(user)
    rows: Any = iter(dataset)
    assert [next(rows)["id"] for _ in range(8)] == whole[:8]
    rows.close()
    state = dataset.state_dict()
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(ids_of, dataset).result() == whole[8:]
    assert ids_of(shipped(dataset)) == whole[8:]
    (home.in_memory if kind == "memory" else home.on_disk).add(make_rows(100, 10))
    resumed = make(home.table(kind))
    resumed.load_state_dict(state)
    assert ids_of(resumed) == whole[8:]


def test_states_go_to_lancedb_and_back(home: Home) -> None:
    settings: dict[str, Any] = {"num_splits": 4, "shuffle_seed": 3}
    ours = StreamingDataset(home.remote(), **settings)
    whole, rows = ids_of(StreamingDataset(home.remote(), **settings)), iter(ours)
    for _ in range(8):
        next(rows)
    theirs = lancedb.streaming.StreamingDataset(home.remote(), **settings)
    theirs.load_state_dict(ours.state_dict())
    assert ids_of(theirs) == whole[8:]
    back = StreamingDataset(home.remote(), **settings)
    back.load_state_dict(
        {"shuffle_seed": 3, "num_splits": 4, "epoch": 0, "samples_consumed_per_split": [2] * 4}
        | {"positions_consumed_per_split": [2] * 4}
    )
    assert ids_of(back) == whole[8:]


@pytest.mark.parametrize("kind", ["memory", "remote"])
def test_a_plan_of_ones_own_names_the_same_rows_in_copies(home: Home, kind: str) -> None:
    plan = permutation_builder(home.on_disk).split_random(fixed=4, seed=9).execute().to_arrow()
    expected = ids_of(StreamingDataset(home.on_disk, plan=plan))
    dataset = StreamingDataset(home.table(kind), plan=plan)
    assert ids_of(shipped(dataset)) == expected
    assert ids_of(dataset) == expected


def lance_stream_ids(factory: Callable[[str], Any], **options: Any) -> list[int]:
    stream = LanceStream(
        table="t", connection_factory=factory, num_splits=4, global_batch_size=8, shuffle_seed=7, **options
    )
    with shipped(stream).open() as shard:
        return [int(i) for batch in shard.iter_batches() for i in batch["id"]]


@pytest.mark.parametrize("order", ["feistel", "lancedb"])
def test_lance_stream_takes_a_connection_factory(home: Home, order: str) -> None:
    remote = functools.partial(open_remote, home.server.url, API_KEY)
    expected = lance_stream_ids(functools.partial(open_local, home.path), order=order)
    assert lance_stream_ids(remote, order=order) == expected
    assert lance_stream_ids(grown_in_memory, order=order) == expected


def test_lance_stream_says_how_to_reach_a_server() -> None:
    with pytest.raises(ConfigError, match=r"Remedy: pass connection_factory=.*lancedb\.connect\('db://"):
        LanceStream("db://base", "t", num_splits=4, global_batch_size=8)


@pytest.mark.slow
@pytest.mark.cluster
def test_prefetchers_read_them(home: Home) -> None:
    expected = ids_of(StreamingDataset(home.on_disk, num_splits=4, shuffle_seed=3))
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        for table in (home.in_memory, home.remote()):
            dataset = StreamingDataset(table, num_splits=4, shuffle_seed=3)
            dataset.use_prefetchers(1)
            assert ids_of(dataset) == expected
            dataset.close()
    finally:
        ray.shutdown()


# --- trouble -----------------------------------------------------------------------------------------


def assert_hidden(error: BaseException) -> None:
    assert API_KEY not in "".join(traceback.format_exception(error))
    assert API_KEY not in repr(pickle.loads(pickle.dumps(error)))


@pytest.mark.parametrize("kind", ["remote", "factory"])
def test_the_api_key_is_never_shown(home: Home, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    ref = home.ref(kind)
    table = ref.open()
    dataset = StreamingDataset(home.remote(), num_splits=4)
    assert API_KEY not in f"{ref} {ref!r} {table!r} {table.uri} {dataset!r}".replace(repr(ref.connection_factory), "")
    home.server.broken = (500, f"the server failed over {API_KEY}")  # as a careless server quotes a request's headers
    for ask in (lambda: table.take(np.array([0]), None), lambda: table.matching_rows("id = 1"), lambda: list(dataset)):
        with pytest.raises(OSError, match=r"the server failed over \*\*\*") as caught:
            ask()
        assert_hidden(caught.value)
    home.server.api_key = "another"
    for version in (None, 1):
        with pytest.raises(Exception, match=r"cannot be opened|no such key") as opened:
            home.server.broken = None
            ref.open(version)
        if kind == "remote":  # what a factory raises is the user's own
            assert isinstance(opened.value, ConfigError)
            assert_hidden(opened.value)
    assert API_KEY not in caplog.text


def test_a_server_that_is_gone_is_a_failure_of_storage(home: Home) -> None:
    table = home.ref("remote").open()
    home.server.broken = (503, "busy")
    with pytest.raises(OSError, match=r"reading 't' version 3 failed.*busy"):
        table.take(np.array([0]), None)
    with pytest.raises(OSError, match="busy"):
        table.matching_rows("id = 1")
    home.server.broken = None
    assert table.take(np.array([0]), ["id"])["id"].to_pylist() == [0]


def test_a_server_that_gives_other_rows_is_an_error(home: Home) -> None:
    table = home.ref("remote").open()
    table.take(np.array([0]), None)
    database = lancedb.connect(home.path)
    database.drop_table("t")
    again = database.create_table("t", make_rows(0, 10))
    again.add(make_rows(10, 1))
    again.add(make_rows(11, 1))
    with pytest.raises(Exception, match=r"LanceDB did not give the rows asked for.*Found: 9 rows.*Expected: 37"):
        table.take(np.arange(37), ["id"])


def test_headers_from_a_function_need_a_connection_factory(home: Home) -> None:
    url = home.server.url

    class Headers(lancedb.remote.HeaderProvider):  # type: ignore[misc]
        def get_headers(self) -> dict[str, str]:
            return {"x-more": "1"}

    def connect(name: str) -> Any:
        config = lancedb.remote.ClientConfig(header_provider=Headers())
        return lancedb.connect("db://base", api_key=API_KEY, host_override=url, client_config=config).open_table(name)

    with pytest.raises(ConfigError, match="Remedy: pass connection_factory"):
        StreamingDataset(connect("t"), num_splits=4)
    dataset = StreamingDataset(connect("t"), num_splits=4, connection_factory=connect)
    expected = ids_of(StreamingDataset(home.on_disk, num_splits=4))
    assert ids_of(shipped(dataset)) == expected
    assert ids_of(dataset) == expected


def test_blob_columns_are_refused() -> None:
    blob = pa.field("image", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
    data = pa.Table.from_arrays([pa.array([b"a", b"b"], pa.large_binary())], schema=pa.schema([blob]))
    table = lancedb.connect("memory://").create_table("t", data)
    with pytest.raises(ConfigError, match=r"blob columns.*Found: image"):
        TableRef.of(table).open()

"""Tables on an object store that fails: with faults made by a proxy before a real server of the S3 protocol."""

from __future__ import annotations

import functools
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lance
import lancedb
import pytest
import ray
from conftest import Tables, rows_from
from loops import ids_of
from remote_server import serving
from runs import opened_here
from stores import BROKEN, RESET, SLOW_DOWN, Fault, Seen, Store, refused, store

from ray_lance_stream import BlockError, ConfigError, LanceStream, PrefetchConfig, StreamingDataset
from ray_lance_stream.block import BlockBuilder
from ray_lance_stream.location import TableRef
from ray_lance_stream.storage import is_refusal, is_trouble

pytestmark = pytest.mark.thorough

ROWS = 3000
SECRET = "some-secret-key"
EXPIRED = refused("ExpiredToken", "The provided token has expired.", 400)
NO_SUCH_KEY = refused("InvalidAccessKeyId", "The AWS Access Key Id you provided does not exist in our records.")
DENIED = refused("AccessDenied", f"Access Denied to {SECRET}")  # as a careless gateway says it


@pytest.fixture(scope="module")
def running() -> Iterator[Store]:
    with store() as found:
        found.make_bucket("tables")
        options = found.options()
        lancedb.connect("s3://tables/db", storage_options=options).create_table("t", rows_from(0, ROWS))
        yield found


@pytest.fixture
def faulty(running: Store) -> Iterator[Store]:
    """The store, without faults at first."""
    running.requests.clear()
    running.faults = 0
    yield running
    running.fault = lambda _: None


def make_stream(options: dict[str, str] | None = None, **more: Any) -> LanceStream:
    """A stream of many small blocks, so that it reads until its end."""
    prefetch = PrefetchConfig(
        num_actors=1, block_bytes=4096, max_buffer_bytes=8192, retry_window_s=60, placement_timeout_s=120
    )
    place: dict[str, Any] = {"storage_options": options, "uri": "s3://tables/db"} if options is not None else {}
    settings: dict[str, Any] = {"num_splits": 4, "global_batch_size": 120, "shuffle_seed": 3, "prefetch": prefetch}
    return LanceStream(table="t", **(place | settings | more))


def reads_of_data(seen: Seen) -> bool:
    return seen.method == "GET" and "/data/" in seen.path


class Once:
    """Faults at the n-th to m-th read of data."""

    def __init__(self, fault: Fault, first: int, last: int) -> None:
        self.fault, self.first, self.last, self.count = fault, first, last, 0

    def __call__(self, seen: Seen) -> Fault | None:
        if not reads_of_data(seen):
            return None
        self.count += 1
        return self.fault if self.first <= self.count <= self.last else None


def batches_of(stream: LanceStream) -> list[list[int]]:
    with opened_here(stream) as shard:
        return [ids_of(batch) for batch in shard]


@pytest.fixture(scope="module")
def expected(running: Store) -> list[list[int]]:
    return batches_of(make_stream(running.options()))


# --- faults that pass --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault", [BROKEN, SLOW_DOWN, RESET, Fault(delay_s=1.0)], ids=["500", "503", "reset", "a slow answer"]
)
def test_faults_that_pass_change_nothing(faulty: Store, expected: list[list[int]], fault: Fault) -> None:
    stream = make_stream(faulty.options())
    once = Once(fault, 20, 24)  # more than the client tries by itself
    faulty.fault = once
    assert batches_of(stream) == expected
    assert faulty.faults == 5 and once.count > 30, "some of them came when all was well again"


def always(fault: Fault, seen: Seen) -> Fault:
    del seen
    return fault


def test_an_outage_while_a_table_is_opened_again_may_pass(faulty: Store) -> None:
    """As when a prefetcher is started anew: the driver has opened the table, so that its options are no mistake."""
    stream = make_stream(faulty.options())
    by_factory = make_stream(connection_factory=connector(faulty.options()))
    for recipe, fault in ((stream.recipe, SLOW_DOWN), (by_factory.recipe, RESET)):
        builder = BlockBuilder(recipe)
        faulty.fault = functools.partial(always, fault)
        with pytest.raises(OSError, match=r"table 't' cannot be opened"):
            builder.tables.version(1)
        faulty.fault = lambda _: None
        assert builder.tables.version(1).num_rows == ROWS
    faulty.fault = lambda _: SLOW_DOWN
    with pytest.raises(ConfigError, match=r"table 't' cannot be opened.*SlowDown"):
        make_stream(faulty.options())  # while the driver builds the stream, whoever sits there is told


def test_a_filter_is_not_blamed_for_an_outage(faulty: Store) -> None:
    table = TableRef(uri="s3://tables/db", name="t", storage_options=faulty.options()).open()
    faulty.fault = lambda seen: SLOW_DOWN if reads_of_data(seen) else None
    with pytest.raises(OSError, match="SlowDown"):
        table.matching_rows("id < 10")
    faulty.fault = lambda _: None
    assert len(table.matching_rows("id < 10")) == 10
    with pytest.raises(ConfigError, match="does not work on table"):
        table.matching_rows("ib < 10")


@pytest.mark.fault
def test_an_outage_that_does_not_pass_ends_in_an_error_of_ours(faulty: Store) -> None:
    with opened_here(make_stream(faulty.options())) as shard:
        faulty.fault = lambda seen: BROKEN if reads_of_data(seen) else None
        with pytest.raises(BlockError, match=r"InternalError.*Remedy: look at the storage"):
            list(shard)
        faulty.fault = lambda _: None
        assert len(list(shard)) > 0, "and goes on where it stood"


# --- credentials -------------------------------------------------------------------------------------


class Keys:
    """Credentials that are renewed whenever the table is opened, as those of a role are. Notes each in a file."""

    def __init__(self, options: dict[str, str], notes: Path) -> None:
        self.options, self.notes = options, notes

    def __call__(self, name: str) -> Any:
        key = f"key-{os.getpid()}-{len(list(self.notes.iterdir()))}"
        (self.notes / key).touch()
        options = self.options | {"aws_access_key_id": key}
        return lancedb.connect("s3://tables/db", storage_options=options).open_table(name)


class Valid:
    """Lets a key read data so many times; then it has expired."""

    def __init__(self, reads: int, fault: Fault) -> None:
        self.reads, self.fault = reads, fault
        self.used: dict[str, int] = {}

    def __call__(self, seen: Seen) -> Fault | None:
        if not seen.key.startswith("key-"):
            return None
        self.used[seen.key] = self.used.get(seen.key, 0) + reads_of_data(seen)
        return self.fault if self.used[seen.key] > self.reads else None


def connector_to(uri: str) -> Callable[[str], Any]:
    def connect(name: str) -> Any:
        return lancedb.connect(uri).open_table(name)

    return connect


def connector(options: dict[str, str]) -> Callable[[str], Any]:
    def connect(name: str) -> Any:
        return lancedb.connect("s3://tables/db", storage_options=options).open_table(name)

    return connect


@pytest.mark.parametrize("fault", [EXPIRED, NO_SUCH_KEY, DENIED], ids=["expired", "unknown", "denied"])
def test_a_factory_renews_credentials_in_the_middle_of_an_epoch(
    faulty: Store, expected: list[list[int]], tmp_path: Path, fault: Fault
) -> None:
    stream = make_stream(connection_factory=Keys(faulty.options(), tmp_path))
    faulty.fault = valid = Valid(10, fault)
    assert batches_of(stream) == expected
    assert len([key for key, reads in valid.used.items() if reads > 5]) >= 3, "several were used up"


@pytest.mark.fault
def test_credentials_that_cannot_be_renewed_say_what_to_do(faulty: Store) -> None:
    with opened_here(make_stream(faulty.options())) as shard:
        faulty.fault = lambda _: EXPIRED
        with pytest.raises(BlockError) as error:
            list(shard)
    text = str(error.value)
    assert "the storage refused the credentials for table 't'; they may have expired" in text
    assert "pass connection_factory, a function that connects with credentials it fetches" in text
    faulty.fault = lambda _: DENIED
    asks: tuple[Callable[[], Any], ...] = (
        lambda: make_stream(faulty.options()),
        lambda: make_stream(connection_factory=connector(faulty.options())),
    )
    for ask in asks:
        with pytest.raises(ConfigError, match=r"cannot be opened.*AccessDenied") as refusal:
            ask()
        assert SECRET not in "".join(traceback.format_exception(refusal.value))
        assert SECRET not in repr(pickle.loads(pickle.dumps(refusal.value)))


def test_a_table_that_is_open_already_is_opened_anew_with_new_credentials(faulty: Store, tmp_path: Path) -> None:
    keys = Keys(faulty.options(), tmp_path)
    options: dict[str, Any] = {"num_splits": 4, "shuffle_seed": 3}
    plain = StreamingDataset(connector(faulty.options())("t"), **options)
    expected = [row["id"] for row in plain]
    reads = sum(map(reads_of_data, faulty.requests))
    dataset = StreamingDataset(keys("t"), connection_factory=keys, **options)
    faulty.fault = valid = Valid(reads - 1, EXPIRED)
    assert [row["id"] for row in dataset] == expected
    assert len([key for key, count in valid.used.items() if count]) == 2, f"one is good for {reads - 1} reads"


class CurrentKey:
    """Connects to a server with the API key that a file holds."""

    def __init__(self, url: str, file: Path) -> None:
        self.url, self.file = url, file

    def __call__(self, name: str) -> Any:
        key = self.file.read_text()
        return lancedb.connect("db://base", api_key=key, host_override=self.url).open_table(name)


def test_an_api_key_is_renewed_as_well(tables: Tables, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("the-first-key")
    with serving(tables.uri(50), "the-first-key") as server:
        stream = make_stream(connection_factory=CurrentKey(server.url, key), global_batch_size=8)
        with opened_here(stream) as shard:
            batches = iter(shard)
            found = [ids_of(next(batches))]
            server.api_key = "the-second-key"
            key.write_text("the-second-key")
            found += [ids_of(batch) for batch in batches]
            found += [ids_of(batch) for batch in shard]
    with opened_here(make_stream(connection_factory=connector_to(tables.uri(50)), global_batch_size=8)) as shard:
        assert found == [ids_of(batch) for _ in range(2) for batch in shard]


class Outage:
    """Fails so many requests, and then leaves the rest to another."""

    def __init__(self, count: int, then: Callable[[Seen], Fault | None]) -> None:
        self.left, self.then = count, then

    def __call__(self, seen: Seen) -> Fault | None:
        self.left -= 1
        return SLOW_DOWN if self.left >= 0 else self.then(seen)


@pytest.mark.cluster
@pytest.mark.fault
@pytest.mark.usefixtures("one_node")
def test_prefetchers_renew_credentials_and_are_started_again_during_an_outage(
    faulty: Store, expected: list[list[int]], tmp_path: Path
) -> None:
    stream = make_stream(connection_factory=Keys(faulty.options(), tmp_path))
    faulty.fault = valid = Valid(20, EXPIRED)
    found = []
    with stream.open() as shard:
        link: Any = shard.link
        for batch in shard:
            found.append(ids_of(batch))
            if len(found) == 5:
                (prefetcher,) = ray.get(link.session.coordinator.pool.remote())
                _, pid = ray.get(prefetcher.ready.remote())
                faulty.fault = outage = Outage(8, valid)
                os.kill(pid, signal.SIGKILL)  # the new process opens the table anew
    assert found == expected and outage.left < 0
    owners = {key.split("-")[1] for key, reads in valid.used.items() if reads}
    assert len(owners) >= 2 and str(os.getpid()) not in owners, "processes of prefetchers, and not this one"
    stream.close()


# --- options of every store --------------------------------------------------------------------------

OPTIONS = {
    "gs://bucket/db": {"google_service_account": "/secrets/account.json", "google_storage_token": "a-token"},
    "az://container/db": {
        "azure_storage_account_name": "account",
        "azure_storage_account_key": "c29tZS1rZXk=",
        "azure_storage_sas_key": "sv=2024&sig=abc%2Bdef",
        "azure_tenant_id": "tenant",
    },
    "abfss://container@account.dfs.core.windows.net/db": {"azure_storage_use_emulator": "true", "timeout": "30s"},
    "s3://bucket/db": {"aws_session_token": "a-session-token", "aws_sse_kms_key_id": "a-key", "new_options": "too"},
}


@pytest.mark.parametrize("uri", OPTIONS)
def test_options_reach_lance_as_they_were_given(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By both ways: through LanceDB, as the driver opens the table, and directly, as all other processes do."""
    data = lancedb.connect(tmp_path).create_table("t", rows_from(0, 20)).to_lance()
    calls: list[tuple[Any, ...]] = []

    class Table:
        def to_lance(self) -> Any:
            return data

    class Database:
        def open_table(self, name: str, **_: Any) -> Table:
            calls.append(("table", name))
            return Table()

    def connect(place: str, *, storage_options: Any) -> Database:
        calls.append((place, storage_options))
        return Database()

    def open_dataset(place: str, *, storage_options: Any) -> Any:
        calls.append((place, storage_options))
        return data

    options = dict(OPTIONS[uri])
    ref = TableRef(uri=uri, name="t", storage_options=options)
    options.clear()  # what the caller does with the dict afterwards changes nothing
    monkeypatch.setattr(lancedb, "connect", connect)
    monkeypatch.setattr(lance, "dataset", open_dataset)
    opened = ref.open()
    assert calls == [(uri, OPTIONS[uri]), ("table", "t")]
    calls.clear()
    pickle.loads(pickle.dumps(ref.located(opened))).open(opened.version)
    assert calls == [(data.uri, OPTIONS[uri])]
    assert not any(value in repr(ref) for name, value in OPTIONS[uri].items() if "key" in name or "token" in name)


# --- what errors mean --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "trouble", "refusal"),
    [
        (OSError("anything"), True, False),
        (TimeoutError("timed out"), True, False),
        (ValueError("LanceError(IO): Generic S3 error: status code: 503 Service Unavailable"), True, False),
        (RuntimeError("HTTP error: error sending request"), True, False),
        (OSError("Generic S3 error: Server returned non-2xx status code: 403 Forbidden"), True, True),
        (ValueError('inner: Status { status: 400, body: Some("<Code>ExpiredToken</Code>") }, IO {'), True, True),
        (ValueError("IO { <Code>InvalidAccessKeyId</Code> The key does not exist }"), True, True),
        (ValueError("Dataset at path db/t.lance was not found: LanceError(IO)"), False, False),
        (FileNotFoundError(2, "No such file"), False, False),
        (ValueError("No field named ib"), False, False),
        (KeyError("AWS_ROLE"), False, False),
    ],
)
def test_texts_tell_what_is_the_storages_doing(error: Exception, trouble: bool, refusal: bool) -> None:
    assert (is_trouble(error), is_refusal(error)) == (trouble, refusal)

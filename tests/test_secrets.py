"""Credentials are planted wherever a user may put them, and looked for wherever somebody else may look."""

from __future__ import annotations

import functools
import logging
import pickle
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lancedb
import pytest
import ray
import ray.train
from checkpoints import run as command_line
from conftest import Tables, rows_from
from ray.util import state as ray_state
from runs import fit, read_log
from secretloops import train_until_refused
from stores import Store, refused, store

from ray_lance_stream import ConfigError, LanceStream, PrefetchConfig, StateError, StreamDataConfig
from ray_lance_stream.block import BlockBuilder, BlockRecipe
from ray_lance_stream.checkpoint import locate
from ray_lance_stream.cluster.parcel import Parcel
from ray_lance_stream.location import TableRef
from ray_lance_stream.redacting import hidden, in_function, in_uri, named, shown_uri

pytestmark = pytest.mark.thorough

PLANTED = ("planted-secret-1", "planted/secret+2", "planted-secret-3")
QUOTED = ("planted%2Fsecret%2B2",)
API_KEY = PLANTED[0]  # a global, as scripts have them


def leaks(text: str) -> list[str]:
    return [secret for secret in PLANTED + QUOTED if secret in text]


def failing(error: Exception) -> Callable[[str], Any]:
    def connect(_: str) -> Any:
        raise error

    return connect


def open_with(name: str, *, password: str) -> Any:
    raise ValueError(f"{name} does not open with {password}")


class Connector:
    """A factory that is an object, as one with a session would be."""

    def __init__(self, token: str) -> None:
        self.token = token

    def __repr__(self) -> str:
        return f"Connector({self.token})"  # careless

    def __call__(self, name: str) -> Any:
        raise ValueError(f"cannot open {name} with {self.token}")

    def method(self, name: str) -> Any:
        return self(name)


def with_global(name: str) -> Any:
    raise ValueError(f"{name} does not open with {API_KEY}")


def with_closure(options: dict[str, str]) -> Callable[[str], Any]:
    def connect(name: str) -> Any:
        raise ValueError(f"{name} does not open with {options['api_key']}")

    return connect


def with_default(name: str, secret: str = PLANTED[0]) -> Any:
    raise ValueError(f"{name} does not open with {secret}")


FACTORIES: dict[str, Callable[[str], Any]] = {
    "partial": functools.partial(open_with, password=PLANTED[0]),
    "object": Connector(PLANTED[0]),
    "method": Connector(PLANTED[0]).method,
    "global": with_global,
    "closure": with_closure({"api_key": PLANTED[0]}),
    "default": with_default,
    "partial of a partial": functools.partial(functools.partial(open_with, password=PLANTED[0])),
}


@pytest.mark.parametrize("kind", FACTORIES)
def test_a_factory_shows_nothing_it_carries(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    factory = FACTORIES[kind]
    assert PLANTED[0] in in_function(factory)
    ref = TableRef(name="t", connection_factory=factory)
    recipe = BlockRecipe(table=ref)
    assert leaks(f"{ref} {ref!r} {recipe} {recipe!r} {named(factory)}") == []
    with pytest.raises(ConfigError, match=r"table 't' cannot be opened.*\*\*\*.*check connection_factory") as error:
        LanceStream(table="t", connection_factory=factory, num_splits=4, global_batch_size=8)
    assert_hidden(error.value)
    assert leaks(caplog.text) == []


def assert_hidden(error: BaseException) -> None:
    assert leaks("".join(traceback.format_exception(error))) == []
    again = pickle.loads(pickle.dumps(error))
    assert leaks(f"{again!r} {again} {vars(again)}") == []


URIS = {
    f"s3://{PLANTED[0]}:planted%2Fsecret%2B2@bucket/db": "s3://***:***@bucket/db",
    f"s3://{PLANTED[0]}@bucket/db": "s3://***@bucket/db",
    f"s3://AKIA:abc/{PLANTED[0]}+/@bucket/db": "s3://***:***@bucket/db",
    f"az://container/db?sig={QUOTED[0]}&sv=2024": "az://container/db?sig=***&sv=2024",
    f"https://host/db?token={PLANTED[2]}": "https://host/db?token=***",
}


@pytest.mark.parametrize("uri", URIS)
def test_a_uri_is_shown_without_credentials(uri: str) -> None:
    assert shown_uri(uri) == URIS[uri]
    assert leaks(hidden(uri, in_uri(uri))) == []
    assert leaks(repr(TableRef(uri=uri, name="t"))) == []


def test_a_database_that_cannot_be_reached_is_named_without_its_password() -> None:
    options = {"client_max_retries": "0", "aws_endpoint": "http://127.0.0.1:9", "allow_http": "true"}
    with pytest.raises(ConfigError, match="table 't' cannot be opened") as error:
        TableRef(uri=next(iter(URIS)), name="t", storage_options=options).open()
    assert_hidden(error.value)


@pytest.mark.parametrize(
    "plain", ["s3://bucket/db", "abfss://c@a.net/db", "/data/db", "db", "db://cloud", "file:///data/db", "http://[::1"]
)
def test_a_uri_without_credentials_is_shown_as_it_is(plain: str) -> None:
    assert shown_uri(plain) == plain and in_uri(plain) == set()


def test_a_checkpoint_that_is_named_with_a_password(tables: Tables) -> None:
    for place in (
        f"nowhere://{PLANTED[0]}:{PLANTED[2]}@bucket/run",
        f"s3://AKIA:abc/{PLANTED[0]}@bucket/run",
        f"s3://a:{PLANTED[0]}@bucket/x?no_option={PLANTED[2]}&token={PLANTED[2]}",
    ):
        with pytest.raises(ConfigError, match="this is no URI of a checkpoint") as error:
            locate(place)
        assert_hidden(error.value)
        with pytest.raises(ConfigError) as error:
            tables.stream(resume_from=place)
        assert_hidden(error.value)


def test_variables_of_the_environment_are_secrets_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", PLANTED[0])
    monkeypatch.setenv("LANCEDB_API_KEY", PLANTED[1])
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/home/somebody/token")
    ref = TableRef(name="t", connection_factory=failing(OSError(f"{PLANTED[0]} {QUOTED[0]} /home/somebody/token")))
    with pytest.raises(ConfigError, match=r"\*\*\* \*\*\* /home/somebody/token") as error:
        ref.open()
    assert_hidden(error.value)
    done = command_line("inspect", f"/nowhere/{PLANTED[0]}", "--debug")
    assert done.exit_code == 2 and leaks(done.output) == []


def test_what_cannot_be_pickled_is_not_quoted(tables: Tables) -> None:
    class Stubborn:
        token = PLANTED[0]

        def __call__(self, name: str) -> Any:
            return lancedb.connect(tables.uri(50)).open_table(name)

        def __reduce__(self) -> Any:
            raise TypeError(f"cannot pickle the session of {self.token}")

    stubborn = Stubborn()
    stubborn.__dict__["token"] = PLANTED[0]
    with pytest.raises(ConfigError, match="connection_factory cannot be pickled") as error:
        LanceStream(table="t", connection_factory=stubborn, num_splits=4, global_batch_size=8)
    assert_hidden(error.value)


def test_everything_that_a_user_may_print(tables: Tables) -> None:
    prefetch = PrefetchConfig(runtime_env={"env_vars": {"TOKEN": PLANTED[0]}})
    options = {"aws_secret_access_key": PLANTED[0], "aws_session_token": PLANTED[1]}
    stream = tables.stream(storage_options=options, prefetch=prefetch)
    recipe = stream.recipe
    builder = BlockBuilder(recipe)
    with stream.open() as shard:
        next(iter(shard))
        things = [stream, stream.config, prefetch, recipe, recipe.table, builder, builder.tables.version(2), shard]
        things += [shard.stats(), shard.state_dict(), shard.seat, shard.link, StreamDataConfig()]
        things += [Parcel.of(stream._recipe)]
    for thing in things:
        assert leaks(f"{thing} {thing!r} {[thing]}") == [], type(thing)
    for sent in (
        shard.state_dict(),
        tables.stream(storage_options=options).config,
    ):  # to training workers, and to files
        assert leaks(pickle.dumps(sent).decode("latin-1")) == []
    with pytest.raises(ConfigError) as error:
        tables.stream(prefetch={"runtime_env": {"env_vars": {"TOKEN": PLANTED[0]}}})
    assert_hidden(error.value)
    with pytest.raises(StateError) as refused_state:
        tables.stream(storage_options=options, resume_from={"token": PLANTED[0]})
    assert_hidden(refused_state.value)


# --- a real run --------------------------------------------------------------------------------------


@pytest.fixture
def cluster() -> Iterator[Path]:
    """Ray with its dashboard, which lists actors; the directory of the session's files."""
    ray.init(address="local", num_cpus=4, include_dashboard=True, log_to_driver=True)
    node: Any = ray._private.worker._global_node
    yield Path(node.get_session_dir_path())
    ray.shutdown()


@pytest.fixture(scope="module")
def running() -> Iterator[Store]:
    with store() as found:
        found.make_bucket("tables")
        lancedb.connect("s3://tables/db", storage_options=found.options()).create_table("t", rows_from(0, 2000))
        yield found


def leaking_files(*roots: Path) -> dict[str, list[str]]:
    """Returns the files that hold something that was planted, with what."""
    found = {}
    for root in roots:
        for path in sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink()):
            what = leaks(path.read_bytes().decode("latin-1"))
            if what:
                found[str(path)] = what
    return found


@pytest.mark.cluster
@pytest.mark.fault
@pytest.mark.timeout(240)
def test_a_run_that_the_store_refuses_writes_them_nowhere(
    running: Store, cluster: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    refuse = tmp_path / "log" / "refuse"
    answer = refused("AccessDenied", " ".join(PLANTED))  # as a careless gateway quotes what it was sent
    running.fault = lambda _: answer if refuse.exists() else None
    options = running.options(PLANTED[0], PLANTED[1], aws_session_token=PLANTED[2])

    def connect(name: str) -> Any:
        return lancedb.connect("s3://tables/db", storage_options=options).open_table(name)

    prefetch = PrefetchConfig(
        num_actors=1, placement_timeout_s=120, retry_window_s=2, block_bytes=4096, max_buffer_bytes=8192
    )
    settings: dict[str, Any] = {"table": "t", "num_splits": 4, "global_batch_size": 40, "prefetch": prefetch}
    streams = {
        "train": LanceStream("s3://tables/db", storage_options=options, **settings),
        "other": LanceStream(connection_factory=connect, **settings),
    }
    with pytest.raises(ray.train.TrainingFailedError) as error:
        fit(train_until_refused, streams, 1, tmp_path)
    assert_hidden(error.value)
    said = {entry["stream"]: entry["error"] for entry in read_log(tmp_path) if "error" in entry}
    assert set(said) == {"train", "other"}, "both ways of giving credentials were refused"
    assert all("the storage refused the credentials" in text for text in said.values())
    assert leaks(str(said)) == []

    assert list(tmp_path.rglob("lance_stream.json")), "there is a checkpoint"
    seen: Any = ray_state  # untyped
    listed = [seen.list_actors(detail=True), seen.list_tasks(detail=True), seen.list_workers(detail=True)]
    listed += [
        seen.list_objects(detail=True, raise_on_missing_output=False),
        seen.list_runtime_envs(detail=True),
        seen.list_jobs(detail=True),
    ]
    internal: Any = ray._private.state
    listed += [internal.actors(), ray.util.list_named_actors(all_namespaces=True)]
    assert "Prefetcher" in str(listed[0]) and "StateManager" in str(listed[0])
    assert leaks(str(listed)) == []
    (node,) = ray.nodes()  # type: ignore[no-untyped-call]
    with urllib.request.urlopen(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics") as answered:
        assert leaks(answered.read().decode()) == []
    for stream in streams.values():
        stream.close()
    assert leaking_files(cluster, tmp_path) == {}
    texts = [path.read_text(errors="replace") for path in (cluster / "logs").rglob("worker-*.err")]
    assert any("StreamShard('train'" in text and "***" in text for text in texts), "the errors were logged"
    out, err = capfd.readouterr()
    assert leaks(out + err) == [] and out + err != ""

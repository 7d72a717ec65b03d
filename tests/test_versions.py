"""Table versions that a run needs: protected by tags, or refused with an error that says what to do."""

from __future__ import annotations

import datetime
import os
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lance
import lancedb
import numpy as np
import pytest
import ray.train
from checkpoints import run, saved
from conftest import Tables, rows_from
from lance.dataset import Tags
from loops import loop
from remote_server import serving
from runs import fit, read_log

from ray_lance_stream import (
    ConfigError,
    LanceStream,
    PrefetchConfig,
    StateMismatchError,
    TableVersionError,
    tags,
)
from ray_lance_stream.location import TableRef
from ray_lance_stream.state import StreamState
from ray_lance_stream.tags import Protection, protections, release, run_in_tags
from ray_lance_stream.testing import global_batches

pytestmark = pytest.mark.thorough

NOW = datetime.timedelta(0)
NUM_CPUS = 4


def dataset(uri: str) -> Any:
    return lance.dataset(f"{uri}/t.lance")


def clean_up(uri: str, **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dataset(uri).cleanup_old_versions(NOW, delete_unverified=True, **options)


def ids(batches: Any) -> list[list[int]]:
    return [batch.columns["id"].tolist() for batch in batches]


# --- tags --------------------------------------------------------------------------------------------


def test_a_protected_version_outlives_every_clean_up_until_it_is_released(tables: Tables, tmp_path: Path) -> None:
    uri, table = tables.own(50)
    stream = tables.stream(uri=uri, protect_version="digits-1")
    version = stream.config.identity.version
    assert stream.version_tag == f"ray-lance-stream.digits-1.v{version}"
    batches = global_batches(stream)
    checkpoint = saved(tmp_path / "run" / "checkpoint_1", StreamState.from_dict(batches[1].state))
    table.delete("id < 20")
    table.optimize()
    table.add(rows_from(50, 5))
    with pytest.raises(OSError, match=r"tagged version.*ray-lance-stream\.digits-1"):
        clean_up(uri)  # of Lance, which says so
    clean_up(uri, error_if_tagged_old_versions=False)
    assert [entry["version"] for entry in dataset(uri).versions()] == [version, table.version]
    resumed = tables.stream(uri=uri, resume_from=checkpoint)
    assert ids(global_batches(resumed)) == ids(batches)[2:]

    listed = run("release", uri, "t")
    assert listed.stdout == f"version {version} protected by ray-lance-stream.digits-1.v{version}\n"
    arguments = ("release", uri, "t", "--run", "digits-1")
    kept = run(*arguments, "--keep", tmp_path / "run", "--json")
    assert (kept.exit_code, kept.stdout.strip()) == (0, "[]"), "the checkpoint refers to it"
    shutil.rmtree(checkpoint)
    gone = run(*arguments, "--keep", tmp_path / "run")
    assert gone.exit_code == 2 and "no stream state" in gone.stderr, "a wrong path releases nothing"
    assert run("release", uri, "t", "--run", "digits-2").stdout == "nothing to release\n"
    done = run(*arguments)
    assert done.stdout == f"version {version} released: removed ray-lance-stream.digits-1.v{version}\n"
    assert dataset(uri).tags.list() == {}
    clean_up(uri)
    with pytest.raises(TableVersionError, match=rf"version {version}.*protect_version"):
        tables.stream(uri=uri, version=version)


def test_runs_do_not_share_tags_and_a_run_finds_its_own_again(tables: Tables) -> None:
    uri, table = tables.own(50)
    first, again = (tables.stream(uri=uri, protect_version="one") for _ in range(2))
    assert first.version_tag == again.version_tag
    other = tables.stream(uri=uri, protect_version="two")
    made_up = [tables.stream(uri=uri, protect_version=True) for _ in range(2)]
    table.add(rows_from(50, 10))
    later = tables.stream(uri=uri, protect_version="one")
    names = {stream.version_tag for stream in (first, other, later, *made_up)}
    assert len(names) == 5 and None not in names and set(dataset(uri).tags.list()) == names
    assert tables.stream(uri=uri).version_tag is None, "off by default"

    ref, version = TableRef(uri=uri, name="t"), first.config.identity.version
    assert [found.version for found in protections(ref, "one")] == [version, table.version]
    assert [found.version for found in release(ref, "one", keep={table.version})] == [version]
    assert {found.run for found in protections(ref)} >= {"one", "two"} and len(protections(ref)) == 4
    assert release(ref, "one", keep={table.version}) == []


def test_only_tags_of_ours_are_touched(tables: Tables) -> None:
    uri, _ = tables.own(50)
    data = dataset(uri)
    foreign = ("mine", "ray-lance-stream.run.v7", "ray-lance-stream.run.vx", "other.run.v1")
    for name in foreign:  # the second names another version than it has
        data.tags.create(name, 1)
    tables.stream(uri=uri, protect_version="run")
    assert len(release(TableRef(uri=uri, name="t"), "run")) == 1
    assert set(dataset(uri).tags.list()) == set(foreign)


@pytest.mark.parametrize("run_name", ["a b", "a/b", "a..b", "x.lock", "é", "-", "x" * 300, "..", "\ud800", "a.v3"])
def test_any_name_of_a_run_makes_a_tag_of_its_own(tables: Tables, run_name: str) -> None:
    uri, _ = tables.own(50)
    others = ["a_b", "x", "a", "e", "_"]
    for name in others:
        tables.stream(uri=uri, protect_version=name)
    tables.stream(uri=uri, protect_version=run_name)
    ref = TableRef(uri=uri, name="t")
    (found,) = protections(ref, run_name)
    assert found.run == run_in_tags(run_name) and found.run not in others
    assert found.version == dataset(uri).version and found in protections(ref)
    assert release(ref, run_name) == [found] and len(protections(ref)) == len(others)


def test_many_processes_of_a_run_protect_and_release_at_once(tables: Tables) -> None:
    uri, _ = tables.own(50)
    ref = TableRef(uri=uri, name="t")
    table = ref.open()
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: tags.protect(ref.open(), ref, "run"), range(16)))
        assert len(set(made)) == 1 and len(protections(ref)) == 1
        gone = list(pool.map(lambda _: release(ref, "run"), range(8)))
    assert protections(ref) == []
    assert {found for released in gone for found in released} == {
        Protection(tag=made[0], run="run", version=table.version)
    }


@pytest.mark.parametrize("value", ["", 1, None, b"run", ["run"]])
def test_a_name_that_is_none_is_refused(tables: Tables, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"protect_version is not valid.*Remedy: pass the run's name"):
        tables.stream(protect_version=value)


def test_a_table_that_may_not_be_written_to_says_so(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    uri, _ = tables.own(50)
    # The superuser, who runs tests in containers, may write anywhere: a file stands where the directory would be.
    Path(uri, "t.lance", "_refs").write_text("")
    with pytest.raises(ConfigError, match=r"version 2 of table 't' cannot be protected.*permission to write"):
        tables.stream(uri=uri, protect_version="run")
    assert tables.stream(uri=uri).config.identity.version == 2
    os.remove(Path(uri, "t.lance", "_refs"))
    stream = tables.stream(uri=uri, protect_version="run")

    def fail(*_: Any) -> None:
        raise OSError("Permission denied (os error 13)")

    monkeypatch.setattr(Tags, "delete", fail)
    with pytest.raises(ConfigError, match=rf"tag {stream.version_tag} of table 't' cannot be removed.*denied"):
        release(TableRef(uri=uri, name="t"), "run")


def test_a_version_that_is_cleaned_up_in_the_same_moment_is_not_called_protected(
    tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, table = tables.own(50)
    ref = TableRef(uri=uri, name="t")
    opened = ref.open()
    table.delete("id < 5")
    clean_up(uri)
    with pytest.raises(TableVersionError, match="version 2"):
        tags.protect(opened, ref, "run")
    current = ref.open()
    create = Tags.create

    def late(self: Any, name: str, version: int) -> None:
        """A clean-up that had looked for tags before this one was there."""
        create(self, name, version)
        table.delete("id < 7")
        self.delete(name)
        clean_up(uri)

    monkeypatch.setattr(Tags, "create", late)
    with pytest.raises(TableVersionError, match=f"version {current.version}"):
        tags.protect(current, ref, "run")


def test_tables_in_memory_have_nothing_to_protect() -> None:
    table = lancedb.connect("memory://").create_table("t", rows_from(0, 20))
    ref = TableRef.of(table)
    with pytest.raises(ConfigError, match="Found: a table in memory"):
        tags.protect(ref.open(), ref, "run")


def test_a_resumed_stream_protects_the_version_of_its_state(tables: Tables) -> None:
    uri, table = tables.own(50)
    state = global_batches(tables.stream(uri=uri), stop_after=2)[-1].state
    version = table.version
    table.add(rows_from(50, 14))
    resumed = tables.stream(uri=uri, resume_from=state, protect_version="run")
    assert resumed.version_tag == f"ray-lance-stream.run.v{version}"


# --- changes during a run, and between save and restore ----------------------------------------------

CHANGES: dict[str, Callable[[Any], Any]] = {
    "append": lambda table: table.add(rows_from(50, 30)),
    "delete": lambda table: table.delete("id < 20"),
    "compact": lambda table: (table.delete("id < 20"), table.optimize()),
    "drop a column": lambda table: table.drop_columns(["text"]),
    "rename a column": lambda table: table.alter_columns({"path": "x", "rename": "y"}),
    "overwrite": lambda table: lance.write_dataset(rows_from(900, 50), table.to_lance().uri, mode="overwrite"),
    "clean up what is old": lambda table: (table.delete("id < 9"), table.cleanup_old_versions(datetime.timedelta(1))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_and_what_is_restored_from_it_see_nothing_of_a_change(tables: Tables, change: str) -> None:
    uri, table = tables.own(50)
    stream = tables.stream(uri=uri)
    expected = ids(global_batches(stream))
    with stream.open() as shard:
        batches = iter(shard)
        found = [next(batches)["id"].tolist(), next(batches)["id"].tolist()]
        state = shard.state_dict()
        CHANGES[change](table)
        found += [batch["id"].tolist() for batch in batches]
        next_epoch = [batch["id"].tolist() for batch in shard]  # its plan is opened after the change
    assert found == expected
    with tables.stream(uri=uri, resume_from=state).open() as shard:
        assert [batch["id"].tolist() for batch in shard] == expected[2:]
        assert [batch["id"].tolist() for batch in shard] == next_epoch


def test_a_clean_up_under_a_run_is_an_error_of_ours_and_never_other_rows(tables: Tables) -> None:
    uri, table = tables.own(4000)
    stream = tables.stream(uri=uri, prefetch=None, global_batch_size=400, columns=["id"])
    with stream.open() as shard:
        first = next(iter(shard))["id"]
        state = shard.state_dict()
        table.delete("id % 2 = 0")
        table.optimize()
        clean_up(uri)
        with pytest.raises(TableVersionError, match=r"version 2 of table 't' cannot be read.*Remedy: restore"):
            for batch in shard:
                assert len(np.intersect1d(batch["id"], first)) == 0
            list(shard)  # what was read ahead is right; the next epoch cannot be
    with pytest.raises(TableVersionError, match=r"Remedy: .*protect_version"):
        tables.stream(uri=uri, resume_from=state)


def test_a_table_made_anew_under_a_run_is_refused_when_it_is_opened(tables: Tables) -> None:
    uri, _ = tables.own(50)
    stream = tables.stream(uri=uri)
    database = lancedb.connect(uri)
    database.drop_table("t")
    database.create_table("t", rows_from(0, 25)).add(rows_from(25, 25))
    with pytest.raises(StateMismatchError, match="dropped and created anew") as error, stream.open():
        pass
    assert error.value.field == "table"


def test_remote_tables_are_protected_by_their_server(tables: Tables) -> None:
    """A server that keeps no tags refuses, and that is said."""
    uri, _ = tables.own(50)
    with serving(uri, "some-api-key") as server:
        url = server.url

        def connect(name: str) -> Any:
            return lancedb.connect("db://base", api_key="some-api-key", host_override=url).open_table(name)

        with pytest.raises(ConfigError, match=r"version 2 of table 't' cannot be protected") as error:
            LanceStream(table="t", connection_factory=connect, num_splits=4, global_batch_size=8, protect_version="run")
        assert "some-api-key" not in str(error.value)


# --- under Ray Train ---------------------------------------------------------------------------------


def made_anew(uri: str) -> None:
    database = lancedb.connect(uri)
    database.drop_table("t")
    database.create_table("t", rows_from(0, 25)).add(rows_from(25, 25))


def cleaned_up(uri: str) -> None:
    lancedb.connect(uri).open_table("t").delete("id < 5")
    clean_up(uri)


@pytest.mark.cluster
@pytest.mark.fault
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("one_node")
@pytest.mark.parametrize(
    ("change", "said"),
    [(made_anew, "dropped and created anew"), (cleaned_up, "version 2 of table 't' cannot be read")],
)
def test_a_version_that_is_gone_when_a_run_starts_ends_it_once(
    tables: Tables, tmp_path: Path, change: Callable[[str], None], said: str
) -> None:
    uri, _ = tables.own(50)
    stream = tables.stream(uri=uri, prefetch=PrefetchConfig(num_actors=1, placement_timeout_s=120))
    change(uri)
    with pytest.raises(ray.train.TrainingFailedError, match=said):
        fit(loop, {"train": stream}, 2, tmp_path, max_failures=-1)
    assert len(list((tmp_path / "log").glob("run-*"))) == 2, "each worker was started once"
    assert read_log(tmp_path) == []
    stream.close()

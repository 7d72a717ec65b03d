"""diskcache.py and cachedtable.py: what a node keeps of a table, within its budget, and that no read depends on it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lance
import lancedb
import numpy as np
import pyarrow as pa
import pytest
from conftest import Tables, rows_from
from loops import ids_of
from runs import opened_here, wait_until
from stores import Store, store

from ray_lance_stream import ConfigError, LanceStream, PrefetchConfig
from ray_lance_stream.cachedtable import CachedTable, cached
from ray_lance_stream.diskcache import CacheSpec, DiskCache, NoRoomError
from ray_lance_stream.location import TableRef
from ray_lance_stream.readable import ReadableTable
from ray_lance_stream.table import PinnedTable

pytestmark = pytest.mark.thorough

SECRET = "some-secret-key"
MIB = 1024 * 1024


def spec_of(path: Path, max_bytes: int = 100 * MIB) -> CacheSpec:
    return CacheSpec(directory=str(path), max_bytes=max_bytes)


def bytes_in(path: Path) -> int:
    """Bytes of files, without their checksums."""
    files = (file for file in path.rglob("*") if file.is_file() and file.suffix != ".sum")
    return sum(file.stat().st_size for file in files)


def files_in(path: Path, suffix: str = ".lance") -> set[str]:
    return {file.name for file in path.rglob(f"*{suffix}") if file.suffix != ".sum"}


@pytest.fixture
def ref(tmp_path: Path) -> TableRef:
    """A table of four fragments of 500 rows, less every 7th row; two data files for each fragment."""
    table = lancedb.connect(str(tmp_path / "db")).create_table("t", rows_from(0, 500))
    for k in range(1, 4):
        table.add(rows_from(500 * k, 500))
    table.delete("id % 7 = 0")
    table.add_columns({"more": "concat('row ', cast(id as string))"})
    return TableRef(uri=str(tmp_path / "db"), name="t")


def kept(ref: TableRef, spec: CacheSpec, counts: list[int]) -> Any:
    """The table, cached; ``counts`` gets how many rows of each read were here."""
    table = ref.open()
    found = cached(table, ref, spec, counts.append)
    assert isinstance(found, CachedTable)
    return found


def keep_all(table: Any, want: int = 4) -> None:
    """Reads all over a table, until so many fragments are here."""
    rows = np.arange(table.num_rows)

    def enough() -> bool:
        table.take(rows[::50], ["id"])
        return int(table._copy._here.sum()) >= want

    wait_until(enough, 30, f"{want} fragments are kept")


# ---------------------------------------------------------------------- tables


def test_reads_are_the_same_whatever_is_kept(ref: TableRef, tmp_path: Path) -> None:
    plain, counts = ref.open(), list[int]()
    table: ReadableTable = kept(ref, spec_of(tmp_path / "cache"), counts)
    rng = np.random.default_rng(0)
    for _ in range(40):  # while the files come, one after another
        rows = rng.integers(0, plain.num_rows, rng.integers(0, 200))
        columns = [None, ["id"], ["more", "id"]][int(rng.integers(3))]
        assert table.take(rows, columns).equals(plain.take(rows, columns))
    keep_all(table)
    counts.clear()
    rows = rng.integers(0, plain.num_rows, 500)
    found = table.take(rows, None)
    assert found.equals(plain.take(rows, None))
    assert counts == [500]
    assert all(column.num_chunks == 1 for column in found.columns)
    assert (table.identity, table.num_rows, table.schema) == (plain.identity, plain.num_rows, plain.schema)
    assert table.matching_rows("id < 100").tolist() == plain.matching_rows("id < 100").tolist()
    with pytest.raises(ConfigError):
        table.take(np.array([plain.num_rows]), None)


def test_what_does_not_fit_is_read_from_the_storage(ref: TableRef, tmp_path: Path) -> None:
    data = bytes_in(tmp_path / "db" / "t.lance" / "data")
    budget = bytes_in(tmp_path / "db" / "t.lance" / "_versions") + data // 2
    plain, counts = ref.open(), list[int]()
    table: Any = kept(ref, spec_of(tmp_path / "cache", budget), counts)
    keep_all(table, 1)
    wait_until(lambda: not table._copy._wanted.qsize(), 30, "no more is fetched")
    rows = np.random.default_rng(1).permutation(plain.num_rows)
    counts.clear()
    assert table.take(rows, None).equals(plain.take(rows, None))
    assert 0 < sum(counts) < len(rows)
    assert bytes_in(tmp_path / "cache") <= budget


def test_a_later_process_finds_what_was_kept(ref: TableRef, tmp_path: Path) -> None:
    spec = spec_of(tmp_path / "cache")
    keep_all(kept(ref, spec, []))
    script = (
        "import sys, time; import numpy as np\n"
        "from ray_lance_stream.cachedtable import cached\n"
        "from ray_lance_stream.diskcache import CacheSpec\n"
        "from ray_lance_stream.location import TableRef\n"
        "ref = TableRef(uri=sys.argv[1], name='t')\n"
        "counts = []\n"
        "table = cached(ref.open(), ref, CacheSpec(directory=sys.argv[2], max_bytes=10**8), counts.append)\n"
        "deadline = time.monotonic() + 30\n"
        "while sum(counts) < 100 and time.monotonic() < deadline:\n"
        "    found = table.take(np.arange(0, table.num_rows, 20), ['id'])\n"
        "print(sum(counts) >= 100)\n"
    )
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.lance")}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "db"), str(tmp_path / "cache")],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.strip() == "True", done.stderr
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.lance")} == before


def test_files_that_are_taken_away_are_read_from_the_storage_again(
    ref: TableRef, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = kept(ref, spec_of(tmp_path / "cache"), [])
    keep_all(table)
    (manifest,) = (tmp_path / "cache").rglob("*.manifest")
    for path in (tmp_path / "cache").rglob("*.lance"):
        path.unlink()
    # As a process does that has not yet opened the files.
    table._copy._table = PinnedTable(lance.dataset(str(manifest.parents[1]), version=table.version), ref)
    rows = np.arange(table.num_rows)
    with caplog.at_level("WARNING", logger="ray_lance_stream"):
        assert table.take(rows, ["more"]).equals(ref.open().take(rows, ["more"]))
    assert "is read from its storage" in caplog.text


def test_files_that_have_changed_are_fetched_anew(ref: TableRef, tmp_path: Path) -> None:
    plain, spec = ref.open(), spec_of(tmp_path / "cache")
    first = kept(ref, spec, [])
    keep_all(first)
    del first
    files = sorted((tmp_path / "cache").rglob("*.lance"))
    contents = [path.read_bytes() for path in files]
    for path in files[::2]:  # as a disk does that fails, at the same size
        data = bytearray(path.read_bytes())
        data[len(data) // 3 : len(data) // 2] = bytes(len(data) // 2 - len(data) // 3)
        path.write_bytes(data)
    files[1].write_bytes(files[3].read_bytes())
    table, rows = kept(ref, spec, []), np.random.default_rng(2).permutation(plain.num_rows)
    for _ in range(3):
        assert table.take(rows, None).equals(plain.take(rows, None))
        keep_all(table)
    assert [path.read_bytes() for path in files] == contents


def test_a_version_that_is_not_in_use_makes_room_for_another(ref: TableRef, tmp_path: Path) -> None:
    data = bytes_in(tmp_path / "db" / "t.lance")
    spec = spec_of(tmp_path / "cache", int(1.2 * data))
    first: Any = kept(ref, spec, [])
    keep_all(first)
    lancedb.connect(str(tmp_path / "db")).open_table("t").delete("id = 1")
    second: Any = kept(ref, spec, [])
    second.take(np.arange(second.num_rows), ["id"])
    wait_until(lambda: not second._copy._wanted.qsize(), 30, "no more is fetched")
    assert int(second._copy._here.sum()) < 4 == int(first._copy._here.sum())  # whose files are in use
    del first

    def has_room() -> bool:
        third: Any = kept(ref, spec, [])
        third.take(np.arange(third.num_rows), ["id"])
        time.sleep(0.2)  # for the files; was it too short, the next one finds them
        return int(third._copy._here.sum()) == 4

    wait_until(has_room, 30, "the first one's files are gone")
    assert bytes_in(tmp_path / "cache") <= spec.max_bytes


@pytest.mark.parametrize("kind", ["in memory", "with blobs", "no directory"])
def test_where_nothing_can_be_kept_it_says_so_and_reads(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "cache"
    if kind == "in memory":
        ref = TableRef.of(lancedb.connect("memory://").create_table("t", rows_from(0, 10)))
    elif kind == "with blobs":
        field = pa.field("blob", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
        blobs = pa.table({"blob": [b"x"] * 10}, schema=pa.schema([field]))
        lancedb.connect(str(tmp_path / "db")).create_table("t", blobs)
        ref = TableRef(uri=str(tmp_path / "db"), name="t")
    else:
        lancedb.connect(str(tmp_path / "db")).create_table("t", rows_from(0, 10))
        ref = TableRef(uri=str(tmp_path / "db"), name="t")
        directory.write_text("a file")
    with caplog.at_level("WARNING", logger="ray_lance_stream"):
        table = cached(ref.open(), ref, spec_of(directory), lambda _: None)
    assert "is not kept on the node's disk" in caplog.text
    assert not isinstance(table, CachedTable)
    assert table.take(np.array([3, 1]), None).num_rows == 2


# ---------------------------------------------------------------------- the disk


def test_the_budget_holds_for_all_who_fetch(tmp_path: Path) -> None:
    one, other = DiskCache(spec_of(tmp_path, 100), "one"), DiskCache(spec_of(tmp_path, 100), "other")
    assert one.fetch("a", 60, lambda path: path.write_bytes(b"x" * 60))
    with pytest.raises(NoRoomError):
        other.fetch("b", 41, lambda path: path.write_bytes(b"x" * 41))
    with pytest.raises(NoRoomError):  # also where it turns out only afterwards
        other.fetch("b", 0, lambda path: path.write_bytes(b"x" * 41))
    assert files_in(tmp_path, "") >= {"a"} and bytes_in(tmp_path) == 60
    one.close()
    assert other.fetch("b", 41, lambda path: path.write_bytes(b"x" * 41))
    assert bytes_in(tmp_path) == 41 and not (tmp_path / "ray_lance_stream" / "one").exists()


def test_a_file_that_is_being_fetched_counts_and_is_not_fetched_twice(tmp_path: Path) -> None:
    one, other = DiskCache(spec_of(tmp_path, 100), "one"), DiskCache(spec_of(tmp_path, 100), "one")

    def download(path: Path) -> None:
        assert not other.fetch("a", 60, lambda _: pytest.fail("fetched twice"))
        with pytest.raises(NoRoomError):
            other.fetch("b", 41, lambda _: pytest.fail("beyond the budget"))
        path.write_bytes(b"x" * 60)

    assert one.fetch("a", 60, download)
    assert other.fetch("a", 60, lambda _: pytest.fail("fetched again"))


def test_what_others_keep_beside_it_is_left_alone(tmp_path: Path) -> None:
    others = [tmp_path / "film.part", tmp_path / "model" / "seat.reserved", tmp_path / "mine" / "in_use"]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * 90)
    one, other = DiskCache(spec_of(tmp_path, 100), "one"), DiskCache(spec_of(tmp_path, 100), "other")
    assert one.fetch("a", 100, lambda path: path.write_bytes(b"x" * 100))
    one.close()
    assert other.fetch("b", 100, lambda path: path.write_bytes(b"x" * 100))
    assert all(path.read_bytes() == b"x" * 90 for path in others)


@pytest.mark.parametrize("kind", ["others may write", "a link", "a file"])
def test_a_default_directory_that_others_have_made_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    spec = CacheSpec(directory=None, max_bytes=100)
    DiskCache(spec, "one").close()
    (own,) = tmp_path.iterdir()
    assert own.stat().st_mode & 0o777 == 0o700
    DiskCache(spec, "one").close()
    if kind == "others may write":
        own.chmod(0o770)
    else:
        shutil.rmtree(own)
        own.symlink_to(tmp_path) if kind == "a link" else own.write_text("")
    with pytest.raises(PermissionError, match="pass cache_dir"):
        DiskCache(spec, "one")


def test_a_download_that_fails_leaves_nothing(tmp_path: Path) -> None:
    cache = DiskCache(spec_of(tmp_path, 100), "one")

    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("the network")

    with pytest.raises(OSError, match="the network"):
        cache.fetch("a", 100, fail)
    assert bytes_in(tmp_path) == 0
    assert cache.fetch("a", 100, lambda path: path.write_bytes(b"x" * 100))


def test_what_a_killed_process_was_fetching_is_fetched_by_another(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "from ray_lance_stream.diskcache import CacheSpec, DiskCache\n"
        "def download(path):\n"
        "    path.write_bytes(b'half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "DiskCache(CacheSpec(directory=sys.argv[1], max_bytes=100), 'one').fetch('a', 60, download)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(list((tmp_path / "ray_lance_stream" / "one").glob("a.*"))) == 2  # its half, and its reservation
    other = DiskCache(spec_of(tmp_path, 100), "other")
    assert other.fetch("b", 90, lambda path: path.write_bytes(b"x" * 90))  # needs what the first one had reserved
    assert DiskCache(spec_of(tmp_path, 100), "one").fetch("a", 10, lambda path: path.write_bytes(b"x" * 10))
    assert bytes_in(tmp_path) == 100


# ---------------------------------------------------------------------- streams


@pytest.mark.parametrize(
    ("given", "message"),
    [({"cache_bytes": -1}, "cache_bytes"), ({"cache_dir": "relative"}, "cache_dir"), ({"cache_dir": 5}, "cache_dir")],
    ids=str,
)
def test_settings_are_checked_at_construction(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PrefetchConfig(**given)


@pytest.fixture(scope="module")
def running() -> Iterator[Store]:
    with store() as found:
        found.make_bucket("tables")
        options = found.options()
        lancedb.connect("s3://tables/db", storage_options=options).create_table("t", rows_from(0, 2000))
        yield found


def stream_of(running: Store, **cache: Any) -> LanceStream:
    prefetch = PrefetchConfig(block_bytes=4096, max_buffer_bytes=8192, **cache)
    return LanceStream(
        "s3://tables/db",
        "t",
        storage_options=running.options(),
        num_splits=4,
        global_batch_size=40,
        shuffle_seed=3,
        prefetch=prefetch,
    )


def test_a_second_epoch_reads_nothing_from_an_object_store(running: Store, tmp_path: Path) -> None:
    with opened_here(stream_of(running)) as shard:
        expected = [ids_of(batch) for _ in range(2) for batch in shard.iter_batches()]
    directory = tmp_path / "cache"
    with opened_here(stream_of(running, cache_bytes=MIB, cache_dir=str(directory))) as shard:
        found = [ids_of(batch) for batch in shard.iter_batches()]
        wait_until(lambda: bool(files_in(directory)), 30, "the file is kept")
        running.requests.clear()
        found += [ids_of(batch) for batch in shard.iter_batches()]
    assert found == expected
    assert not [seen for seen in running.requests if seen.method == "GET" and "/data/" in seen.path]
    for path in directory.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes()
    assert os.stat(directory / "ray_lance_stream").st_mode & 0o077 == 0


@pytest.mark.cluster
@pytest.mark.usefixtures("one_node")
def test_prefetchers_of_a_node_share_what_it_keeps(tables: Tables, tmp_path: Path) -> None:
    uri = tables.uri(2000)
    with opened_here(tables.stream(2000)) as shard:
        expected = [ids_of(batch) for _ in range(3) for batch in shard.iter_batches()]
    cache = {"cache_bytes": 10 * MIB, "cache_dir": str(tmp_path / "cache")}
    prefetch = PrefetchConfig(num_actors=2, block_bytes=2000, max_buffer_bytes=20000, **cache)  # type: ignore[arg-type]
    with tables.stream(2000, uri=uri, prefetch=prefetch) as stream, stream.open() as shard:
        found = [ids_of(batch) for batch in shard.iter_batches()]
        wait_until(lambda: len(files_in(tmp_path / "cache")) == 2, 30, "both files are kept")
        found += [ids_of(batch) for _ in range(2) for batch in shard.iter_batches()]
        assert found == expected

        def told() -> bool:
            known = stream.stats().prefetchers
            return len(known) == 2 and sum(p.rows_kept for p in known) > 2000

        wait_until(told, 30, "the prefetchers say what they read from it")

"""The stream's file in a checkpoint: round trips on several file systems, and files that are not ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import pytest

from ray_lance_stream.checkpoint import (
    FILE_NAME,
    Saved,
    locate,
    read_saved,
    read_streams,
    write_saved,
    write_streams,
)
from ray_lance_stream.counts import SplitCounts
from ray_lance_stream.errors import ConfigError, StateError, StateMismatchError
from ray_lance_stream.plan import OrderSpec, TableIdentity
from ray_lance_stream.provenance import Provenance
from ray_lance_stream.state import StreamState
from ray_lance_stream.topology import Replica

LOCAL = pafs.LocalFileSystem()


def state_at(cycle: int, num_splits: int = 4, epoch: int = 1, **order: Any) -> StreamState:
    table = TableIdentity(version=3, fingerprint="f00d")
    provenance = Provenance(table=table, order=OrderSpec(num_splits=num_splits, **order))
    return StreamState.at_cycle(provenance, epoch, cycle)


def drifted(samples: list[int], positions: list[int]) -> StreamState:
    provenance = state_at(0, len(samples)).provenance
    return StreamState(
        provenance=provenance, epoch=1, samples=SplitCounts.of(samples), positions=SplitCounts.of(positions)
    )


STREAMS = {"train": state_at(7, filter="x > 1"), "validation, again": drifted([5, 5, 6], [5, 8, 6]), "été": state_at(0)}


def in_memory(_: Path) -> tuple[pafs.FileSystem, str]:
    mock: Callable[[], pafs.FileSystem] = pafs._MockFileSystem
    filesystem = mock()
    filesystem.create_dir("bucket/run/checkpoint_000003")
    return filesystem, "bucket/run/checkpoint_000003"


def local(tmp_path: Path) -> tuple[pafs.FileSystem, str]:
    return LOCAL, str(tmp_path)


def below_a_root(tmp_path: Path) -> tuple[pafs.FileSystem, str]:
    """What Ray hands out for a storage path: paths are relative to a root."""
    (tmp_path / "run").mkdir()
    return pafs.SubTreeFileSystem(str(tmp_path), LOCAL), "run"


@pytest.fixture(params=[local, in_memory, below_a_root], ids=lambda make: make.__name__)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[pafs.FileSystem, str]:
    made: tuple[pafs.FileSystem, str] = request.param(tmp_path)
    return made


def put(filesystem: pafs.FileSystem, path: str, data: bytes) -> None:
    with filesystem.open_output_stream(path) as out:
        out.write(data)


def names_in(filesystem: pafs.FileSystem, directory: str) -> list[str]:
    return sorted(info.base_name for info in filesystem.get_file_info(pafs.FileSelector(directory)))


# --- round trips -------------------------------------------------------------------------------------


def test_what_is_written_is_read(place: tuple[pafs.FileSystem, str]) -> None:
    filesystem, directory = place
    write_streams(filesystem, directory, STREAMS)
    assert names_in(filesystem, directory) == [FILE_NAME], "one file, and no leftover"
    assert read_streams(filesystem, directory) == STREAMS
    assert read_streams(filesystem, f"{directory}/{FILE_NAME}") == STREAMS, "the file's own path works as well"


def test_writing_again_replaces(place: tuple[pafs.FileSystem, str]) -> None:
    filesystem, directory = place
    for cycle in (1, 2):
        write_streams(filesystem, directory, {"train": state_at(cycle)})
    assert read_streams(filesystem, directory) == {"train": state_at(2)}


def test_nothing_of_ours(place: tuple[pafs.FileSystem, str]) -> None:
    filesystem, directory = place
    assert read_streams(filesystem, directory) is None
    put(filesystem, f"{directory}/model.pt", b"weights")
    put(filesystem, f"{directory}/lance_stream.json.bak", b"{}")
    assert read_streams(filesystem, directory) is None
    assert read_streams(filesystem, f"{directory}/no/such/directory") is None


def test_unfinished_files_are_ignored(place: tuple[pafs.FileSystem, str]) -> None:
    filesystem, directory = place
    put(filesystem, f"{directory}/{FILE_NAME}.part", b'{"kind": ')
    put(filesystem, f"{directory}/lance_stream.rank-00000.json.part", b"")
    assert read_streams(filesystem, directory) is None
    write_streams(filesystem, directory, {"train": state_at(2)}, rank=1)
    assert read_streams(filesystem, directory) == {"train": state_at(2)}


def test_a_broken_write_leaves_the_old_file(tmp_path: Path) -> None:
    write_streams(LOCAL, str(tmp_path), {"train": state_at(1)})
    bad: Any = {"train": state_at(2), "other": object()}
    with pytest.raises(AttributeError):
        write_streams(LOCAL, str(tmp_path), bad)
    assert read_streams(LOCAL, str(tmp_path)) == {"train": state_at(1)}


@pytest.mark.parametrize("given", [str, Path, lambda path: f"file://{path}", lambda path: f"{path}/"])
def test_paths_and_uris(tmp_path: Path, given: Callable[[Path], str | Path]) -> None:
    write_streams(LOCAL, str(tmp_path), STREAMS)
    filesystem, path = locate(given(tmp_path))
    assert read_streams(filesystem, path) == STREAMS


def test_relative_and_home_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    write_streams(LOCAL, str(tmp_path), STREAMS)
    for text in (".", "~", FILE_NAME, f"~/{FILE_NAME}"):
        assert read_streams(*locate(text)) == STREAMS


def test_a_uri_of_a_store_is_not_a_local_path() -> None:
    filesystem, path = locate("mock:///bucket/run")
    assert (filesystem.type_name, path) == ("mock", "bucket/run")


# --- what the file holds -----------------------------------------------------------------------------


def keys_in(value: object) -> set[str]:
    if not isinstance(value, dict):
        return set()
    return {str(key) for key in value}.union(*(keys_in(item) for item in value.values()))


def test_the_file_is_json_and_says_no_more_than_it_must(tmp_path: Path) -> None:
    """No URI, no storage options, no credentials: checkpoints are copied to places the table is not."""
    write_streams(LOCAL, str(tmp_path), {"train": drifted([5, 5, 6], [5, 8, 6])})
    content = json.loads((tmp_path / FILE_NAME).read_text(encoding="ascii"))
    assert set(content) == {"kind", "version", "stamp", "streams"}
    assert (content["kind"], content["version"]) == ("ray_lance_stream.checkpoint", 1)
    assert keys_in(content["streams"]) == {
        "train", "format", "num_splits", "shuffle_seed", "epoch", "samples_consumed_per_split",
        "positions_consumed_per_split", "base", "exceptions", "1", "2", "provenance", "table_version",
        "table_fingerprint", "filter", "order", "shuffle", "shuffle_clump_size", "plan_format", "pack_sequences",
    }  # fmt: skip


def test_the_same_states_make_the_same_bytes(tmp_path: Path) -> None:
    written = []
    for streams in (STREAMS, dict(reversed(STREAMS.items()))):
        write_streams(LOCAL, str(tmp_path), streams)
        written.append((tmp_path / FILE_NAME).read_bytes())
    assert written[0] == written[1]


def test_a_file_of_many_splits_is_small(tmp_path: Path) -> None:
    write_streams(LOCAL, str(tmp_path), {"train": state_at(10**9, num_splits=8192)})
    assert (tmp_path / FILE_NAME).stat().st_size < 2000


# --- one file per rank -------------------------------------------------------------------------------


def test_the_ranks_files_are_merged(place: tuple[pafs.FileSystem, str]) -> None:
    filesystem, directory = place
    write_streams(filesystem, directory, {"train": drifted([5, 5, 7], [5, 5, 7])}, rank=0)
    write_streams(filesystem, directory, {"train": drifted([5, 6, 5], [9, 6, 5]), "late": state_at(2)}, rank=12)
    expected = {"train": drifted([5, 6, 7], [9, 6, 7]), "late": state_at(2)}
    assert read_streams(filesystem, directory) == expected
    assert len(names_in(filesystem, directory)) == 2


def test_the_merged_file_is_preferred(place: tuple[pafs.FileSystem, str]) -> None:
    filesystem, directory = place
    write_streams(filesystem, directory, {"train": state_at(4)}, rank=0)
    write_streams(filesystem, directory, {"train": state_at(5)}, rank=1)
    write_streams(filesystem, directory, {"train": state_at(6)})
    assert read_streams(filesystem, directory) == {"train": state_at(6)}


def test_ranks_at_different_cycles_are_refused(place: tuple[pafs.FileSystem, str]) -> None:
    filesystem, directory = place
    for rank, cycle in enumerate((4, 5, 4)):
        write_streams(filesystem, directory, {"train": state_at(cycle)}, rank=rank)
    with pytest.raises(StateError, match=r"different numbers of cycles.*state 0: 4, state 1: 5, state 2: 4"):
        read_streams(filesystem, directory)


def test_ranks_of_other_runs_are_refused(place: tuple[pafs.FileSystem, str]) -> None:
    filesystem, directory = place
    write_streams(filesystem, directory, {"train": state_at(4)}, rank=0)
    write_streams(filesystem, directory, {"train": state_at(4, filter="x > 1")}, rank=1)
    with pytest.raises(StateMismatchError, match="filter differs"):
        read_streams(filesystem, directory)


def test_states_of_replicas_that_may_skip_rows_are_complete_or_refused(place: tuple[pafs.FileSystem, str]) -> None:
    """Each is exact for the splits of its replica only; without one of them, rows would come twice."""
    filesystem, directory = place
    states = drifted([5, 5, 5], [9, 5, 5]), drifted([5, 5, 5], [5, 6, 7])

    def write(rank: int, dp_rank: int, cycle: int = 1) -> None:
        parts = {"train": Replica(dp_rank=dp_rank, dp_size=2)}
        saved = Saved(streams={"train": states[dp_rank], "whole": state_at(cycle)}, parts=parts, run="a run")
        write_saved(filesystem, directory, saved, rank)

    write(rank=3, dp_rank=1)
    write(rank=2, dp_rank=1)
    for path in (directory, f"{directory}/lance_stream.rank-00002.json"):
        with pytest.raises(StateError, match=r"stream 'train' in .*not complete.*none of the replicas \[0\]"):
            read_saved(filesystem, path)
    write(rank=0, dp_rank=0)
    found = read_saved(filesystem, directory)
    assert found is not None and found.run == "a run"
    assert found.streams == {"train": drifted([5, 5, 5], [9, 6, 7]), "whole": state_at(1)}


def test_of_streams_that_every_rank_reads_whole_the_lowest_rank_counts(place: tuple[pafs.FileSystem, str]) -> None:
    filesystem, directory = place
    write_saved(filesystem, directory, Saved(streams={"probe": state_at(1), "train": state_at(9)}), 0)  # carried over
    for rank, cycle in ((1, 5), (2, 7)):
        streams = {"probe": state_at(cycle), "train": state_at(9)}
        write_saved(filesystem, directory, Saved(streams=streams, parts={"probe": Replica()}), rank)
    assert read_streams(filesystem, directory) == {"probe": state_at(5), "train": state_at(9)}


# --- files that are not ours -------------------------------------------------------------------------


def content_of(**changes: Any) -> dict[str, Any]:
    streams = {"train": state_at(7).to_dict(compact=True)}
    return {"kind": "ray_lance_stream.checkpoint", "version": 1, "stamp": [5, 2], "streams": streams} | changes


WHOLE = json.dumps(content_of()).encode()
DAMAGED: dict[str, bytes] = {
    "empty": b"",
    "truncated": WHOLE[: len(WHOLE) // 2],
    "last byte missing": WHOLE[:-1],
    "two files in one": WHOLE + WHOLE,
    "binary": bytes(range(256)) * 4,
    "pickle": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00.",
    "zeros": b"\0" * 4096,
    "utf-16 halves": b"\xff\xfe\x00",
    "not utf-8": b'{"kind": "\xff"}',
    "list": b"[]",
    "number": b"1",
    "null": b"null",
    "foreign json": b'{"streams": {}, "model": "bert"}',
    "another kind": json.dumps(content_of(kind="lance")).encode(),
    "later version": json.dumps(content_of(version=2)).encode(),
    "no version": json.dumps({"kind": content_of()["kind"], "streams": {}}).encode(),
    "no stamp": json.dumps(content_of(stamp=None)).encode(),
    "half a stamp": json.dumps(content_of(stamp=[1])).encode(),
    "parts is a list": json.dumps(content_of(parts=[1])).encode(),
    "a part of nothing": json.dumps(content_of(parts={"train": [2, 2]})).encode(),
    "a part that is text": json.dumps(content_of(parts={"train": "01"})).encode(),
    "streams is a list": json.dumps(content_of(streams=[])).encode(),
    "deep": b"[" * 200_000 + b"]" * 200_000,
    "deep, unclosed": b'{"a":' * 200_000,
    "deep version": json.dumps(content_of(version=0)).encode().replace(b"0", b"[" * 900 + b"]" * 900, 1),
    "huge number": json.dumps(content_of(version=0)).encode().replace(b"0", b"9" * 10_000, 1),
    "nan": json.dumps(content_of(version=float("nan"))).encode(),
}
DAMAGED_STATES: dict[str, Any] = {
    "no dict": 3,
    "empty": {},
    "null": None,
    "another format": state_at(7).to_dict() | {"format": 2},
    "no counts": state_at(7).to_dict() | {"samples_consumed_per_split": None},
    "nan": state_at(7).to_dict() | {"epoch": float("nan")},
    "lancedb's": {"samples_consumed_per_split": [1, 1], "num_splits": 2, "epoch": 0, "shuffle_seed": 1},
}


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.parametrize("file", [FILE_NAME, "lance_stream.rank-00003.json"])
def test_a_damaged_file_is_named_with_a_remedy(tmp_path: Path, file: str, name: str) -> None:
    (tmp_path / file).write_bytes(DAMAGED[name])
    with pytest.raises(StateError) as caught:
        read_streams(LOCAL, str(tmp_path))
    assert f"{tmp_path}/{file}" in str(caught.value)
    assert "resume from an earlier checkpoint" in str(caught.value).split("Remedy: ")[1]
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", DAMAGED_STATES)
def test_a_damaged_state_is_named_with_its_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / FILE_NAME
    path.write_text(json.dumps(content_of(streams={"train": DAMAGED_STATES[name]})))
    with pytest.raises(StateError) as caught:
        read_streams(LOCAL, str(path))
    assert str(path) in str(caught.value)
    assert "Remedy: " in str(caught.value)


def test_a_file_of_a_later_version_says_what_reads_it(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(DAMAGED["later version"])
    with pytest.raises(StateError, match=r"version 2, this package reads 1.*use the version of ray_lance_stream"):
        read_streams(LOCAL, str(tmp_path))


def test_a_link_that_leads_nowhere_is_not_taken_for_no_file(tmp_path: Path) -> None:
    (tmp_path / "lance_stream.json").symlink_to(tmp_path / "gone")
    with pytest.raises(StateError, match="leads nowhere"):
        read_streams(*locate(tmp_path))


@pytest.mark.parametrize("path", ["a\x00b", "~no-such-user/x", "/tmp/\udcff", "a" * 5000, "loop/x"])
def test_what_can_be_no_path_is_a_clear_error(tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    with pytest.raises(ConfigError, match="this is no path of a checkpoint"):
        locate(path)


def test_a_directory_in_the_files_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(StateError, match="Found: a directory"):
        read_streams(LOCAL, str(tmp_path))


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    path.write_bytes(WHOLE)
    assert read_streams(LOCAL, str(tmp_path)) == {"train": state_at(7)}
    for end in range(0, len(WHOLE), 5):
        path.write_bytes(WHOLE[:end])
        with pytest.raises(StateError):
            read_streams(LOCAL, str(tmp_path))


def test_a_file_far_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    with path.open("wb") as file:
        file.truncate(2**34)  # a hole: takes no space
    with pytest.raises(StateError, match=f"{2**34} bytes"):
        read_streams(LOCAL, str(tmp_path))


def test_a_file_path_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(b"\x80\x04weights")
    with pytest.raises(StateError, match=r"model\.pt"):
        read_streams(LOCAL, str(path))


def test_leftovers_of_an_earlier_save_in_the_same_directory_do_not_count(tmp_path: Path) -> None:
    """A user may write every checkpoint into one directory; the newest save wins, merged or not."""
    early, late = state_at(3), state_at(5)
    write_streams(LOCAL, str(tmp_path), {"train": early}, stamp=(7, 1))
    write_streams(LOCAL, str(tmp_path), {"train": early}, rank=4, stamp=(7, 1))
    write_streams(LOCAL, str(tmp_path), {"train": late}, rank=0, stamp=(7, 2))
    assert read_streams(LOCAL, str(tmp_path)) == {"train": late}
    write_streams(LOCAL, str(tmp_path), {"train": early}, stamp=(8, 1))  # a later worker group, from an earlier step
    assert read_streams(LOCAL, str(tmp_path)) == {"train": early}


def test_a_run_whose_streams_were_not_begun_says_so(tmp_path: Path) -> None:
    write_streams(LOCAL, str(tmp_path), {})
    assert read_streams(LOCAL, str(tmp_path)) == {}

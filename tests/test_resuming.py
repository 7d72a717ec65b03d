"""Checkpoints that cannot be resumed from: what the error says, and which earlier one it names."""

from __future__ import annotations

import dataclasses
import json
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import pytest
import torch
from checkpoints import saved, state_at
from conftest import Tables
from moto.server import ThreadedMotoServer

from ray_lance_stream import MissingStateError, StateError, StateMismatchError, trainlink
from ray_lance_stream.checkpoint import FILE_NAME, Saved, Streams, write_saved
from ray_lance_stream.counts import SplitCounts
from ray_lance_stream.resuming import intact_beside, with_way_back
from ray_lance_stream.state import StreamState
from ray_lance_stream.testing import global_batches
from ray_lance_stream.topology import Replica

LOCAL = pafs.LocalFileSystem()
EARLIER = "earlier checkpoint of the run"


def any_states(_: Streams) -> bool:
    return True


def run_directory(path: Path, count: int, *, snapshot: list[tuple[str, int]] | None = None) -> list[Path]:
    """Makes a run's directory as Ray Train does: checkpoints 0, 1, ..., the newest last, with a state of that cycle."""
    found = [saved(path / f"checkpoint_{number}", state_at(number), stamp=(7, number)) for number in range(count)]
    entries = [(place.name, number) for number, place in enumerate(found)] if snapshot is None else snapshot
    content = {
        "checkpoint_results": [{"version": 0, "checkpoint_dir_name": name, "metrics": {}} for name, _ in entries],
        "checkpoint_report_indices": [number for _, number in entries],
    }
    (path / "checkpoint_manager_snapshot.json").write_text(json.dumps(content))
    return found


def damage(checkpoint: Path, data: bytes = b'{"kind": ') -> None:
    (checkpoint / FILE_NAME).write_bytes(data)


def test_the_newest_earlier_one_that_is_intact_is_found(tmp_path: Path) -> None:
    first, second, third, fourth = run_directory(tmp_path, 4)
    for path in (fourth, fourth / FILE_NAME, f"{fourth}/"):
        assert intact_beside(LOCAL, str(path), any_states) == (EARLIER, str(third))
    assert intact_beside(LOCAL, str(second), any_states) == (EARLIER, str(first)), "earlier, not newer"
    damage(third)
    (second / FILE_NAME).unlink()
    assert intact_beside(LOCAL, str(fourth), any_states) == (EARLIER, str(first))
    assert intact_beside(LOCAL, str(fourth), lambda states: states["train"] == state_at(2)) is None
    assert intact_beside(LOCAL, str(first), any_states) is None


def test_reported_order_counts_and_not_names_or_scores(tmp_path: Path) -> None:
    """With a score, Ray Train sorts its list by it; what it no longer lists may be half an upload."""
    order = [("checkpoint_3", 0), ("checkpoint_1", 9), ("checkpoint_0", 4)]
    paths = run_directory(tmp_path, 4, snapshot=order)
    assert intact_beside(LOCAL, str(paths[1]), any_states) == (EARLIER, str(paths[0]))
    assert intact_beside(LOCAL, str(paths[0]), any_states) == (EARLIER, str(paths[3]))
    assert intact_beside(LOCAL, str(paths[3]), any_states) is None


@pytest.mark.parametrize("snapshot", [None, b"", b"[]", b'{"checkpoint_results": [{}]}', b'{"checkpoint_results": []}'])
def test_without_ray_trains_list_our_own_stamps_tell_the_newest(tmp_path: Path, snapshot: bytes | None) -> None:
    paths = run_directory(tmp_path, 4)
    place = tmp_path / "checkpoint_manager_snapshot.json"
    place.unlink() if snapshot is None else place.write_bytes(snapshot)
    saved(tmp_path / "a-name-of-its-own", state_at(5), stamp=(8, 1))
    damage(paths[3])
    which, found = intact_beside(LOCAL, str(paths[3]), any_states) or ("", "")
    assert (which, found) == ("checkpoint beside it", str(tmp_path / "a-name-of-its-own"))


def test_partial_states_are_not_intact(tmp_path: Path) -> None:
    first, second, third = run_directory(tmp_path, 3)
    (second / FILE_NAME).unlink()
    part = Saved(streams={"train": state_at(2)}, parts={"train": Replica(dp_rank=0, dp_size=2)})
    write_saved(LOCAL, str(second), part, rank=0)
    assert intact_beside(LOCAL, str(third), any_states) == (EARLIER, str(first))


def test_a_root_or_a_place_without_siblings_names_nothing(tmp_path: Path) -> None:
    damage(saved(tmp_path / "alone", state_at(1)))
    assert intact_beside(LOCAL, "/", any_states) is None
    assert intact_beside(LOCAL, str(tmp_path / "alone"), any_states) is None
    assert intact_beside(LOCAL, str(tmp_path / "no" / "where"), any_states) is None
    assert intact_beside(pafs.SubTreeFileSystem(str(tmp_path), LOCAL), "alone", any_states) is None


@pytest.mark.parametrize("kind", [StateError, MissingStateError, StateMismatchError])
def test_an_error_keeps_its_kind_and_fields(tmp_path: Path, kind: type[StateError]) -> None:
    first, second = run_directory(tmp_path, 2)
    values = ("filter", "x > 1", None) if kind is StateMismatchError else ()
    error = with_way_back(kind("what. Remedy: this.", *values), LOCAL, str(second), any_states)
    assert type(error) is kind
    assert str(error).startswith("what. Remedy: this. The newest earlier checkpoint of the run whose state is intact")
    assert f"resume_from={str(first)!r}" in str(error)
    if isinstance(error, StateMismatchError):
        assert (error.field, error.saved, error.current) == values
    without = with_way_back(kind("what.", *values), LOCAL, str(first), any_states)
    assert ("on_missing_state='restart'" in str(without)) == (kind is StateError)


# --- resume_from -------------------------------------------------------------------------------------------


def empty(path: Path) -> None:
    damage(path, b"")


def truncated(path: Path) -> None:
    damage(path, (path / FILE_NAME).read_bytes()[:-40])


def binary(path: Path) -> None:
    damage(path, bytes(range(256)))


def other_json(path: Path) -> None:
    damage(path, b'{"model": "bert", "streams": {}}')


def another_version(path: Path) -> None:
    damage(path, (path / FILE_NAME).read_bytes().replace(b'"version": 1', b'"version": 2'))


def missing(path: Path) -> None:
    (path / FILE_NAME).unlink()


def a_rank_missing(path: Path) -> None:
    missing(path)
    part = Saved(streams={"train": state_at(2)}, parts={"train": Replica(dp_rank=1, dp_size=2)})
    write_saved(LOCAL, str(path), part, rank=1)


DAMAGES: dict[Callable[[Path], None], str] = {
    empty: "0 bytes that are not JSON",
    truncated: "that are not JSON",
    binary: "256 bytes that are not JSON",
    other_json: "JSON that this package did not write",
    another_version: "format version 2, this package reads 1",
    missing: "no lance_stream.json",
    a_rank_missing: r"none of the replicas \[0\]",
}


@pytest.mark.parametrize("how", DAMAGES, ids=lambda how: how.__name__)
def test_a_damaged_resume_from_fails_on_the_driver_and_names_an_earlier_one(
    tables: Tables, tmp_path: Path, how: Callable[[Path], None]
) -> None:
    first, second = run_directory(tmp_path, 2)
    how(second)
    with pytest.raises((StateError, MissingStateError), match=DAMAGES[how]) as error:
        tables.stream(resume_from=second)
    assert str(second) in str(error.value) and f"resume_from={str(first)!r}" in str(error.value)
    how(first)
    with pytest.raises((StateError, MissingStateError), match=DAMAGES[how]) as error:
        tables.stream(resume_from=str(second))
    assert "on_missing_state='restart'" in str(error.value), "how to begin anew"
    if how is not missing:
        with pytest.raises(StateError, match=DAMAGES[how]):  # what is damaged is not hidden by the switch
            tables.stream(resume_from=second, on_missing_state="restart")


def test_a_resume_from_that_does_not_exist_says_so(tables: Tables, tmp_path: Path) -> None:
    with pytest.raises(MissingStateError, match="Found: no such directory") as error:
        tables.stream(resume_from=tmp_path / "nowhere")
    assert "restart" not in str(error.value)


@pytest.fixture
def bucket() -> Iterator[pafs.S3FileSystem]:
    """A file system of an object store, with a bucket "bucket-of-runs"."""
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        urllib.request.urlopen(urllib.request.Request(f"http://{host}:{port}/bucket-of-runs", method="PUT"))
        yield pafs.S3FileSystem(
            access_key="access-key-id",
            secret_key="secret",
            endpoint_override=f"http://{host}:{port}",
            region="us-east-1",
        )
    finally:
        server.stop()


def test_checkpoints_of_an_object_store(tables: Tables, tmp_path: Path, bucket: pafs.S3FileSystem) -> None:
    import ray.train

    paths = run_directory(tmp_path / "run", 3)
    damage(paths[1])
    damage(paths[2], b"")
    pafs.copy_files(str(tmp_path / "run"), "bucket-of-runs/run", destination_filesystem=bucket)
    checkpoint: Any = ray.train.Checkpoint("bucket-of-runs/run/checkpoint_2", filesystem=bucket)
    with pytest.raises(StateError, match=r"bucket-of-runs/run/checkpoint_2/lance_stream\.json cannot be read") as error:
        tables.stream(resume_from=checkpoint)
    assert "resume_from='s3://bucket-of-runs/run/checkpoint_0'" in str(error.value)
    write_saved(bucket, "bucket-of-runs/run/checkpoint_2", Saved(streams={"train": state_at(2)}))
    names = bucket.get_file_info(pafs.FileSelector("bucket-of-runs/run/checkpoint_2"))
    assert [info.base_name for info in names] == [FILE_NAME], "written in one piece, and no leftover"
    assert intact_beside(bucket, "bucket-of-runs/run/checkpoint_1", any_states) is not None


# --- the run's own checkpoint, as a worker finds it --------------------------------------------------------


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Makes this process one of a worker of the run "run" that started from a checkpoint."""
    from ray.train import Checkpoint

    def start(checkpoint: Path) -> None:
        monkeypatch.setattr(trainlink, "_start", [Checkpoint.from_directory(checkpoint)])
        monkeypatch.setattr(trainlink, "_found", None)
        monkeypatch.setattr(trainlink, "run_name", lambda: "run")

    return start


def own_state(tables: Tables, step: int, **options: Any) -> StreamState:
    return StreamState.from_dict(global_batches(tables.stream(**options))[step - 1].state)


def test_the_state_of_the_run_is_taken(tables: Tables, tmp_path: Path, started: Callable[[Path], None]) -> None:
    state = own_state(tables, 2)
    started(saved(tmp_path / "checkpoint", {"train": state, "validation": own_state(tables, 1, shuffle=False)}))
    assert trainlink.saved_state(tables.stream().config, "train") == state
    assert trainlink.saved_state(tables.stream(20, num_splits=2).config, "added later") is None


def test_a_file_of_other_data_is_refused_with_its_place(
    tables: Tables, tmp_path: Path, started: Callable[[Path], None]
) -> None:
    checkpoint = saved(tmp_path / "checkpoint", {"train": own_state(tables, 2, filter="id > 3")})
    started(checkpoint)
    with pytest.raises(StateMismatchError, match="filter differs") as error:
        trainlink.saved_state(tables.stream().config, "train")
    assert error.value.field == "filter" and f"{checkpoint}/{FILE_NAME}, stream 'train'" in str(error.value)
    within = dataclasses.replace(state_at(), samples=SplitCounts.of([6, 6, 5, 5]))
    started(
        saved(tmp_path / "other", {"train": dataclasses.replace(within, provenance=own_state(tables, 2).provenance)})
    )
    with pytest.raises(StateError, match=r"other/lance_stream.json, stream 'train': .*end of a cycle"):
        trainlink.saved_state(tables.stream().config, "train")


def test_a_file_of_another_run_without_the_stream_is_refused(
    tables: Tables, tmp_path: Path, started: Callable[[Path], None]
) -> None:
    """Of this run it would mean that the stream had not been begun."""
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    streams = {"text": own_state(tables, 2, shuffle=False)}
    for run in ("run", None):
        write_saved(LOCAL, str(checkpoint), Saved(streams=streams, run=run))
        started(checkpoint)
        assert trainlink.saved_state(tables.stream().config, "train") is None
    write_saved(LOCAL, str(checkpoint), Saved(streams=streams, run="another"))
    started(checkpoint)
    with pytest.raises(MissingStateError, match=r"'text'.*of the run 'another'.*by the run 'run'"):
        trainlink.saved_state(tables.stream().config, "train")
    assert trainlink.saved_state(tables.stream(on_missing_state="restart").config, "train") is None


def test_what_fits_the_stream_counts_as_intact(tables: Tables, tmp_path: Path) -> None:
    config = tables.stream().config
    states = [own_state(tables, 1), own_state(tables, 2, filter="id > 3"), own_state(tables, 3)]
    paths = [saved(tmp_path / f"checkpoint_{n}", state, stamp=(1, n)) for n, state in enumerate(states)]
    found = intact_beside(LOCAL, str(paths[2]), lambda streams: trainlink.fits(config, "train", streams))
    assert found == ("checkpoint beside it", str(paths[0]))
    assert intact_beside(LOCAL, str(paths[2]), lambda streams: trainlink.fits(config, "other", streams)) is None


def test_a_file_that_is_no_checkpoint(tables: Tables, tmp_path: Path) -> None:
    """It may hold a state dict. What lies beside it has nothing to do with it."""
    stream = tables.stream(50)
    batches = global_batches(stream, 2)
    saved(tmp_path / "of-another-run", state_at(3))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "state.json").write_text(json.dumps(batches[2].state))
    rest = global_batches(tables.stream(50, resume_from=tmp_path / "mine" / "state.json"), 3)
    assert [batch.columns["id"].tolist() for batch in rest] == [b.columns["id"].tolist() for b in batches[3:]]
    torch.save({"stream": batches[2].state}, tmp_path / "mine" / "model.pt")
    with pytest.raises(StateError, match=r"holds no stream state.*not JSON.*resume_from=torch.load") as error:
        tables.stream(50, resume_from=tmp_path / "mine" / "model.pt")
    assert "of-another-run" not in str(error.value)
    with pytest.raises(
        StateError, match=r"not a stream state. Found: a dict with the keys \['stream'\].*that dict alone"
    ):
        tables.stream(50, resume_from={"stream": batches[2].state})

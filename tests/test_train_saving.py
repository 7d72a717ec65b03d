"""Every way to save a checkpoint in Ray Train, to a disk and to an object store, and checkpoints that are damaged."""

from __future__ import annotations

import json
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import pytest
import ray
import ray.train
from conftest import Tables
from loops import loop
from moto.server import ThreadedMotoServer
from ray.train import Checkpoint, ValidationConfig
from runs import delivered, fit, named_actors, opened_here, read_log, reference
from saveloops import WAYS, cycles_of, save_in_every_way

from ray_lance_stream import PrefetchConfig
from ray_lance_stream.checkpoint import FILE_NAME, read_saved

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.usefixtures("one_node")]
NUM_CPUS = 8
PREFETCH = PrefetchConfig(num_actors=1, placement_timeout_s=120)


@pytest.fixture
def bucket() -> Iterator[tuple[pafs.FileSystem, str]]:
    """An object store's file system, and a path in a bucket of its own."""
    server, name = ThreadedMotoServer(port=0, verbose=False), f"saves-{uuid.uuid4().hex}"  # servers share buckets
    server.start()
    try:
        host, port = server.get_host_and_port()
        urllib.request.urlopen(urllib.request.Request(f"http://{host}:{port}/{name}", method="PUT"))
        filesystem = pafs.S3FileSystem(
            access_key="access-key-id",
            secret_key="secret",
            endpoint_override=f"http://{host}:{port}",
            region="us-east-1",
        )
        yield filesystem, f"{name}/runs"
    finally:
        server.stop()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("place", ["disk", pytest.param("bucket", marks=pytest.mark.fault)])
def test_every_way_of_saving_leads_to_the_next_row(
    tables: Tables, tmp_path: Path, place: str, request: pytest.FixtureRequest
) -> None:
    where = request.getfixturevalue("bucket") if place == "bucket" else None
    filesystem, root = where or (pafs.LocalFileSystem(), str(tmp_path / "runs"))
    steps = len(WAYS)
    stream = tables.stream(8 * (steps + 3), prefetch=PREFETCH)
    fit(
        save_in_every_way,
        {"train": stream},
        2,
        tmp_path,
        max_failures=1,
        bucket=where,
        keep=None,
        validation=ValidationConfig(fn=cycles_of),
    )
    stream.close()

    entries = read_log(tmp_path)
    assert [entry["start"] for entry in entries if "start" in entry] == [[0, 0]] * 2 + [[0, steps]] * 2
    want = reference(stream, 1)
    assert delivered(entries) == want

    with filesystem.open_input_stream(f"{root}/run/checkpoint_manager_snapshot.json") as source:
        results = json.loads(source.read())["checkpoint_results"]
    metrics = {result["metrics"]["way"]: result["metrics"] for result in results}
    assert list(metrics) == list(WAYS) and metrics["validated"]["cycles"] == 2 * metrics["validated"]["step"]
    for result in results:
        step, way = result["metrics"]["step"], result["metrics"]["way"]
        path = f"{root}/run/{result['checkpoint_dir_name']}"
        names = {info.base_name for info in filesystem.get_file_info(pafs.FileSelector(path))}
        assert names - {"weights-0.json", "weights-1.json"} == {FILE_NAME}, (way, names)
        saved = read_saved(filesystem, path)
        assert saved is not None and saved.run == "run" and list(saved.streams) == ["train"], way
        assert saved.streams["train"].completed_cycles == 2 * step, way
        checkpoint: Any = Checkpoint(path, filesystem=filesystem)
        with opened_here(tables.stream(8 * (steps + 3), resume_from=checkpoint)) as shard:
            assert next(iter(shard))["id"].tolist() == want[0, step + 1], way


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_damaged_checkpoint_ends_the_run_once_and_another_goes_on(tables: Tables, tmp_path: Path) -> None:
    stream = tables.stream(60, prefetch=PREFETCH)
    with pytest.raises(ray.train.TrainingFailedError):
        fit(loop, {"train": stream}, 1, tmp_path, report_at=[[0, 2], [0, 3]], fail_at=[0, 4])
    earlier, damaged = sorted(path for path in (tmp_path / "runs" / "run").glob("checkpoint_*") if path.is_dir())
    file = damaged / FILE_NAME
    file.write_bytes(file.read_bytes()[:-100])
    starts = len(list((tmp_path / "log").glob("run-*")))

    # As often as it likes; but every start would find the same.
    with pytest.raises(ray.train.TrainingFailedError) as error:
        fit(loop, {"train": stream}, 1, tmp_path, max_failures=-1)
    text = str(error.value)
    assert f"{file} cannot be read" in text and "that are not JSON" in text
    assert f"earlier checkpoint of the run whose state is intact is {earlier}" in text
    assert len(list((tmp_path / "log").glob("run-*"))) == starts + 1, "no step was trained, and it began once"
    stream.close()

    resumed = tables.stream(60, prefetch=PREFETCH, resume_from=earlier)
    fit(loop, {"train": resumed}, 1, tmp_path, name="another", epochs=1)
    entries = read_log(tmp_path, "another")
    assert next(entry["start"] for entry in entries if "start" in entry) == [0, 2]
    assert delivered(entries) == {at: ids for at, ids in reference(stream, 1).items() if at > (0, 2)}
    resumed.close()
    assert not named_actors(stream) and not named_actors(resumed)

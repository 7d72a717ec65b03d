"""State files are data: whatever is in one, it is read or refused with an error of ours, soon and in little memory."""

from __future__ import annotations

import copy
import functools
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import pytest
from checkpoints import run, saved, state_at
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ray_lance_stream import LanceStreamError, StateError, load_rank_states
from ray_lance_stream.checkpoint import FILE_NAME, read_saved, strict_json
from ray_lance_stream.cli.loading import newest_stamp, versions_in
from ray_lance_stream.plan import OrderSpec, TableIdentity
from ray_lance_stream.provenance import Provenance
from ray_lance_stream.resuming import intact_beside
from ray_lance_stream.state import StreamState

LOCAL = pafs.LocalFileSystem()
RANK_FILE = "lance_stream.rank-00000.json"
MIB = 1024 * 1024
LANCEDB = Provenance(
    table=TableIdentity(version=1, fingerprint="f00d"), order=OrderSpec(num_splits=4, order="lancedb", plan_format=1)
)


def content(**changes: Any) -> dict[str, Any]:
    """What a checkpoint's file holds."""
    made = {
        "kind": "ray_lance_stream.checkpoint",
        "version": 1,
        "stamp": [7, 3],
        "run": "run",
        "streams": {"train": state_at(7, filter="x > 1").to_dict(compact=True)},
    }
    return copy.deepcopy(made | changes)


FOREIGN = {
    "shuffle_seed": 0,
    "num_splits": 4,
    "epoch": 0,
    "samples_consumed_per_split": [1, 1, 1, 1],
    "pack_sequences": 8,
    "eos_id": 0,
    "pad_id": 0,
    "blocks_per_epoch": 8,
    "blocks_emitted_per_split": [1, 1, 1, 1],
    "pack_buffers": {"0": {"tokens": [1, 2], "starts": [0]}},
}

NUMBERS = st.sampled_from([0, -1, 2**31, 2**63 - 1, 2**63, 2**64, 10**18, 10**400, 1e308, -0.0, 0.5])
SCALARS = st.none() | st.booleans() | NUMBERS | st.text(max_size=4) | st.sampled_from(["\ud800", "\x00", "feistel"])
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["train", "base", "exceptions", "0", "\ud800"]), inner, max_size=4)
    ),
    max_leaves=12,
)


def places(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Returns where values stand in nested dicts and lists."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [here] if here else []
    for key, item in inner:
        found += places(item, (*here, key))
    return found


@st.composite
def damaged(draw: st.DrawFn, whole: dict[str, Any]) -> dict[str, Any]:
    """A structure in which some values are others, or gone."""
    made = copy.deepcopy(whole)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(places(made)))
        place: Any = made
        for key in path[:-1]:
            place = place[key]
        if draw(st.booleans()):
            place[path[-1]] = draw(ANYTHING)
        else:
            del place[path[-1]]
        if not places(made):
            break
    return made


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """The bytes of a state file of somebody who means no good, or of a disk that failed."""
    parts = {"train": [draw(st.integers(-1, 3)), draw(NUMBERS)]}
    ranks = {f"rank 0 of {draw(st.sampled_from([1, 2, 999_999_999, 10**30]))}": state_at(7).to_dict()}
    whole = draw(st.sampled_from([content(), content(parts=parts), content(streams=ranks), FOREIGN]))
    text = json.dumps(draw(damaged(whole) | st.just(whole)), ensure_ascii=draw(st.booleans()))
    how = draw(st.sampled_from(["whole", "cut", "bytes", "utf-16", "latin-1", "twice", "nan", "deep", "noise"]))
    data = text.encode(errors="surrogatepass")
    if how == "cut":
        return data[: draw(st.integers(0, len(data)))]
    if how == "bytes":
        at = draw(st.integers(0, len(data)))
        return data[:at] + draw(st.binary(max_size=4)) + data[at + 1 :]
    if how in ("utf-16", "latin-1"):
        return text.encode(how, errors="replace")
    if how == "twice":
        return data.replace(b'"version": 1', b'"version": 1, "version": 1')
    if how == "nan":
        return data.replace(b"7", draw(st.sampled_from([b"NaN", b"Infinity", b"-Infinity", b"1e999", b"7" * 5000])))
    if how == "deep":
        depth = draw(st.sampled_from([50, 900, 100_000]))
        return data.replace(b'"run"', b"[" * depth + b"]" * depth)
    return draw(st.binary(max_size=60)) if how == "noise" else data


def read_or_refuse(read: Callable[[], Any]) -> Any:
    """Returns what was read, or the error of ours; all other errors fail the test, as does much memory."""
    tracemalloc.start()
    try:
        return read()
    except LanceStreamError as error:
        assert len(str(error)) < 2000, "a message, not a dump"
        return error
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 16 * MIB


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a checkpoint that is whole, and one that the tests write anew."""
    path = tmp_path_factory.mktemp("hostile")
    saved(path / "whole", state_at(7))
    (path / "bad").mkdir()
    return path


FUZZ = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(files(), st.sampled_from([FILE_NAME, RANK_FILE]))
def test_any_file_is_read_or_refused(directory: Path, data: bytes, name: str) -> None:
    bad = directory / "bad"
    for other in bad.iterdir():
        other.unlink()
    (bad / name).write_bytes(data)
    for place in (str(bad), str(bad / name)):
        found = read_or_refuse(functools.partial(read_saved, LOCAL, place))
        if not isinstance(found, LanceStreamError):
            assert all(isinstance(state, StreamState) for state in found.streams.values())
    read_or_refuse(lambda: load_rank_states(bad))
    read_or_refuse(lambda: versions_in(str(bad)))
    assert all(type(part) is int for part in newest_stamp(LOCAL, str(bad), (name,)))


@settings(FUZZ, max_examples=25)
@given(files(), st.sampled_from([FILE_NAME, "state.json"]))
def test_the_command_line_says_in_one_line_what_is_wrong(directory: Path, data: bytes, name: str) -> None:
    place = directory / "file" / name
    place.parent.mkdir(exist_ok=True)
    place.write_bytes(data)
    out = directory / "out.json"
    out.unlink(missing_ok=True)
    for arguments in (
        ("inspect", place),
        ("inspect", place, "--global-batch-size", 8, "--json"),
        ("diff", place, directory / "whole"),
        ("convert", place, out, "--to", "state-dict"),
    ):
        done = run(*arguments)
        assert done.exit_code in (0, 1, 2) and "Traceback" not in done.output
        assert done.exception is None or isinstance(done.exception, SystemExit)
        if done.exit_code == 2:
            assert len(done.stderr.splitlines()) <= 4 and len(done.stderr) < 3000


@settings(FUZZ, max_examples=100)
@given(damaged(FOREIGN))
def test_a_state_of_lancedb_is_read_or_refused(value: dict[str, Any]) -> None:
    found = read_or_refuse(lambda: StreamState.from_dict(value, of=LANCEDB))
    if isinstance(found, StreamState):
        again = json.loads(json.dumps(found.to_dict()))
        assert StreamState.from_dict(again).to_dict() == found.to_dict()
    else:
        assert isinstance(found, StateError)


@settings(FUZZ, max_examples=20)
@given(st.binary(max_size=80) | files())
def test_ray_trains_list_of_checkpoints_is_data_as_well(directory: Path, data: bytes) -> None:
    run_directory = directory / "run"
    saved(run_directory / "checkpoint_1", state_at(3))
    saved(run_directory / "checkpoint_2", state_at(4))
    snapshot = (
        b'{"checkpoint_results": [{"checkpoint_dir_name": "checkpoint_2"}], "checkpoint_report_indices": [1e999]}'
    )
    for text in (data, snapshot, b"[" * 100_000):
        (run_directory / "checkpoint_manager_snapshot.json").write_bytes(text)
        assert intact_beside(LOCAL, str(run_directory / "checkpoint_2"), lambda _: True) is not None


CLAIMS: dict[str, dict[str, Any]] = {
    "replicas": content(parts={"train": [0, 10**15]}),
    "replicas of as many splits": content(parts={"train": [0, 10**9]}),
    "ranks": content(streams={f"rank 0 of {10**9 - 1}": state_at(7).to_dict()}),
    "a rank": content(streams={"rank 999999999": state_at(7).to_dict()}),
    "a rank of many digits": content(streams={f"rank {'9' * 5000}": state_at(7).to_dict()}),
    "splits": content(streams={"train": state_at(7).to_dict(compact=True) | {"num_splits": 10**12}}),
    "streams": content(streams={f"stream {i}": None for i in range(50_000)}),
}


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.timeout(20)
def test_a_few_bytes_claim_neither_memory_nor_time(tmp_path: Path, claim: str) -> None:
    (tmp_path / RANK_FILE).write_text(json.dumps(CLAIMS[claim]))
    found = read_or_refuse(lambda: load_rank_states(tmp_path))
    assert isinstance(found, StateError)
    done = run("inspect", tmp_path, "--name", "other")
    assert done.exit_code == 2 and len(done.stderr) < 3000 and "Traceback" not in done.stderr


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    """Readers differ in which of the two counts."""
    text = json.dumps(content())
    (tmp_path / FILE_NAME).write_text(text.replace('"epoch": 1', '"epoch": 1, "epoch": 2'))
    assert json.loads((tmp_path / FILE_NAME).read_text())["streams"]["train"]["epoch"] == 2
    with pytest.raises(StateError, match="not JSON"):
        read_saved(LOCAL, str(tmp_path))
    for constant in (b"NaN", b"Infinity", b"-Infinity"):
        with pytest.raises(ValueError, match="no number of JSON"):
            strict_json(b'{"x": ' + constant + b"}")


def test_nothing_that_python_would_execute_is(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    pickled = b"cposix\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR."
    for name in (FILE_NAME, RANK_FILE):
        (tmp_path / name).write_bytes(pickled)
    with pytest.raises(StateError):
        read_saved(LOCAL, str(tmp_path))
    with pytest.raises(StateError):
        load_rank_states(tmp_path)
    assert not marker.exists()

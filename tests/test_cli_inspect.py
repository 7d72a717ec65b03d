"""``inspect`` and ``diff``: what checkpoints say, and how two of them differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import drifted, run, saved, state_at, state_of
from conftest import Tables, rows_from

from ray_lance_stream.checkpoint import FILE_NAME, Streams
from ray_lance_stream.errors import StateMismatchError
from ray_lance_stream.state import merge_states
from ray_lance_stream.testing import global_batches

# --- inspect -----------------------------------------------------------------------------------------


def test_a_run_step_by_step(tables: Tables, tmp_path: Path) -> None:
    """Of every checkpoint: how far, and how much is left, as the run itself counts it."""
    stream = tables.stream(50, filter="id < 46")
    batches = global_batches(stream, 2)
    for k, batch in enumerate(batches, 1):
        place = saved(tmp_path / f"{k}", state_of(batch))
        options = ("--global-batch-size", 8, "--uri", tables.uri(50), "--table", "t")
        done = run("inspect", place, *options, "--json")
        assert (done.exit_code, done.stderr) == (0, "")
        said = json.loads(done.stdout)
        assert (said["path"], said["files"], list(said["streams"])) == (str(place), [FILE_NAME], ["train"])
        entry = said["streams"]["train"]
        consumed = sum(len(before.columns["id"]) for before in batches[:k])
        counts = batch.state["samples_consumed_per_split"]
        assert entry["progress"] == {
            "epoch": 0,
            "rows_consumed": consumed,
            "cycles_completed": counts[0],
            "rows_per_split": {"min": counts[0], "max": counts[0], "most": counts[0], "different": {}},
            "rows_skipped_per_split": {},
        }
        assert entry["provenance"] == {
            "num_splits": 4,
            "shuffle_seed": 7,
            **batch.state["provenance"],
        }
        assert entry["table"] == {
            "latest_version": 2,
            "table_rows": 50,
            "rows": 46,
            "dropped_rows": 2,
            "global_batch_size": 8,
            "step": batch.step,
            "num_steps": len(batches),
            "steps_left": len(batches) - k,
            "cycles_into_next_step": 0,
            "cycles_left": 11 - counts[0],
            "rows_left": sum(len(after.columns["id"]) for after in batches[k:]),
        }


def test_the_text(tables: Tables, tmp_path: Path) -> None:
    uri, table = tables.own(50)
    stream = tables.stream(uri=uri, filter="id < 46", shuffle_clump_size=2, drop_last=True)
    place = saved(tmp_path, state_of(global_batches(stream)[2]))
    fingerprint = stream.config.identity.fingerprint
    assert run("inspect", place, columns=100).stdout.splitlines() == [
        f"{place} ({FILE_NAME})",
        "",
        "train",
        "  epoch     0 (counted from 0)",
        "  consumed  24 rows: 6 of each of 4 splits",
        f"  table     version 2, fingerprint {fingerprint}",
        "  filter    id < 46",
        "  order     clumps of 2 rows shuffled with seed 7 (feistel, plan format 1)",
        "  splits    4",
    ]
    table.add(rows_from(50, 5))
    whole = ("--uri", uri, "--table", "t", "--global-batch-size", 8, "--drop-last")
    assert run("inspect", place, *whole, columns=140).stdout.splitlines()[3:9] == [
        "  epoch     0 (counted from 0)",
        "  consumed  24 rows: 6 of each of 4 splits",
        "  step      3 of 5 finished, with global batches of 8 rows",
        "  left      16 rows in 2 steps of this epoch (4 cycles)",
        "  left out  6 rows of every epoch, which fill no cycle or step",
        f"  table     version 2, fingerprint {fingerprint}; found there, 50 rows, 46 of which satisfy the filter; "
        "the latest is 3",
    ]


def test_the_step_without_a_table(tmp_path: Path) -> None:
    place = saved(tmp_path, state_at(7))
    for size, step, inside in ((28, 1, 0), (4, 7, 0), (12, 2, 1), (400, 0, 7)):
        said = json.loads(run("inspect", place, "--global-batch-size", size, "--json").stdout)
        assert said["streams"]["train"]["steps"] == {
            "global_batch_size": size,
            "step": step,
            "cycles_into_next_step": inside,
        }
    assert "  step      7 finished, with global batches of 4 rows\n" in run(
        "inspect", place, "--global-batch-size", 4
    ).stdout  # fmt: skip
    text = " ".join(run("inspect", place, "--global-batch-size", 12).stdout.split())
    assert "2 finished, with global batches of 12 rows; 1 cycle into the next one: this is the epoch's short" in text


def test_splits_that_drifted_apart(tmp_path: Path) -> None:
    place = saved(tmp_path, drifted([5, 5, 6, 5, 9], [5, 8, 6, 5, 10]))
    entry = json.loads(run("inspect", place, "--json").stdout)["streams"]["train"]
    assert entry["progress"] == {
        "epoch": 1,
        "rows_consumed": 30,
        "cycles_completed": 5,
        "rows_per_split": {"min": 5, "max": 9, "most": 5, "different": {"2": 6, "4": 9}},
        "rows_skipped_per_split": {"1": 3, "4": 1},
    }
    text = " ".join(run("inspect", place).stdout.split())
    assert "30 rows: 5 to 9 of each of 5 splits (split 2: 6, split 4: 9, the others: 5); 5 cycles complete" in text
    assert "skipped 4 rows (split 1: 3, split 4: 1)" in text


def test_many_different_splits_do_not_fill_the_screen(tmp_path: Path) -> None:
    counts = [3] * 600 + list(range(4, 404))
    text = run("inspect", saved(tmp_path, drifted(counts, counts))).stdout
    assert "and 392 more splits" in text and len(text.splitlines()) < 20


def test_several_streams_and_files_of_ranks(tmp_path: Path) -> None:
    for rank in range(3):
        samples = [6 if split == rank else 5 for split in range(3)]
        states: Streams = {"train": drifted(samples, samples)} | ({"validation": state_at(0)} if rank == 1 else {})
        saved(tmp_path, states, rank=rank)
    said = json.loads(run("inspect", tmp_path, "--json").stdout)
    assert said["files"] == [f"lance_stream.rank-0000{rank}.json" for rank in range(3)]
    assert list(said["streams"]) == ["train", "validation"]
    assert said["streams"]["train"]["progress"]["rows_consumed"] == 18
    assert list(json.loads(run("inspect", tmp_path, "--name", "validation", "--json").stdout)["streams"]) == [
        "validation"
    ]
    assert "(lance_stream.rank-00000.json and 2 more)" in run("inspect", tmp_path, columns=200).stdout


@pytest.mark.parametrize("form", ["directory", "file", "uri", "state dict"])
def test_every_way_to_name_a_checkpoint(tmp_path: Path, form: str) -> None:
    state = state_at(7, filter="x > 1")
    place: object = saved(tmp_path, state)
    if form == "file":
        place = tmp_path / FILE_NAME
    elif form == "uri":
        place = f"file://{tmp_path}"
    elif form == "state dict":
        place = tmp_path / "state.json"
        place.write_text(json.dumps(state.to_dict()))
    entry = json.loads(run("inspect", place, "--json").stdout)["streams"]["train"]
    assert entry["progress"]["rows_consumed"] == 28
    assert entry["provenance"]["filter"] == "x > 1"
    assert run("inspect", place, "--name", "train").exit_code == 0


def test_a_checkpoint_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\nx"
    done = run("inspect", saved(tmp_path, {evil: state_at(filter=evil)}))
    assert done.exit_code == 0 and "\\x1b]0;owned" in done.stdout
    assert all(line.isprintable() for line in done.stdout.split("\n"))


def test_nothing_in_a_file_is_executed(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    pickled = b"cposix\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR."
    for name in (FILE_NAME, "state.json", "state.pt"):
        (tmp_path / name).write_bytes(pickled)
        done = run("inspect", tmp_path / name)
        assert done.exit_code == 2 and "not JSON" in done.stderr
    assert not marker.exists()


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("[1, 2]", "holds no stream state. Found: a list"),
        ("{}", "not a stream state"),
        ('{"samples_consumed_per_split": [1], "num_splits": 1}', "does not say what data it belongs to"),
        ('{"kind": "ray_lance_stream.checkpoint", "version": 99, "streams": {}}', "format version 99"),
        ("[" * 100_000, "not JSON"),
        ("", "not JSON"),
    ],
)
def test_foreign_files(tmp_path: Path, content: str, named: str) -> None:
    (tmp_path / "some.json").write_text(content)
    done = run("inspect", tmp_path / "some.json")
    assert (done.exit_code, done.stdout) == (2, "")
    assert named in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_run_directory_stands_for_what_the_run_would_go_on_from(tmp_path: Path) -> None:
    for k in range(4):
        saved(tmp_path / f"checkpoint_{k}", state_at(k), stamp=(1, k))
    (tmp_path / "checkpoint_5").mkdir()  # reported without our state
    # The last one was written, and the run broke off before all workers had reported it.
    content = {
        "checkpoint_results": [{"checkpoint_dir_name": f"checkpoint_{k}"} for k in (2, 0, 1, 5)],
        "checkpoint_report_indices": [2, 0, 1, 5],
    }
    (tmp_path / "checkpoint_manager_snapshot.json").write_text(json.dumps(content))
    done = run("inspect", tmp_path)
    assert done.exit_code == 0 and f"{tmp_path}/checkpoint_2 (lance_stream.json)" in done.stdout


def test_without_ray_trains_list_a_run_directory_stands_for_its_newest_checkpoint(tmp_path: Path) -> None:
    for k, name in enumerate(("b", "c", "a")):
        saved(tmp_path / f"checkpoint_{name}", state_at(k), stamp=(1, k))
    (tmp_path / "other").mkdir()
    (tmp_path / "checkpoint_manager_snapshot.json").write_text('{"checkpoint_results": []}')
    for place in (tmp_path, tmp_path / "checkpoint_manager_snapshot.json"):
        done = run("inspect", place)
        assert done.exit_code == 0 and f"{tmp_path}/checkpoint_a (lance_stream.json)" in done.stdout
        assert "8 rows: 2 of each" in done.stdout
    (tmp_path / "empty").mkdir()
    empty = run("inspect", tmp_path / "empty")
    assert empty.exit_code == 2 and "no lance_stream.json" in empty.stderr


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--global-batch-size", 10), "pass 8 or 12"),
        (("--uri", "db"), "go together"),
        (("--table", "t"), "go together"),
        (("--name", "validation"), "no stream 'validation'"),
        (("--uri", "no/database", "--table", "t"), "does not exist"),
    ],
)
def test_mistakes(tmp_path: Path, options: tuple[object, ...], named: str) -> None:
    done = run("inspect", saved(tmp_path, state_at()), *options)
    assert (done.exit_code, done.stdout) == (2, "")
    assert named in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


def test_another_table_is_not_taken_for_it(tables: Tables, tmp_path: Path) -> None:
    place = saved(tmp_path, state_of(global_batches(tables.stream(50))[0]))
    done = run("inspect", place, "--uri", tables.uri(48), "--table", "t")
    assert (done.exit_code, done.stdout) == (2, "") and "table differs" in done.stderr
    gone = run("inspect", saved(tmp_path, state_at(version=77)), "--uri", tables.uri(48), "--table", "t")
    assert gone.exit_code == 2 and "version 77" in gone.stderr


# --- diff --------------------------------------------------------------------------------------------

BASE: dict[str, Any] = {"filter": "x > 1", "shuffle_seed": 5}
CHANGES: list[tuple[dict[str, Any], dict[str, list[Any]]]] = [
    ({"filter": None}, {"filter": ["x > 1", None]}),
    ({"shuffle_seed": 6}, {"shuffle_seed": [5, 6]}),
    ({"shuffle_clump_size": 9}, {"shuffle_clump_size": [1, 9]}),
    ({"shuffle": False}, {"shuffle": [True, False]}),
    ({"version": 4}, {"table_version": [3, 4]}),
    ({"epoch": 2}, {"epoch": [1, 2]}),
]


@pytest.mark.parametrize(("change", "expected"), CHANGES)
def test_each_field(tmp_path: Path, change: dict[str, Any], expected: dict[str, list[Any]]) -> None:
    first = saved(tmp_path / "a", state_at(**BASE))
    second = saved(tmp_path / "b", state_at(**BASE | change))
    done = run("diff", first, second, "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout) == {"first": str(first), "second": str(second), "streams": {"train": expected}}
    text = run("diff", first, second)
    assert text.exit_code == 1
    field, values = next(iter(expected.items()))
    cells = [field, *("none" if value is None else str(value) for value in values)]
    assert text.stdout.split() == " ".join(["train:", "first", "second", *cells]).split()


def test_the_same(tmp_path: Path) -> None:
    first, second = saved(tmp_path / "a", state_at(**BASE)), saved(tmp_path / "b", state_at(**BASE), rank=0)
    done = run("diff", first, second)
    assert (done.exit_code, done.stdout) == (0, "train: no difference\n")
    assert json.loads(run("diff", first, second, "--json").stdout)["streams"] == {"train": {}}


def test_progress(tables: Tables, tmp_path: Path) -> None:
    batches = global_batches(tables.stream(50))
    first, second = (saved(tmp_path / name, state_of(batches[k])) for name, k in (("a", 0), ("b", 3)))
    assert json.loads(run("diff", first, second, "--json").stdout)["streams"]["train"] == {
        "rows_consumed": [8, 32],
        "cycles_completed": [2, 8],
        "rows_per_split": [
            {"min": count, "max": count, "most": count, "different": {}} for count in (2, 8)
        ],
    }  # fmt: skip
    assert run("diff", first, second).stdout.splitlines() == [
        "train:",
        "                    first      second",
        "  rows_consumed     8          32",
        "  cycles_completed  2          8",
        "  rows_per_split    2 of each  8 of each",
    ]


def test_drift_is_a_difference(tmp_path: Path) -> None:
    first = saved(tmp_path / "a", drifted([5, 5, 6], [5, 5, 6]))
    second = saved(tmp_path / "b", drifted([6, 5, 5], [6, 5, 7]))
    done = run("diff", first, second)
    assert done.exit_code == 1
    lines = [line.split("  ") for line in done.stdout.splitlines()[2:]]
    assert [[cell.strip() for cell in line if cell] for line in lines] == [
        ["rows_per_split", "5 to 6, 1 differ", "5 to 6, 1 differ"],
        ["rows_skipped", "none", "2 in 1 splits"],
    ]


def test_what_an_unshuffled_order_ignores(tmp_path: Path) -> None:
    states = [state_at(shuffle=False, shuffle_seed=seed, shuffle_clump_size=seed + 1) for seed in (1, 2)]
    first, second = (saved(tmp_path / str(k), state) for k, state in enumerate(states))
    assert merge_states(states) == states[0], "a run takes them for the same, too"
    assert run("diff", first, second).exit_code == 0


@pytest.mark.parametrize("change", [change for change, _ in CHANGES])
def test_it_differs_where_states_do_not_fit_together(change: dict[str, Any]) -> None:
    with pytest.raises(StateMismatchError):
        merge_states([state_at(**BASE), state_at(**BASE | change)])


def test_long_values_stand_below_each_other(tmp_path: Path) -> None:
    filters = [f"label IN ({', '.join(map(str, range(start, start + 40)))})" for start in (0, 1)]
    first, second = (saved(tmp_path / str(k), state_at(filter=text)) for k, text in enumerate(filters))
    lines = run("diff", first, second).stdout.splitlines()
    assert lines[:2] == ["train:", "  filter"] and all(len(line) <= 80 for line in lines)
    words = " ".join(" ".join(lines[2:]).split())
    assert words == f"first {filters[0]} second {filters[1]}"


def test_streams_of_one_only(tmp_path: Path) -> None:
    first = saved(tmp_path / "a", {"train": state_at(), "old": state_at()})
    second = saved(tmp_path / "b", {"train": state_at(), "new": state_at()})
    done = run("diff", first, second)
    assert done.exit_code == 1
    assert done.stdout.splitlines() == [
        "new:",
        "  only in the second checkpoint",
        "old:",
        "  only in the first checkpoint",
        "train: no difference",
    ]


def test_a_state_dict_is_compared_with_the_one_stream(tmp_path: Path) -> None:
    first = saved(tmp_path / "a", {"validation": state_at(7)})
    (tmp_path / "state.json").write_text(json.dumps(state_at(7).to_dict()))
    for pair in ((first, tmp_path / "state.json"), (tmp_path / "state.json", first)):
        done = run("diff", *pair)
        assert (done.exit_code, done.stdout) == (0, "validation: no difference\n")


def test_errors_are_no_difference(tmp_path: Path) -> None:
    first = saved(tmp_path / "a", state_at())
    done = run("diff", first, tmp_path / "b")
    assert (done.exit_code, done.stdout) == (2, "") and "b does not exist" in done.stderr
    assert run("diff", first).exit_code == 2

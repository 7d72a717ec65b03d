"""The soak example: its proof finds what went wrong, its numbers are right, and a minute of it passes."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from soak.faults import RESTARTS, Event, Faults
from soak.proof import Proof, prove
from soak.sampling import Sample, Store, growth, judge
from soak.steplog import Following, LogWriter, Share, Worker, read_log
from soak.timeline import events_text, restarts, samples_text, steps_over_time, world_sizes

ROOT = Path(__file__).parent.parent
SPLITS, ROWS = 4, 20
MIB = 1024 * 1024
# Two epochs of two steps of two cycles and a short one; rows in an order that is none of the numbers' own.
REFERENCE = {
    (epoch, step + 1): np.random.default_rng(epoch).permutation(ROWS)[8 * step : 8 * step + 8].tolist()
    for epoch in range(2)
    for step in range(3)
}
ORDER = list(REFERENCE)


def group(
    number: int, world: int, first: int, steps: int, *, began_s: float = 0.0, step_s: float = 1.0
) -> list[Worker]:
    """A worker group that was handed some steps of the reference, from the ``first`` of all epochs on."""
    start = (0, 0) if first == 0 else ORDER[first - 1]
    workers = []
    for rank in range(world):
        splits = (rank * SPLITS // world, (rank + 1) * SPLITS // world)
        head = {"splits": splits, "start": start, "weights": start, "time_s": began_s, "node": f"node {rank}"}
        worker = Worker(group=number, rank=rank, world=world, **head)  # type: ignore[arg-type]
        for place, at in enumerate(ORDER[first : first + steps]):
            ids = np.array(REFERENCE[at]).reshape(-1, SPLITS)[:, slice(*splits)].ravel().tolist()
            worker.shares.append(Share(time_s=began_s + step_s * place, at=at, ids=ids))
        workers.append(worker)
    return workers


def run() -> list[list[Worker]]:
    """Three workers, then two from an older checkpoint on, then one. The first lost a step half-way."""
    groups = [group(1, 3, 0, 4), group(2, 2, 2, 3, began_s=20), group(3, 1, 5, 1, began_s=40)]
    groups[0][2].shares.pop()  # the last step reached two of three
    return groups


def proven(groups: list[list[Worker]]) -> Proof:
    return prove(groups, REFERENCE, SPLITS, ROWS)


def changed(worker: Worker, place: int, ids: list[int]) -> None:
    worker.shares[place] = replace(worker.shares[place], ids=ids)


def test_a_run_that_is_as_it_should_be() -> None:
    proof = proven(run())
    assert proof.problems == []
    assert (proof.steps, proof.epochs, proof.rows) == (6, 2, 2 * ROWS)
    assert (proof.replayed, proof.replays, proof.partial) == (1, [0, 1, 0], 1)
    assert proof.shares == 3 * 4 - 1 + 2 * 3 + 1


def test_a_lost_row_is_found() -> None:
    groups = run()
    worker = groups[1][1]
    row = worker.shares[2].ids[-1]
    changed(worker, 2, worker.shares[2].ids[:-1])
    problems = proven(groups).problems
    assert any(f"rank 1 of worker group 2 of 2 workers: 1 rows were lost ({row})" in text for text in problems)
    assert f"epoch 1: 1 rows never came ({row})" in problems


def test_a_doubled_row_is_found() -> None:
    groups = run()
    worker = groups[2][0]
    ids = worker.shares[0].ids
    changed(worker, 0, [*ids[:-1], ids[0]])
    problems = proven(groups).problems
    assert f"epoch 1: 1 rows came more than once ({ids[0]})" in problems
    assert f"epoch 1: 1 rows never came ({ids[-1]})" in problems


def test_swapped_rows_are_found() -> None:
    groups = run()
    worker = groups[0][0]
    first, second, *rest = worker.shares[1].ids
    changed(worker, 1, [second, first, *rest])
    (share, whole) = proven(groups).problems
    assert f"rank 0 of worker group 1 of 3 workers: rows out of order from place 0 on: {second} instead" in share
    assert "epoch 0, step 2 of worker group 1 of 3 workers: rows out of order" in whole


def test_a_swap_in_a_step_that_was_in_vain_is_found() -> None:
    groups = run()
    worker = groups[0][1]
    changed(worker, 3, worker.shares[3].ids[::-1])  # only two of three were handed this step
    (problem,) = proven(groups).problems
    assert "epoch 1, step 1, rank 1 of worker group 1 of 3 workers: rows out of order" in problem


def test_a_step_that_is_run_again_differently_is_found() -> None:
    groups = run()
    changed(groups[1][0], 0, groups[1][0].shares[0].ids[::-1])
    assert "epoch 0, step 3 was delivered differently by worker group 2 of 2 workers" in proven(groups).problems


def test_a_step_lost_at_a_restart_is_found() -> None:
    problems = proven([group(1, 3, 0, 2), group(2, 2, 3, 3)]).problems
    assert problems[0] == "worker group 2 of 2 workers began 1 steps after the last one delivered: 1 steps were lost"
    assert any(text.startswith("epoch 0: 4 rows never came") for text in problems)


def test_a_step_handed_out_twice_is_found() -> None:
    groups = run()
    for worker in groups[1]:
        worker.shares.insert(1, worker.shares[0])
    assert "was handed epoch 0, step 3 instead of epoch 1, step 1" in proven(groups).problems[0]


def test_steps_out_of_order_are_found() -> None:
    groups = run()
    for worker in groups[1]:
        worker.shares.reverse()
    assert "was handed epoch 1, step 2 instead of epoch 0, step 3" in proven(groups).problems[0]


def test_weights_that_stand_elsewhere_than_the_stream_are_found() -> None:
    groups = run()
    groups[1][1] = replace(groups[1][1], weights=(0, 1))
    (problem,) = proven(groups).problems
    assert "rank 1" in problem and "weights of epoch 0, step 1 and the stream after epoch 0, step 2" in problem


def test_workers_that_begin_at_different_steps_are_found() -> None:
    groups = run()
    groups[1][1] = replace(groups[1][1], start=(0, 1), weights=(0, 1))
    assert "began at different steps: [(0, 1), (0, 2)]" in proven(groups).problems[0]


def test_the_log_comes_back_as_it_was_written(tmp_path: Path) -> None:
    following = Following(tmp_path)
    assert following.newest() == (0, 0)
    for number, world in ((7, 1), (12, 2)):
        for rank in range(world):
            head = {"splits": [0, 4], "start": [0, 1], "weights": [0, 1], "node": "n"}
            log = LogWriter(str(tmp_path), group=number, rank=rank, world=world, **head)
            log.share((0, 2), [rank, 5])
            log.saved((0, 2), "preempted")
    log.error(ValueError("no"))
    with (tmp_path / "12-1.jsonl").open("a") as file:
        file.write('{"at": [0, 3], "ids": [')  # killed while it wrote
    assert following.newest() == (12, 1)
    (old,), (first, second) = read_log(tmp_path)
    assert (old.group, old.world, old.start, old.splits) == (7, 1, (0, 1), (0, 4))
    assert [(share.at, share.ids) for share in second.shares] == [((0, 2), [1, 5])]
    assert second.saved == [((0, 2), "preempted")]
    assert (first.error, second.error) == ([], ["builtins", "ValueError", "no"])


def test_what_a_restart_cost() -> None:
    groups, proof = run(), proven(run())
    events = [
        Event(time_s=1.0, kind="manager killed", detail="pid 1"),
        Event(time_s=4.0, kind="worker killed", detail="pid 2"),
        Event(time_s=5.0, kind="trainer node lost", detail="node a"),  # while the run recovers
        Event(time_s=33.0, kind="trainer node preempted", detail="node b", noticed_s=21.0),
    ]
    first, second = restarts(groups, events, proof)
    assert (first.cause, second.cause) == (events[1], events[3])
    assert (first.world, second.world) == ((3, 2), (2, 1))
    assert (first.cost_s, second.cost_s) == (16.0, 7.0)
    assert (first.pause_s, second.pause_s) == (17.0, 18.0)
    assert (first.replayed, second.replayed) == (1, 0)
    assert world_sizes(groups) == [(0, 3), (3, 0), (20, 2), (22, 0), (40, 1), (40, 0)]
    assert steps_over_time(groups, 3)[2:6] == [(2, 3), (3, 4), (20, 3), (21, 4)]

    lines = events_text(events, [first, second], 0.0).splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["1.0", "4.0", "5.0", "33.0"]
    assert lines[1].split()[-5:] == ["3", "->", "2", "16.0", "1"] and lines[2].endswith("(node a)")


def test_a_group_was_ended_by_what_it_prepared_for_or_by_what_came_with_its_last_step() -> None:
    groups = run()
    groups[1][0].saved.append(((1, 2), "preempted"))
    added = [Event(time_s=time_s, kind="trainer node added", detail="node c") for time_s in (1.0, 20.5)]
    killed = Event(time_s=4.0, kind="worker killed", detail="pid 2")
    taken = Event(time_s=33.0, kind="trainer node preempted", detail="node b", noticed_s=21.0)
    events = [added[0], killed, added[1], taken]
    assert [restart.cause for restart in restarts(groups, events, proven(groups))] == [killed, taken]
    assert [restart.cause for restart in restarts(groups, added, proven(groups))] == added


def test_a_restart_without_a_cause_is_shown() -> None:
    groups = run()
    found = restarts(groups, [Event(time_s=4.0, kind="manager killed", detail="pid 1")], proven(groups))
    assert [restart.cause for restart in found] == [None, None]
    assert [restart.cost_s for restart in found] == [17.0, 18.0]
    assert events_text([], found, 0.0).count("without a cause") == 2


def test_groups_that_were_handed_nothing_are_passed_over() -> None:
    groups = run()
    groups.insert(1, group(2, 2, 2, 0, began_s=10))
    cause = Event(time_s=4.0, kind="worker killed", detail="pid 2")
    first, _ = restarts(groups, [cause], proven(groups))
    assert (first.world, first.cost_s, first.replayed) == ((3, 2), 16.0, 1)


def samples(role: str, pid: int, mib: list[float], *, began_s: float = 0.0, every_s: float = 10.0) -> list[Sample]:
    return [
        Sample(
            time_s=began_s + every_s * place,
            role=role,
            pid=pid,
            rss_bytes=int((value + 50) * MIB),
            private_bytes=int(value * MIB),
            files=10,
        )
        for place, value in enumerate(mib)
    ]


def test_one_slope_through_lives_at_different_levels() -> None:
    found = growth("x", [([0, 60, 120], [5, 6, 7]), ([200, 260, 320], [105, 106, 107])], 0.5)
    assert found.per_minute == pytest.approx(1.0) and found.mean == 56 and found.span_s == 320
    assert found.is_judged and found.is_bad
    assert not growth("x", [([0, 60], [5, 9])], 0.5).is_judged
    assert growth("x", [], 0.5).per_minute == 0 and not growth("x", [([3], [1])], 0.5).is_bad


@pytest.mark.parametrize(("per_sample", "grows"), [(1.0, True), (0.0, False), (-1.0, False)])
def test_growth_is_judged_after_the_warm_up(per_sample: float, grows: bool) -> None:
    warm = 36  # six minutes of samples; a new process fills its memory within the first twenty seconds
    controller = samples("controller", 1, [100 + per_sample * place for place in range(2 * warm)])
    manager = samples("manager", 2, [20, 60, 100, *[100.0] * (warm - 3)], began_s=10.0 * warm)
    found = {g.what: g for g in judge([*controller, *manager], [], 10.0 * warm)}
    assert found["memory of the controller, MiB"].per_minute == pytest.approx(6 * per_sample)
    assert found["memory of the controller, MiB"].is_bad is grows
    assert found["memory of the manager, MiB"].per_minute == pytest.approx(0)
    assert not any(g.is_bad for what, g in found.items() if "controller, MiB" not in what and "actors" not in what)


def test_the_run_over_time_as_a_table() -> None:
    seen = sorted(
        samples("controller", 1, [10, 11, 12, 13, 14]) + samples("prefetcher", 2, [20, 21, 22, 23, 24]),
        key=lambda sample: sample.time_s,
    )
    stores = [Store(time_s=15.0, used_bytes=3 * MIB, objects=7)]
    lines = [line.split() for line in samples_text(run(), seen, stores, 3, 0.0).splitlines()[1:]]
    assert [line[:3] for line in lines] == [
        ["0.0", "1", "3"],
        ["10.0", "4", "-"],
        ["20.0", "3", "2"],
        ["30.0", "5", "-"],
        ["40.0", "6", "-"],
    ]
    assert lines[2][3:] == ["62", "MiB", "-", "-", "72", "MiB", "20", "1", "7", "3", "MiB"]


class Cluster:
    """As much of the cluster as dealing asks for: three nodes of each pool."""

    def of(self, pool: str) -> list[str]:
        return [pool] * 3


def test_in_the_end_only_trainers_are_harmed() -> None:
    nodes: Any = Cluster()
    faults = Faults(nodes, Following(Path()), Random(3), print)
    assert {faults._next() for _ in range(200)} >= {kind for kind in RESTARTS if not kind.endswith("added")}
    faults._spares = True
    late = {faults._next() for _ in range(200)} - {"trainer node added", "loader node added"}
    assert late == {"worker killed", "trainer node lost", "trainer node preempted"}


@pytest.mark.cluster
@pytest.mark.fault
@pytest.mark.timeout(600)
def test_a_minute_of_it(tmp_path: Path, rng: Random) -> None:
    command = [sys.executable, str(ROOT / "examples" / "elastic_soak.py"), "--output", str(tmp_path / "soak")]
    done = subprocess.run(
        [*command, "--minutes", "1", "--seed", str(rng.randrange(1000))],
        env=os.environ | {"RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    facts = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if len(line.split(maxsplit=1)) == 2)
    assert facts["verdict"] == "passed"
    assert int(facts["faults"].split(",")[0]) >= 1
    assert (tmp_path / "soak" / "timeline.txt").read_text() in done.stdout
    assert (tmp_path / "soak" / "timeline.png").read_bytes().startswith(b"\x89PNG")

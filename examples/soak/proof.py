"""Proves from the log of a run that every row came exactly once per epoch, in order. Numbers in, findings out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from soak.steplog import At, Worker

Steps = dict[At, list[int]]  # the ids of each step, in canonical order
_SHOWN = 5  # of rows and of problems: the rest is more of the same


@dataclass
class Proof:
    """What the log shows.

    Attributes:
        steps: Steps of the history that the trained weights come from.
        epochs: Whole epochs among them.
        rows: Rows of these steps.
        shares: Workers' parts of steps that were compared, those of half-delivered steps included.
        replayed: Steps delivered again after a restart, the same as before.
        replays: The same, for each worker group.
        partial: Steps that a group which was killed delivered to some of its workers only.
        problems: What is not as it should be; empty if all is proven.
    """

    steps: int = 0
    epochs: int = 0
    rows: int = 0
    shares: int = 0
    replayed: int = 0
    replays: list[int] = field(default_factory=list)
    partial: int = 0
    problems: list[str] = field(default_factory=list)


def prove(groups: Sequence[Sequence[Worker]], reference: Steps, num_splits: int, table_rows: int) -> Proof:
    """Compares what the worker groups were handed with what one uninterrupted reader gets.

    The history of a run is what its weights have seen: each group goes on from a checkpoint, and what older groups
    were handed after that checkpoint was in vain. The history must be the reader's steps, without a gap or a
    repetition, and so must be every share that was ever delivered, also in vain.

    Args:
        groups: The worker groups, oldest first, each with its workers by rank.
        reference: The reader's steps, in its order, up to the end of the last epoch that the run has touched.
        num_splits: Splits of the stream.
        table_rows: Rows of the table, whose ids are 0, 1, ...; all of them belong to an epoch.
    """
    proof = Proof()
    order = list(reference)
    per_epoch = sum(epoch == 0 for epoch, _ in order)
    history: list[tuple[At, list[int]]] = []
    first_delivery: Steps = {}
    for workers in groups:
        _check_start(workers, proof)
        name, begin = _name(workers), min(w.start[0] * per_epoch + w.start[1] for w in workers)
        if begin > len(history):
            lost = begin - len(history)
            proof.problems.append(f"{name} began {lost} steps after the last one delivered: {lost} steps were lost")
            history += [(at, []) for at in order[len(history) : begin]]
        del history[begin:]
        proof.replays.append(0)
        if problem := _out_of_order(workers, order[begin:]):
            proof.problems.append(f"{name}, {problem}")
            continue
        for at, shares in _steps_of(workers).items():
            proof.shares += len(shares)
            for worker, ids in shares:
                if problem := _compare(ids, _share_of(reference[at], worker, num_splits)):
                    proof.problems.append(f"{_step(at)}, rank {worker.rank} of {name}: {problem}")
            if len(shares) < workers[0].world:
                proof.partial += 1
                continue  # if the run goes on after this step all the same, the history has a gap, which is found
            whole = _joined(shares)
            if problem := _compare(whole, reference[at]):
                proof.problems.append(f"{_step(at)} of {name}: {problem}")
            if at in first_delivery:
                proof.replays[-1] += 1
                if whole != first_delivery[at]:
                    proof.problems.append(f"{_step(at)} was delivered differently by {name}")
            first_delivery.setdefault(at, whole)
            history.append((at, whole))
    proof.replayed = sum(proof.replays)
    proof.steps, proof.epochs = len(history), len(history) // per_epoch
    proof.rows = sum(len(ids) for _, ids in history)
    proof.problems += _count_rows(history, proof.epochs, table_rows)
    return proof


def _check_start(workers: Sequence[Worker], proof: Proof) -> None:
    name = _name(workers)
    starts = {worker.start for worker in workers}
    if len(starts) > 1:
        proof.problems.append(f"the workers of {name} began at different steps: {sorted(starts)}")
    for worker in workers:
        if worker.weights != worker.start:
            proof.problems.append(
                f"rank {worker.rank} of {name} began with weights of {_step(worker.weights)} "
                f"and the stream after {_step(worker.start)}"
            )


def _out_of_order(workers: Sequence[Worker], order: list[At]) -> str | None:
    """Says which worker was not handed one step after the other."""
    for worker in workers:
        for share, expected in zip(worker.shares, [*order, None], strict=False):
            if share.at != expected:
                return f"rank {worker.rank}: was handed {_step(share.at)} instead of {_step(expected or 'the end')}"
    return None


def _steps_of(workers: Sequence[Worker]) -> dict[At, list[tuple[Worker, list[int]]]]:
    """The shares of each step a group was handed, by rank."""
    steps: dict[At, list[tuple[Worker, list[int]]]] = {}
    for worker in workers:
        for share in worker.shares:
            steps.setdefault(share.at, []).append((worker, share.ids))
    return dict(sorted(steps.items()))


def _share_of(step: list[int], worker: Worker, num_splits: int) -> list[int]:
    """A worker's rows of a whole step: of every cycle those of its splits."""
    first, stop = worker.splits
    share: list[int] = np.array(step).reshape(-1, num_splits)[:, first:stop].ravel().tolist()
    return share


def _joined(shares: list[tuple[Worker, list[int]]]) -> list[int]:
    """The whole step of all shares, cycle by cycle; in a row where they are no whole cycles of the same number."""
    widths = [worker.splits[1] - worker.splits[0] for worker, _ in shares]
    cycles = {len(ids) / width for (_, ids), width in zip(shares, widths, strict=True)}
    if len(cycles) > 1 or not cycles.pop().is_integer():
        return [row for _, ids in shares for row in ids]
    grids = [np.array(ids).reshape(-1, width) for (_, ids), width in zip(shares, widths, strict=True)]
    whole: list[int] = np.concatenate(grids, axis=1).ravel().tolist()
    return whole


def _compare(found: list[int], expected: list[int]) -> str | None:
    """Says what is wrong with rows, None if nothing."""
    if found == expected:
        return None
    have, want = Counter(found), Counter(expected)
    facts = []
    if lost := sorted((want - have).elements()):
        facts.append(f"{len(lost)} rows were lost ({_some(lost)})")
    if doubled := sorted((have - want).elements()):
        facts.append(f"{len(doubled)} rows came that do not belong there or came twice ({_some(doubled)})")
    if not facts:
        first = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
        facts.append(f"rows out of order from place {first} on: {found[first]} instead of {expected[first]}")
    return ", ".join(facts)


def _count_rows(history: list[tuple[At, list[int]]], epochs: int, table_rows: int) -> list[str]:
    """Counts every row of every epoch, without regard to order or to what the reader got."""
    problems = []
    by_epoch: dict[int, list[int]] = {}
    for (epoch, _), ids in history:
        by_epoch.setdefault(epoch, []).extend(ids)
    for epoch, ids in by_epoch.items():
        times = np.bincount(np.array(ids, dtype=np.int64), minlength=table_rows)
        if len(times) > table_rows:
            problems.append(f"epoch {epoch}: rows came that the table does not have ({max(ids)})")
        if doubled := np.flatnonzero(times > 1).tolist():
            problems.append(f"epoch {epoch}: {len(doubled)} rows came more than once ({_some(doubled)})")
        if epoch < epochs and (lost := np.flatnonzero(times[:table_rows] == 0).tolist()):
            problems.append(f"epoch {epoch}: {len(lost)} rows never came ({_some(lost)})")
    return problems


def _name(workers: Sequence[Worker]) -> str:
    return f"worker group {workers[0].group} of {workers[0].world} workers"


def _step(at: At | str) -> str:
    return at if isinstance(at, str) else f"epoch {at[0]}, step {at[1]}"


def _some(rows: list[int]) -> str:
    return ", ".join(map(str, rows[:_SHOWN])) + (", ..." if len(rows) > _SHOWN else "")

"""The log of a run: which ids every training worker was handed, step by step. Written by workers, read at the end."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

At = tuple[int, int]  # epoch, and steps of it that are finished


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one worker was handed of one step.

    Attributes:
        time_s: When, in seconds since 1970.
        at: Epoch and step, the step counted from 1.
        ids: The rows' ids, cycle by cycle.
    """

    time_s: float
    at: At
    ids: list[int]


@dataclass(frozen=True, kw_only=True)
class Worker:
    """One training worker of one worker group.

    Attributes:
        group: The worker group; later ones are larger.
        rank: World rank.
        world: World size of the group.
        splits: First split it owns, and the one after its last.
        start: Where the stream began: epoch, and steps of it that were finished.
        weights: Where the weights were saved that it began with.
        time_s: When it began.
        node: Ray's id of its node.
        shares: What it was handed, in that order.
        saved: Steps after which it reported a checkpoint, and why: "preempted", "in turn" or "last".
        error: What ended its training loop, if an exception did.
    """

    group: int
    rank: int
    world: int
    splits: tuple[int, int]
    start: At
    weights: At
    time_s: float
    node: str
    shares: list[Share] = field(default_factory=list)
    saved: list[tuple[At, str]] = field(default_factory=list)
    error: list[str] = field(default_factory=list)


class LogWriter:
    """Writes one worker's file; every line is handed to the kernel at once, so it outlives the process.

    Args:
        directory: The log's directory.
        head: Everything :class:`Worker` knows from the start.
    """

    def __init__(self, directory: str, **head: Any) -> None:
        name = f"{head['group']}-{head['rank']}.jsonl"
        self._file = open(os.path.join(directory, name), "w", buffering=1)  # noqa: SIM115
        self._write(**head)

    def share(self, at: At, ids: list[int]) -> None:
        """Notes what the worker was handed of a step."""
        self._write(at=at, ids=ids)

    def saved(self, at: At, why: str) -> None:
        """Notes that a checkpoint was reported."""
        self._write(saved=at, why=why)

    def error(self, error: Exception) -> None:
        """Notes what ended the loop."""
        self._write(error=[type(error).__module__, type(error).__name__, str(error)])

    def _write(self, **entry: Any) -> None:
        print(json.dumps(entry | {"time_s": time.time()}), file=self._file)


def read_log(directory: Path) -> list[list[Worker]]:
    """Returns the worker groups, oldest first, each with its workers by rank."""
    groups: dict[int, list[Worker]] = {}
    for path in directory.glob("*.jsonl"):
        worker = _read(path)
        if worker is not None:
            groups.setdefault(worker.group, []).append(worker)
    return [sorted(groups[group], key=lambda worker: worker.rank) for group in sorted(groups)]


def _read(path: Path) -> Worker | None:
    lines = path.read_text().splitlines(keepends=True)
    # The last line of a worker that was killed while it wrote may be torn: it had not trained on that step.
    entries = [json.loads(line) for line in lines if line.endswith("\n")]
    if not entries:
        return None
    head = entries[0]
    pairs = {name: (head[name][0], head[name][1]) for name in ("splits", "start", "weights")}
    worker = Worker(**{**head, **pairs})
    for entry in entries[1:]:
        if "ids" in entry:
            worker.shares.append(Share(time_s=entry["time_s"], at=_at(entry["at"]), ids=entry["ids"]))
        elif "saved" in entry:
            worker.saved.append((_at(entry["saved"]), entry["why"]))
        else:
            worker.error.extend(entry["error"])
    return worker


def _at(pair: list[int]) -> At:
    return pair[0], pair[1]


class Following:
    """Tells while a run goes on how far it is, from the log's files as they grow."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def newest(self) -> tuple[int, int]:
        """Returns the newest worker group (0 before the first), and how many steps its rank 0 was handed."""
        names = [path.stem.split("-") for path in self._directory.glob("*.jsonl")]
        group = max((int(name[0]) for name in names), default=0)
        path = self._directory / f"{group}-0.jsonl"
        if not path.exists():
            return group, 0
        return group, sum('"ids"' in line for line in path.read_text().splitlines())

"""Checkpoints, and the command line that looks at them, for the tests of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from ray_lance_stream.checkpoint import Streams, locate, write_streams
from ray_lance_stream.cli.main import cli
from ray_lance_stream.counts import SplitCounts
from ray_lance_stream.plan import OrderSpec, TableIdentity
from ray_lance_stream.provenance import Provenance
from ray_lance_stream.state import StreamState
from ray_lance_stream.testing import GlobalBatch


def run(*arguments: object, columns: int = 80) -> Result:
    """Runs the command line in a terminal of that many columns."""
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(cli, [str(argument) for argument in arguments])


def state_of(batch: GlobalBatch) -> StreamState:
    """The state after a step."""
    return StreamState.from_dict(batch.state)


def state_at(cycle: int = 7, *, epoch: int = 1, version: int = 3, num_splits: int = 4, **order: Any) -> StreamState:
    """A state at the end of a cycle."""
    provenance = Provenance(
        table=TableIdentity(version=version, fingerprint="f00d"), order=OrderSpec(num_splits=num_splits, **order)
    )
    return StreamState.at_cycle(provenance, epoch, cycle)


def drifted(samples: list[int], positions: list[int]) -> StreamState:
    """A state whose splits differ."""
    state = state_at(num_splits=len(samples))
    return dataclasses.replace(state, samples=SplitCounts.of(samples), positions=SplitCounts.of(positions))


def saved(directory: Path, states: Streams | StreamState, **options: Any) -> Path:
    """Writes states into a checkpoint directory, and returns that."""
    directory.mkdir(parents=True, exist_ok=True)
    streams = {"train": states} if isinstance(states, StreamState) else states
    write_streams(*locate(directory), streams, **options)
    return directory

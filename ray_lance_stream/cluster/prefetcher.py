"""The prefetcher: an actor on a CPU node that builds blocks for whoever asks."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import ray

from ray_lance_stream.cluster.meter import BusyTime
from ray_lance_stream.cluster.metrics import PrefetcherMetrics
from ray_lance_stream.cluster.parcel import Parcel
from ray_lance_stream.cluster.sightings import Workload
from ray_lance_stream.errors import StaleIncarnationError, TransformError, explain
from ray_lance_stream.permutation import IntArray
from ray_lance_stream.plan import Plan, PlanSpec
from ray_lance_stream.request import PlanHandle, Ranges
from ray_lance_stream.sifting import SkippedRow

# Two blocks at a time: one is read while the transform works on the other. Control calls have a thread
# of their own, so that they never wait behind blocks.
CONCURRENCY_GROUPS = {"build": 2, "control": 1}


class Prefetcher:
    """Holds nothing that matters: it may die at any moment and be replaced by another one.

    Args:
        recipe: A ``block.BlockRecipe``.
        version: Of the table, to be opened before the first request comes; None to open none.
        name: The prefix of its lines in Ray's logs.
    """

    _name = "starting"  # Ray asks for the repr even when the constructor has failed

    def __init__(self, recipe: Parcel, version: int | None, name: str) -> None:
        from ray_lance_stream.block import BlockBuilder  # here: the coordinator, too, imports this module

        self._name = name
        self._builder = BlockBuilder(recipe.unpack())
        # Ready means ready: Lance is loaded and the table open. What fails here fails again, and is then raised, when
        # a plan is opened or a block built; and what kills here, kills once.
        with contextlib.suppress(Exception), _no_panic("warming up"):
            if version is not None and not ray.get_runtime_context().was_current_actor_reconstructed:
                self._builder.tables.warm_up(version, self._builder.recipe.columns)
        self._lock = threading.Lock()
        self._incarnation = 0
        self._busy = BusyTime()
        self._metrics = PrefetcherMetrics()
        self._built = {"blocks": 0, "rows": 0, "num_bytes": 0, "take_s": 0.0, "transform_s": 0.0, "dropped": 0}

    def __repr__(self) -> str:  # the prefix of its lines in Ray's logs
        return f"Prefetcher({self._name})"

    @ray.method(concurrency_group="control")
    def ready(self) -> tuple[str, int]:
        """Returns the id of the node it runs on, and its process id there."""
        return str(ray.get_runtime_context().get_node_id()), os.getpid()

    @ray.method(concurrency_group="control")
    def fence(self, incarnation: int) -> None:
        """From now on drops requests of older incarnations unread."""
        with self._lock:
            self._incarnation = max(self._incarnation, incarnation)

    @ray.method(concurrency_group="control")
    def stats(self) -> dict[str, float]:
        """Returns totals since it started: blocks, rows, bytes, seconds of reading and of transforming."""
        with self._lock:
            return dict(self._built)

    @ray.method(concurrency_group="control")
    def workload(self, run: str, stream: str) -> Workload:
        """Returns where it runs, and what it has done since it started; records that for the stream of a run, too."""
        node, pid = str(ray.get_runtime_context().get_node_id()), os.getpid()
        with self._lock:
            built = dict(self._built)
        workload = Workload(
            node=node,
            pid=pid,
            blocks=int(built["blocks"]),
            rows=int(built["rows"]),
            num_bytes=int(built["num_bytes"]),
            take_s=built["take_s"],
            transform_s=built["transform_s"],
            busy_s=self._busy.total_s(time.monotonic()),
            building=self._busy.blocks,
            rows_kept=self._builder.tables.rows_kept,
        )
        self._metrics.tell(workload, run, stream)
        return workload

    @ray.method(concurrency_group="build")
    def open_plan(self, spec: PlanSpec, deadly: tuple[SkippedRow, ...] = ()) -> tuple[PlanHandle, IntArray | None]:
        """Opens a plan; called with ``num_returns=2``, so that the rows travel through the object store."""
        with _no_panic("opening a plan"):
            return self._builder.open_plan(spec, deadly)

    @ray.method(concurrency_group="build")
    def count_plan(self, spec: PlanSpec, factor: int) -> tuple[tuple[PlanHandle, Ranges], IntArray | None]:
        """Returns which rows opening a plan builds, and does not build them; called as ``open_plan``."""
        with _no_panic("counting a plan"):
            return self._builder.count_plan(spec, factor)

    @ray.method(concurrency_group="build")
    def build(self, handle: PlanHandle, ranges: Ranges, incarnation: int, deadly: tuple[SkippedRow, ...] = ()) -> Any:
        """Returns a block: a ``sifting.Whole`` or ``Sifted``; ``deadly`` rows of it are not touched.

        Raises:
            StaleIncarnationError: A newer incarnation has been announced, or has asked for a block.
        """
        with self._lock:
            stale = incarnation < self._incarnation
            # A prefetcher that was restarted learns here what was announced before.
            self._incarnation = max(self._incarnation, incarnation)
            self._built["dropped"] += stale
        if stale:
            raise StaleIncarnationError(f"the worker group {incarnation} has been replaced by a newer one")
        with _no_panic("building a block"), self._busy.block():
            block, stats = self._builder.build(handle, ranges, resolve_rows, deadly)
        with self._lock:
            self._built["blocks"] += 1
            self._built["rows"] += stats.rows
            self._built["num_bytes"] += stats.num_bytes
            self._built["take_s"] += stats.take_s
            self._built["transform_s"] += stats.transform_s
        return block

    @ray.method(concurrency_group="build")
    def try_build(self, handle: PlanHandle, ranges: Ranges) -> None:
        """Builds a block that nobody wants, to see whether it can be built."""
        with _no_panic("building a block"):
            self._builder.build(handle, ranges, resolve_rows)

    @ray.method(concurrency_group="control")
    def left_out(self, handle: PlanHandle, ranges: Ranges, error: Exception) -> SkippedRow | None:
        """Returns how a single row with this error is left out, None if the stream does not tolerate the error."""
        ((number, split, position),) = self._rows_of(handle, ranges)
        return self._builder.left_out(error, number, split, position)

    @ray.method(concurrency_group="control")
    def rows_of(self, handle: PlanHandle, ranges: Ranges) -> list[tuple[int, int, int]]:
        """Returns (row number, split, position) of every row of a block, without reading it."""
        return self._rows_of(handle, ranges)

    def _rows_of(self, handle: PlanHandle, ranges: Ranges) -> list[tuple[int, int, int]]:
        splits, positions = ranges.places()
        rows = Plan(handle.spec, handle.num_rows, resolve_rows(handle.matching_rows)).rows(splits, positions)
        return list(zip(rows.tolist(), splits.tolist(), positions.tolist(), strict=True))


@contextlib.contextmanager
def _no_panic(doing: str) -> Iterator[None]:
    try:
        yield
    except Exception:
        raise
    except (KeyboardInterrupt, SystemExit) as error:  # of the user's code; final, where others are tried again
        raise TransformError(
            explain(
                f"{type(error).__name__} was raised while {doing}",
                found=f"{type(error).__name__}: {error}",
                expected="a block, or an error of the transform",
                remedy="raise an exception in the transform, and leave ending the process to the training loop",
            )
        ) from None
    except BaseException as error:  # a panic in native code is no Exception, and would end the actor
        raise RuntimeError(f"{type(error).__name__} while {doing}: {error}") from None


def resolve_rows(rows: Any) -> IntArray | None:
    """Returns the list of matching rows that a handle refers to; None where it has none."""
    if rows is None:
        return None
    numbers: IntArray = ray.get(rows)
    return numbers

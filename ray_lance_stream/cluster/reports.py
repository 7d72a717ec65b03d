"""What consumers tell the coordinator of the pool, once a second, and what they are told: who is in it now."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, Protocol

import ray

from ray_lance_stream.cluster.sizing import Load
from ray_lance_stream.gone import when_gone
from ray_lance_stream.observing import Sight

logger = logging.getLogger("ray_lance_stream")
REPORT_EVERY_S: Final = 1.0


@dataclass(frozen=True, kw_only=True)
class Report:
    """One consumer's report.

    Attributes:
        holder: Names the consumer.
        incarnation: The worker group it belongs to.
        node: Id of the node it runs on.
        load: What it saw since its last report.
        may_ask: Ids of the prefetchers that it may ask, or has asked and waits for.
        life: The coordinator that told it of them, as that calls itself; empty if none has.
        run: Name of the Ray Train run it works for; empty outside of one.
        sight: What its shard shows; None before there is one.
        asked_of: Ids of the prefetchers that were asked for the block it waits for.
    """

    holder: str
    incarnation: int
    node: str
    load: Load
    may_ask: frozenset[str]
    life: str
    run: str = ""
    sight: Sight | None = None
    asked_of: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class PoolView:
    """The pool as one consumer should see it.

    Attributes:
        life: Names this life of the coordinator, which may be restarted.
        members: The prefetchers to ask.
        near: Ids of those that are preferred among equals, because they are on the consumer's node and have time.
        silent: Ids of those that do not answer now: they may hang, or be on their way back.
    """

    life: str
    members: list[Any]
    near: frozenset[str] = frozenset()
    silent: frozenset[str] = frozenset()


class Reporting(Protocol):
    """A consumer that reports."""

    def report(self, holder: str, node: str) -> Report:
        """Returns what is to be told."""

    def take_view(self, view: PoolView) -> None:
        """Takes over who is in the pool now."""


def keep_reporting(source: Reporting, coordinator: Any, holder: str, closed: threading.Event) -> None:
    """Reports for a source until it is closed or dropped, on a thread that does not keep it alive."""
    node = str(ray.get_runtime_context().get_node_id())
    when_gone(source, closed.set)  # dropped is as good as closed
    arguments = (weakref.ref(source), coordinator, holder, node, closed)
    threading.Thread(target=_report, args=arguments, name="lance-stream-reports", daemon=True).start()


def _report(source: weakref.ref[Reporting], coordinator: Any, holder: str, node: str, closed: threading.Event) -> None:
    told: Future[PoolView] | None = None
    failed = False
    while not closed.wait(REPORT_EVERY_S):
        present = source()
        if present is None or not ray.is_initialized():  # after ray.shutdown() a call would start Ray anew
            return
        if told is None or told.done():  # a coordinator that is being restarted is not asked again and again
            try:
                report = coordinator.report.options(max_task_retries=0)
                told = report.remote(present.report(holder, node)).future()
                told.add_done_callback(_take_view(source))
            except Exception:  # whatever it is, the next report may work, and until then the pool stays as it is
                if not failed:
                    logger.warning("could not tell the stream's coordinator how busy the pool is", exc_info=True)
                failed = True
        del present


def _take_view(source: weakref.ref[Reporting]) -> Callable[[Future[PoolView]], None]:
    def take(told: Future[PoolView]) -> None:
        present = source()
        # A coordinator that does not answer is looked for when a request fails.
        if present is not None and told.exception() is None:
            present.take_view(told.result())

    return take

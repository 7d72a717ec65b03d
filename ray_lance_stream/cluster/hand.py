"""A prefetcher as its coordinator keeps it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ray_lance_stream.stats import PrefetcherState


@dataclass(eq=False)
class Hand:
    """A prefetcher.

    Attributes:
        actor: Its handle.
        index: A number that was free when it was started; names it, and spreads placement.
        id: Names it in reports.
        node: Id of the node it runs on, once it has answered.
        answers: Whether it answered when it was asked last.
        broken: Why it cannot be started; Ray does not try again.
        broken_at: Since when.
        retired_at: Since when it is let go; None while it is wanted.
        opening: Plans that the coordinator has it open.
    """

    actor: Any
    index: int
    id: str
    node: str | None = None
    answers: bool = False
    broken: Exception | None = None
    broken_at: float = 0.0
    retired_at: float | None = None
    opening: int = 0
    watch: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def state(self) -> PrefetcherState:
        """What is known of it without its own word."""
        if self.broken is not None:
            return "cannot start"
        if self.retired_at is not None:
            return "leaving"
        if self.node is None:
            return "starting"
        return "idle" if self.answers else "not answering"

    @contextlib.contextmanager
    def used(self) -> Iterator[Any]:
        """Keeps it from being let go while the coordinator waits for it; gives the handle."""
        self.opening += 1
        try:
            yield self.actor
        finally:
            self.opening -= 1

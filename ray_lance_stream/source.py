"""Where blocks come from: one small protocol."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

from ray_lance_stream.plan import PlanSpec
from ray_lance_stream.request import PlanHandle, Ranges


class BlockSource(Protocol):
    """Builds blocks on request. Requests are idempotent and may be answered in any order."""

    def plan(self, spec: PlanSpec) -> PlanHandle:
        """Opens a plan, or finds it open; safe to repeat. Raises what the plan's making raised."""

    def request(self, handle: PlanHandle, ranges: Ranges) -> Future[Any]:
        """Asks for a block: a ``sifting.Whole``, or a ``sifting.Sifted``. Does not wait; the future may raise."""

    def retry_delay_s(self, error: BaseException, attempt: int, elapsed_s: float) -> float | None:
        """Returns after how long a failed request should be sent again, or None to give up.

        Args:
            error: What the future raised.
            attempt: How many times this block has been asked for, 1 or more.
            elapsed_s: Seconds since it first failed; 0 for its first failure.

        Raises:
            LanceStreamError: Give up, with this error.
        """

    def advice(self, error: BaseException) -> str:
        """Returns what the user may do about a block that will not come, for the remedy of the error."""

    def close(self) -> None:
        """Gives up all requests and everything that belongs to this source."""

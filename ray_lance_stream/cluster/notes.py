"""What workers leave with a stream's state manager for one another and for the run's controller."""

from __future__ import annotations

from typing import Final

from ray_lance_stream.errors import LanceStreamError
from ray_lance_stream.state import StreamState
from ray_lance_stream.topology import Seat

_REPORTS_KEPT: Final = 4


class Notes:
    """The part of the state manager that only keeps what it is told. Nothing is lost for good with it."""

    def __init__(self) -> None:
        self._refusal: LanceStreamError | None = None
        self._whole: dict[tuple[int, int], dict[int, dict[str, StreamState]]] = {}

    async def refuse(self, refusal: LanceStreamError) -> None:
        """Notes that the run's checkpoint cannot be resumed from, so that starting once more is of no use."""
        self._refusal = refusal

    async def refusal(self) -> LanceStreamError | None:
        """Returns what :meth:`refuse` was told last."""
        return self._refusal

    async def note_whole(self, seat: Seat, number: int, states: dict[str, StreamState]) -> None:
        """Notes a worker's states of the streams that every worker reads whole, before its report of that number."""
        self._whole.setdefault((seat.incarnation, number), {})[seat.world_rank] = states
        for old in sorted(self._whole)[:-_REPORTS_KEPT]:
            del self._whole[old]

    async def whole(self, seat: Seat, number: int) -> dict[str, StreamState]:
        """Returns what :meth:`note_whole` was told: of each stream the state of the lowest rank that has opened it.

        Asked after the report of that number, so that every worker gets the same answer.
        """
        noted = self._whole.get((seat.incarnation, number), {})
        return {name: state for rank in sorted(noted, reverse=True) for name, state in noted[rank].items()}

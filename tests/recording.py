"""A block source that notes what it is asked for."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from ray_lance_stream.config import StreamConfig
from ray_lance_stream.local import LocalLink
from ray_lance_stream.request import PlanHandle, Ranges
from ray_lance_stream.sifting import Whole
from ray_lance_stream.source import BlockSource
from ray_lance_stream.topology import Seat


class Recording:
    """A block source that notes what is asked for."""

    def __init__(self, source: BlockSource) -> None:
        self._source = source
        self.asked: list[Ranges] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def request(self, handle: PlanHandle, ranges: Ranges) -> Future[Whole]:
        self.asked.append(ranges)
        return self._source.request(handle, ranges)


class RecordingLink(LocalLink):
    """Opens such a source."""

    source: Recording

    def open_source(self, config: StreamConfig, seat: Seat) -> BlockSource:
        self.source = Recording(super().open_source(config, seat))
        return self.source

"""How many prefetchers a trainer needs, how large their blocks are to be, and what buffers that takes.

A prefetcher works on two blocks at a time, but transforms one at a time: one is read while the other is transformed.
With n rows of b bytes in a block, reading takes ``read_latency_s + n * b / read_bytes_per_s``, transforming
``n * transform_s_per_row``, and

    rows a prefetcher makes in a second = n / max(transform_s, (read_s + transform_s) / 2)
    rows a trainer takes in a second = global_batch_size / step_time_s
    prefetchers = the second over the first, over 0.8

The fifth that is left over is for requests that meet at one prefetcher by chance, for all workers ask at once, at the
end of a step. What a worker reads ahead must last from asking for a block until it is there: the time to build one, and
that in which the pool builds one for every worker; twice, for the same reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ray_lance_stream.errors import ConfigError, explain

BLOCKS_AT_ONCE: Final = 2  # of a prefetcher
_MOST_USED: Final = 0.8
_LATENCY_SHARE: Final = 0.8  # of the speed of endlessly large blocks, that blocks should reach
_LEAST_BLOCK_BYTES: Final = 512 * 1024  # smaller ones cost more in requests than they save
_USUAL_BLOCK_BYTES: Final = 32 * 1024 * 1024  # the default of PrefetchConfig
_DAY_S: Final = 86_400
_MOST_BLOCK_BYTES: Final = 128 * 1024 * 1024  # some of them, times the workers, must find room


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """What building blocks and training take.

    Attributes:
        step_time_s: Seconds the trainer takes for a step, without waiting for data.
        read_latency_s: Seconds that reading a block takes, however few its bytes.
        read_bytes_per_s: How fast one block is read beyond that.
        transform_s_per_row: Seconds the transform takes for a row.
    """

    step_time_s: float
    read_latency_s: float = 0.0
    read_bytes_per_s: float = math.inf
    transform_s_per_row: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("step_time_s", 1e-9), ("read_latency_s", 0), ("transform_s_per_row", 0)):
            value = getattr(self, name)
            if not least <= value <= _DAY_S:
                above = "more than" if least else "at least"
                raise _not_valid(name, value, f"a number of seconds, {above} 0 and at most {_DAY_S} (a day)")
        if not self.read_bytes_per_s > 0:
            raise _not_valid("read_bytes_per_s", self.read_bytes_per_s, "a number of bytes above 0")

    def read_s(self, num_bytes: float) -> float:
        """Returns how long reading a block takes."""
        return self.read_latency_s + num_bytes / self.read_bytes_per_s

    def transform_s(self, rows: int) -> float:
        """Returns how long transforming a block takes."""
        return rows * self.transform_s_per_row

    def block_s(self, rows: int, bytes_per_row: float) -> float:
        """Returns how long an idle prefetcher takes for a block."""
        return self.read_s(rows * bytes_per_row) + self.transform_s(rows)

    def prefetcher_rows_per_s(self, rows: int, bytes_per_row: float) -> float:
        """Returns how fast a busy prefetcher is with blocks of so many rows; maybe infinitely."""
        slowest = max(self.transform_s(rows), self.block_s(rows, bytes_per_row) / BLOCKS_AT_ONCE)
        return rows / slowest if slowest else math.inf

    def good_block_bytes(self, bytes_per_row: float, rows_of: Callable[[int], int]) -> int:
        """Returns the smallest block size whose latency costs at most a fifth of a prefetcher's speed.

        Args:
            bytes_per_row: Size of a row.
            rows_of: Returns the rows of a block, given ``block_bytes``: whole cycles, and whole steps of small ones.
        """
        endless_s = max(
            self.transform_s_per_row,
            (bytes_per_row / self.read_bytes_per_s + self.transform_s_per_row) / BLOCKS_AT_ONCE,
        )
        if not endless_s:  # then larger is always better, and nothing says how large
            return _USUAL_BLOCK_BYTES
        size = _LEAST_BLOCK_BYTES
        while (
            size < _MOST_BLOCK_BYTES
            and self.prefetcher_rows_per_s(rows_of(size), bytes_per_row) * endless_s < _LATENCY_SHARE
            and self.read_latency_s > 0
        ):
            size *= 2
        return size


@dataclass(frozen=True, kw_only=True)
class Need:
    """What a trainer's demand comes to.

    Attributes:
        rows_per_s: Rows the trainer takes.
        block_rows: Rows of a block.
        block_s: How long an idle prefetcher takes for one.
        prefetcher_rows_per_s: Rows one prefetcher makes; infinite if neither reading nor transforming takes time.
        prefetchers: How many are needed.
        store_bytes: What the blocks of all workers take in the nodes' object stores.
        max_buffer_bytes: The budget with which that fits: those blocks, and the batches made ahead of them.
    """

    rows_per_s: float
    block_rows: int
    block_s: float
    prefetcher_rows_per_s: float
    prefetchers: int
    store_bytes: int
    max_buffer_bytes: int

    @classmethod
    def of(
        cls,
        speeds: Speeds,
        *,
        block_rows: int,
        bytes_per_row: float,
        step_rows: int,
        share_rows: int,
        world_size: int,
        prefetch_batches: int = 1,
    ) -> Need:
        """Returns the need.

        Args:
            speeds: What takes how long.
            block_rows: Rows of a block.
            bytes_per_row: Size of a row.
            step_rows: Rows of a step on all workers.
            share_rows: Rows of a step on the worker that gets most.
            world_size: Number of workers.
            prefetch_batches: Batches that each makes ahead.
        """
        demand, supply = step_rows / speeds.step_time_s, speeds.prefetcher_rows_per_s(block_rows, bytes_per_row)
        prefetchers = max(1, math.ceil(demand / supply / _MOST_USED - 1e-9))
        block_s = speeds.block_s(block_rows, bytes_per_row)
        taken_per_s = share_rows / speeds.step_time_s
        ahead_blocks = math.ceil(2 * (1 + taken_per_s * block_s / block_rows))
        step_bytes, block_bytes = share_rows * bytes_per_row, block_rows * bytes_per_row
        # Blocks stay until the trainer has been handed all of their rows: those of the step under way and of the
        # batches made ahead, and the rest of the block that the last of them ends in.
        held = (1 + prefetch_batches) * step_bytes + block_bytes + ahead_blocks * block_bytes
        return cls(
            rows_per_s=demand,
            block_rows=block_rows,
            block_s=block_s,
            prefetcher_rows_per_s=supply,
            prefetchers=prefetchers,
            store_bytes=math.ceil(held) * world_size,
            max_buffer_bytes=math.ceil(held + prefetch_batches * step_bytes) * world_size,
        )


def _not_valid(name: str, value: object, expected: str) -> ConfigError:
    return ConfigError(explain(f"{name} is not valid", found=value, expected=expected, remedy="pass what was measured"))

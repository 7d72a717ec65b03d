"""What a shard can say of the batches it has handed out."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from ray_lance_stream.config import StreamConfig
from ray_lance_stream.origins import Origin, explained, unknown_rows
from ray_lance_stream.topology import Seat


class HandedOut:
    """The part of a shard that knows where its last batch came from."""

    _config: StreamConfig
    _seat: Seat
    _origin: Origin | None = None  # of the last batch

    def explain(self, batch: Any = None) -> pa.Table:
        """Returns where the rows of a batch come from, in the terms of ``ray-lance-stream explain``.

        Args:
            batch: A batch made with ``with_rows=True``, of this shard or of another rank's; by default the last one
                handed out, which needs ``with_rows=True`` only where the plan is a list (``filter``, ``plan=``,
                ``order="lancedb"``) or rows may be skipped.

        Returns:
            int64 columns, one row per row: ``epoch``; ``step``, counted from 1; ``index`` in the global batch;
            ``split``; ``position`` in the split; ``row`` number in the table version; ``rank`` of the replica that
            gets it; and ``rank_index`` in that replica's part of the step.

        Raises:
            ConfigError: It is not known: no batch was handed out, rows are packed, or ``with_rows`` was not passed.
        """
        world_size = self._seat.replica.dp_size
        if batch is not None:
            return explained(batch, num_splits=self._config.order.num_splits, world_size=world_size)
        if self._origin is None:
            packed = self._config.packing is not None
            raise unknown_rows("a stream of packed documents" if packed else "no batch handed out yet")
        if self._config.sifts and self._origin.numbers is None:
            raise unknown_rows("a stream that may skip rows")
        return self._origin.table(world_size)

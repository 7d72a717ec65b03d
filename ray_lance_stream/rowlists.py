"""Orders that are lists of row numbers: filtered rows, LanceDB's own permutation, and rows the user chose."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from ray_lance_stream.errors import ConfigError, explain
from ray_lance_stream.permutation import IntArray
from ray_lance_stream.plan import PlanSpec

if TYPE_CHECKING:
    from ray_lance_stream.location import TableRef
    from ray_lance_stream.table import PinnedTable

_EPOCH_FACTOR: Final = 100_003  # how lancedb.streaming derives an epoch's seed from the first
_MEMORY_VARIABLE: Final = "LANCEDB_PERM_BUILDER_MEMORY_LIMIT"
_BYTES_PER_ROW: Final = 1024  # far more than the builder's sort needs; its default of 100 MB fails at 3M rows
_MAX_BUILDER_SEED: Final = 2**64 - 1


@dataclass(frozen=True, kw_only=True)
class UserPlan:
    """Rows in splits that the user chose.

    Attributes:
        row_ids: Row ids (``_rowid``), split by split; uint64, shape (splits * rows of the shortest,).
        num_splits: Number of splits.
        surplus_rows: Rows beyond the end of the shortest split, which are left out.
        base_version: The table version the ids belong to, if the plan says.
        digest: Digest of the rows and their splits.
    """

    row_ids: np.ndarray[Any, np.dtype[np.uint64]] = field(repr=False)
    num_splits: int
    surplus_rows: int
    base_version: int | None
    digest: str

    @classmethod
    def of(cls, plan: object) -> UserPlan:
        """Reads a plan: an Arrow table, or a table with ``to_arrow()``, with columns row_id and split_id.

        Rows keep the order they have in their split; a row may stand there any number of times.

        Raises:
            ConfigError: It is none, or a split from 0 to the largest has no row.
        """
        table = plan if isinstance(plan, pa.Table) else getattr(plan, "to_arrow", lambda: None)()
        if not isinstance(table, pa.Table) or not {"row_id", "split_id"} <= set(table.column_names):
            raise _bad_plan(
                f"a table with columns {table.column_names}"
                if isinstance(table, pa.Table)
                else f"an object of type {type(plan).__name__}"
            )
        ids, splits = table.column("row_id"), table.column("split_id")
        if not (pa.types.is_integer(ids.type) and pa.types.is_integer(splits.type)) or ids.null_count:
            raise _bad_plan(f"row_id of type {ids.type} with {ids.null_count} nulls, split_id of type {splits.type}")
        if not len(ids) or splits.null_count:
            raise _bad_plan(f"{len(ids)} rows, {splits.null_count} without split")
        row_ids = ids.cast(pa.uint64()).to_numpy()
        split_ids = splits.cast(pa.int64()).to_numpy()
        counts = np.bincount(split_ids) if split_ids.min() >= 0 else np.zeros(1, np.int64)
        if not counts.min():
            raise _bad_plan(f"splits without rows: {np.flatnonzero(counts == 0)[:20].tolist()} of {len(counts)}")
        length = int(counts.min())
        order = np.argsort(split_ids, kind="stable")
        starts = np.cumsum(counts) - counts
        chosen = order[(starts[:, None] + np.arange(length)).reshape(-1)]
        version = (table.schema.metadata or {}).get(b"base_version")
        taken = np.ascontiguousarray(row_ids[chosen])
        digest = hashlib.sha256(str(len(counts)).encode() + taken.tobytes()).hexdigest()[:32]
        return cls(
            row_ids=taken,
            num_splits=len(counts),
            surplus_rows=len(row_ids) - len(taken),
            base_version=None if version is None else int(version),
            digest=digest,
        )


def listed_rows(spec: PlanSpec, table: PinnedTable, ref: TableRef, plan: UserPlan | None) -> tuple[IntArray, int]:
    """Returns the row numbers that places of a plan refer to, in the plan's order; and how many are left out.

    Args:
        spec: The plan; its order is a list.
        table: The table version, open.
        ref: How to open it with LanceDB.
        plan: The user's rows, for the order "plan".

    Raises:
        ConfigError: The filter is not valid, fewer rows than splits, or ids of rows that are not in the version.
    """
    order = spec.order
    if order.order == "plan":
        assert plan is not None
        return table.numbers_of(plan.row_ids), plan.surplus_rows
    matching = None if order.filter is None else table.matching_rows(order.filter)
    count = table.num_rows if matching is None else len(matching)
    if order.is_listed_per_epoch and count >= order.num_splits:  # with fewer the plan says what is wrong
        rows = table.numbers_of(_permuted(spec, table, ref))
        return rows, count - len(rows)
    return np.arange(count) if matching is None else matching, 0


def _permuted(spec: PlanSpec, table: PinnedTable, ref: TableRef) -> Any:
    """Asks LanceDB's permutation builder for an epoch's order: row ids, split by split, without the remainder."""
    from lancedb.permutation import permutation_builder

    order = spec.order
    seed = order.shuffle_seed + spec.epoch * _EPOCH_FACTOR
    if seed > _MAX_BUILDER_SEED:
        raise ConfigError(
            explain(
                "shuffle_seed is too large for order='lancedb' in this epoch",
                found=f"shuffle_seed={order.shuffle_seed}, epoch={spec.epoch}",
                expected=f"shuffle_seed + epoch * {_EPOCH_FACTOR} below 2**64",
                remedy="pass a smaller seed, or order='feistel'",
            )
        )
    limit = str(max(1 << 30, table.num_rows * _BYTES_PER_ROW))
    os.environ.setdefault(_MEMORY_VARIABLE, limit)  # read at every build
    builder = permutation_builder(ref.open_lancedb(table.version))
    if order.filter is not None:
        builder = builder.filter(order.filter)
    clump = None if order.shuffle_clump_size == 1 else order.shuffle_clump_size
    built = builder.split_random(fixed=order.num_splits, seed=seed, clump_size=clump).execute()
    return built.to_arrow().column("row_id").to_numpy()


def _bad_plan(found: str) -> ConfigError:
    return ConfigError(
        explain(
            "plan is not valid",
            found=found,
            expected="an Arrow table, or a LanceDB table, of row_id and split_id, every split from 0 on with rows",
            remedy="build one with lancedb.permutation.permutation_builder, or from the table's _rowid",
        )
    )

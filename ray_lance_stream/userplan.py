"""What the user says about rows: their order, the splits of a plan, and their columns."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ray_lance_stream.errors import ConfigError, explain, shown
from ray_lance_stream.plan import OrderSpec, require_int, whole


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
        lowest, highest = int(pc.min(splits).as_py()), int(pc.max(splits).as_py())
        if lowest < 0 or highest >= len(splits):  # checked before there are counts of so many
            raise _bad_plan(f"{len(splits)} rows in splits {lowest} to {highest}, some of which have none")
        if pc.min(ids).as_py() < 0:
            raise _bad_plan(f"row_id {pc.min(ids).as_py()}")
        row_ids = ids.cast(pa.uint64()).to_numpy()
        split_ids = splits.cast(pa.int64()).to_numpy()
        counts = np.bincount(split_ids)
        if not counts.min():
            raise _bad_plan(f"splits without rows: {np.flatnonzero(counts == 0)[:20].tolist()} of {len(counts)}")
        length = int(counts.min())
        order = np.argsort(split_ids, kind="stable")
        starts = np.cumsum(counts) - counts
        chosen = order[(starts[:, None] + np.arange(length)).reshape(-1)]
        taken = np.ascontiguousarray(row_ids[chosen])
        digest = hashlib.sha256(str(len(counts)).encode() + taken.tobytes()).hexdigest()[:32]
        return cls(
            row_ids=taken,
            num_splits=len(counts),
            surplus_rows=len(row_ids) - len(taken),
            base_version=_base_version(table.schema.metadata),
            digest=digest,
        )


def order_spec(
    *,
    order: str | None,
    default_order: str,
    plan: UserPlan | None,
    num_splits: int | None,
    shuffle: bool,
    shuffle_seed: int,
    shuffle_clump_size: int | None,
    filter: str | None,
) -> OrderSpec:
    """Returns the order a stream is built for, whether of an algorithm or of the user's plan.

    ``default_order`` is that where ``order`` is None and there is no plan; the others are what the user passed.

    Raises:
        ConfigError: A value cannot work, or stands beside a plan that decides it.
    """
    num_splits, shuffle_seed, shuffle_clump_size = map(whole, (num_splits, shuffle_seed, shuffle_clump_size))
    given: Any = shuffle
    switch = given.item() if isinstance(given, np.generic) else whole(given)
    if isinstance(switch, int) and switch in (0, 1):
        shuffle = bool(switch)  # a state says True or False
    if order is None:
        order = default_order if plan is None else "plan"
    if plan is None:
        return OrderSpec(
            num_splits=num_splits,
            shuffle=shuffle,
            shuffle_seed=shuffle_seed,
            shuffle_clump_size=1 if shuffle_clump_size is None else shuffle_clump_size,
            filter=filter,
            order=order,
        )
    if order != "plan" or filter is not None or shuffle_clump_size is not None:
        raise ConfigError(
            explain(
                "plan says which rows come in which order",
                found=f"order={order!r}, filter={filter!r}, shuffle_clump_size={shuffle_clump_size!r} beside it",
                expected="plan alone",
                remedy="leave them out, and choose and order the rows in the plan",
            )
        )
    if num_splits is not None:
        require_int("num_splits", num_splits, minimum=1, remedy="leave it out: the plan has its own")
    if num_splits not in (None, plan.num_splits):
        raise ConfigError(
            explain(
                "num_splits is not the number of splits in plan",
                found=f"num_splits={num_splits}",
                expected=str(plan.num_splits),
                remedy="leave it out",
            )
        )
    return OrderSpec(num_splits=plan.num_splits, shuffle=False, order="plan", plan_digest=plan.digest)


def column_names(columns: Sequence[str] | None) -> tuple[str, ...] | None:
    """Returns the columns a user named, None for all; raises ConfigError if it is no list of names."""
    if columns is None:
        return None
    names = tuple(columns) if isinstance(columns, (list, tuple)) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            explain("columns is not valid", found=shown(columns), expected="a list of column names", remedy="pass one")
        )
    return names


def read_plan(plan: object) -> UserPlan | None:
    """Returns the user's plan, if there is one."""
    return None if plan is None else UserPlan.of(plan)


def _base_version(metadata: Mapping[bytes, bytes] | None) -> int | None:
    """Returns the table version that a plan names, None if it names none."""
    text = (metadata or {}).get(b"base_version")
    if text is None:
        return None
    if not (text.isdigit() and 0 < len(text) < 19 and int(text) > 0):
        raise _bad_plan(f"base_version {shown(text)} in the plan's metadata")
    return int(text)


def _bad_plan(found: str) -> ConfigError:
    return ConfigError(
        explain(
            "plan is not valid",
            found=found,
            expected="an Arrow table, or a LanceDB table, of row_id and split_id, every split from 0 on with rows",
            remedy="build one with lancedb.permutation.permutation_builder, or from the table's _rowid",
        )
    )

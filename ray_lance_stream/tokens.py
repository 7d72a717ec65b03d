"""Token lists: the column that is packed, its lists in one form, and how many blocks they make."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ray_lance_stream.block import BlockBuilder, BlockRecipe
from ray_lance_stream.errors import ConfigError, explain
from ray_lance_stream.packspec import Packing, estimate_blocks, sample_positions
from ray_lance_stream.plan import Plan, PlanSpec
from ray_lance_stream.readable import ReadableTable
from ray_lance_stream.transform import Transform

_NULLS: Final = "pack_sequences does not support null token lists or values"
_SAMPLED_AT_ONCE: Final = 4096  # documents


def packing_transform(table: ReadableTable, columns: Sequence[str] | None, transform: object) -> Transform:
    """Returns what brings documents into one form, having checked that there is one column of them.

    Raises:
        ConfigError: The columns are not one of token lists, or there is a transform.
    """
    if transform is not None:
        raise ConfigError(
            explain(
                "transform cannot be combined with pack_sequences",
                found="both",
                expected="one of them",
                remedy="store token lists in the table, and leave transform out",
            )
        )
    if columns is None or len(columns) != 1:
        raise ConfigError(
            explain(
                "pack_sequences needs columns to name exactly one column, that of the token lists",
                found=f"columns={columns!r}",
                expected="one column",
                remedy="pass columns=['tokens'], or whatever its name is",
            )
        )
    kind = table.take(np.empty(0, np.int64), columns).schema.field(0).type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not is_list or not pa.types.is_integer(kind.value_type):
        raise ConfigError(
            explain(
                f"column {columns[0]!r} does not hold token lists",
                found=str(kind),
                expected="a list, large_list or fixed_size_list of integers",
                remedy="pass the name of a column of token ids in columns",
            )
        )
    return TokenLists()


class TokenLists(Transform):
    """Brings documents into one form."""

    def __init__(self) -> None:
        super().__init__(token_lists)

    def known_schema(self, schema: pa.Schema) -> pa.Schema | None:
        """Returns the schema of documents in that form."""
        return pa.schema([pa.field(name, pa.large_list(pa.int64())) for name in schema.names])

    def _what_failed(self, exc: BaseException, rows: int) -> str:
        is_null = str(exc) == _NULLS
        return explain(
            _NULLS if is_null else "pack_sequences cannot use some token lists",
            found=f"{'a null' if is_null else exc} among {rows} documents",
            expected="lists of tokens that are 64-bit integers",
            remedy="mend the rows, or leave them out with filter (such as 'tokens IS NOT NULL') or with "
            "on_transform_error='skip'",
        )


def token_lists(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Returns the one column of a batch as ``large_list<int64>``.

    Raises:
        ValueError: A list or a token is null, or a token does not fit.
    """
    lists: Any = batch.column(0)
    tokens = lists.flatten()
    if lists.null_count or tokens.null_count:
        raise ValueError(_NULLS)
    offsets = np.zeros(len(lists) + 1, np.int64)
    np.cumsum(pc.list_value_length(lists).to_numpy(zero_copy_only=False), out=offsets[1:])
    try:
        tokens = tokens.cast(pa.int64())
    except pa.ArrowInvalid as error:
        raise ValueError(f"pack_sequences supports tokens that are 64-bit integers: {error}") from None
    column = pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), tokens)
    return pa.RecordBatch.from_arrays([column], names=batch.schema.names)


def with_estimate(packing: Packing, recipe: BlockRecipe, spec: PlanSpec) -> Packing:
    """Returns the packing with its number of blocks: for "auto" LanceDB's estimate, with a warning that it is one.

    Args:
        packing: What the user gave.
        recipe: How to read the table; documents that its policy would skip count as none.
        spec: The plan of an epoch.

    Raises:
        ValueError: A list in the sample is null, and the policy does not skip it.
    """
    if packing.blocks_per_epoch != "auto":
        return packing
    builder = BlockBuilder(dataclasses.replace(recipe, transform=None, policy=None))
    handle, matching = builder.open_plan(spec)
    plan = Plan(spec, handle.num_rows, matching)
    length, num_splits = plan.layout.rows_per_split, packing.num_splits
    sampled = sample_positions(shuffle_seed=spec.order.shuffle_seed, num_splits=num_splits, rows_per_split=length)
    splits = np.repeat(np.arange(num_splits), [len(positions) for positions in sampled])
    rows = np.sort(plan.rows(splits, np.concatenate(sampled)))
    table, lengths = builder.tables.version(spec.table.version), []
    for start in range(0, len(rows), _SAMPLED_AT_ONCE):
        lists: Any = table.take(rows[start : start + _SAMPLED_AT_ONCE], recipe.columns).column(0)
        if lists.null_count and (
            recipe.policy is None or not recipe.policy.tolerates(ValueError(_NULLS), "the documents of the estimate")
        ):
            raise ValueError(_NULLS)
        found = pc.list_value_length(lists).cast(pa.int64()).fill_null(-1)  # not even a separator
        lengths.append(found.to_numpy())
    estimate = estimate_blocks(
        np.concatenate(lengths), pack_sequences=packing.pack_sequences, num_splits=num_splits, rows_per_split=length
    )
    warnings.warn(
        f"blocks_per_epoch='auto' is an estimate: {estimate.blocks} blocks, from the lengths of "
        f"{estimate.sampled_documents} of {num_splits * length} documents, with a standard error of "
        f"{estimate.standard_error:.3g} blocks. Splits with fewer tokens are padded, tokens beyond are left out. "
        f"Pass blocks_per_epoch={estimate.blocks} to fix it, or a smaller or larger multiple of {num_splits}.",
        UserWarning,
        stacklevel=3,
    )
    return dataclasses.replace(packing, blocks_per_epoch=estimate.blocks)

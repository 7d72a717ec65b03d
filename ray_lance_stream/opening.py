"""What every stream does when it is built: says what blocks of its table are made of, and checks that they can be."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ray_lance_stream.block import BlockRecipe
from ray_lance_stream.errors import ConfigError, explain
from ray_lance_stream.location import TableRef
from ray_lance_stream.packspec import Packing
from ray_lance_stream.readable import ReadableTable
from ray_lance_stream.sifting import ErrorPolicy
from ray_lance_stream.state import StreamState
from ray_lance_stream.tokens import packing_transform
from ray_lance_stream.transform import Transform
from ray_lance_stream.userplan import UserPlan, column_names


def block_recipe(
    ref: TableRef,
    table: ReadableTable,
    *,
    columns: Sequence[str] | None,
    transform: Callable[..., Any] | None,
    wrapped_in: Callable[[Callable[..., Any]], Transform],
    packing: Packing | None,
    policy: ErrorPolicy,
    plan: UserPlan | None,
    always_sifts: bool = False,
) -> BlockRecipe:
    """Returns what blocks are made of, having checked the columns.

    Args:
        ref: The table.
        table: One of its versions.
        columns: Those the user named.
        transform: What the user wants done to rows.
        wrapped_in: Makes a transform of that.
        packing: How rows become packed blocks, if they do.
        policy: What happens to rows that fail.
        plan: The user's rows in splits.
        always_sifts: Whether blocks say which rows they hold even where none can be missing. Packed ones always do.

    Raises:
        ConfigError: A column is unknown, or cannot be packed; a transform cannot be called, or not be packed; the plan
            names rows that are not there.
    """
    names = column_names(columns)
    table.check_columns(names)
    if plan is not None:
        table.numbers_of(plan.row_ids)  # now, and not with the first block
    made = None
    if packing is not None:
        made = packing_transform(table, names, transform)
    elif transform is not None:
        made = wrapped_in(transform)
    # Also without a transform: a row that kills who reads it may be left out, too.
    sifts = always_sifts or packing is not None or not policy.raises
    return BlockRecipe(
        table=ref.located(table), columns=names, transform=made, policy=policy if sifts else None, plan=plan
    )


@contextlib.contextmanager
def checked_against(table: ReadableTable, *, is_latest: bool) -> Iterator[None]:
    """Says of what does not go with a table's latest version that a run may have begun on an earlier one.

    Args:
        table: A version of the table.
        is_latest: Whether it was taken because nothing named another one.
    """
    try:
        yield
    except ConfigError as error:
        if not is_latest or table.version == 1:
            raise
        raise ConfigError(
            f"{error} That is so in version {table.version}, the latest: to go on with a run that began on an earlier "
            "one, pass version= as ray-lance-stream inspect shows it of the run's checkpoint."
        ) from error


def saved_version(version: int | None, states: Mapping[str, StreamState] | None) -> int | None:
    """Returns the version to check arguments against: the one that will be read, which a state may name."""
    saved = {state.provenance.table.version for state in (states or {}).values()}
    return saved.pop() if version is None and len(saved) == 1 else version


def pickled(recipe: BlockRecipe, dumps: Callable[[Any], bytes]) -> bytes:
    """Returns a recipe as it travels to other processes.

    Raises:
        ConfigError: Its ``connection_factory`` cannot be pickled.
    """
    try:
        return dumps(recipe)
    except Exception as error:
        raise ConfigError(
            explain(
                "connection_factory cannot be pickled",
                found=recipe.table.without_secrets(f"{type(error).__name__}: {error}"),
                expected="a function that other processes can import or rebuild",
                remedy="open connections inside the function, and keep none in its closure",
            )
        ) from recipe.table.shown(error)

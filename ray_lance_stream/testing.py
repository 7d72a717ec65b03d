"""Checks that a stream keeps its promises, for your own tables and transforms, without a cluster.

All replicas of a run are opened in this process and advanced step by step. Nothing here needs Ray to be
started; where it is, the shards use its prefetchers. Failed checks raise ``AssertionError``.

Example:
    >>> import lancedb, numpy as np, pyarrow as pa, tempfile
    >>> from ray_lance_stream import LanceStream
    >>> from ray_lance_stream.testing import check_resume_at_every_step, global_batches
    >>> uri = tempfile.mkdtemp()
    >>> table = lancedb.connect(uri).create_table("numbers", pa.table({"id": np.arange(30)}))
    >>> stream = LanceStream(uri, "numbers", num_splits=4, global_batch_size=12, shuffle=False)
    >>> first, *_, last = global_batches(stream, world_size=3)
    >>> first.columns["id"].tolist()
    [0, 7, 14, 21, 1, 8, 15, 22, 2, 9, 16, 23]
    >>> last.step, len(last.columns["id"]), last.state["samples_consumed_per_split"]
    (3, 4, [7, 7, 7, 7])
    >>> len(check_resume_at_every_step(stream, world_sizes=(1, 3)))
    6
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ray_lance_stream.agreement import ThreadAgreement
from ray_lance_stream.columns import cast_to
from ray_lance_stream.errors import ConfigError, explain
from ray_lance_stream.rowcontext import TransformContext
from ray_lance_stream.state import merge_state_dicts
from ray_lance_stream.transform import Transform

if TYPE_CHECKING:
    from ray_lance_stream.shard import StreamShard
    from ray_lance_stream.stream import LanceStream

__all__ = ["GlobalBatch", "check_loop", "check_resume_at_every_step", "check_transform", "global_batches"]

T = TypeVar("T")
Columns = dict[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True, eq=False)
class GlobalBatch:
    """One step of all replicas together.

    Attributes:
        epoch: Epoch of the step, counted from 0.
        step: Steps of the epoch that are finished, this one included.
        columns: Every column of the stream, rows in canonical order: ``(rows, ...)``.
        state: What ``state_dict()`` returned after the step, on every replica alike.
        micro_batches: In how many micro-batches each replica got its share.
    """

    epoch: int
    step: int
    columns: Columns
    state: dict[str, Any]
    micro_batches: int


def global_batches(
    stream: LanceStream,
    world_size: int = 1,
    *,
    epoch_count: int = 1,
    state: Mapping[str, Any] | None = None,
    stop_after: int | None = None,
    micro_batch_size: int | None = None,
    prefetch_batches: int = 1,
) -> list[GlobalBatch]:
    """Runs all replicas of a stream in lockstep and returns the ordered global batches.

    Args:
        stream: The stream.
        world_size: Number of replicas, 1 to ``num_splits``.
        epoch_count: How many times to iterate. With a ``state`` the first is the rest of its epoch, which is
            empty if the state was taken after the last step.
        state: Where to begin, as ``state_dict()`` returned it; by default where the stream begins.
        stop_after: Leave after so many steps, as a ``break`` would.
        micro_batch_size: As for ``StreamShard.iter_batches``.
        prefetch_batches: As for ``StreamShard.iter_batches``.

    Raises:
        AssertionError: The replicas differ in steps, micro-batches or states, or their loss scales do not
            add up.
        ConfigError: ``stream`` is no ``LanceStream``.
    """
    if not hasattr(stream, "open"):
        raise ConfigError(
            explain(
                "these checks open a stream for any number of replicas",
                found=f"an object of type {type(stream).__qualname__}",
                expected="a LanceStream",
                remedy="build one of the same table and arguments; for the rows of a StreamingDataset with "
                "order='lancedb' and a global_batch_size",
            )
        )
    options: dict[str, Any] = {"micro_batch_size": micro_batch_size, "prefetch_batches": prefetch_batches}
    batches: list[GlobalBatch] = []
    with _opened(stream, world_size, state) as (shards, pool):
        for _ in range(epoch_count):
            iterators = [iter(shard.iter_batches(**options)) for shard in shards]
            while len(batches) != stop_after and (batch := _next_step(shards, iterators, stream, pool)) is not None:
                batches.append(batch)
    return batches


def check_resume_at_every_step(
    stream: LanceStream,
    world_sizes: Sequence[int] = (1, 2, 3),
    *,
    micro_batch_size: int | None = None,
    prefetch_batches: int = 1,
) -> list[GlobalBatch]:
    """Checks that checkpoints taken after any step continue bit for bit at any of the world sizes.

    Two epochs are run at the first world size. Against them are compared: two epochs at every other one; the
    rest of the epoch from the state after every step, the first and the last included, where the rest is
    empty and a whole epoch follows; and, for every world size to begin with, a run that is stopped and
    resumed at the next world size after every single step. States pass through JSON.

    Args:
        stream: The stream; a small table will do, costs grow with the square of the steps.
        world_sizes: Numbers of replicas, 1 to ``num_splits`` each.
        micro_batch_size: As for ``StreamShard.iter_batches``.
        prefetch_batches: As for ``StreamShard.iter_batches``.

    Returns:
        The global batches of the two epochs.

    Raises:
        AssertionError: A run differs; the message names the step, the world sizes and the first difference.
        ConfigError: ``stream`` is no ``LanceStream``.
    """

    def run(world_size: int, **options: Any) -> list[GlobalBatch]:
        return global_batches(
            stream, world_size, micro_batch_size=micro_batch_size, prefetch_batches=prefetch_batches, **options
        )

    first = world_sizes[0]
    expected = run(first, epoch_count=2)
    begin = expected[0].epoch if expected else 0
    steps = sum(batch.epoch == begin for batch in expected)
    for size in world_sizes[1:]:
        _compare(run(size, epoch_count=2), expected, f"{size} replicas instead of {first}")
    for step in range(steps + 1):
        state = _saved(expected, step)
        # After the last step two iterations make one epoch: the first of them must yield nothing.
        epochs, end = (1, steps) if step < steps else (2, len(expected))
        for size in world_sizes:
            what = f"resumed after step {step} of epoch {begin}, from {first} to {size} replicas"
            _compare(run(size, state=state, epoch_count=epochs), expected[step:end], what)
    for start in range(len(world_sizes)):
        _check_chain(run, [*world_sizes[start:], *world_sizes[:start]], expected)
    return expected


def check_loop(
    loop: Callable[[StreamShard], Iterable[Mapping[str, Any]]],
    stream: LanceStream,
    world_sizes: Sequence[int] = (1, 2, 3),
) -> None:
    """Checks that a training loop of your own trains on every row once and in order, wherever it is taken up again.

    An epoch is run at every world size, and from the state after every step. A loop that fetches batches ahead of
    those it trains on, or leaves some out, is found: its state is ahead of what it has yielded.

    Args:
        loop: A generator function. Called with each replica's shard, it iterates as the training loop does, from
            where the shard stands, and yields after every step what it has just trained on: a mapping of one or more
            of the stream's columns, ``(rows, ...)`` each. The state is taken at that moment, and the loop closed
            there or continued.
        stream: The stream; a small table will do.
        world_sizes: Numbers of replicas, 1 to ``num_splits`` each.

    Raises:
        AssertionError: It trains on other rows, or its state does not fit what it has trained on; the message names
            the step.
        ConfigError: ``stream`` is no ``LanceStream``.

    Example:
        >>> import lancedb, numpy as np, pyarrow as pa, tempfile
        >>> from ray_lance_stream import LanceStream
        >>> uri = tempfile.mkdtemp()
        >>> table = lancedb.connect(uri).create_table("numbers", pa.table({"id": np.arange(30)}))
        >>> def loop(shard):
        ...     for batch in shard.iter_batches():
        ...         yield {"id": batch["id"]}
        >>> check_loop(loop, LanceStream(uri, "numbers", num_splits=4, global_batch_size=12))
    """
    expected = global_batches(stream, world_sizes[0])
    for step in range(len(expected)):
        for size in world_sizes:
            what = f"the loop, from step {step} on, with {size} replicas"
            _follow(loop, stream, size, _saved(expected, step), expected[step:], what)


def _follow(
    loop: Callable[[StreamShard], Iterable[Mapping[str, Any]]],
    stream: LanceStream,
    world_size: int,
    state: Mapping[str, Any] | None,
    expected: list[GlobalBatch],
    what: str,
) -> None:
    """Runs a loop on all replicas, step by step, and compares what it yields, and the states, with what should come."""
    with _opened(stream, world_size, state) as (shards, pool):
        running = [iter(loop(shard)) for shard in shards]
        widths = [len(shard.replica.owned_splits(stream.config.order.num_splits)) for shard in shards]
        for batch in expected:
            where = f"{what}: step {batch.step} of epoch {batch.epoch}"
            yielded = list(pool.map(lambda steps: next(steps, None), running))
            shares = [[{name: np.asarray(of) for name, of in rows.items()}] for rows in yielded if rows is not None]
            if len(shares) < world_size:
                raise AssertionError(f"{where}: the loop has ended on {world_size - len(shares)} replicas")
            for name in shares[0][0]:
                found = _in_canonical_order(name, shares, widths, where)
                wanted = batch.columns.get(name)
                if wanted is None:
                    raise AssertionError(f"{where}: {name!r} is no column of the stream, which has {[*batch.columns]}")
                if found.shape != wanted.shape or not np.array_equal(found, wanted.astype(found.dtype)):
                    raise AssertionError(f"{where}: column {name!r} holds other rows, or in another order")
            if difference := _difference(_state(where, shards), batch.state):
                raise AssertionError(f"{where}: the state is not that of the rows yielded, {difference}")


def check_transform(transform: Callable[..., Any], rows: pa.Table | pa.RecordBatch, *, seed: int = 0) -> pa.Table:
    """Checks that a transform treats every row alike, whatever rows share its batch and however often it runs.

    The rows are transformed in one batch, in the same batch again, one by one, in halves, and in reverse order,
    each time by a new instance if the transform is a class.

    Args:
        transform: As for ``LanceStream``.
        rows: Some rows of the table.
        seed: The stream's seed, for the generators of the context.

    Returns:
        The transformed rows.

    Raises:
        AssertionError: A row came out differently; the message names it.

    Example:
        >>> def jitter(batch, ctx):
        ...     return {"x": [float(x) + g.normal() for x, g in zip(batch["x"].to_pylist(), ctx.generators())]}
        >>> check_transform(jitter, pa.table({"x": [1.0, 2.0, 3.0]})).num_rows
        3
    """
    table = pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
    whole, half = list(range(table.num_rows)), table.num_rows // 2
    cuts = {
        "in the same batch again": [whole],
        "one by one": [[row] for row in whole],
        "in halves": [whole[:half], whole[half:]],
        "in reverse order": [whole[::-1]],
    }
    wrapper = Transform(transform)
    result = _transformed(wrapper, table, whole, seed)
    expected = list(map(repr, result.to_pylist()))  # repr, not ==: NaN is NaN, and 0.0 is not -0.0
    for cut, parts in cuts.items():
        wrapper = Transform(transform)  # a class is built anew, as it is on every prefetcher
        for part in filter(None, parts):
            found = cast_to(_transformed(wrapper, table, part, seed), result.schema)
            for row, values in zip(part, map(repr, found.to_pylist()), strict=True):
                if values != expected[row]:
                    raise AssertionError(
                        f"{wrapper.name} is not row-wise or not repeatable: row {row} differs when transformed {cut}. "
                        f"Found: {values}. Expected, as in the whole batch: {expected[row]}. "
                        "Remedy: use nothing but the row itself and ctx.generator(row)."
                    )
    return result


@contextmanager
def _opened(
    stream: LanceStream, world_size: int, state: Mapping[str, Any] | None
) -> Iterator[tuple[list[StreamShard], ThreadPoolExecutor]]:
    """Opens all replicas at a state; with a thread for each: where rows may be skipped, they wait for one another."""
    agreement = ThreadAgreement(world_size)
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(world_size))
        shards = [
            stack.enter_context(stream.open(rank=r, world_size=world_size, coordinator=agreement.member(r)))
            for r in range(world_size)
        ]
        for shard in shards:
            if state is not None:
                shard.load_state_dict(state)
        yield shards, pool


def _next_step(
    shards: list[StreamShard], iterators: list[Iterator[Any]], stream: LanceStream, pool: ThreadPoolExecutor
) -> GlobalBatch | None:
    """Advances every replica by one step; None at the common end of the epoch."""
    epoch = shards[0].epoch
    where = f"epoch {epoch}, step {shards[0].step + 1}, {len(shards)} replicas"
    shares: list[list[Columns]] = [[] for _ in shards]
    scale = 0.0
    while True:
        batches = [batch for batch in pool.map(lambda iterator: next(iterator, None), iterators) if batch is not None]
        if not batches and not shares[0]:
            return None
        if len(batches) < len(shards):
            raise AssertionError(f"{where}: {len(shards) - len(batches)} replicas have ended, the others have not")
        for share, batch in zip(shares, batches, strict=True):
            share.append(batch)
        scale += sum(shard.loss_scale for shard in shards) / len(shards)
        if _common(f"{where}: is_step_end", [shard.is_step_end for shard in shards]):
            break
    if not math.isclose(scale, 1.0, rel_tol=1e-9):
        raise AssertionError(f"{where}: the loss scales add up to {scale}, not to 1")
    widths = [len(shard.replica.owned_splits(stream.config.order.num_splits)) for shard in shards]
    return GlobalBatch(
        epoch=epoch,
        step=_common(f"{where}: step", [shard.step for shard in shards]),
        columns={name: _in_canonical_order(name, shares, widths, where) for name in shares[0][0]},
        state=_state(where, shards),
        micro_batches=len(shares[0]),
    )


def _state(where: str, shards: list[StreamShard]) -> dict[str, Any]:
    """The state of all replicas: one for all, or, where rows may be skipped, what theirs make together."""
    states = [shard.state_dict() for shard in shards]
    if shards[0].is_partial:
        return merge_state_dicts(states)
    return _common(f"{where}: state_dict()", states)


def _common(what: str, values: list[T]) -> T:
    """Returns what all replicas say, which must be the same."""
    different = {rank: value for rank, value in enumerate(values) if value != values[0]}
    if different:
        raise AssertionError(f"{what} of replica 0 is {values[0]}, but by replica {different}")
    return values[0]


def _in_canonical_order(name: str, shares: list[list[Columns]], widths: list[int], where: str) -> NDArray[Any]:
    """Interleaves the replicas' shares: of every cycle first replica 0's splits, then replica 1's, and so on."""
    parts = [np.concatenate([part[name] for part in share]) for share in shares]
    # As fractions, so that a replica whose rows are no whole cycles stands out as well.
    cycles = _common(
        f"{where}: cycles", [Fraction(len(part), width) for part, width in zip(parts, widths, strict=True)]
    )
    grids = [part.reshape(int(cycles), -1, *part.shape[1:]) for part in parts]  # (cycle, split, ...)
    return np.concatenate(grids, axis=1).reshape(-1, *parts[0].shape[1:])


def _check_chain(run: Callable[..., list[GlobalBatch]], sizes: list[int], expected: list[GlobalBatch]) -> None:
    """Stops and resumes after every step, each time at the next of the world sizes."""
    state = None
    for step, batch in enumerate(expected):
        before, size = sizes[(step - 1) % len(sizes)], sizes[step % len(sizes)]
        found = run(size, state=state, epoch_count=2, stop_after=1)
        what = f"resumed {step} times, lastly after step {step} of the run, from {before} to {size} replicas"
        _compare(found, [batch], what)
        state = _saved(found, 1)


def _saved(batches: list[GlobalBatch], steps: int) -> dict[str, Any] | None:
    """The state after so many steps, as it comes back from a file."""
    return json.loads(json.dumps(batches[steps - 1].state)) if steps else None


def _compare(found: list[GlobalBatch], expected: list[GlobalBatch], what: str) -> None:
    for a, b in zip(found, expected, strict=False):
        facts = _facts(a)
        for name, value in _facts(b).items():
            if difference := _difference(facts.get(name), value):
                raise AssertionError(f"{what}: step {b.step} of epoch {b.epoch} differs in {name}, {difference}")
    if len(found) != len(expected):
        raise AssertionError(f"{what}: {len(found)} steps came, expected {len(expected)}")


def _facts(batch: GlobalBatch) -> dict[str, Any]:
    columns = {f"column {name!r}": values for name, values in batch.columns.items()}
    return {"epoch": batch.epoch, "step": batch.step, "columns": list(batch.columns), **columns, "state": batch.state}


def _difference(found: Any, expected: Any) -> str | None:
    """Says where two values, or the bits of two arrays, differ first; None if nowhere."""
    if not (isinstance(found, np.ndarray) and isinstance(expected, np.ndarray)):
        # repr, not ==: NaN is NaN, and 0.0 is not -0.0.
        return None if repr(found) == repr(expected) else f"found {found!r}, expected {expected!r}"
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return f"found {found.dtype}{found.shape}, expected {expected.dtype}{expected.shape}"
    if found.dtype != object and found.tobytes() == expected.tobytes():
        return None
    rows = (_difference(a, b) for a, b in zip(found, expected, strict=True))
    return next((f"first in row {row}: {difference}" for row, difference in enumerate(rows) if difference), None)


def _transformed(transform: Transform, table: pa.Table, rows: list[int], seed: int) -> pa.Table:
    places = np.array(rows, dtype=np.int64)
    context = TransformContext(epoch=0, row_numbers=places, splits=0 * places, positions=places, seed=seed)
    result: pa.Table = transform(table.take(places).combine_chunks().to_batches()[0], context)
    return result

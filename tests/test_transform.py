"""The transform: how it is called, with which context, and how its failures are told."""

from __future__ import annotations

import functools
import operator
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ray_lance_stream.errors import ConfigError, TransformError, UnpicklableError
from ray_lance_stream.rowcontext import TransformContext
from ray_lance_stream.transform import Transform, UserError

ROWS = 4
BATCH = pa.record_batch({"n": pa.array(range(ROWS)), "f": pa.array([0.5, 1.5, 2.5, 3.5], pa.float32())})


def context(rows: int = ROWS, start: int = 0, **changes: Any) -> TransformContext:
    index = np.arange(start, start + rows, dtype=np.int64)
    fields: dict[str, Any] = {"epoch": 1, "seed": 42, "row_numbers": index * 10}
    return TransformContext(**{**fields, "splits": index % 2, "positions": index // 2, **changes})


# --- Context ----------------------------------------------------------------------------------------------


def test_a_generator_depends_on_seed_epoch_split_and_position_only() -> None:
    ctx = context()
    first = [g.random(3).tolist() for g in ctx.generators()]
    assert [ctx.generator(i).random(3).tolist() for i in range(ROWS)] == first
    assert len({tuple(v) for v in first}) == ROWS
    assert [context(2, start=2).generator(i).random(3).tolist() for i in range(2)] == first[2:]
    assert ctx.slice(1).generator(0).random(3).tolist() == first[1] and len(ctx.slice(1)) == 1
    assert context(row_numbers=np.zeros(ROWS, np.int64)).generator(3).random(3).tolist() == first[3]
    swapped = context(splits=ctx.positions, positions=ctx.splits)
    for other in (context(epoch=2), context(seed=43), context(seed=-42), swapped):
        assert other.generator(1).random(3).tolist() != first[1]
    assert context(seed=-1).generator(0).random() == context(seed=2**64 - 1).generator(0).random()


def test_generators_are_pinned() -> None:
    generator = context().generator(3)
    assert generator.bit_generator.random_raw(2).tolist() == [18322158521170037052, 4003958690926340623]
    child = context().generator(3).spawn(2)[1]
    assert child.bit_generator.random_raw(1).tolist() == [13793812433507052113]
    copy = pickle.loads(pickle.dumps(generator))
    assert copy.random() == generator.random()


def test_spawned_generators_are_repeatable_and_distinct() -> None:
    generator = context().generator(0)
    children = [*generator.spawn(2), *generator.spawn(1)]
    again = context().generator(0).spawn(3)
    values = [child.random() for child in children]
    assert values == [child.random() for child in again]
    assert len({*values, context().generator(0).random(), again[0].spawn(1)[0].random()}) == 5


def test_a_context_checks_its_arrays() -> None:
    for wrong in ({"splits": np.zeros(3, np.int64)}, {"positions": np.zeros(ROWS, np.int32)}):
        with pytest.raises(ConfigError, match="do not fit together"):
            context(**wrong)


# --- Call -------------------------------------------------------------------------------------------------


class Stateful:
    built = 0

    def __init__(self, step: int = 1) -> None:
        type(self).built += 1
        self.step = step
        self.inside = 0

    def __call__(self, batch: pa.RecordBatch, ctx: TransformContext) -> dict[str, Any]:
        self.inside += 1
        alone = self.inside
        time.sleep(0.002)
        self.inside -= 1
        rows = batch.num_rows
        return {"step": [self.step] * rows, "alone": [alone] * rows, "row": ctx.row_numbers}


class Methods:
    def one(self, batch: pa.RecordBatch) -> list[str]:
        return ["none"] * batch.num_rows

    def two(self, batch: pa.RecordBatch, rows: TransformContext) -> list[str]:
        return seen(batch, rows)

    def __call__(self, batch: pa.RecordBatch) -> list[str]:
        return self.one(batch)


def seen(batch: Any, ctx: Any) -> list[str]:
    return ["context" if isinstance(ctx, TransformContext) else repr(ctx)] * batch.num_rows


def star(batch: Any, *rest: Any) -> list[str]:
    return [str(len(rest))] * batch.num_rows


def by_name(batch: Any, width: int = 3, ctx: Any = None) -> list[str]:
    assert width in (3, 5)
    return seen(batch, ctx)


def width_first(width: int, batch: Any, ctx: Any) -> list[str]:
    assert width == 3
    return seen(batch, ctx)


def takes_none() -> None: ...


def takes_three(batch: Any, ctx: Any, more: Any) -> None: ...


def takes_more(batch: Any, *, width: int) -> None: ...


CALLS: list[tuple[Callable[..., Any], str]] = [
    (lambda batch: seen(batch, 0), "0"),
    (lambda batch, whatever: seen(batch, whatever), "context"),
    (lambda batch, ctx=None: seen(batch, ctx), "context"),
    (lambda batch, context=1: seen(batch, context), "context"),
    (lambda batch, *, ctx: seen(batch, ctx), "context"),
    (lambda batch, width=7: seen(batch, width), "7"),
    (lambda batch, /, ctx: seen(batch, ctx), "context"),
    (by_name, "context"),
    (star, "0"),
    (lambda *args: [str(len(args))] * args[0].num_rows, "1"),
    (functools.partial(by_name, width=5), "context"),
    (functools.partial(seen, ctx=9), "9"),
    (functools.partial(width_first, 3), "context"),
    (Methods().one, "none"),
    (Methods().two, "context"),
    (Methods(), "none"),
    (Methods, "none"),
]


@pytest.mark.parametrize(("fn", "want"), CALLS, ids=range(len(CALLS)))
def test_the_signature_decides_whether_a_context_is_passed(fn: Callable[..., Any], want: str) -> None:
    assert Transform(fn)(BATCH, context())["value"].to_pylist() == [want] * ROWS


def test_a_builtin_without_signature_gets_the_batch() -> None:
    got = Transform(operator.methodcaller("to_pylist"))(BATCH, context())
    assert got.to_pylist() == BATCH.to_pylist()


class NeedsArguments:
    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, batch: pa.RecordBatch) -> list[str]:
        return [self.path] * batch.num_rows


@pytest.mark.parametrize(
    ("fn", "found"),
    [
        (NeedsArguments, "missing a required argument: 'path'"),
        (takes_none, "too many positional arguments"),
        (takes_three, "missing a required argument: 'more'"),
        (takes_more, "missing a required"),
        (dict, "not callable"),
        (3, "not callable"),
    ],
)
def test_what_cannot_be_called_is_refused_at_once(fn: Any, found: str) -> None:
    with pytest.raises(ConfigError, match=r"Transform .* cannot be called.*" + found):
        Transform(fn)


def test_a_class_is_built_once_per_process_and_entered_by_one_thread() -> None:
    Stateful.built = 0
    transform = Transform(Stateful)
    assert Stateful.built == 0
    tables: list[pa.Table] = []
    threads = [threading.Thread(target=lambda: tables.append(transform(BATCH, context()))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Stateful.built == 1 and {t["alone"][0].as_py() for t in tables} == {1} and len(tables) == 6
    copy = pickle.loads(pickle.dumps(transform))
    assert copy.name == "Stateful" and copy(BATCH, context())["row"].to_pylist() == [0, 10, 20, 30]
    assert Stateful.built == 2
    bound = Transform(functools.partial(Stateful, step=5))
    assert bound(BATCH, context())["step"].to_pylist() == [5] * ROWS
    assert Transform(functools.partial(NeedsArguments, "p"))(BATCH, context())["value"][0].as_py() == "p"


def test_picklability_is_checked_with_the_senders_pickle() -> None:
    transform = Transform(Stateful)
    transform(BATCH, context())
    transform.validate_picklable(pickle.dumps)
    with pytest.raises(ConfigError, match=r"Transform .*hold.* cannot be sent.*cannot pickle '_thread.lock'"):
        Transform(functools.partial(hold, lock=threading.Lock())).validate_picklable(pickle.dumps)


def hold(batch: pa.RecordBatch, lock: Any) -> pa.RecordBatch:
    with lock:
        return batch


def broken(batch: pa.RecordBatch) -> Any:
    values: list[Any] = batch["n"].to_pylist()
    for value in values:
        yield 1 // (2 - value)


def test_errors_of_the_users_code_name_the_transform_and_the_line() -> None:
    with pytest.raises(TransformError) as info:
        Transform(broken)(BATCH, context())
    text = str(pickle.loads(pickle.dumps(info.value)))
    assert "Transform broken failed" in text and "ZeroDivisionError" in text
    assert "test_transform.py" in text and "in broken" in text and "in to_table" not in text
    assert isinstance(info.value.__cause__, ZeroDivisionError)

    def lazy(batch: pa.RecordBatch) -> dict[str, Any]:
        return {"x": broken(batch)}

    with pytest.raises(TransformError, match=r"lazy failed.*ZeroDivisionError.*in broken"):
        Transform(lazy)(BATCH, context())

    class Unbuilt:
        def __init__(self) -> None:
            raise OSError("no such model")

        def __call__(self, batch: pa.RecordBatch) -> Any: ...

    with pytest.raises(TransformError, match="no such model"):
        Transform(Unbuilt)(BATCH, context())


class Locked(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class TwoArguments(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")


class NoText(Exception):
    def __init__(self, lock: Any) -> None:
        super().__init__(lock)

    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "text"),
    [(Locked("no key"), "no key"), (TwoArguments(7, "no key"), "7: no key"), (NoText(threading.Lock()), "__str__")],
    ids=lambda value: type(value).__name__,
)
def test_errors_that_cannot_be_pickled_are_stood_in_for(error: Exception, text: str) -> None:
    def failing(_: pa.RecordBatch) -> Any:
        raise error

    with pytest.raises(UserError) as info:
        Transform(failing)(BATCH, context())
    assert info.value.user_error is error
    found = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(info.value))))
    assert type(found) is UserError and str(found) == str(info.value)
    stand_in = found.user_error
    assert isinstance(stand_in, UnpicklableError)
    assert stand_in.type_name == type(error).__name__ and text in stand_in.text
    assert "in failing" in stand_in.traceback_text and "raise error" in stand_in.traceback_text
    assert str(stand_in).startswith(type(error).__name__)
    plain = pickle.loads(pickle.dumps(UserError("text", KeyError("key"))))
    assert type(plain.user_error) is KeyError and plain.user_error.args == ("key",)


def test_what_is_no_exception_is_no_error_of_rows() -> None:
    """Even where errors are tolerated: that the process is to end is no property of a row."""

    def raising(error: BaseException) -> Transform:
        def transform(_: pa.RecordBatch) -> Any:
            raise error

        return Transform(transform)

    for of_process in (KeyboardInterrupt("stop"), SystemExit(3)):
        with pytest.raises(type(of_process)) as info:
            raising(of_process)(BATCH, context())
        assert info.value is of_process
    for error in (GeneratorExit("closed"), BaseException("panic")):
        with pytest.raises(TransformError, match=rf"failed.*{type(error).__name__}: {error}.*Remedy: correct") as told:
            raising(error)(BATCH, context())
        assert not isinstance(told.value, UserError)


def test_output_that_makes_no_block_names_the_transform() -> None:
    with pytest.raises(TransformError, match=r"Output of transform broken_output: Column 'x' has 3 rows") as info:
        Transform(broken_output)(BATCH, context())
    assert info.value.__cause__ is None
    with pytest.raises(TransformError, match=r"Output of transform .*<lambda>: Column 'x' holds values") as info:
        Transform(lambda batch: {"x": [object()] * batch.num_rows})(BATCH, context())
    assert isinstance(info.value.__cause__, pa.ArrowException)


def broken_output(batch: pa.RecordBatch) -> Any:
    return {"x": range(batch.num_rows - 1)}

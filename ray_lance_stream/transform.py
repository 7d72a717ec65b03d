"""The user's transform: how it is called.

What it may know about the rows it gets is :mod:`ray_lance_stream.rowcontext`; what it may return, and how that becomes
columns, :mod:`ray_lance_stream.columns`.
"""

from __future__ import annotations

import functools
import inspect
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pyarrow as pa

from ray_lance_stream import columns
from ray_lance_stream.errors import ConfigError, TransformError, UnpicklableError, explain
from ray_lance_stream.rowcontext import TransformContext

_CONTEXT_NAMES = ("ctx", "context")
# Left out of the traces users see: a lazy output runs the user's code while it is converted.
_OWN_FILES = (__file__, columns.__file__)


class UserError(TransformError):
    """The user's transform raised: ``user_error``, as it was.

    Once pickled, an ``UnpicklableError`` stands for one that does not come through pickling.
    """

    def __init__(self, message: str, user_error: Exception) -> None:
        super().__init__(message, user_error)
        self.user_error = user_error

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        error = self.user_error
        if isinstance(error, UnpicklableError):
            return UserError, (str(self), error)
        trace = "".join(traceback.format_exception(error))
        return _unpickled, (str(self), _pickled(error), UnpicklableError(type(error).__qualname__, _said(error), trace))


def _pickled(error: Exception) -> bytes | None:
    """Returns an exception as bytes; with Ray loaded by its pickle, which knows classes defined in functions."""
    pickler: Any = sys.modules.get("ray.cloudpickle", pickle)
    try:
        found: bytes = pickler.dumps(error)
        return found if isinstance(pickle.loads(found), type(error)) else None
    except Exception:  # anything: it is the user's code
        return None


def _unpickled(message: str, pickled: bytes | None, stand_in: UnpicklableError) -> UserError:
    """Returns the error with the user's exception, if that can be made anew in this process."""
    try:
        error = stand_in if pickled is None else pickle.loads(pickled)
    except Exception:  # anything: it is the user's code, or is not installed here
        error = stand_in
    return UserError(message, error if isinstance(error, Exception) else stand_in)


class Transform:
    """Picklable wrapper of the user's callable; at most one thread of a process is inside it at a time.

    Args:
        fn: A function ``fn(batch)`` or ``fn(batch, ctx)``, an object that can be called so, or a class (or a
            ``functools.partial`` of one) whose instances can: it is built once per process, at first use.

    Raises:
        ConfigError: ``fn`` cannot be called in either way, or the class needs constructor arguments.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        target = fn.func if isinstance(fn, functools.partial) else fn
        self.name: str = getattr(target, "__qualname__", None) or type(target).__qualname__
        self._fn = fn
        self._is_class = isinstance(target, type) and any("__call__" in vars(c) for c in target.__mro__)
        if not callable(fn) or (isinstance(fn, type) and not self._is_class):
            raise self._cannot_call(f"{fn!r}, which is not callable")
        self._context = self._context_parameter(target)
        self._reset()

    def _reset(self) -> None:
        self._lock: Any = threading.Lock()
        self._instance: Callable[..., Any] | None = None if self._is_class else self._fn

    def __getstate__(self) -> dict[str, Any]:
        # A lock cannot travel, and every process builds its own instance.
        return {k: v for k, v in vars(self).items() if k not in ("_lock", "_instance")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._reset()

    def _cannot_call(self, found: str) -> ConfigError:
        expected = "a callable (batch) or (batch, ctx), or a class of such callables built without arguments"
        remedy = "bind further arguments with functools.partial"
        what = f"Transform {self.name} cannot be called"
        return ConfigError(explain(what, found=found, expected=expected, remedy=remedy))

    def _context_parameter(self, target: Any) -> str | None:
        """Returns how the context is passed: None not at all, "" as second argument, else by this name."""
        try:
            if self._is_class:
                inspect.signature(self._fn).bind()
                call = inspect.signature(target.__call__)
                signature = call.replace(parameters=list(call.parameters.values())[1:])  # without self
            else:
                signature = inspect.signature(self._fn)
        except ValueError:  # a builtin that does not tell its signature
            return None
        except TypeError as exc:
            raise self._cannot_call(f"a class whose constructor says: {exc}") from exc
        bound = self._fn.keywords if isinstance(self._fn, functools.partial) and not self._is_class else {}
        style = _context_style(signature, bound)
        try:
            signature.bind(*([None, None] if style == "" else [None]), **({style: None} if style else {}))
        except TypeError as exc:
            raise self._cannot_call(f"the signature {signature} ({exc})") from exc
        return style

    def validate_picklable(self, dumps: Callable[[object], bytes]) -> None:
        """Checks that prefetchers can receive the transform, with the ``dumps`` that will send it.

        Raises:
            ConfigError: ``dumps`` fails; the message names the transform and the cause.
        """
        try:
            dumps(self)
        except Exception as exc:
            what = f"Transform {self.name} cannot be sent to the prefetchers"
            expected = "a picklable transform"
            remedy = "open files, locks and connections inside a callable class, which every process builds"
            raise ConfigError(explain(what, found=_text(exc), expected=expected, remedy=remedy)) from exc

    def __call__(self, batch: pa.RecordBatch, ctx: TransformContext) -> Any:
        """Runs the transform on a batch and returns its output as a table with as many rows.

        Raises:
            UserError: The user's code raised; a TransformError with the exception chained.
            TransformError: Its output cannot become a block.
        """
        # The output is converted under the lock as well: a lazy one runs the user's code while it is read.
        with self._lock:
            try:
                return self._converted(self._call(batch, ctx), batch.num_rows)
            except RowCountError:
                raise
            except columns.OutputError as exc:
                raise TransformError(f"Output of transform {self.name}: {exc}") from exc.__cause__
            except Exception as exc:
                raise self._failed(exc, batch.num_rows) from exc
            except (KeyboardInterrupt, SystemExit):
                raise  # of the process, not of the rows
            except BaseException as exc:  # GeneratorExit, or a panic of native code: no row may be left out for it
                raise TransformError(self._what_failed(exc, batch.num_rows)) from exc

    def _converted(self, output: Any, rows: int) -> Any:
        return columns.to_table(output, rows)

    def known_schema(self, schema: pa.Schema) -> pa.Schema | None:
        """Returns the schema of the output for rows of a schema, where no row has to be transformed to know it."""
        del schema
        return None

    def _failed(self, exc: Exception, rows: int) -> UserError:
        return UserError(self._what_failed(exc, rows), exc)

    def _what_failed(self, exc: BaseException, rows: int) -> str:
        expected = f"an output for the {rows} rows of the batch"
        remedy = "correct the transform"
        if isinstance(exc, Exception):
            remedy += ", or choose with on_transform_error which rows may be left out"
        what = f"Transform {self.name} failed"
        return explain(what, found=_text(exc), expected=expected, remedy=remedy)

    def _call(self, batch: pa.RecordBatch, ctx: TransformContext) -> Any:
        if self._instance is None:
            self._instance = self._fn()
        if self._context == "":
            return self._instance(batch, ctx)
        return self._instance(batch, **({self._context: ctx} if self._context else {}))


class RowCountError(TransformError, ValueError):
    """A transform did not return one row for each it was given."""


class RowTransform(Transform):
    """A transform whose output is one Python object for each row, whatever it is.

    Args:
        fn: As for :class:`Transform`; returns an iterable.
        parallelism: How many threads of a process may be inside it at a time; more than one for functions only.
        batch_size: Most rows it is given at a time.
    """

    def __init__(self, fn: Callable[..., Any], parallelism: int = 1, batch_size: int = 64) -> None:
        self._parallelism = parallelism
        self._batch_size = batch_size
        super().__init__(fn)

    def __call__(self, batch: pa.RecordBatch, ctx: TransformContext) -> list[Any]:
        """Runs the transform on a batch, a few rows at a time, and returns its objects."""
        rows: list[Any] = []
        for start in range(0, batch.num_rows, self._batch_size):
            part = batch.slice(start, self._batch_size)
            rows += super().__call__(part, ctx.slice(start, part.num_rows))
        return rows

    def _reset(self) -> None:
        super()._reset()
        if not self._is_class:
            self._lock = threading.Semaphore(self._parallelism)

    def _converted(self, output: Any, rows: int) -> list[Any]:
        if not isinstance(output, Iterable):
            raise columns.OutputError(
                explain(
                    "it is no rows",
                    found=f"{output!r:.80}, a {type(output).__name__}",
                    expected="an iterable with one object for each row of the batch",
                    remedy="return a list, or the batch itself",
                )
            )
        objects = list(output)
        if len(objects) != rows:
            raise RowCountError(
                explain(
                    f"transform returned {len(objects)} rows for a batch of {rows}",
                    found=f"{len(objects)} objects from {self.name}",
                    expected="exactly one output row for each input row",
                    remedy="return one, or leave rows out with filter or on_transform_error",
                )
            )
        return objects


def _context_style(signature: inspect.Signature, bound: Mapping[str, Any]) -> str | None:
    parameters = list(signature.parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    second = positional[1] if len(positional) > 1 else None
    if second is not None and (second.default is second.empty or second.name in _CONTEXT_NAMES):
        return ""
    by_name = [p.name for p in parameters[1:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return next((name for name in by_name if name in _CONTEXT_NAMES and name not in bound), None)


def _text(exc: BaseException) -> str:
    """Returns an exception as text with its last three frames: it must survive the way to another process."""
    frames = [f for f in traceback.extract_tb(exc.__traceback__) if f.filename not in _OWN_FILES][-3:]
    where = ", ".join(f"{os.path.basename(f.filename)}:{f.lineno} in {f.name}" for f in frames)
    return f"{type(exc).__name__}: {_said(exc)}" + (f" (at {where})" if where else "")


def _said(exc: BaseException) -> str:
    try:
        return str(exc)
    except Exception:  # anything: it is the user's code
        return "<no text: its __str__ fails>"

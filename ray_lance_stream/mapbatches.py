"""Functions written for ``ray.data.Dataset.map_batches``, as a stream's ``transform``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pyarrow as pa

from ray_lance_stream.errors import ConfigError, TransformError, explain

_FORMATS: Final = ("numpy", "pandas", "pyarrow")


class MapBatches:
    """A transform that calls a function as ``map_batches`` does: with a batch of the format it was written for.

    Rows must stay as many and in order, and each depend on itself alone: a block is cut wherever it suits.

    Args:
        fn: The function, or a class whose instances are called; it is built once per prefetcher.
        batch_format: "numpy", a dict of arrays, Ray Data's default; "pandas" or "pyarrow".
        fn_args: Further arguments of every call.
        fn_kwargs: Further keyword arguments of every call.
        fn_constructor_args: Arguments of the class.
        fn_constructor_kwargs: Keyword arguments of the class.

    Raises:
        ConfigError: Another format, or ``fn`` cannot be called.

    Example:
        >>> import pyarrow as pa
        >>> def double(batch):
        ...     return {"x": batch["x"] * 2}
        >>> MapBatches(double)(pa.RecordBatch.from_pydict({"x": [1, 2, 3]}))
        {'x': array([2, 4, 6])}
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        batch_format: str | None = "numpy",
        fn_args: tuple[Any, ...] = (),
        fn_kwargs: dict[str, Any] | None = None,
        fn_constructor_args: tuple[Any, ...] = (),
        fn_constructor_kwargs: dict[str, Any] | None = None,
    ) -> None:
        chosen = "numpy" if batch_format == "default" else "pyarrow" if batch_format is None else batch_format
        if chosen not in _FORMATS or not callable(fn):
            raise ConfigError(
                explain(
                    "a function for map_batches is not valid",
                    found=f"{fn!r} with batch_format={batch_format!r}",
                    expected=f"a callable, and one of {', '.join(_FORMATS)}",
                    remedy="pass the arguments that map_batches was given",
                )
            )
        self._fn = fn
        self._format = chosen
        self._args = tuple(fn_args)
        self._kwargs = dict(fn_kwargs or {})
        self._constructor = (tuple(fn_constructor_args), dict(fn_constructor_kwargs or {}))
        self._instance: Callable[..., Any] | None = None
        self.__qualname__ = getattr(fn, "__qualname__", type(fn).__qualname__)  # the name in errors

    def __call__(self, batch: pa.RecordBatch) -> Any:
        """Returns what the function makes of the rows."""
        from ray.data.block import BlockAccessor  # here: prefetchers without such a transform do not need Ray Data

        if self._instance is None:
            args, kwargs = self._constructor
            self._instance = self._fn(*args, **kwargs) if isinstance(self._fn, type) else self._fn
        rows = BlockAccessor.for_block(pa.Table.from_batches([batch])).to_batch_format(self._format)
        result = self._instance(rows, *self._args, **self._kwargs)
        if hasattr(result, "__next__"):
            raise TransformError(
                explain(
                    "the function yields batches",
                    found="a generator",
                    expected="one batch with as many rows as it was given",
                    remedy="return one batch instead of yielding several",
                )
            )
        return result

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_instance": None}

"""Exceptions of ray_lance_stream. Every one is picklable: they cross process borders.

A user's mistake is a :class:`ConfigError` (a ``ValueError``) raised on the driver where it can be
known there. Messages follow one form, made by :func:`explain`: what is wrong, what was found, what
was expected, what to do.
"""

from __future__ import annotations


def explain(what: str, *, found: object, expected: str, remedy: str) -> str:
    """Returns a message in the package's one form: what, found, expected, remedy.

    >>> explain("num_splits is too small", found=0, expected="an integer >= 1", remedy="pass 48")
    'num_splits is too small. Found: 0. Expected: an integer >= 1. Remedy: pass 48.'
    """
    return f"{what}. Found: {found}. Expected: {expected}. Remedy: {remedy}."


def shown(value: object, limit: int = 80) -> str:
    """Returns ``repr(value)``, cut to ``limit`` characters; for values that come from outside.

    Never fails: ``repr`` of an integer of thousands of digits, or of deep nesting, raises.
    """
    try:
        text = repr(value)
    except Exception:
        return f"<{type(value).__name__} that cannot be shown>"
    return text if len(text) <= limit else text[: limit - 3] + "..."


class LanceStreamError(Exception):
    """Base class of every exception this package raises on purpose."""


class ConfigError(LanceStreamError, ValueError):
    """A parameter, or a combination of parameters, that cannot work."""


class StateError(LanceStreamError, ValueError):
    """A state that cannot be read, merged or used: damaged, partial, or not a state at all."""


class StateMismatchError(StateError):
    """A state that belongs to other data than the stream it is loaded into.

    ``field`` names what differs, ``saved`` and ``current`` are the two values.
    """

    def __init__(self, message: str, field: str = "", saved: object = None, current: object = None) -> None:
        super().__init__(message, field, saved, current)
        self.field = field
        self.saved = saved
        self.current = current

    def __str__(self) -> str:
        return str(self.args[0])


class MissingStateError(LanceStreamError, RuntimeError):
    """A checkpoint to resume from holds no stream state."""


class TableVersionError(LanceStreamError, RuntimeError):
    """The pinned table version is gone, or is not the one that was meant."""


class TransformError(LanceStreamError, RuntimeError):
    """The user's transform failed, or returned something that cannot become a block."""


class UnpicklableError(LanceStreamError, RuntimeError):
    """Stands for an exception that could not be sent to another process: what it said, as text.

    Attributes:
        type_name: The name of its type.
        text: Its message.
        traceback_text: Where it was raised.
    """

    def __init__(self, type_name: str, text: str = "", traceback_text: str = "") -> None:
        super().__init__(type_name, text, traceback_text)
        self.type_name = type_name
        self.text = text
        self.traceback_text = traceback_text

    def __str__(self) -> str:
        return f"{self.type_name}: {self.text}" if self.text else self.type_name


class BlockError(LanceStreamError, RuntimeError):
    """A block could not be built after the allowed number of attempts."""


class DeadlyRowError(BlockError):
    """A row kills every process that reads or transforms it."""


class PlacementError(LanceStreamError, RuntimeError):
    """Prefetchers could not be placed on the cluster in time."""


class LockstepError(LanceStreamError, RuntimeError):
    """The replicas of one run do not stand at the same step."""


class StaleIncarnationError(LanceStreamError, RuntimeError):
    """A request or a state of a worker group that has been replaced by a newer one."""


class StreamClosedError(LanceStreamError, RuntimeError):
    """A stream or shard was used after it was closed."""

"""Answers of actors: what was raised there arrives here as it was raised."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import RayTaskError

from ray_lance_stream.errors import LanceStreamError


def answer_of(ref: ray.ObjectRef[Any]) -> Any:
    """Waits for an actor's answer.

    Raises:
        LanceStreamError: An error of ours, as the actor raised it.
        RayError: Any other error, or the actor was lost.
    """
    try:
        return ray.get(ref)
    except RayTaskError as error:
        cause = cause_of(error)
        raise (cause if isinstance(cause, LanceStreamError) else error) from None


def cause_of(error: BaseException) -> BaseException:
    """Returns what an actor's method raised; any other error as it is."""
    cause = getattr(error, "cause", None) if isinstance(error, RayTaskError) else None
    return cause if isinstance(cause, BaseException) else error

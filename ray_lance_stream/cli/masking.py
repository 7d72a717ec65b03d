"""Keeps credentials out of everything that is printed: messages of object stores quote URLs and headers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import click

from ray_lance_stream.redacting import hidden, in_environment, in_uri

_KEY: Final = "ray_lance_stream.cli.secrets"


def remember(context: click.Context, values: Iterable[str]) -> None:
    """Notes texts that must not be shown."""
    context.meta[_KEY] = context.meta.get(_KEY, frozenset()) | frozenset(values)


def remember_uri(context: click.Context, uri: str) -> None:
    """Notes the credentials in a URI, if there are any."""
    remember(context, in_uri(uri))


def masked(context: click.Context, text: str) -> str:
    """Returns a text with every secret replaced by ``***``: those that were noted, and the environment's."""
    secrets: frozenset[str] = context.meta.get(_KEY, frozenset())
    return hidden(text, secrets | in_environment())

"""Keeps credentials out of everything that is printed: messages of object stores quote URLs and headers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final
from urllib.parse import unquote, urlsplit

import click

_KEY: Final = "ray_lance_stream.cli.secrets"
_SHORT: Final = 3  # "1" and the like are no secrets, and would eat the message


def remember(context: click.Context, values: Iterable[str]) -> None:
    """Notes texts that must not be shown."""
    context.meta[_KEY] = context.meta.get(_KEY, frozenset()) | frozenset(values)


def remember_uri(context: click.Context, uri: str) -> None:
    """Notes the user name and password in a URI, if there are any."""
    try:
        parts = urlsplit(uri)
        found = [parts.username or "", parts.password or ""]
    except ValueError:  # not a URI; whoever opens it says so
        return
    remember(context, [text for part in found for text in (part, unquote(part))])


def masked(context: click.Context, text: str) -> str:
    """Returns a text with every secret replaced by ``***``."""
    secrets: frozenset[str] = context.meta.get(_KEY, frozenset())
    for value in sorted(secrets - {"true", "false"}, key=len, reverse=True):
        if len(value) > _SHORT:
            text = text.replace(value, "***")
    return text

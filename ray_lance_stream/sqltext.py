"""The text of a filter: read as LanceDB reads it, and checked to mean the same rows whenever it is evaluated.

LanceDB takes a name in double quotes for a column, as SQL has it; Lance itself takes it for a string, and only a name
in backticks for a column. Written with backticks a filter is the same to both, so that is how it goes to either.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Final

from ray_lance_stream.errors import ConfigError, explain, shown

# What a filter consists of. Strings and names end at their quote unless it is doubled, backslashes mean nothing, and
# comments do not nest. What begins none of these, an open quote for one, is a single character.
_PARTS: Final = re.compile(
    r"""(?P<string>'(?:[^']|'')*')
    |(?P<quoted>"(?:[^"]|"")*")
    |(?P<ticked>`(?:[^`]|``)*`)
    |(?P<comment>--[^\n]*|/\*.*?\*/)
    |(?P<word>[\w@\#$]+)
    |(?P<space>\s+)
    |(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_NAMES: Final = ("word", "quoted", "ticked")
_PREFIXES: Final = ("b", "r", "n")  # of strings of bytes, without escapes, and national ones
_VOLATILE: Final = frozenset({"random", "rand", "uuid", "now", "today"})
_CLOCKS: Final = frozenset({"current_date", "current_time", "current_timestamp"})  # need no parentheses


def as_lance_reads(filter: str) -> str:
    """Returns a filter in which columns in double quotes stand in backticks, and all else is as it was.

    >>> as_lance_reads("\"the name\" <> 'x'")
    "`the name` <> 'x'"

    Raises:
        ConfigError: It has strings of a kind that neither LanceDB nor Lance can read.
    """
    parts = list(_parts(filter))
    for (kind, text), (after, _) in itertools.pairwise([*parts, ("end", "")]):
        if kind == "word" and (
            text.startswith("$")
            or (after == "string" and text.lower() in _PREFIXES)
            or (after == "quoted" and text.lower() in _PREFIXES[:2])
        ):
            raise ConfigError(
                explain(
                    f"filter {filter!r} has a string that cannot be read",
                    found=f"{text} before its quote" if not text.startswith("$") else shown(text),
                    expected="strings in single quotes and nothing else, a quote in them doubled",
                    remedy="write 'it''s', and columns as \"name\" or `name`",
                )
            )
    return "".join(_ticked(text) if kind == "quoted" else text for kind, text in parts)


def has_double_quotes(filter: str) -> bool:
    """Whether something in a filter stands in double quotes."""
    return any(kind == "quoted" for kind, _ in _parts(filter))


def check_stable(filter: str) -> None:
    """Raises ConfigError if a SQL condition does not mean the same rows whenever it is evaluated."""
    parts = [(kind, text) for kind, text in _parts(filter) if kind not in ("space", "comment")]
    for place, (kind, text) in enumerate(parts):
        name = (text if kind == "word" else text[1:-1]).lower()
        if kind not in _NAMES or (name not in _VOLATILE and name not in _CLOCKS):
            continue
        called = parts[place + 1 : place + 2] == [("other", "(")]
        of_a_struct = parts[max(0, place - 1) : place] == [("other", ".")]
        if called or (kind == "word" and name in _CLOCKS and not of_a_struct):
            raise ConfigError(
                explain(
                    f"filter {filter!r} does not mean the same rows every time",
                    found=f"{name}()" if called else name,
                    expected="a condition that depends on the row alone",
                    remedy="write the value itself, or store it in a column"
                    + ("" if called else f"; a column of that name is `{text}`"),
                )
            )


def _parts(filter: str) -> Iterator[tuple[str, str]]:
    """Yields (kind, text) of all parts of a filter, in order."""
    for match in _PARTS.finditer(filter):
        yield str(match.lastgroup), match.group()


def _ticked(quoted: str) -> str:
    name = quoted[1:-1].replace('""', '"')
    return "`" + name.replace("`", "``") + "`"

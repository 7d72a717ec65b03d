"""Keeps credentials out of texts: which texts hold some, and how they are shown without."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import CodeType, FunctionType, MethodType
from typing import Any, Final
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit, urlunsplit

_HIDDEN: Final = "***"
_SHORT: Final = 3  # "1" and the like are no secrets, and would eat the message
_SHORT_IN_ENVIRONMENT: Final = 7  # many variables are named like secrets and hold a mode or a number
_DEPTH: Final = 4  # of functions within functions that are looked into
_SENSITIVE: Final = re.compile(r"key|token|secret|passw|passphrase|credential|authorization|signature|sas|sig$", re.I)
_VARIABLE: Final = re.compile(r"SECRET|PASSWORD|TOKEN|API_KEY|ACCESS_KEY|ACCOUNT_KEY|SAS_KEY")
_UNESCAPED: Final = re.compile(r"[a-z][a-z0-9+.-]*://([^/@:?#]*):([^@?#]*/[^?#]*)@", re.I)
_PLACE: Final = re.compile(r"_(PATH|FILE|URI|URL|DIR)$")


def hidden(text: str, secrets: Iterable[str]) -> str:
    """Returns a text with ``***`` for every secret, also where it stands as in a URL."""
    forms = {form for value in secrets for form in (value, quote(value, safe=""), quote(value))}
    for value in sorted(forms - {"true", "false"}, key=len, reverse=True):
        if len(value) > _SHORT:
            text = text.replace(value, _HIDDEN)
    return text


def in_uri(uri: str) -> set[str]:
    """Returns the credentials in a URI: user name and password, and what its query gives for keys and signatures."""
    try:
        parts = urlsplit(uri)
        found = ["" if _names_container(parts) else parts.username or "", parts.password or ""]
    except ValueError:  # not a URI; whoever opens it says so
        return set(_before_host(uri))
    found += _before_host(uri)
    found += [value for name, value in parse_qsl(parts.query) if _SENSITIVE.search(name)]
    return {text for part in found if part for text in (part, unquote(part))}


def shown_uri(uri: str) -> str:
    """Returns a URI as messages may show it."""
    uri = hidden(uri, _before_host(uri))
    try:
        parts = urlsplit(uri)
    except ValueError:
        return uri
    if "://" not in uri:
        return uri
    user, at, host = parts.netloc.rpartition("@")
    if at and not _names_container(parts):
        user = ":".join(_HIDDEN for _ in user.split(":", 1))
    netloc = f"{user}{at}{host}"
    return hidden(urlunsplit(parts._replace(netloc=netloc)), in_uri(f"x://x?{parts.query}"))


def _before_host(uri: str) -> list[str]:
    """Credentials with a "/" that should have been written %2F: a URI's syntax takes them for a path."""
    found = _UNESCAPED.match(uri)
    return [] if found is None else [text for text in found.groups() if text]


def _names_container(parts: SplitResult) -> bool:
    """Whether what stands where others have the user is a container, as Azure writes it."""
    return parts.scheme in ("abfs", "abfss") and parts.password is None


def in_environment() -> set[str]:
    """Returns the values of environment variables that are named like secrets: clients of storage read them."""
    return {
        value
        for name, value in os.environ.items()
        if len(value) > _SHORT_IN_ENVIRONMENT and _VARIABLE.search(name.upper()) and not _PLACE.search(name.upper())
    }


def in_function(function: object) -> set[str]:
    """Returns texts that a function carries under names of secrets: in its closure, arguments, globals or object."""
    found: set[str] = set()
    _look_into(function, found, _DEPTH)
    return found


def named(function: object) -> str:
    """Returns what messages call a function: never its repr, which shows what a partial or an object carries."""
    if isinstance(function, functools.partial):
        return f"partial of {named(function.func)}"
    name = getattr(function, "__qualname__", None)
    return f"{function.__module__}.{name}" if name else f"an object of type {type(function).__qualname__}"


def _look_into(value: object, found: set[str], depth: int) -> None:
    if depth <= 0:
        return
    if isinstance(value, functools.partial):
        _look_into(value.func, found, depth - 1)
        for item in value.args:
            _look_into(item, found, depth - 1)
        _note(value.keywords, found, depth)
        return
    if isinstance(value, Mapping):
        _note(value, found, depth)
        return
    owner = getattr(value, "__self__", None)
    if owner is not None:
        _look_into(owner, found, depth - 1)
    function = value.__func__ if isinstance(value, MethodType) else value
    if isinstance(function, FunctionType):
        _note(_variables(function, function.__code__), found, depth)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        _note(dict(vars(value)), found, depth)
    with suppress(Exception):  # of a database, whose property may be anything
        options = getattr(value, "storage_options", None)
        if isinstance(options, Mapping):
            found.update(map(str, options.values()))


def _variables(function: FunctionType, code: CodeType) -> dict[str, Any]:
    """Returns what a function sees beside its arguments: closure, defaults, and the globals that it names."""
    seen = {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
    defaults = function.__defaults__ or ()
    seen |= dict(zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True))
    seen |= function.__kwdefaults__ or {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            seen[name] = cell.cell_contents
        except ValueError:  # not filled yet
            continue
    return seen


def _note(variables: Mapping[Any, Any], found: set[str], depth: int) -> None:
    for name, value in variables.items():
        if isinstance(value, bytes):
            value = value.decode(errors="replace")
        if isinstance(value, str):
            found |= in_uri(value) if "://" in value else set()
            if _SENSITIVE.search(str(name)):
                found.add(value)
        elif isinstance(value, (Mapping, functools.partial, FunctionType, MethodType)):
            _look_into(value, found, depth - 1)

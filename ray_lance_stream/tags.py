"""Tags that keep a table's version alive: Lance cleans no version up that has one.

A tag's name says who made it and of which run: ``ray-lance-stream.<run>.v<version>``. It is made when a stream is built
and stays when the run ends, because checkpoints refer to the version; ``ray-lance-stream release`` removes it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

from ray_lance_stream.errors import ConfigError, explain, shown
from ray_lance_stream.location import TableRef
from ray_lance_stream.readable import ReadableTable

_PREFIX: Final = "ray-lance-stream"
_TAG: Final = re.compile(rf"{_PREFIX}\.(.+)\.v([0-9]{{1,19}})")
_ALLOWED: Final = re.compile(r"[A-Za-z0-9_-]{1,80}")  # Lance takes letters, digits, ".", "-" and "_"
_OTHER: Final = re.compile(r"[^A-Za-z0-9_-]+")
_DIGEST_CHARS: Final = 8


@dataclass(frozen=True, kw_only=True)
class Protection:
    """A tag of ours.

    Attributes:
        tag: Its name.
        run: The run, as it stands in the name; see :func:`run_in_tags`.
        version: The table's version that it keeps.
    """

    tag: str
    run: str
    version: int


def run_in_tags(run: str) -> str:
    """Returns how a run is called in the names of its tags: as it is, if Lance takes that.

    Else other characters become "_", and a digest is added, so that two runs never share tags.

    Raises:
        ConfigError: It is empty.
    """
    if _ALLOWED.fullmatch(run):
        return run
    if not run:
        raise ConfigError(
            explain(
                "protect_version is not valid",
                found="an empty name",
                expected="True, False, or the run's name",
                remedy="pass the run's name, the same whenever the run is started again",
            )
        )
    digest = hashlib.sha256(run.encode(errors="surrogatepass")).hexdigest()[:_DIGEST_CHARS]
    return f"{_OTHER.sub('_', run)[:60]}-{digest}"


def protect(table: ReadableTable, ref: TableRef, run: str) -> str:
    """Tags the version that is open, and returns the tag's name. Safe to repeat, and for several processes at once.

    Raises:
        ConfigError: The table is in memory, or may not be written to.
        TableVersionError: The version was cleaned up in this moment.
    """
    tags, version = _tags_of(table, ref), table.version
    tag = f"{_PREFIX}.{run_in_tags(run)}.v{version}"
    try:
        tags.create(tag, version)
    except Exception as error:
        if not _points_to(tags, tag, version):  # else it was made by an earlier start of the run
            ref.open(version)  # says so if the version is gone
            raise _refused(ref, f"version {version}", "protected", error) from ref.shown(error)
    # Not only made: a clean-up that had begun before may not have seen it.
    ref.open(version)
    return tag


def protections(ref: TableRef, run: str | None = None) -> list[Protection]:
    """Returns the table's tags of ours, in order of their names; those of one run if it is given."""
    table = ref.open()
    wanted = None if run is None else run_in_tags(run)
    found = []
    for tag, entry in sorted(_tags_of(table, ref).list().items()):
        match = _TAG.fullmatch(tag)
        if match is not None and wanted in (None, match[1]) and int(entry["version"]) == int(match[2]):
            found.append(Protection(tag=tag, run=match[1], version=int(match[2])))
    return found


def release(ref: TableRef, run: str, keep: Collection[int] = ()) -> list[Protection]:
    """Removes a run's tags, and returns them; Lance may then clean the versions up.

    Args:
        ref: The table.
        run: The run, as it was given to the stream.
        keep: Versions that stay protected, because checkpoints refer to them.

    Raises:
        ConfigError: The table may not be written to.
    """
    gone = [found for found in protections(ref, run) if found.version not in keep]
    tags = _tags_of(ref.open(), ref)
    for found in gone:
        try:
            tags.delete(found.tag)
        except Exception as error:
            if found.tag in tags.list():  # else somebody else was faster
                raise _refused(ref, f"tag {found.tag}", "removed", error) from ref.shown(error)
    return gone


def check_protect(protect_version: object) -> None:
    """Raises ConfigError unless it is a bool or a name."""
    if not isinstance(protect_version, (bool, str)):
        raise ConfigError(
            explain(
                "protect_version is not valid",
                found=shown(protect_version),
                expected="True, False, or the run's name",
                remedy="pass the run's name, the same whenever the run is started again",
            )
        )
    if isinstance(protect_version, str):
        run_in_tags(protect_version)


def _points_to(tags: Any, tag: str, version: int) -> bool:
    try:
        return int(tags.get_version(tag)) == version
    except Exception:
        return False  # what went wrong before says more than this


def _tags_of(table: ReadableTable, ref: TableRef) -> Any:
    tags = None if table.uri.startswith("memory://") else getattr(table, "tags", None)
    if tags is None:
        raise ConfigError(
            explain(
                f"versions of table {ref.name!r} cannot be protected",
                found="a table in memory",
                expected="a table that Lance keeps in files, or a remote one",
                remedy="leave protect_version out: a table in memory keeps the versions that are open",
            )
        )
    return tags


def _refused(ref: TableRef, what: str, done: str, error: Exception) -> ConfigError:
    return ConfigError(
        explain(
            f"{what} of table {ref.name!r} cannot be {done}",
            found=ref.without_secrets(f"{type(error).__name__}: {error}"),
            expected="permission to write below _refs/tags in the table's directory",
            remedy="give it, or leave protect_version out and clean versions up later than the run ends",
        )
    )

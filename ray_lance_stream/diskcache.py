"""Files on a disk of the node, within a budget that all processes of the node share."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import uuid
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_LOCK: Final = "lock"
_IN_USE: Final = "in_use"
_SUMS: Final = "sums"
_PART, _RESERVED, _SUM = ".part", ".reserved", ".sum"
_BELOW: Final = "ray_lance_stream"  # in a directory that may hold other things, too
_READ_BYTES: Final = 1 << 20


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """Where a node keeps files, and how many bytes of them; see ``PrefetchConfig``."""

    directory: str | None
    max_bytes: int


class DiskCache:
    """The files kept under one key, in use until it is closed or its process ends.

    Who looks for room removes the files of keys that nobody uses, those used longest ago first; never files in use.
    Processes find out about each other by locks on files, which end with who holds them, however it ends.

    Args:
        spec: Below which directory, by default in one of this user's among the system's temporary ones; and the most
            bytes of all files there, those that are just being fetched included.
        key: A file name.

    Raises:
        OSError: The directory cannot be written, or the default one is not this user's alone.
    """

    def __init__(self, spec: CacheSpec, key: str) -> None:
        if fcntl is None:
            raise OSError("this system has no locks of files that end with who holds them")
        self._root = _own_temporary() if spec.directory is None else Path(spec.directory, _BELOW)
        self._max_bytes = spec.max_bytes
        self._checked: set[str] = set()  # files that this process has seen to be whole
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = self._root / key
        with self._alone():  # nobody removes the directory before it is in use
            self.path.mkdir(mode=0o700, exist_ok=True)
            self._used: int | None = os.open(self.path / _IN_USE, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._used, fcntl.LOCK_SH)
            os.utime(self.path / _IN_USE)

    def close(self) -> None:
        """Lets the files go; they stay until room is needed. Safe to repeat."""
        used, self._used = self._used, None
        if used is not None:
            os.close(used)

    def fetch(self, name: str, num_bytes: int, download: Callable[[Path], object]) -> bool:
        """Has a file in the cache, whose bytes are those that were fetched: one that has changed is fetched anew.

        Args:
            name: Below the key's directory.
            num_bytes: Its size, as far as it is known before.
            download: Writes it to a path.

        Returns:
            Whether it is there. If not, another process is just fetching it, or has just done so.

        Raises:
            NoRoomError: The budget is used up by files in use.
            OSError: It could not be fetched or written.
        """
        target = self.path / name
        if self._is_whole(name):
            return True
        part = target.with_name(f"{target.name}.{uuid.uuid4().hex}{_PART}")
        reservation = self._reserve(target, part.with_suffix(_RESERVED), num_bytes)
        if reservation is None:
            return False
        try:
            download(part)
            found = _sum_of(part)
            with self._alone():
                extra = max(0, part.stat().st_size - num_bytes)
                if extra and not self._make_room(extra):
                    raise NoRoomError(name)
                self._sum_path(name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._sum_path(name).write_text(found)
                part.replace(target)
            self._checked.add(name)
        finally:
            part.unlink(missing_ok=True)
            part.with_suffix(_RESERVED).unlink(missing_ok=True)
            os.close(reservation)
        return True

    def _is_whole(self, name: str) -> bool:
        """Whether a file is there, with the bytes that were fetched. Removes one that has changed."""
        target, expected = self.path / name, self._sum_path(name)
        if not target.exists():
            return False
        if name in self._checked:
            return True
        with contextlib.suppress(FileNotFoundError):  # evicted, or found to have changed by another process
            if _sum_of(target) == expected.read_text():
                self._checked.add(name)
                return True
        with self._alone():
            target.unlink(missing_ok=True)
        return False

    def _sum_path(self, name: str) -> Path:
        return self.path / _SUMS / f"{name}{_SUM}"

    def _reserve(self, target: Path, reserved: Path, num_bytes: int) -> int | None:
        """Counts a file's bytes from now on; None if another process has done so, or the file is there."""
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._alone():
            if target.exists() or any(map(_is_held, target.parent.glob(f"{target.name}.*{_RESERVED}"))):
                return None
            if not self._make_room(num_bytes):
                raise NoRoomError(target.name)
            held = os.open(reserved, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(held, fcntl.LOCK_SH)
            os.truncate(held, num_bytes)  # takes no room yet
            return held

    def _make_room(self, num_bytes: int) -> bool:
        room = self._max_bytes - sum(self._sizes().values())
        if room >= num_bytes:
            return True
        others = [path for path in self._root.iterdir() if (path / _IN_USE).exists() and path != self.path]
        for path in sorted(others, key=lambda path: (path / _IN_USE).stat().st_mtime):
            if not _is_held(path / _IN_USE):
                shutil.rmtree(path)
                room = self._max_bytes - sum(self._sizes().values())
                if room >= num_bytes:
                    return True
        return False

    def _sizes(self) -> dict[Path, int]:
        """The sizes of all files and reservations; what was left by processes that died in the middle is removed."""
        sizes: dict[Path, int] = {}
        for directory, _, names in os.walk(self._root):
            for path in (Path(directory, name) for name in names):
                if path.suffix == _PART:
                    if not path.with_suffix(_RESERVED).exists():
                        path.unlink(missing_ok=True)
                elif path.suffix == _RESERVED and not _is_held(path):
                    path.unlink(missing_ok=True)
                    path.with_suffix(_PART).unlink(missing_ok=True)
                elif path.suffix != _SUM:  # of some bytes
                    with contextlib.suppress(FileNotFoundError):  # its process is done with it
                        sizes[path] = path.stat().st_size
        return sizes

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keeps other processes and threads from changing what is counted."""
        with open(self._root / _LOCK, "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


class NoRoomError(Exception):
    """The budget of a cache is used up by files in use."""


def _own_temporary() -> Path:
    """This user's directory among the temporary ones, in which anybody could have made one of its name before."""
    path = Path(tempfile.gettempdir(), f"ray_lance_stream-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"{path} is not a directory of this user's that nobody else may write: pass cache_dir")
    return path


def _sum_of(path: Path) -> str:
    """Size and checksum, against what disks and crashes do; against people, the directory is this user's."""
    size, crc = 0, 0
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            size, crc = size + len(piece), zlib.crc32(piece, crc)
    return f"{size} {crc:08x}"


def _is_held(path: Path) -> bool:
    """Whether a process that lives has locked a file."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False

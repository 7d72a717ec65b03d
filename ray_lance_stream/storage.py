"""What the errors of storage mean. Lance and its clients raise the same few types for everything, so texts tell."""

from __future__ import annotations

import re
from typing import Final

from ray_lance_stream.errors import ConfigError

_TROUBLE: Final = re.compile(
    r"LanceError\(IO\)|\bIO \{|Generic (S3|GCS|MicrosoftAzure|HTTP)\b|store: \"|RetryError|HTTP error|"
    r"status(?: code)?: (?:4\d\d|5\d\d)|timed out|connection (?:reset|refused|closed)|lacked the necessary privileges",
    re.IGNORECASE,
)
_REFUSED: Final = re.compile(
    r"status(?: code)?: 40[13]|lacked the necessary privileges|Expired_?Token|TokenExpired|token (?:has|is) expired|"
    r"InvalidAccessKeyId|InvalidToken|SignatureDoesNotMatch|AccessDenied|AuthenticationFailed|AuthorizationFailure|"
    r"Unauthenticated|Unauthorized|RequestTimeTooSkewed",
    re.IGNORECASE,
)
_ABSENT: Final = re.compile(r"was not found|no such table|does not exist", re.IGNORECASE)


class CannotOpenError(ConfigError):
    """A table that could not be opened.

    Attributes:
        may_pass: Whether that was the storage's doing, so that it may work later.
    """

    may_pass = False


class RefusedError(OSError):
    """The storage did not accept the credentials."""


def is_trouble(error: BaseException) -> bool:
    """Whether an error is the storage's, so that the same may work later; not that something is not there."""
    text = str(error)
    if isinstance(error, (FileNotFoundError, NotADirectoryError)) or (_ABSENT.search(text) and not _refuses(error)):
        return False
    return isinstance(error, OSError) or _TROUBLE.search(text) is not None


def is_refusal(error: BaseException) -> bool:
    """Whether the storage has refused the credentials, which may have expired."""
    return _refuses(error) and is_trouble(error)


def _refuses(error: BaseException) -> bool:
    return _REFUSED.search(str(error)) is not None

"""Values that must not be shown: passwords, tokens, keys, and the URLs that contain them.

A secret comes from a variable, or from the file that the variable NAME_FILE names. The file is read again at each use,
so that a new password takes effect at the next connection.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import stat
import weakref
from collections.abc import Callable, Collection, Mapping
from functools import cache, partial
from typing import Any, Self

from sublet_protocol.domain.errors import InvalidSetting

log = logging.getLogger(__name__)

MASK = "***"
MAX_FILE_BYTES = 65_536
MIN_HIDDEN_CHARS = 4
"""A shorter one is not replaced in texts: it would be found in every other word."""

_known: dict[int, weakref.ref[Secret]] = {}
"""Those that exist, by identity."""


def _select_all(value: str) -> tuple[str, ...]:
    return (value,)


class Secret(str):
    """A text that is `***` when it is printed, formatted, encoded, copied or pickled; `reveal` returns its value.

    `source`: the value, or a function that returns it, called at each `reveal`. `parts`: returns which parts of a value
    are secret (default: all of it). Secrets are equal if their sources are. One that was pickled cannot be revealed.
    """

    __slots__ = ("__weakref__", "_hidden", "_parts", "_source")
    _source: str | Callable[[], str]
    _parts: Callable[[str], Collection[str]]
    _hidden: Collection[str]

    def __new__(cls, source: str | Callable[[], str], parts: Callable[[str], Collection[str]] = _select_all) -> Self:
        self = super().__new__(cls, MASK)
        self._source, self._parts = source, parts
        self._hidden = () if callable(source) else parts(source)
        key = id(self)
        _known[key] = weakref.ref(self, lambda _: _known.pop(key, None))
        return self

    def reveal(self) -> str:
        """Return the value. Raise `InvalidSetting` where it cannot be read."""
        if not callable(self._source):
            return self._source
        value = self._source()
        self._hidden = self._parts(value)
        return value

    def __repr__(self) -> str:
        return MASK

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return False
        if callable(self._source) or callable(other._source):
            return self._source == other._source
        return hmac.compare_digest(self._source.encode(), other._source.encode())

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((Secret, self._source))

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Secret, (_raise_left_behind,)


def _raise_left_behind() -> str:
    raise InvalidSetting(
        "a secret was pickled, and its value stays in the process it was in. Read it where it is needed, from a "
        "variable or a file."
    )


def hide_secrets(text: str) -> str:
    """Return the text with `***` for each part of a secret of this process; those of fewer than 4 characters stay."""
    secrets = [secret for ref in list(_known.values()) if (secret := ref()) is not None]
    for part in sorted({part for each in secrets for part in each._hidden}, key=len, reverse=True):
        if len(part) >= MIN_HIDDEN_CHARS:
            text = text.replace(part, MASK)
    return text


class SecretFilter(logging.Filter):
    """A logging filter that hides every known secret in a record's message, fields and traceback. For handlers: a
    logger's own filter does not see what its children log.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Hide the secrets in the record, and return True: it is always logged."""
        _hide_in(record)
        if fields := getattr(record, "fields", None):
            record.fields = {
                name: hide_secrets(value) if isinstance(value, str) else value for name, value in fields.items()
            }
        return True


class _HidingRecordFactory:
    """A factory of log records in which known secrets are replaced by `***`."""

    def __init__(self, make: Callable[..., logging.LogRecord]) -> None:
        self._make = make

    def __call__(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record = self._make(*args, **kwargs)
        with contextlib.suppress(Exception):  # arguments that do not fit: the handler reports that
            _hide_in(record)
        return record


def _hide_in(record: logging.LogRecord) -> None:
    """Hide secrets in the record. One without secrets stays as it is: handlers may use its arguments and exception."""
    message = record.getMessage()
    if (hidden := hide_secrets(message)) != message:
        record.msg, record.args = hidden, None
    text = record.exc_text or (record.exc_info and logging.Formatter().formatException(record.exc_info)) or ""
    if (hidden := hide_secrets(text)) != text:
        record.exc_info, record.exc_text = None, hidden


def hide_secrets_in_records() -> None:
    """Hide known secrets in all that this process logs from now on, for a process whose handlers others make."""
    make = logging.getLogRecordFactory()
    if not isinstance(make, _HidingRecordFactory):
        logging.setLogRecordFactory(_HidingRecordFactory(make))


def read_secret_setting(
    name: str,
    parts: Callable[[str], Collection[str]] = _select_all,
    check: Callable[[str], object] = str,
    environ: Mapping[str, str] = os.environ,
) -> Secret | None:
    """Return the secret that the variable `name` has, or the file that `name`_FILE names; None where neither is set.

    `check` raises `InvalidSetting` for a value that cannot be used. Raise `InvalidSetting` where both are set, and for
    a file that cannot be read, is empty, or may be written by others.
    """
    value, path = environ.get(name), environ.get(f"{name}_FILE")
    if value and path:
        raise InvalidSetting(f"{name} and {name}_FILE are both set, and only one of them is used. Unset the other.")
    if path:
        secret = Secret(ReloadingSecretFile(path, f"{name}_FILE", check), parts)
        secret.reveal()
        return secret
    return Secret(value, parts) if value else None


class ReloadingSecretFile:
    """A file from which a secret is read at each call. Where it cannot be used any more a warning is logged and the
    last value stays: a file may be replaced in several steps.

    `setting`: what names the file, for messages. `check`: raises `InvalidSetting` for a value that cannot be used.
    """

    def __init__(self, path: str, setting: str, check: Callable[[str], object] = str) -> None:
        self._path, self._setting, self._check = os.path.abspath(path), setting, check
        self._last: str | None = None

    def __call__(self) -> str:
        try:
            value = _read_file(self._path, self._setting)
            self._check(value)
        except InvalidSetting as error:
            if self._last is None:
                raise
            log.warning("secret invalid, previous value used: %s", error)
            return self._last
        self._last = value
        return value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReloadingSecretFile) and other._path == self._path

    def __hash__(self) -> int:
        return hash(self._path)


def _read_file(path: str, setting: str) -> str:
    """Return what is in the file, without surrounding blanks and newlines."""
    error = partial(_file_error, path, setting)
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            content = file.read(MAX_FILE_BYTES + 1)
        value = content.decode().strip()
    except OSError as problem:
        raise error(f"it cannot be read ({problem.strerror})", "Correct the path, or its owner and mode") from None
    except ValueError:
        raise error("it is not text in UTF-8", "Write the value alone into it") from None
    if stat.S_ISREG(status.st_mode) and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise error("other users may write to it", f"Run `chmod 600 {path}`")
    if not value or len(content) > MAX_FILE_BYTES:
        raise error("it is empty" if not value else f"it has more than {MAX_FILE_BYTES} bytes", "Write the value to it")
    if stat.S_ISREG(status.st_mode) and status.st_mode & stat.S_IROTH:
        _warn_readable(path, setting)
    return value


def _file_error(path: str, setting: str, problem: str, hint: str) -> InvalidSetting:
    return InvalidSetting(f"{setting} names {path}: {problem}. {hint}.")


@cache
def _warn_readable(path: str, setting: str) -> None:
    """Warn, once: containers are given such files, and have no other users."""
    log.warning("secret file readable by every user: setting=%s path=%s: run `chmod 600 %s`", setting, path, path)

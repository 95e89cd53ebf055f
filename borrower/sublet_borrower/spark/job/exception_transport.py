"""Carries an exception from a task to the driver: pickled where possible, else as text."""

from __future__ import annotations

import itertools
import pickle
import traceback
from typing import Any


class TaskFailed(RuntimeError):
    """Stands for an exception that could not leave its task."""


class UserCodeExited(RuntimeError):
    """The user's code called `sys.exit`, or raised SystemExit some other way."""


def pack(error: BaseException) -> bytes:
    """Return the exception and what it was raised from."""
    links: list[tuple[bytes | None, str, str]] = []
    link: BaseException | None = error
    while link is not None:
        traceback_text = "".join(traceback.format_tb(link.__traceback__)).rstrip()
        links.append((_pickled(link), f"{type(link).__name__}: {link}", traceback_text))
        link = link.__cause__
    return pickle.dumps(links)


def unpack(packed: bytes) -> BaseException:
    """Return the exception again, with its causes; each has a note with where in the task it was raised."""
    links: list[tuple[bytes | None, str, str]] = pickle.loads(packed)  # from our own task, as all of Spark's results
    errors = [_restored(*link) for link in links]
    for error, cause in itertools.pairwise(errors):
        error.__cause__ = cause
    return errors[0]


def _pickled(error: BaseException) -> bytes | None:
    """Class, arguments and attributes: an exception's own pickle calls `__init__` with the text alone."""
    from pyspark import cloudpickle

    try:
        pickled: bytes = cloudpickle.dumps((type(error), error.args, error.__dict__))  # type: ignore[no-untyped-call]
    except Exception:  # noqa: BLE001 whatever a user's exception holds: a socket, a lock
        return None
    return pickled


def _restored(pickled: bytes | None, text: str, traceback_text: str) -> BaseException:
    error = _unpickled(pickled) if pickled is not None else None
    if error is None:
        error = TaskFailed(text)
    if traceback_text:
        error.add_note(f"In the task:\n{traceback_text}")
    return error


def _unpickled(pickled: bytes) -> BaseException | None:
    try:
        kind, arguments, attributes = pickle.loads(pickled)
        error: Any = kind.__new__(kind, *arguments)
        error.args = arguments
        error.__dict__.update(attributes)
    except Exception:  # noqa: BLE001 such as a class that is not there on the driver
        return None
    return error if isinstance(error, BaseException) else None

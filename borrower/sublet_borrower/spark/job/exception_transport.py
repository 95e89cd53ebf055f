"""Carries an exception from a task to the driver as plain data.

It has the class name, the message and the traceback text. The driver makes no object of a class that a task names,
except for sublet's own errors, which come with their numbers and texts.
"""

from __future__ import annotations

import itertools
import json
import traceback
from typing import Any

from sublet_protocol.domain import errors
from sublet_protocol.domain.errors import SubletError, UsageError
from sublet_protocol.domain.secret import hide_secrets

MAX_LINKS = 5
"""Maximum number of causes in a chain; the nearest ones are sent."""

MAX_MESSAGE_CHARACTERS = 4_000
MAX_TRACEBACK_CHARACTERS = 8_000
"""In characters; of a longer traceback the end is sent."""

_OURS = errors.__name__


class TaskFailed(RuntimeError):
    """An exception raised in a task. `class_name`: its class, such as `builtins.ValueError`; `message`: its text."""

    def __init__(self, class_name: str, message: str) -> None:
        self.class_name, self.message = class_name, message
        super().__init__(f"{class_name}: {message}")


class UserCodeCalledExit(RuntimeError):
    """An exit of the user's code: by `sys.exit`, by raising SystemExit some other way, or what is no `Exception`."""


def pack(error: BaseException) -> str:
    """Return the exception and what it was raised from."""
    links: list[dict[str, Any]] = []
    link: BaseException | None = error
    while link is not None and len(links) < MAX_LINKS:
        fields: dict[str, Any] = {
            "class": f"{type(link).__module__}.{type(link).__qualname__}"[:MAX_MESSAGE_CHARACTERS],
            "message": _format_error(link)[:MAX_MESSAGE_CHARACTERS],
            "traceback": "".join(traceback.format_tb(link.__traceback__)).rstrip()[-MAX_TRACEBACK_CHARACTERS:],
        }
        if isinstance(link, SubletError):
            fields["attributes"] = _keep_plain(vars(link))
        links.append(fields)
        link = link.__cause__
    return json.dumps(links)


def unpack(packed: str) -> BaseException:
    """Return what ended a task, with its causes; each has a note with where in the task it was raised. Raises
    `UsageError` for what no task has packed."""
    try:
        failures = [_restore_error(link) for link in json.loads(packed)[:MAX_LINKS]]
        first = failures[0]
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise UsageError(f"not a task's failure ({type(error).__name__}: {error}): only tasks report here.") from None
    for failure, cause in itertools.pairwise(failures):
        failure.__cause__ = cause
    return first


def _format_error(error: BaseException) -> str:
    """Return its text, for the driver's log, without the secrets of this process."""
    try:
        return hide_secrets(str(error))
    except Exception as unfit:  # noqa: BLE001 a user's exception may raise anything
        return f"(its text cannot be had: {type(unfit).__name__})"


def _restore_error(link: dict[str, Any]) -> BaseException:
    error = _make_error(str(link["class"]), str(link["message"]), link.get("attributes") or {})
    if link["traceback"]:
        error.add_note(f"In the task:\n{link['traceback']}")
    return error


def _make_error(class_name: str, message: str, attributes: dict[str, Any]) -> BaseException:
    module, _, name = class_name.rpartition(".")
    kind = getattr(errors, name, None) if module == _OURS else None
    if not (isinstance(kind, type) and issubclass(kind, SubletError)):
        return TaskFailed(class_name, message)
    error = kind.__new__(kind)  # not of its arguments, but of the text that these had made
    error.args = (message,)
    vars(error).update(_keep_plain(attributes))
    return error


def _keep_plain(attributes: dict[str, Any]) -> dict[str, Any]:
    return {
        name: hide_secrets(value) if isinstance(value, str) else value
        for name, value in attributes.items()
        if name[0] != "_" and isinstance(value, int | str)
    }

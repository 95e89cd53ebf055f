"""A reset of a group that may be live: it is paused, its members hand over, all positions are set, and it goes on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator

from protocol.errors import Conflict, NotFound
from storage.groups import resets
from storage.groups.channel import Connection
from storage.groups.exclusive import resetting
from storage.groups.instructions import instruct
from storage.groups.model import Group
from storage.groups.orders import FOR_A_RESET, Pause, Resume
from storage.groups.resets import Move
from storage.groups.rules import by
from storage.groups.sql import database_user
from storage.groups.targets import Target

LOOK_S = 0.2
"""Between two looks whether members have handed over what they had."""

LEADER_LOOKS_S = 5.0
"""How long it takes at most until a leader knows of a pause that no news has told it of (`renew_streams_s`)."""


def reset(
    url: str,
    connection: Connection,
    group: Group,
    target: Target,
    streams: Collection[int],
    *,
    force: bool,
    patience_s: float,
    waiting: Callable[[int], None] = lambda held: None,
) -> tuple[Move, ...]:
    """Let the group go on from the target; what moved. `connection` is in autocommit, on the database of `url`.

    `force` does not wait for members, who are else given `patience_s` seconds; `waiting` is told how many streams they
    still hold. Raises `Conflict` where somebody else is resetting it, where they have not handed over in time, and what
    `resets.carry_out` raises: nothing was changed then.
    """
    with resetting(url, group), _paused(url, group, target):
        if not force:
            _wait(connection, group, patience_s, waiting)
        try:
            with connection.transaction():
                reason = by(f"reset to {target}", database_user(connection))
                return resets.carry_out(connection, group, target, streams, reason=reason, force=force)
        except Conflict as error:
            if force or patience_s > LEADER_LOOKS_S:
                raise
            said = (
                f"A leader may take {LEADER_LOOKS_S:g} s to hear of the pause: wait for longer than {patience_s:g} s."
            )
            raise Conflict(f"{error} {said}") from None


@contextlib.contextmanager
def _paused(url: str, group: Group, target: Target) -> Iterator[None]:
    """The group is paused meanwhile; whatever happens, it is resumed afterwards unless somebody else has paused it."""
    wanted, reason = group.subscription, f"{FOR_A_RESET}{target}"
    found, _ = instruct(url, wanted, Pause(reason))
    try:
        if found.group_id != group.group_id:
            raise NotFound(f"group {str(wanted)!r} was deleted and made anew meanwhile. Look at it, and try again.")
        yield
    finally:
        instruct(url, wanted, Resume(only=reason))


def _wait(connection: Connection, group: Group, patience_s: float, waiting: Callable[[int], None]) -> None:
    """Until nobody has anything, or the time is over: then what is done next says what is still lent."""
    deadline, told = time.monotonic() + patience_s, -1
    while (held := resets.held(connection, group)) and time.monotonic() < deadline:
        if held != told:
            waiting(held)
            told = held
        time.sleep(LOOK_S)

"""The errors that the truth and its twin raise alike, each with the value, the rule and the remedy."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.errors import Conflict, LostLeadership, UndeclaredQueue
from protocol.words import Subscription
from storage.groups.model import Group, GroupWrites, Start


def undeclared(subscription: Subscription) -> UndeclaredQueue:
    """A queue that nobody declared."""
    return UndeclaredQueue(
        f"{subscription}: a queue keeps messages for consumers that are yet to come, so it is declared before it is"
        f" used. Run: sublet groups create '{subscription}'"
    )


def same_start(group: Group, start: Start) -> Group:
    """The group, if it was created with this start; raises `Conflict` if with another."""
    if group.start is not start:
        raise Conflict(
            f"{group.subscription} exists as group {group.group_id}, started at {group.start}, not at {start}."
            " Reset it to where you want it, or delete it and create it again."
        )
    return group


def lost(group_id: int, term: int) -> LostLeadership:
    """A read under a term that is over."""
    return LostLeadership(f"group {group_id}: term {term} is over. Step down; claim again to lead under a new term.")


def check_batch(batch: Sequence[GroupWrites]) -> None:
    """Raise `ValueError` where a group occurs twice in a batch, or a stream twice in a group: our own broken rule."""
    groups = [writes.group_id for writes in batch]
    if len(set(groups)) < len(groups):
        raise ValueError(f"a group occurs twice in one batch: {sorted(groups)}")
    for writes in batch:
        streams = [entry.stream_id for entry in writes.entries]
        if len(set(streams)) < len(streams):
            raise ValueError(f"group {writes.group_id}: two entries for one stream in one batch: {writes.entries}")

"""The errors that the truth and its twin raise alike, each with the value, the rule and the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from shlex import quote
from typing import TYPE_CHECKING

from sublet_protocol.domain.errors import Conflict, LostLeadership, NotFound, UndeclaredQueue
from sublet_protocol.domain.subscriptions import Subscription

if TYPE_CHECKING:
    from sublet_storage.groups.model.records import Group, GroupOptions, GroupWrites


def undeclared(subscription: Subscription) -> UndeclaredQueue:
    """A queue that nobody declared."""
    return UndeclaredQueue(
        f"{subscription}: a queue keeps messages for consumers that are yet to come, so it is declared before it is"
        f" used. Run: sublet groups create {quote(str(subscription))}"
    )


def no_such_group(subscription: Subscription) -> NotFound:
    """A group that is not there, or not any more."""
    return NotFound(
        f"group {str(subscription)!r}: there is no such group. `sublet groups list` shows those there are; "
        "a $share group comes into being with its first consumer."
    )


def no_such_stream(subscription: Subscription, stream_id: int) -> NotFound:
    """A stream that the group does not have."""
    return NotFound(
        f"stream {stream_id} is none of {subscription}, or retention has taken it. "
        f"`sublet groups describe {quote(str(subscription))}` lists its streams."
    )


def same_options(group: Group, options: GroupOptions) -> Group:
    """The group, if it was created with these options; raises `Conflict`, which names what differs, if with others."""
    has, wanted = _spelled(group.options), _spelled(options)
    if has != wanted:
        differing = "; ".join(
            f"its {name} is {has[name]}, not {wanted[name]}" for name in has if has[name] != wanted[name]
        )
        raise Conflict(
            f"{group.subscription} exists as group {group.group_id} with other options: {differing}."
            " Use it as it is, or lose the progress made: "
            f"`sublet groups delete {quote(str(group.subscription))}`, and create it again."
        )
    return group


def _spelled(options: GroupOptions) -> dict[str, str]:
    """The options by the names that the command line gives them."""
    return {
        "start": str(options.start),
        "policy when messages are gone": options.when_gone.value,
        "policy at a block that cannot be decoded": options.on_poison.value,
        "hold on retention": "on" if options.holds_retention else "off",
        "strategy": options.strategy,
        "session expiry": f"{float(options.session_expiry_s)} s",
        "delivery": "atomic, in whole epochs" if options.atomic else "message by message",
    }


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

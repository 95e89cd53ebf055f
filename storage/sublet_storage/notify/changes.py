"""Notification messages and their values, and the settings of both sides; `codec` encodes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from sublet_protocol.domain.errors import SubletError
from sublet_protocol.domain.settings_base import CrossSettingRule, SettingsBase

STREAM, SPACE, GROUP, NODE, EPOCHS = "stream", "space", "group", "node", "epochs"
KINDS = (STREAM, SPACE, GROUP, NODE, EPOCHS)
"""The kinds of objects; each has a channel of its own, of the same name."""

_REVISION_BITS = 20
_LAST_REVISION = (1 << _REVISION_BITS) - 1
"""Added to the version of a group: subscribers that see more changes than this only by reading."""


class MalformedNotification(SubletError):
    """An error for bytes that are no message of ours: they are counted and dropped."""


class ObjectChange(Struct, frozen=True):
    """A change: the object `key` of that kind is at `version` now, or was deleted at it.

    Versions of one object only grow, also when it is deleted and created again; of two changes of one version the
    deletion is the later.
    """

    kind: str
    key: str
    version: int
    is_deleted: bool = False
    data: Mapping[str, Any] | None = None

    @property
    def order_key(self) -> int:
        """Return a number that grows from change to change of one object."""
        return 2 * self.version + self.is_deleted


class ChangeNotification(Struct, frozen=True):
    """The changes on one channel, number `sequence` of that publisher there; `predecessor` is the number before it."""

    publisher: str
    incarnation: str
    channel: str
    sequence: int
    predecessor: int
    changes: tuple[ObjectChange, ...]


class NotificationHeartbeat(Struct, frozen=True):
    """A sign of life of a publisher, with its last numbers of all channels it has used. `is_leaving`: its last
    message."""

    publisher: str
    incarnation: str
    sequences: Mapping[str, int]
    is_leaving: bool = False


Message = ChangeNotification | NotificationHeartbeat


class CatchUpSnapshot(Struct, frozen=True):
    """The state of one kind of objects in the database at one instant.

    `keys`: the requested objects, of which those without a change do not exist; None: all objects.
    """

    changes: tuple[ObjectChange, ...]
    keys: frozenset[str] | None = None


def stream_change(stream_id: int, head: int, closed: bool) -> ObjectChange:
    """Return the change of a stream that has grown or was closed."""
    return ObjectChange(STREAM, str(stream_id), 2 * head + closed, data={"head": head, "closed": closed})


def space_change(
    name: str, generation_id: int, deleted: bool = False, data: Mapping[str, Any] | None = None
) -> ObjectChange:
    """Return the change of a space that was created, rolled over or dropped; `generation_id` is its newest
    generation."""
    return ObjectChange(SPACE, name, generation_id, deleted, data)


def group_change(subscription: str, group_id: int, deleted: bool = False, revision: int = 0) -> ObjectChange:
    """Return the change of a group that was created or deleted; `revision` counts the changes of its desired state."""
    version = group_id << _REVISION_BITS | (_LAST_REVISION if deleted else min(revision, _LAST_REVISION))
    data = None if deleted else {"group_id": group_id, "revision": revision}
    return ObjectChange(GROUP, subscription, version, deleted, data)


def node_change(
    name: str, started_us: int, deleted: bool = False, data: Mapping[str, Any] | None = None
) -> ObjectChange:
    """Return the change of a node that has come or gone; `started_us`: when this incarnation was registered, by the
    database's clock."""
    return ObjectChange(NODE, name, started_us, deleted, data)


def epochs_change(space_id: int, moves: int) -> ObjectChange:
    """Return the change of a space in which more epochs are completed; `moves`: how often its lower frontier has moved,
    from 0 also where it has the name of one that was dropped."""
    return ObjectChange(EPOCHS, str(space_id), moves)


def _make_sum_rule(name: str, *summands: str, reason: str) -> CrossSettingRule:
    return CrossSettingRule(
        (name, *summands),
        f"{name} must be at least {' + '.join(summands)}",
        lambda s: getattr(s, name) >= sum(getattr(s, each) for each in summands),
        reason,
        f"Raise {name}",
    )


_RULES = (
    _make_sum_rule(
        "hello_interval_s", "gap_window_s", reason="a listener waits that long for what a hello says is missing"
    ),
    _make_sum_rule(
        "publisher_expiry_s",
        "hello_interval_s",
        "gap_window_s",
        reason="a publisher that only says hello would be forgotten between two of them",
    ),
    _make_sum_rule(
        "tombstone_retention_s",
        "hello_interval_s",
        "gap_window_s",
        reason="late notifications would bring back what was deleted",
    ),
    _make_sum_rule("poll_interval_s", "catch_up_min_interval_s", reason="catch-ups are not made more often"),
    _make_sum_rule(
        "catch_up_interval_s", "poll_interval_s", reason="with push no more of them are needed than without"
    ),
)


@dataclass(frozen=True, slots=True)
class NotifySettings(SettingsBase):
    """Settings in seconds, but for `max_sends_per_s`. Publishers and subscribers of one database need the same
    values."""

    PREFIX = "SUBLET_NOTIFY_"
    RULES = _RULES

    hello_interval_s: float = 5.0
    """After so long without a message a publisher says hello again."""
    gap_window_s: float = 0.2
    """How long a listener waits for what seems to be missing: the longest that notifications are under way."""
    catch_up_min_interval_s: float = 0.5
    """Least time between the beginnings of two catch-ups of one channel; more are put off, never dropped."""
    catch_up_jitter_s: float = 0.5
    """Catch-ups that all listeners need at once are spread over so long."""
    poll_interval_s: float = 1.0
    """Between two catch-ups where nothing is pushed: with the driver `poll`, or while a driver cannot listen."""
    catch_up_interval_s: float = 30.0
    """Between two catch-ups that nothing asked for, with a driver that pushes."""
    publisher_expiry_s: float = 60.0
    """A publisher that has been silent for so long is forgotten."""
    tombstone_retention_s: float = 600.0
    """How long it is remembered that something was deleted."""
    endpoint_refresh_interval_s: float = 5.0
    """How often a publisher looks who listens where, while it has changes to send."""
    max_sends_per_s: float = 200.0
    """Most messages a publisher sends per second, and under load a tenth of it; what changes meanwhile is sent with the
    next."""

    @property
    def publisher_timeout_s(self) -> float:
        """Return the silence after which a publisher has stopped, or its messages were lost."""
        return self.hello_interval_s + self.gap_window_s

"""Options with which a group is created, once for its life."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from msgspec import Struct

from sublet_protocol.domain.errors import UsageError
from sublet_protocol.domain.subscriptions import StartingPosition

MAX_SESSION_EXPIRY_S = 366 * 86_400.0
"""The longest time that a group's streams can be reserved for a session that has left."""


class OnDataLoss(StrEnum):
    """The reaction of a group to messages that retention took before it had consumed them."""

    FAIL = "fail"  # the stream is blocked until an operator decides
    SKIP = "skip"  # the stream is finished without them, and they are counted as lost


class OnPoison(StrEnum):
    """The reaction of a group to a block that cannot be decoded, or whose payload is not the one that was stored
    remotely."""

    BLOCK = "block"  # the stream is blocked before it until an operator decides
    SKIP = "skip"  # the stream goes on behind it, and its messages are counted as lost


class GroupOptions(Struct, frozen=True):
    """The options of a group, for its life. Raises `UsageError` for combinations that can never work.

    `session_expiry_s`: how long the streams of a named session that has left are reserved for its return. `atomic`: its
    consumers get entire epochs only. `holds_retention`: retention takes nothing that it has not consumed, as of every
    `$queue` group.
    """

    starting_position: StartingPosition = StartingPosition.LATEST
    on_data_loss: OnDataLoss = OnDataLoss.FAIL
    strategy: str = "even"
    session_expiry_s: float = 0.0
    atomic: bool = False
    on_poison: OnPoison = OnPoison.BLOCK
    holds_retention: bool = False

    def __post_init__(self) -> None:
        if not self.strategy.strip() or not self.strategy.isprintable() or len(self.strategy) > 255:
            raise UsageError(
                f"strategy {self.strategy!r}: it is named with 1 to 255 printable characters. Write even, load, or "
                "the name of an installed one."
            )
        if self.atomic and self.on_data_loss is OnDataLoss.SKIP:
            raise UsageError(
                "an atomic group cannot skip messages that are gone: it would give their epochs out in part. Leave one "
                "of the two out."
            )
        if self.atomic and self.on_poison is OnPoison.SKIP:
            raise UsageError(
                "an atomic group cannot skip messages that cannot be decoded: it would give their epochs out in part. "
                "Leave one of the two out."
            )
        if not 0 <= self.session_expiry_s <= MAX_SESSION_EXPIRY_S:
            raise UsageError(
                f"session expiry {self.session_expiry_s}: it is a number of seconds from 0 (sessions are not waited "
                f"for) to {MAX_SESSION_EXPIRY_S:.0f}. Choose one of these."
            )

    @classmethod
    def from_row(cls, start: str, options: Mapping[str, Any]) -> GroupOptions:
        """Return the options from the columns of the table consumer_group; missing ones have their defaults."""
        on_data_loss, strategy = options.get("on_data_loss", OnDataLoss.FAIL), options.get("strategy", "even")
        expiry_s, atomic = options.get("session_expiry_s", 0.0), options.get("atomic", False)
        on_poison = OnPoison(options.get("on_poison", OnPoison.BLOCK))
        holds = options.get("holds_retention", False)
        return cls(
            StartingPosition.parse(start), OnDataLoss(on_data_loss), strategy, expiry_s, atomic, on_poison, holds
        )

    def to_row(self) -> dict[str, Any]:
        """Return all but the start, which has a column of its own, as an object of JSON."""
        return {
            "on_data_loss": self.on_data_loss.value,
            "strategy": self.strategy,
            "session_expiry_s": self.session_expiry_s,
            "atomic": self.atomic,
            "on_poison": self.on_poison.value,
            "holds_retention": self.holds_retention,
        }


DEFAULTS = GroupOptions()
"""The options of a group that names none."""

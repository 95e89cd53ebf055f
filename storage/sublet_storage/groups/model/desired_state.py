"""The desired state of a live group: whether it is paused, and its sessions' weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, assert_never

from msgspec import Struct
from msgspec.structs import replace

from sublet_protocol.domain.errors import UsageError
from sublet_protocol.domain.limits import MAX_WEIGHT, MAX_WEIGHTS, MIN_WEIGHT

MAX_TEXT = 255
FOR_A_RESET: Final = "to be reset to "
"""Begins the reason of a pause that ends with a reset, and of no other."""


class PauseGroup(Struct, frozen=True):
    """Takes all streams back, and grants none until `ResumeGroup`; members stay. Raises `UsageError` for a reason that
    is too long, or is one of a reset.

    A group that is paused stays paused for its first reason. Only a group that is paused by a reset may be paused for
    another, and is not resumed by that reset then.
    """

    reason: str = ""

    def __post_init__(self) -> None:
        _check_text("reason", self.reason)
        if type(self) is PauseGroup and self.reason.startswith(FOR_A_RESET):
            raise UsageError(
                f"reason {self.reason!r}: those that begin with {FOR_A_RESET!r} are of resets, of which the next would "
                "resume the group. Give another."
            )

    def __str__(self) -> str:
        return format_pause(self.reason)


class PauseGroupForReset(PauseGroup, frozen=True):
    """Pauses the group for a reset: `reason` begins with `FOR_A_RESET`."""


class ResumeGroup(Struct, frozen=True):
    """Resumes granting. `only`: if the group is paused for this very reason."""

    only: str | None = None

    def __str__(self) -> str:
        return "resumed"


class OverrideSessionWeight(Struct, frozen=True):
    """Sets the weight of sessions of that name, whatever they request; None: as they request. Raises `UsageError` for
    an invalid weight."""

    session: str
    weight: float | None

    def __post_init__(self) -> None:
        _check_text("session", self.session)
        if not self.session:
            raise UsageError("a session without a name: only a named session has a weight that can be changed.")
        if self.weight is not None and not MIN_WEIGHT <= self.weight <= MAX_WEIGHT:
            rule = f"it is a number from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}"
            raise UsageError(f"weight {self.weight}: {rule}. To grant nothing, pause the group.")

    def __str__(self) -> str:
        share = "as requested" if self.weight is None else f"{self.weight:g}"
        return f"weight of session {self.session!r}: {share}"


GroupCommand = PauseGroup | ResumeGroup | OverrideSessionWeight


class GroupDesiredState(Struct, frozen=True):
    """The desired state of a group. `pause_reason` is None if it is not paused; `weights` are by session name,
    sorted."""

    pause_reason: str | None = None
    weights: tuple[tuple[str, float], ...] = ()

    def apply(self, command: GroupCommand) -> GroupDesiredState:
        """Return the state with this command applied; the same state if that is in force already. Raise `UsageError`
        for more weights than a group may have."""
        match command:
            case PauseGroup(reason):
                for_a_while = self.pause_reason is None or self.pause_reason.startswith(FOR_A_RESET)
                return replace(self, pause_reason=reason) if for_a_while else self
            case ResumeGroup(only):
                return replace(self, pause_reason=None) if only in (None, self.pause_reason) else self
            case OverrideSessionWeight(session, weight):
                others = {name: each for name, each in self.weights if name != session}
                weights = others if weight is None else {**others, session: float(weight)}
                if len(weights) > max(MAX_WEIGHTS, len(self.weights)):
                    raise UsageError(
                        f"session {session!r}: the group has weights for {MAX_WEIGHTS} sessions, which is the limit. "
                        "End one of them, with `own`, first."
                    )
                return replace(self, weights=tuple(sorted(weights.items())))
            case _:
                assert_never(command)

    def format(self) -> str:
        """Return the state as text for people."""
        weights = [str(OverrideSessionWeight(session, weight)) for session, weight in self.weights]
        return "; ".join(
            [str(ResumeGroup()) if self.pause_reason is None else format_pause(self.pause_reason), *weights]
        )

    def to_json(self) -> dict[str, Any]:
        """Return the state as a JSON object."""
        paused = {} if self.pause_reason is None else {"paused": self.pause_reason}
        return {**paused, "weights": dict(self.weights)} if self.weights else paused

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> GroupDesiredState:
        """Return the state that `to_json` wrote."""
        return cls(document.get("paused"), tuple(sorted(document.get("weights", {}).items())))


NO_DESIRED_STATE = GroupDesiredState()


def format_pause(reason: str | None) -> str:
    """Return a pause as text for people."""
    return f"paused: {reason}" if reason else "paused"


def _check_text(label: str, text: str) -> None:
    if len(text) > MAX_TEXT or not (text.isprintable() or not text):
        raise UsageError(f"{label} {text[:40]!r}: it has at most {MAX_TEXT} characters, all of them printable.")

"""The event of every machine that time has passed."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tick:
    """The event that time has passed: the machine's `wake_at` has come, or may have."""

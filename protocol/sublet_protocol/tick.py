"""The event of every machine that time has passed."""

from msgspec import Struct


class Tick(Struct, frozen=True):
    """The event that time has passed: the machine's `wake_at` has come, or may have."""

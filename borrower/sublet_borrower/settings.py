"""Settings of a consumer: times in seconds, and the bounds between them."""

from __future__ import annotations

from dataclasses import dataclass

from sublet_protocol.domain.settings_base import CrossSettingRule, SettingsBase
from sublet_storage.db.liveness_lock import LivenessLockSettings

_RULES = (
    CrossSettingRule(
        ("ping_timeout_s", "ping_interval_s", "resend_interval_s"),
        "ping_timeout_s must be more than ping_interval_s + resend_interval_s",
        lambda s: s.ping_timeout_s > s.ping_interval_s + s.resend_interval_s,
        "a single lost ping must not cost the leader",
        "Raise ping_timeout_s",
    ),
    CrossSettingRule(
        ("lock_confirm_interval_s", "lock_valid_s"),
        "lock_confirm_interval_s must be at most half of lock_valid_s",
        lambda s: s.lock_confirm_interval_s <= s.lock_valid_s / 2,
        "one look that takes its time must not keep calls waiting",
        "Lower lock_confirm_interval_s or raise lock_valid_s",
    ),
)

LOCK_TIMEOUT_S = 2.0
"""How long Postgres may take for a look at the lock."""


@dataclass(frozen=True, slots=True)
class BorrowerSettings(SettingsBase):
    """The settings of a consumer. The defaults fit the leader's; a deployment that changes one side must change the
    other.
    """

    RULES = _RULES

    ping_interval_s: float = 2.0
    """Between two pings of one borrower."""
    ping_timeout_s: float = 6.0
    """A leader that has answered no ping sent within this time is lost, and looked for anew."""
    leader_lookup_interval_s: float = 1.0
    """Between two requests for a leader."""
    resend_interval_s: float = 1.0
    """After which an unconfirmed progress or disconnect is sent again."""
    progress_interval_s: float = 0.05
    """Least time between two progress reports that are not final."""
    unsubscribe_timeout_s: float = 5.0
    """How long a leaving borrower waits for its session's last progress."""
    disconnect_timeout_s: float = 10.0
    """How long, after that, it waits for the leader to confirm: one lease."""

    read_timeout_s: float = 30.0
    """How long a read waits for Postgres while not a byte comes, or for the answer of a node; then it is tried again on
    another connection."""

    lock_confirm_interval_s: float = 0.25
    """Between two looks of a consumer whether it still holds its lock in the database."""
    lock_valid_s: float = 0.7
    """How long after such a look it begins calls: leaders grant its streams to others soon after its lock is free."""

    max_poll_interval_s: float = 1800.0
    """How long a session may take between two requests for a batch; after that it gives its streams up."""

    @property
    def lock_times(self) -> LivenessLockSettings:
        """Return the times of the connection that holds the consumer's lock."""
        interval_s, timeout_s = self.lock_confirm_interval_s, LOCK_TIMEOUT_S
        return LivenessLockSettings(interval_s, interval_s, 4 * interval_s, timeout_s, timeout_s, 2 * timeout_s)

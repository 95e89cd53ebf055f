"""Settings of a consumer: times in seconds, and the bounds between them."""

from __future__ import annotations

from dataclasses import dataclass

from sublet_protocol.domain.settings_base import CrossSettingRule, SettingsBase
from sublet_protocol.messages.borrower_leader import LOCK_VALID_S
from sublet_storage.db.advisory_lock import LockTimes

_RULES = (
    CrossSettingRule(
        ("ping_timeout_s", "ping_interval_s", "resend_interval_s"),
        "ping_timeout_s must be more than ping_interval_s + resend_interval_s",
        lambda s: s.ping_timeout_s > s.ping_interval_s + s.resend_interval_s,
        "a single lost ping must not cost the leader",
        "Raise ping_timeout_s",
    ),
    CrossSettingRule(
        ("lock_check_interval_s",),
        f"lock_check_interval_s must be at most {LOCK_VALID_S / 2:g}",
        lambda s: s.lock_check_interval_s <= LOCK_VALID_S / 2,
        f"calls begin for {LOCK_VALID_S:g} s after a look, and one that takes its time must not keep them waiting",
        "Lower lock_check_interval_s",
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

    lock_check_interval_s: float = 0.25
    """Between two looks of a consumer whether it still holds its lock in the database: it begins calls only for a
    moment after one."""

    max_poll_interval_s: float = 1800.0
    """How long a session may take between two requests for a batch; after that it gives its streams up."""

    @property
    def lock_times(self) -> LockTimes:
        """Return the times of the connection that holds the consumer's lock."""
        interval_s = self.lock_check_interval_s
        return LockTimes(interval_s, interval_s, 4 * interval_s, LOCK_TIMEOUT_S, LOCK_TIMEOUT_S, 2 * LOCK_TIMEOUT_S)

"""Settings of a node: times in seconds, and the bounds between them."""

from __future__ import annotations

from dataclasses import dataclass

from sublet_protocol.domain.settings_base import CrossSettingRule, SettingsBase
from sublet_storage.db.liveness_lock import LivenessLockSettings

_SLACK = 1 + 1e-9
"""Scaling may change an exact equality in the last bit."""
MIN_CLOCK_RATE = 0.85
"""Minimum reading of one clock while another counts 1: they drift apart by a seventh at most."""

_RULES = (
    CrossSettingRule(
        ("history_retention_s", "lease_duration_s"),
        "history_retention_s must be at least 60 times lease_duration_s",
        lambda s: s.history_retention_s * _SLACK >= 60 * s.lease_duration_s,
        "a consumer that lost the answer to its commit looks there how far it came",
        "Raise history_retention_s",
    ),
    CrossSettingRule(
        ("statement_timeout_s", "lease_margin_s"),
        "statement_timeout_s must be less than lease_margin_s",
        lambda s: s.statement_timeout_s < s.lease_margin_s,
        "a write that began inside the trust window has to be over when the lease is",
        "Lower statement_timeout_s or raise lease_margin_s",
    ),
    CrossSettingRule(
        ("tcp_timeout_s", "lease_margin_s"),
        "tcp_timeout_s must be less than lease_margin_s",
        lambda s: s.tcp_timeout_s < s.lease_margin_s,
        "a write on a dead connection has to be given up before the lease ends",
        "Lower tcp_timeout_s or raise lease_margin_s",
    ),
    CrossSettingRule(
        ("lock_timeout_s", "statement_timeout_s"),
        "lock_timeout_s must be less than statement_timeout_s",
        lambda s: s.lock_timeout_s < s.statement_timeout_s,
        "a locked row should be reported as such and not as a slow statement",
        "Lower lock_timeout_s",
    ),
    CrossSettingRule(
        ("lease_margin_s", "lease_duration_s", "lease_renew_interval_s"),
        "lease_margin_s must be less than lease_duration_s - lease_renew_interval_s",
        lambda s: s.lease_margin_s < s.lease_duration_s - s.lease_renew_interval_s,
        "trust would run out before the renewal is even tried",
        "Lower lease_margin_s or lease_renew_interval_s, or raise lease_duration_s",
    ),
    CrossSettingRule(
        ("lease_renew_interval_s", "lease_duration_s"),
        "lease_renew_interval_s must be at most a third of lease_duration_s",
        lambda s: s.lease_renew_interval_s <= s.lease_duration_s / 3 * _SLACK,
        "one failed renewal must not cost the leadership",
        "Lower lease_renew_interval_s or raise lease_duration_s",
    ),
    CrossSettingRule(
        ("lock_recheck_delay_s", "lock_check_interval_s"),
        "lock_recheck_delay_s must be at most lock_check_interval_s",
        lambda s: s.lock_recheck_delay_s <= s.lock_check_interval_s * _SLACK,
        "a lock that was found free is looked at again sooner than others",
        "Lower lock_recheck_delay_s or raise lock_check_interval_s",
    ),
    CrossSettingRule(
        ("lock_check_interval_s", "lease_duration_s"),
        "lock_check_interval_s must be less than an eighth of lease_duration_s",
        lambda s: s.lock_watch_age_s < s.lease_duration_s,
        "only who has looked for eight of them may act on a free lock, and the lease would be over by then",
        "Lower lock_check_interval_s or raise lease_duration_s",
    ),
    CrossSettingRule(
        ("reconnect_grace_s", "eviction_timeout_s"),
        "reconnect_grace_s must be less than eviction_timeout_s",
        lambda s: s.reconnect_grace_s < s.eviction_timeout_s,
        "a consumer that is silent so long has lost its streams anyway",
        "Lower reconnect_grace_s or raise eviction_timeout_s",
    ),
    CrossSettingRule(
        ("eviction_timeout_s", "ping_timeout_s", "resend_interval_s"),
        "eviction_timeout_s must be more than ping_timeout_s + resend_interval_s",
        lambda s: s.eviction_timeout_s > s.ping_timeout_s + s.resend_interval_s,
        "a borrower has to have stopped by itself before its streams are granted to others",
        "Raise eviction_timeout_s or lower ping_timeout_s",
    ),
    CrossSettingRule(
        ("reclaim_grace_s", "ping_timeout_s", "resend_interval_s"),
        "reclaim_grace_s must be more than ping_timeout_s + resend_interval_s",
        lambda s: s.reclaim_grace_s > s.ping_timeout_s + s.resend_interval_s,
        "a borrower may need that long to notice that its leader has changed",
        "Raise reclaim_grace_s or lower ping_timeout_s",
    ),
    CrossSettingRule(
        ("ping_interval_s", "ping_timeout_s"),
        "ping_interval_s must be at most half of ping_timeout_s",
        lambda s: s.ping_interval_s <= s.ping_timeout_s / 2 * _SLACK,
        "one lost ping must not cost the borrower its leader",
        "Lower ping_interval_s or raise ping_timeout_s",
    ),
    CrossSettingRule(
        ("poll_hold_s", "lease_duration_s"),
        "poll_hold_s must be at most half of lease_duration_s",
        lambda s: s.poll_hold_s <= s.lease_duration_s / 2 * _SLACK,
        "an agent has to notice a dead node before another one leads",
        "Lower poll_hold_s or raise lease_duration_s",
    ),
    CrossSettingRule(
        ("revoke_deadline_s", "ping_timeout_s", "resend_interval_s"),
        "revoke_deadline_s must be more than ping_timeout_s + resend_interval_s",
        lambda s: s.revoke_deadline_s > s.ping_timeout_s + s.resend_interval_s,
        "a holder that does not receive it has to have stopped by itself before its streams are granted to others",
        "Raise revoke_deadline_s or lower ping_timeout_s",
    ),
    CrossSettingRule(
        ("unsubscribe_timeout_s", "resend_interval_s"),
        "unsubscribe_timeout_s must be more than resend_interval_s",
        lambda s: s.unsubscribe_timeout_s > s.resend_interval_s,
        "one lost message must not cut a leave short",
        "Raise unsubscribe_timeout_s",
    ),
    CrossSettingRule(
        ("rebalance_debounce_s", "rebalance_debounce_max_s"),
        "rebalance_debounce_s must be at most rebalance_debounce_max_s",
        lambda s: s.rebalance_debounce_s <= s.rebalance_debounce_max_s * _SLACK,
        "the cap is the longest that a chain of quiet times may grow",
        "Lower rebalance_debounce_s or raise rebalance_debounce_max_s",
    ),
    CrossSettingRule(
        ("leader_idle_timeout_s", "reclaim_grace_s"),
        "leader_idle_timeout_s must be more than reclaim_grace_s",
        lambda s: s.leader_idle_timeout_s > s.reclaim_grace_s,
        "a new leader must not stop before its borrowers had time to come back",
        "Raise leader_idle_timeout_s or lower reclaim_grace_s",
    ),
)


@dataclass(frozen=True, slots=True)
class LeaderSettings(SettingsBase):
    """Times in seconds. Borrowers have their own settings; `ping_interval_s` and `ping_timeout_s` must be the same
    there."""

    RULES = _RULES

    lease_duration_s: float = 10.0
    """How long a claim or a renewal keeps other nodes from leading, in seconds of the database's clock."""
    lease_renew_interval_s: float = 3.0
    """From the start of one renewal of all leases of a node to the start of the next."""
    lease_margin_s: float = 1.0
    """How much earlier than the database a leader stops trusting its lease: covers drift and time on the wire."""
    claim_retry_interval_s: float = 1.0
    """Least time between two attempts to claim one group, and before a failed renewal or release is tried again."""
    lock_check_interval_s: float = 0.25
    """Between two looks at the locks of leaders that this node would succeed."""
    lock_recheck_delay_s: float = 0.15
    """Least time between two looks that find a leader's lock free, after which its group is claimed though its lease
    runs. A leader whose connection was cut has to have its lock back sooner."""
    reconnect_grace_s: float = 1.0
    """How long a consumer may hold no poll while its lock is free before its streams are granted to others. Where it is
    not a fifth longer than the consumer's `lock_valid_s`, the eviction time counts."""
    statement_timeout_s: float = 0.8
    """After which Postgres cancels a statement of a leader."""
    tcp_timeout_s: float = 0.8
    """After which a connection to Postgres whose bytes are not acknowledged is dead."""
    lock_timeout_s: float = 0.3
    """How long a statement of a leader waits for a row that somebody else has locked."""
    resend_interval_s: float = 1.0
    """After which a grant, revoke or revoked without an answer is sent again."""
    revoke_deadline_s: float = 30.0
    """How long a forced revoke (drain, reset, delete, operator) waits for the borrower's final report."""
    eviction_timeout_s: float = 10.0
    """A borrower that is silent for this long loses its streams."""
    reclaim_grace_s: float = 10.0
    """How long a new leader keeps a held stream for its borrower to come back."""
    rebalance_debounce_s: float = 0.2
    """Quiet time after a join or leave before streams are shared out anew."""
    rebalance_debounce_max_s: float = 2.0
    """Longest time that joins and leaves can put that off."""
    min_grant_duration_s: float = 5.0
    """A stream granted less than this ago is not revoked for balance."""
    rebalance_interval_s: float = 30.0
    """Between two checks of the balance that nothing asked for."""
    stream_sync_interval_s: float = 5.0
    """Between two looks for streams opened or closed since."""
    leader_idle_timeout_s: float = 60.0
    """A leader without members for this long gives its claim up."""
    ping_interval_s: float = 2.0
    """Between two pings of a borrower."""
    ping_timeout_s: float = 6.0
    """A borrower that got no ping response for this long counts its leader as lost."""
    poll_hold_s: float = 5.0
    """How long a node holds an agent's poll when there is nothing to say."""
    unsubscribe_timeout_s: float = 5.0
    """How long a leaving borrower waits for its session's last progress."""
    history_retention_s: float = 30 * 86400.0
    """Retention of the history of groups (why a stream is blocked: as long as it is)."""
    payload_deletion_grace_s: float = 7 * 86400.0
    """How long an object outside of Postgres is kept when no block names it any more: at least the age of the oldest
    backup that is to be restored, and the delay of a standby."""

    @property
    def receive_timeout_s(self) -> float:
        """Return how long a leader's connection to Postgres may stay silent before it is closed: longer than the server
        takes to cancel a statement, and shorter than a lease."""
        return (self.statement_timeout_s + self.lease_margin_s) / 2

    @property
    def lock_times(self) -> LivenessLockSettings:
        """Return the times of the connection that holds this node's lock."""
        return LivenessLockSettings(
            self.lock_check_interval_s,
            self.lock_recheck_delay_s,
            self.lock_grace_s,
            self.statement_timeout_s,
            self.tcp_timeout_s,
            self.receive_timeout_s,
        )

    @property
    def lock_grace_s(self) -> float:
        """Return how long a leader may be without its lock before it stops sending."""
        return 4 * self.lock_check_interval_s

    @property
    def lock_watch_age_s(self) -> float:
        """Return the minimum age of a connection for a lock that it finds free to count: after a restart of the
        database all are free, and leaders need a moment to reacquire theirs."""
        return 8 * self.lock_check_interval_s

    @property
    def max_lock_valid_s(self) -> float:
        """Return how long after it last saw its lock held an agent may begin calls, by its clock, to be gone after the
        reconnect grace."""
        return MIN_CLOCK_RATE * self.reconnect_grace_s

    def is_lock_short(self, lock_valid_s: float) -> bool:
        """Return whether an agent that has declared a lock with that time is gone after the reconnect grace."""
        return 0.0 < lock_valid_s <= self.max_lock_valid_s

    @property
    def grant_validity_s(self) -> float:
        """Return how long after a ping was answered no leader may grant its sender's streams to others by force."""
        return min(self.eviction_timeout_s, self.reclaim_grace_s, self.revoke_deadline_s)

    @property
    def ping_valid_for_s(self) -> float:
        """Return how long after it was sent an answered ping lets a borrower begin user calls: that ends before the
        leaders' validity does, though their clocks drift apart by a seventh."""
        return MIN_CLOCK_RATE * self.grant_validity_s

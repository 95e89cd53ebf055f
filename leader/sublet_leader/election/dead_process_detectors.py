"""Pure machines that find nodes and agents that have ended, by their free locks.

A lock is free for a moment where its holder's connection was cut, and all are after a restart of the database. So one
check is not enough: two must find it free, some time apart, over one connection that is itself old enough.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from sublet_leader.settings import LeaderSettings
from sublet_protocol.domain.grant_keys import timeline_number
from sublet_protocol.domain.limits import MAX_SUBSCRIBERS
from sublet_protocol.messages.borrower_leader import LeaderWanted, ToLeader
from sublet_storage.db.liveness_lock import PeerLocksChecked, compute_lock_key


class FreeLockDetector:
    """Tracks the locks that were free in the last check of this connection. `delay_s`: from the answer to the first to
    the start of the last of the checks."""

    def __init__(self, settings: LeaderSettings, delay_s: float) -> None:
        self._settings, self._delay_s = settings, delay_s
        self._connected_at = float("-inf")
        self._free_since: dict[int, float] = {}

    def check(self, look: PeerLocksChecked) -> frozenset[int]:
        """Return the keys of the locks that have been free long enough, each once; a later report needs two checks
        again."""
        if look.connected_at != self._connected_at:
            self._connected_at, self._free_since = look.connected_at, {}
        if look.sent_at < look.connected_at + self._settings.lock_watch_age_s:
            return frozenset()
        free_since = {key: self._free_since.get(key, look.answered_at) for key in look.free}
        delay_s = self._delay_s
        twice = frozenset(key for key, at in free_since.items() if look.sent_at >= at + delay_s)
        self._free_since = {key: at for key, at in free_since.items() if key not in twice}
        return twice

    def forget(self, key: int) -> None:
        """Forget that this lock was free: its next check counts as the first."""
        self._free_since.pop(key, None)


class _MissingAgent(Struct, frozen=True):
    """An agent that holds no poll. `since`: when that, or its last message, was noticed. `holders`: those of its
    borrowers that had not reclaimed what a former leader granted them while the lock was held in this database, on this
    `timeline`."""

    agent: str
    began_at: float
    since: float
    holders: Set[str] = frozenset()
    timeline: int | None = None

    def is_same_lock(self, message: ToLeader) -> bool:
        """Return whether the lock that the agent has by this message, if any, is the one that its holders had: a
        borrower is replaced when the lock is lost, and again when one is acquired."""
        if not (self.holders and isinstance(message, LeaderWanted)):
            return True
        return message.lock_valid_s > 0.0 and not self.holders.isdisjoint({message.borrower_id, message.predecessor})


class DeadAgentDetector:
    """Finds the agents whose process has ended: no poll of theirs is held, nothing comes from them, and for
    `reconnect_grace_s` every check has found their locks free.

    That is enough, whatever happened to connections: an agent with a lock begins calls for a shorter time than that
    after it last saw its lock held, and one that has lost its lock needs a leader's answer before it goes on. A lock
    counts only if this very connection has seen it held: the agent's database may be another, or a standby. Or if the
    database has, when a former leader granted what is not reclaimed, and is on the same timeline now.
    """

    def __init__(self, settings: LeaderSettings) -> None:
        self._settings = settings
        self._free_locks = FreeLockDetector(settings, settings.reconnect_grace_s)
        self._connected_at = float("-inf")
        self._missing: dict[int, _MissingAgent] = {}
        self._declared: dict[int, float] = {}  # {key of a lock that is still to be seen held: since when}
        self._seen: dict[int, None] = {}  # keys of locks that were seen held

    def keys(self) -> tuple[int, ...]:
        """Return the keys of the locks to check. Thread-safe."""
        return (*tuple(self._missing), *tuple(self._declared))

    def note_message(self, agent: str, message: ToLeader, now: float) -> None:
        """Begin anew, as what was found before the message does not count; see whether the lock it declares is held."""
        declares_lock = isinstance(message, LeaderWanted) and message.lock_valid_s > 0.0
        if not (self._missing or declares_lock):
            return
        key = compute_lock_key(agent)
        if (missing := self._missing.pop(key, None)) is not None:
            if missing.is_same_lock(message):
                self._missing[key] = replace(missing, since=now)
            self._free_locks.forget(key)
        if declares_lock and key not in self._seen:
            self._declared[key] = now
            _drop_oldest(self._declared)

    def note_poll(self, agent: str, is_held: bool, now: float) -> None:
        """Begin to watch the agent, or stop, as it polls."""
        key = compute_lock_key(agent)
        if is_held:
            missing = self._missing.pop(key, None)
            if missing is not None and missing.holders:  # it may end again before its lock is checked
                self._missing[key] = replace(missing, since=now)
            self._free_locks.forget(key)
        elif key in self._seen:
            self._missing.setdefault(key, _MissingAgent(agent, now, now))

    def watch(self, holders: Mapping[str, Set[str]], term: int, now: float) -> None:
        """Begin to watch agents whose borrowers have not reclaimed what they hold, and got while the agents' locks were
        held on the timeline of this term, as {agent: borrowers}."""
        for agent, borrowers in holders.items():
            key = compute_lock_key(agent)
            self._missing[key] = _MissingAgent(agent, now, now, borrowers, timeline_number(term))
            self._free_locks.forget(key)

    def expire(self, now: float) -> None:
        """Stop watching what an eviction for its silence has ended by now, agents that are elsewhere, and locks that
        were never seen held."""
        since = now - self._settings.eviction_timeout_s
        if self._missing or self._declared:
            self._missing = {key: each for key, each in self._missing.items() if each.began_at > since}
            self._declared = {key: at for key, at in self._declared.items() if at > since}

    def check(self, look: PeerLocksChecked) -> frozenset[str]:
        """Return the agents that are gone, each once."""
        if look.connected_at != self._connected_at:
            self._connected_at = look.connected_at
            self._declared |= dict.fromkeys(self._seen, look.answered_at)
            self._seen = {}
        for key in self._declared.keys() & look.held:
            del self._declared[key]
            self._seen[key] = None
            _drop_oldest(self._seen)
        free = frozenset(
            key
            for key in look.free
            if (missing := self._missing.get(key)) is not None
            and look.sent_at >= missing.since
            and (key in self._seen or (missing.holders and missing.timeline == look.timeline))
        )
        gone_keys = self._free_locks.check(replace(look, free=free))
        for key in gone_keys:
            self._seen.pop(key, None)  # it is declared again with the next message of one that comes back
        return frozenset(self._missing.pop(key).agent for key in gone_keys)


def _drop_oldest(keys: dict[int, Any]) -> None:
    """Drop the oldest key if there are more than a node may have agents."""
    if len(keys) > MAX_SUBSCRIBERS:
        del keys[next(iter(keys))]

"""A node's cache of all rules and tokens, which serves for a while without the database."""

from __future__ import annotations

import hmac
from collections.abc import Callable

from sublet_protocol.domain.access.rights import ALL, AccessRule, AccessSnapshot, Right
from sublet_protocol.domain.access.token import hash_token, parse_token_id
from sublet_protocol.domain.errors import Unavailable
from sublet_protocol.domain.topics import TopicFilter

MAX_AGE_S = 60.0
"""Maximum age while the database is away; after that it allows nothing."""


class AccessCache:
    """A cache of rules and tokens. Thread-safe: `replace` and `confirm` are called by the reader of the tables. `clock`
    is in seconds.
    """

    def __init__(self, snapshot: AccessSnapshot, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._used: set[str] = set()
        self.replace(snapshot)

    def replace(self, snapshot: AccessSnapshot) -> None:
        """Decide by this snapshot, which was read just now."""
        self.confirm()
        self._state = snapshot, self._confirmed_at

    def confirm(self) -> None:
        """Note that nothing has changed by now."""
        self._confirmed_at = self._clock()

    @property
    def version(self) -> str:
        """Return the version of the snapshot in use."""
        return self._state[0].version

    @property
    def is_stale(self) -> bool:
        """Return whether it is too old to allow anything."""
        return self._clock() - self._confirmed_at > MAX_AGE_S

    def authenticate(self, token: str) -> str | None:
        """Return the principal of the token; None for one that is unknown, wrong, expired or revoked."""
        snapshot, read_at = self._state
        token_id = parse_token_id(token)
        stored_token = None if token_id is None else snapshot.tokens.get(token_id)
        if token_id is None or stored_token is None or not hmac.compare_digest(stored_token.digest, hash_token(token)):
            return None
        if self._clock() - read_at >= stored_token.remaining_s:
            return None
        self._used.add(token_id)
        return stored_token.principal

    def find_rule(
        self, principal: str, right: Right, filter: TopicFilter = ALL, group: str | None = None
    ) -> AccessRule | None:
        """Return the rule that allows it, as `AccessRules.find_rule` does. Raise `Unavailable` where the rules are too
        old.
        """
        if self.is_stale:
            raise Unavailable(
                f"this node has not been able to read the rights for {MAX_AGE_S:g} s, and grants none until it has. "
                "Try again when the database is back."
            )
        return self._state[0].rights.find_rule(principal, right, filter, group)

    def has_right(self, principal: str, right: Right) -> bool:
        """Return whether a rule allows the principal this right, on any topic or group; however old the rules are."""
        return self._state[0].rights.has_right(principal, right)

    def take_used(self) -> set[str]:
        """Return the ids of the tokens that were used since the last call."""
        used, self._used = self._used, set()
        return used

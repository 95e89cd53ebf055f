"""Principals with their tokens and rights, for tests of nodes that ask who calls."""

from __future__ import annotations

from sublet_protocol.domain.access.rights import AccessRule, Right
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.groups.admin.access_rules import allow, revoke
from sublet_storage.groups.admin.access_tokens import make_token, revoke_token
from tests.integration.log_kit import Connection
from tests.kit_nodes import Fleet

DAY_S = 86_400.0


def serve_asking(fleet: Fleet, conn: Connection, **settings: str) -> str:
    """Start a node that asks who calls, with these settings, and return its address."""
    fleet.extra = {"SUBLET_AUTH": "required", **settings}
    fleet.serve("n1")
    ((address,),) = conn.execute("select address from node").fetchall()
    return str(address)


def rule(principal: str, right: Right, filter: str, group: str = "*") -> AccessRule:
    return AccessRule(principal, right, TopicFilter(filter), group)


def token_of(conn: Connection, principal: str) -> str:
    """A new token of the principal."""
    return make_token(conn, principal, DAY_S)[0].token.reveal()


def expired_token(conn: Connection, principal: str) -> str:
    token = token_of(conn, principal)
    conn.execute("update token set expires_at = clock_timestamp() where token_id = %s", (token[4:12],))
    return token


def revoked_token(conn: Connection, principal: str) -> str:
    token = token_of(conn, principal)
    revoke_token(conn, token[4:12])
    return token


def bearer(token: str | None) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a call with the token."""
    return () if token is None else (("authorization", f"Bearer {token}"),)


__all__ = ["allow", "bearer", "expired_token", "revoke", "revoked_token", "rule", "serve_asking", "token_of"]

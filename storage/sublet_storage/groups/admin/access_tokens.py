"""Access tokens in the table `token`: their hashes, principals and expiry."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import psycopg
from msgspec import Struct

from sublet_protocol.domain.access.token import NewToken
from sublet_protocol.domain.errors import Conflict, NotFound
from sublet_storage.groups.admin.access_rules import insert_right

_LIVE = "revoked_at is null and expires_at > clock_timestamp()"
_VALID = f"select token_id from token where principal = %s and {_LIVE} order by made_at"
_STORE = "select store_token(%s, %s, %s, %s, %s)"
_REVOKE = "select revoke_token(%s)"
_LIST = f"""
select token_id, principal, made_by, made_at, expires_at, revoked_at, last_used, note, {_LIVE}
  from token order by principal, made_at"""


class TokenEntry(Struct, frozen=True):
    """The description of a token, without its hash."""

    token_id: str
    principal: str
    made_by: str
    made_at: datetime
    expires_at: datetime
    revoked_at: datetime | None
    last_used: Any
    note: str
    is_valid: bool


def make_token(
    conn: psycopg.Connection[Any], principal: str, lifetime_s: float, note: str = ""
) -> tuple[NewToken, datetime]:
    """Return a new token and when it expires. Raise `Conflict` if the principal has two, or there are too many."""
    token = NewToken.draw()
    (expires_at,) = insert_right(conn, _STORE, (token.token_id, token.digest, principal, lifetime_s, note)) or (None,)
    if expires_at is None:
        valid = [row[0] for row in conn.execute(_VALID, (principal,)).fetchall()]
        raise Conflict(
            f"{principal} has {len(valid)} valid tokens, {' and '.join(valid)}, and that is the limit: one in use and "
            f"one to replace it. Revoke the older one first: `sublet access revoke-token {next(iter(valid), 'ID')}`."
        )
    return token, expires_at


def revoke_token(conn: psycopg.Connection[Any], token_id: str) -> bool:
    """Revoke a token; return False if it was revoked before. Raise `NotFound`."""
    ((revoked,),) = conn.execute(_REVOKE, (token_id,)).fetchall()
    if revoked is None:
        raise NotFound(
            f"token {token_id!r:.100}: there is none of that id, which is the 8 characters behind sub_. "
            "`sublet access tokens` shows all."
        )
    return bool(revoked)


def delete_past_tokens(conn: psycopg.Connection[Any], older_than_s: float) -> int:
    """Delete the tokens that were revoked, or have expired, longer ago than that; return their number."""
    ((count,),) = conn.execute("select forget_tokens(make_interval(secs => %s))", (older_than_s,)).fetchall()
    return int(count)


def list_tokens(conn: psycopg.Connection[Any]) -> list[TokenEntry]:
    """Return all tokens, by principal; revoked and expired ones until maintenance deletes them."""
    return [TokenEntry(*row) for row in conn.execute(_LIST).fetchall()]

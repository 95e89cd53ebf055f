"""Rules and tokens in Postgres: what is stored, counted, refused and noted."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from sublet_leader.jobs.maintenance import _delete_old_history
from sublet_protocol.domain.access.rights import AccessRule, Right
from sublet_protocol.domain.access.token import hash_token
from sublet_protocol.domain.errors import Conflict, NotFound
from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.db.connect import connect
from sublet_storage.groups.admin import access_rules
from sublet_storage.groups.admin.access_rules import allow, delete_past_changes, list_rules, revoke
from sublet_storage.groups.admin.access_snapshot import CHANNEL, read_access, read_changes, read_version, record_use
from sublet_storage.groups.admin.access_tokens import delete_past_tokens, list_tokens, make_token, revoke_token
from sublet_storage.groups.coordinator import session_names

RULE = AccessRule("user:etl", Right.JOIN, TopicFilter("orders/#"), "team-*")
YEAR_S = 365 * 86400.0


@pytest.fixture
def conn(database: str) -> Iterator[psycopg.Connection[Any]]:
    with connect(database) as connection:
        yield connection


def history(conn: psycopg.Connection[Any]) -> list[tuple[str, ...]]:
    return conn.execute("select event, principal, object from access_history order by number").fetchall()


def test_rules_are_given_listed_and_taken_away(conn: psycopg.Connection[Any]) -> None:
    assert allow(conn, RULE)
    assert not allow(conn, RULE)
    everybody = AccessRule("*", Right.READ, TopicFilter("public/#"))
    allow(conn, everybody)
    allow(conn, AccessRule("user:other", Right.WATCH, TopicFilter("#")))
    assert [each.rule for each in list_rules(conn, "user:etl")] == [everybody, RULE]
    assert len(list_rules(conn)) == 3
    assert list_rules(conn)[0].granted_by.startswith("database user ")
    revoke(conn, RULE)
    with pytest.raises(NotFound, match="sublet access list user:etl"):
        revoke(conn, RULE)
    assert [each.rule for each in list_rules(conn, "user:etl")] == [everybody]
    assert [event for event, _, _ in history(conn)] == ["allow", "allow", "allow", "revoke"]
    assert history(conn)[0] == ("allow", "user:etl", "join orders/# team-*")


def test_a_token_is_stored_as_its_hash(conn: psycopg.Connection[Any]) -> None:
    new, expires_at = make_token(conn, "user:etl", YEAR_S, "for the night")
    ((row,),) = conn.execute("select to_jsonb(token)::text from token").fetchall()
    assert new.token.reveal() not in row
    assert new.token.reveal()[13:] not in row
    ((stored,),) = conn.execute("select digest from token").fetchall()
    assert bytes(stored) == hash_token(new.token.reveal())
    (entry,) = list_tokens(conn)
    assert (entry.token_id, entry.principal, entry.note) == (new.token_id, "user:etl", "for the night")
    assert (entry.is_valid, entry.expires_at, entry.last_used) == (True, expires_at, None)
    assert history(conn) == [("token", "user:etl", new.token_id)]


def test_two_tokens_are_valid_at_a_time(conn: psycopg.Connection[Any]) -> None:
    first, _ = make_token(conn, "user:etl", YEAR_S)
    second, _ = make_token(conn, "user:etl", YEAR_S)
    make_token(conn, "user:other", YEAR_S)
    with pytest.raises(Conflict, match=f"revoke-token {first.token_id}"):
        make_token(conn, "user:etl", YEAR_S)
    assert revoke_token(conn, first.token_id)
    assert not revoke_token(conn, first.token_id)
    third, _ = make_token(conn, "user:etl", YEAR_S)
    assert {name for name, each in read_access(conn).tokens.items() if each.principal == "user:etl"} == {
        second.token_id,
        third.token_id,
    }
    with pytest.raises(NotFound, match="sublet access tokens"):
        revoke_token(conn, "aaaaaaaa")


def test_of_many_at_once_two_get_a_token(database: str) -> None:
    def make(_: int) -> bool:
        with connect(database) as connection:
            try:
                make_token(connection, "user:etl", YEAR_S)
            except Conflict:
                return False
        return True

    with ThreadPoolExecutor(6) as pool:
        assert sorted(pool.map(make, range(6))) == [False] * 4 + [True] * 2


def test_an_expired_token_is_not_valid(conn: psycopg.Connection[Any]) -> None:
    new, _ = make_token(conn, "user:etl", YEAR_S)
    conn.execute("update token set expires_at = clock_timestamp()")
    assert new.token_id not in read_access(conn).tokens
    assert not list_tokens(conn)[0].is_valid
    make_token(conn, "user:etl", YEAR_S)
    make_token(conn, "user:etl", YEAR_S)


@pytest.mark.conforms("X4")
def test_a_full_history_refuses_what_gives_a_right(conn: psycopg.Connection[Any]) -> None:
    """What takes one away it has room for."""
    allow(conn, RULE)
    token, _ = make_token(conn, "user:etl", YEAR_S)
    name = Subscription.parse("$share/billing/orders/#"), "etl"
    session_names.draw_epoch(conn, *name, "user:etl")
    fill = "insert into access_history (event, principal, object) select 'allow', 'x', 'y' from generate_series(3, %s)"
    conn.execute(fill, (300_000 - 1,))
    other = AccessRule("user:etl", Right.READ, TopicFilter("#"))
    allow(conn, other)
    with pytest.raises(Conflict, match=r"access_history has 300000 rows: that is the limit.*HISTORY_RETENTION_S"):
        allow(conn, AccessRule("user:etl", Right.WATCH, TopicFilter("#")))
    with pytest.raises(Conflict, match="access_history has 300000 rows"):
        make_token(conn, "user:etl", YEAR_S)
    revoke(conn, other)
    assert revoke_token(conn, token.token_id)
    assert session_names.release(conn, *name) == "user:etl"
    assert [each.rule for each in list_rules(conn)] == [RULE]


def test_old_changes_of_rights_are_deleted(conn: psycopg.Connection[Any]) -> None:
    """But the last, by whose number nodes go, and those of the last day."""
    rights = [Right.READ, Right.JOIN, Right.WATCH, Right.PUBLISH]
    for right in rights:
        allow(conn, AccessRule("user:etl", right, TopicFilter("#")))
    first = read_version(conn) - len(rights) + 1
    conn.execute("update access_history set at = at - interval '2 days' where number <= %s", (first + 1,))
    assert delete_past_changes(conn, 3 * 86_400.0) == 0
    assert delete_past_changes(conn, 0.0) == 2
    assert len(history(conn)) == 2
    conn.execute("update access_history set at = at - interval '2 days'")
    version = read_version(conn)
    _delete_old_history(conn, 86_400.0)  # as a node does
    assert read_version(conn) == version
    assert len(history(conn)) == 1


def test_tokens_that_are_over_are_deleted_in_time(conn: psycopg.Connection[Any]) -> None:
    """Which is no change of rights."""
    names = ("valid", "fresh", "expired", "revoked")
    tokens = {name: make_token(conn, f"user:{name}", YEAR_S)[0].token_id for name in names}
    for name in ("fresh", "revoked"):
        revoke_token(conn, tokens[name])
    over = "clock_timestamp() - interval '2 days'"
    conn.execute(f"update token set expires_at = {over} where token_id = %s", (tokens["expired"],))
    conn.execute(f"update token set revoked_at = {over} where token_id = %s", (tokens["revoked"],))
    before = read_version(conn)
    assert delete_past_tokens(conn, 86_400.0) == 2
    assert {each.token_id for each in list_tokens(conn)} == {tokens["valid"], tokens["fresh"]}
    assert delete_past_tokens(conn, 86_400.0) == 0
    assert delete_past_tokens(conn, -2 * YEAR_S) == 1, "never one that counts"
    assert [each.token_id for each in list_tokens(conn)] == [tokens["valid"]]
    assert read_version(conn) == before
    conn.execute("delete from token")
    assert history(conn)[-1] == ("revoke-token", "user:valid", tokens["valid"]), "by hand, of one that counts"


def test_changes_are_read_between_versions(conn: psycopg.Connection[Any]) -> None:
    start = read_version(conn)
    allow(conn, RULE)
    middle = read_version(conn)
    revoke(conn, RULE)
    conn.execute("insert into access values ('user:b', 'read', '#', '*', 'somebody')")
    assert [each.event for each in read_changes(conn, start, middle, 10)] == ["allow"]
    found = read_changes(conn, middle, read_version(conn), 10)
    assert [(each.event, each.object) for each in found] == [
        ("revoke", "user:etl join orders/# team-*"),
        ("allow", "user:b read # *"),
    ]
    assert found[0].by.startswith("database user ")
    assert read_changes(conn, start, read_version(conn), 2) == found, "the newest"


def test_every_change_has_a_number_and_a_notice(database: str, conn: psycopg.Connection[Any]) -> None:
    with connect(database) as listening:
        listening.execute(f"listen {CHANNEL}")
        before = read_version(conn)
        allow(conn, RULE)
        new, _ = make_token(conn, "user:etl", YEAR_S)
        assert read_version(conn) == before + 2
        record_use(conn, [new.token_id])
        assert read_version(conn) == before + 2, "that it was used is no change"
        assert list_tokens(conn)[0].last_used is not None
        conn.execute("delete from access")
        revoke_token(conn, new.token_id)
        assert read_version(conn) == before + 4
        assert [each.payload for each in listening.notifies(timeout=30, stop_after=4)] == ["sublet"] * 4


def test_changes_become_visible_in_their_order(database: str, conn: psycopg.Connection[Any]) -> None:
    """Else a node that has read the later one would never read the earlier one."""
    with connect(database, autocommit=False) as first:
        allow(first, RULE)
        conn.execute("set lock_timeout = '100ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            allow(conn, AccessRule("user:b", Right.READ, TopicFilter("#")))
        first.commit()
    assert len(list_rules(conn)) == 1


def test_rules_and_tokens_are_bounded(conn: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_rules, "MAX_ROWS", 2)
    for name in ("a", "b"):
        allow(conn, AccessRule(f"user:{name}", Right.READ, TopicFilter("#")))
        make_token(conn, f"user:{name}", YEAR_S)
    with pytest.raises(Conflict, match="table access has 2 rows, which is the limit"):
        allow(conn, AccessRule("user:c", Right.READ, TopicFilter("#")))
    with pytest.raises(Conflict, match="table token has 2 rows, which is the limit"):
        make_token(conn, "user:c", YEAR_S)

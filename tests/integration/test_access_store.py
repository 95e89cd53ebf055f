"""Rules and tokens in Postgres: what is stored, counted, refused and noted."""

from __future__ import annotations

import itertools
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import psycopg
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sublet_leader.jobs.maintenance import _delete_old_history
from sublet_protocol.domain.access.rights import AccessRule, Right, parse_right
from sublet_protocol.domain.access.token import hash_token
from sublet_protocol.domain.errors import Conflict, NotFound, UsageError
from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.bootstrap.embedded.server import EmbeddedPostgres
from sublet_storage.bootstrap.migrate import migrate
from sublet_storage.db.connect import connect
from sublet_storage.doctor.checks import Severity, run_checks
from sublet_storage.groups.admin import access_snapshot
from sublet_storage.groups.admin.access_rules import allow, delete_past_changes, list_rules, read_rules, revoke
from sublet_storage.groups.admin.access_snapshot import (
    CHANNEL,
    has_changed,
    read_access,
    read_changes,
    read_version,
    record_use,
)
from sublet_storage.groups.admin.access_tokens import delete_past_tokens, list_tokens, make_token, revoke_token
from sublet_storage.groups.coordinator import session_name_owners
from tests.integration.log_kit import Connection

RULE = AccessRule("user:etl", Right.JOIN, TopicFilter("orders/#"), "team-*")
YEAR_S = 365 * 86400.0


def history(conn: Connection) -> list[tuple[str, ...]]:
    return conn.execute("select event, principal, object from access_history order by number").fetchall()


def test_a_full_queue_of_notifications_keeps_no_right(server_home: Path) -> None:
    """Any client can fill it that listens and does not read."""
    with EmbeddedPostgres(server_home / "data") as server, connect(server.url) as conn:
        conn.execute("alter system set max_notify_queue_pages = 64")
    with EmbeddedPostgres(server_home / "data") as server:
        migrate(server.url)
        with connect(server.url) as conn, connect(server.url, autocommit=False) as listener:
            allow(conn, RULE)
            token, _ = make_token(conn, "user:etl", YEAR_S)
            listener.execute("listen other")
            listener.commit()
            listener.execute("select 1")
            with pytest.raises(psycopg.Error, match="too many notifications in the NOTIFY queue"):
                all(conn.execute("select pg_notify('other', %s)", (f"{number:07900}",)) for number in itertools.count())
            revoke(conn, RULE)
            revoke_token(conn, token.token_id)
            assert not list_rules(conn)


def test_rules_are_given_listed_and_taken_away(conn: Connection) -> None:
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


def test_a_token_is_stored_as_its_hash(conn: Connection) -> None:
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


def test_two_tokens_are_valid_at_a_time(conn: Connection) -> None:
    first, _ = make_token(conn, "user:etl", YEAR_S)
    second, _ = make_token(conn, "user:etl", YEAR_S)
    make_token(conn, "user:other", YEAR_S)
    with pytest.raises(Conflict, match=f"revoke-token {first.token_id}"):
        make_token(conn, "user:etl", YEAR_S)
    assert revoke_token(conn, first.token_id)
    assert not revoke_token(conn, first.token_id)
    third, _ = make_token(conn, "user:etl", YEAR_S)
    with pytest.raises(Conflict, match=f"has 2 valid tokens, {second.token_id} and {third.token_id}, "):
        make_token(conn, "user:etl", YEAR_S)
    valid = {name for name, each in read_access(conn).tokens.items() if each.principal == "user:etl"}
    assert valid == {second.token_id, third.token_id}
    with pytest.raises(NotFound, match="sublet access tokens"):
        revoke_token(conn, "aaaaaaaa")
    conn.execute("update token set expires_at = clock_timestamp()")
    assert read_access(conn).tokens == {}
    assert not any(each.is_valid for each in list_tokens(conn))
    for _ in range(2):
        make_token(conn, "user:etl", YEAR_S)


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


@pytest.mark.conforms("X4")
def test_a_full_history_refuses_what_gives_a_right(conn: Connection) -> None:
    """What takes one away it has room for."""
    allow(conn, RULE)
    token, _ = make_token(conn, "user:etl", YEAR_S)
    name = Subscription.parse("$share/billing/orders/#"), "etl"
    session_name_owners.next_session_epoch(conn, *name, "user:etl")
    fill = "insert into access_history (event, principal, object) select 'allow', 'x', 'y' from generate_series(3, %s)"
    conn.execute(fill, (300_000 - 1,))
    other = AccessRule("user:etl", Right.READ, TopicFilter("#"))
    allow(conn, other)
    with pytest.raises(Conflict, match=r"access_history has 300000 rows: that is the limit.*HISTORY_RETENTION_S"):
        allow(conn, AccessRule("user:etl", Right.WATCH, TopicFilter("#")))
    with pytest.raises(Conflict, match="access_history has 300000 rows"):
        make_token(conn, "user:etl", YEAR_S)
    conn.execute("delete from access_history where number = 100000")
    allow(conn, AccessRule("user:etl", Right.WATCH, TopicFilter("#")))
    revoke(conn, AccessRule("user:etl", Right.WATCH, TopicFilter("#")))
    revoke(conn, other)
    assert revoke_token(conn, token.token_id)
    assert session_name_owners.release(conn, *name) == "user:etl"
    assert [each.rule for each in list_rules(conn)] == [RULE]


def test_old_changes_of_rights_are_deleted(conn: Connection) -> None:
    """But those of the last day; and it is no change of rights."""
    for right in (Right.READ, Right.JOIN, Right.WATCH, Right.PUBLISH):
        allow(conn, AccessRule("user:etl", right, TopicFilter("#")))
    conn.execute("update access_history set at = at - interval '2 days' where object ~ '^(read|join)'")
    version = read_version(conn)
    assert delete_past_changes(conn, 3 * 86_400.0) == 0
    assert delete_past_changes(conn, 0.0) == 2
    conn.execute("update access_history set at = at - interval '2 days' where object ~ '^watch'")
    _delete_old_history(conn, 86_400.0)  # as a node does
    assert [each[2] for each in history(conn)] == ["publish # *"]
    assert [each.object for each in read_changes(conn, version, read_version(conn), 10)] == []


def test_tokens_that_are_over_are_deleted_in_time(conn: Connection) -> None:
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
    assert not has_changed(conn, before)
    conn.execute("delete from token")
    assert history(conn)[-1] == ("revoke-token", "user:valid", tokens["valid"]), "by hand, of one that counts"
    token, _ = make_token(conn, "user:again", YEAR_S)
    conn.execute(f"update token set expires_at = {over}")
    before = read_version(conn)
    conn.execute("update token set expires_at = clock_timestamp() + interval '1 hour'")
    assert has_changed(conn, before), "one that was over counts again"
    assert history(conn)[-1] == ("revoke-token", "user:again", token.token_id)


def test_changes_are_read_between_versions(conn: Connection) -> None:
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


def test_what_changes_while_it_is_read_is_read_again(conn: Connection) -> None:
    class Changing:
        """Runs statements, with a change behind the first."""

        def execute(self, *statement: Any) -> psycopg.Cursor[Any]:
            try:
                return conn.execute(*statement)
            finally:
                allow(conn, RULE)

    read = read_access(cast(Connection, Changing()))
    assert has_changed(conn, read.version)


def test_every_change_is_seen_and_has_a_notice(database: str, conn: Connection) -> None:
    with connect(database) as listening:
        listening.execute(f"listen {CHANNEL}")
        version = read_version(conn)
        assert not has_changed(conn, version)
        allow(conn, RULE)
        assert has_changed(conn, version)
        version = read_version(conn)
        new, _ = make_token(conn, "user:etl", YEAR_S)
        assert has_changed(conn, version)
        version = read_version(conn)
        record_use(conn, [new.token_id])
        assert not has_changed(conn, version), "that it was used is no change"
        assert list_tokens(conn)[0].last_used is not None
        make_token(conn, "user:other", YEAR_S)
        version = read_version(conn)
        record_use(conn, [new.token_id])
        assert [each.last_used is None for each in list_tokens(conn)] == [False, True], "only of that one"
        written = conn.execute("select ctid from token").fetchall()
        record_use(conn, [new.token_id])
        assert conn.execute("select ctid from token").fetchall() == written, "once a day"
        conn.execute("delete from access")
        assert has_changed(conn, version)
        version = read_version(conn)
        revoke_token(conn, new.token_id)
        assert has_changed(conn, version)
        assert not has_changed(conn, read_version(conn))
        assert [each.payload for each in listening.notifies(timeout=30, stop_after=5)] == ["sublet"] * 5


@pytest.mark.conforms("X6")
@pytest.mark.parametrize(("table", "event"), [("access", "revoke"), ("token", "revoke-token")])
def test_emptying_a_table_is_a_change(database: str, conn: Connection, table: str, event: str) -> None:
    allow(conn, RULE)
    make_token(conn, "user:etl", YEAR_S)
    version = read_version(conn)
    with connect(database) as listening:
        listening.execute(f"listen {CHANNEL}")
        conn.execute(f"truncate {table}")
        assert [each.payload for each in listening.notifies(timeout=30, stop_after=1)] == ["sublet"]
    assert has_changed(conn, version)
    assert history(conn)[-1] == (event, "*", "all")


@pytest.mark.conforms("X6")
def test_an_open_change_of_rights_blocks_no_revocation(database: str, conn: Connection) -> None:
    """And is seen once it commits, although another with a later number committed before it."""
    allow(conn, RULE)
    token, _ = make_token(conn, "user:a", YEAR_S)
    session_name_owners.next_session_epoch(conn, Subscription.parse("$share/g/#"), "etl", "user:etl")
    late = AccessRule("user:b", Right.READ, TopicFilter("#"))
    with connect(database, autocommit=False) as first:
        allow(first, late)
        make_token(first, "user:b", YEAR_S)
        conn.execute("set lock_timeout = '1s'")
        revoke(conn, RULE)
        assert revoke_token(conn, token.token_id)
        assert session_name_owners.release(conn, Subscription.parse("$share/g/#"), "etl") == "user:etl"
        with pytest.raises(psycopg.errors.LockNotAvailable):
            allow(conn, AccessRule("user:c", Right.READ, TopicFilter("#")))  # it is counted
        assert list_rules(conn) == []
        version = read_version(conn)
        assert not has_changed(conn, version)
        first.commit()
    assert has_changed(conn, version)
    assert [each.event for each in read_changes(conn, version, read_version(conn), 10)] == ["allow", "token"]
    assert [each.rule for each in list_rules(conn)] == [late]


def test_changes_of_a_restored_database_are_not_ahead(conn: Connection) -> None:
    """Its transactions may have numbers that this server has yet to reach."""
    allow(conn, RULE)
    conn.execute("update access_history set xact = (xact::text::bigint + 1000000)::text::xid8")
    version = read_version(conn)
    assert not has_changed(conn, version)
    revoke(conn, RULE)
    assert has_changed(conn, version)


@pytest.mark.conforms("X7")
def test_rules_and_tokens_are_bounded(conn: Connection) -> None:
    """By the functions, so that nobody who may call these fills what nodes read."""
    token = "(token_id, digest, principal, made_by, expires_at) select i, sha256(i::text::bytea), 'x', 'x', now()"
    rule = "(principal, may, filter, granted_by) select 'user:' || i, 'read', '#', 'x'"
    for table, columns in (("access", rule), ("token", token)):
        conn.execute(f"alter table {table} disable trigger noted")
        conn.execute(f"insert into {table} {columns} from generate_series(1, 99999) i")
        conn.execute(f"alter table {table} enable trigger noted")
    allow(conn, RULE)
    make_token(conn, "user:a", YEAR_S)
    with pytest.raises(Conflict, match=r"table access has 100000 rows: that is the limit.*Delete some first"):
        allow(conn, AccessRule("user:c", Right.READ, TopicFilter("#")))
    with pytest.raises(Conflict, match="table token has 100000 rows: that is the limit"):
        make_token(conn, "user:c", YEAR_S)
    assert len(read_access(conn).tokens) == 1


@pytest.mark.conforms("X7")
def test_more_than_a_node_keeps_is_refused(conn: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever wrote the tables."""
    allow(conn, RULE)
    make_token(conn, "user:a", YEAR_S)
    monkeypatch.setattr(access_snapshot, "MAX_ROWS", 1)
    assert len(read_access(conn).tokens) == 1
    make_token(conn, "user:b", YEAR_S)
    with pytest.raises(Conflict, match="table token has more than 1 rows"):
        read_access(conn)
    allow(conn, AccessRule("user:b", Right.READ, TopicFilter("#")))
    with pytest.raises(Conflict, match="table access has more than 1 rows"):
        read_access(conn)


PARTS = st.lists(st.sampled_from(["a", "/", "+", "#", "$", "*", ":", ".", "user:", " ", "\n", "\x7f", "\xad", "é"]))
TEXTS = PARTS.map("".join)


@pytest.mark.conforms("X7")
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TEXTS | st.just("*"), st.sampled_from([*Right, "", "own"]), TEXTS | st.just("#"), TEXTS | st.just("*"))
@example("user:" + "é" * 250, "join", "/".join("a" * 128), "é" * 255 + "*")
@example("user:" + "é" * 251, "join", "#", "*")
@example("user:a", "join", "/".join("a" * 129), "*")
@example("user:a", "read", "é" * 2048, "*")
@example("user:a", "read", "é" * 2048 + "a", "*")
@example("user:a", "join", "#", "a" * 256)
@example("user:a", "join", "a/#\n", "*")
@example("user:a", "join", "a/#/b", "*")
def test_sql_takes_the_rules_that_nodes_read(
    conn: Connection, principal: str, right: str, filter: str, group: str
) -> None:
    try:
        AccessRule(principal, parse_right(right), TopicFilter(filter), group)
        is_rule = True
    except UsageError:
        is_rule = False
    refusal = None
    with conn.transaction(force_rollback=True):
        try:
            conn.execute("select allow_access(%s, %s, %s, %s)", (principal, right, filter, group))
        except psycopg.Error as error:
            refusal = error.sqlstate
    assert refusal == (None if is_rule else "SB002")


def test_sql_knows_what_is_printable(conn: Connection) -> None:
    """As Python does, of all that Unicode has assigned."""
    known = [chr(code) for code in range(1, 0x110000) if unicodedata.category(chr(code)) not in ("Cn", "Cs")]
    rows = conn.execute("select c from unnest(%s::text[]) as u (c) where is_printable(c)", (known,)).fetchall()
    assert {c for (c,) in rows} == {c for c in known if c.isprintable()}


def test_sql_stores_no_token_that_cannot_be_read(conn: Connection) -> None:
    good = {"p_token": "a" * 8, "p_principal": "user:" + "a" * 250, "p_lifetime_s": 315360000.0, "p_note": "a" * 200}
    call = "select store_token(%(p_token)s, sha256('x'), %(p_principal)s, %(p_lifetime_s)s, %(p_note)s)"
    for name, wrong in (
        ("p_token", "A" * 8), ("p_token", "aaaaaaaa\n"), ("p_principal", "*"), ("p_principal", "etl"),
        ("p_principal", "user:"), ("p_principal", "user:a b"), ("p_principal", "user:a\n"), ("p_principal", "user:*"),
        ("p_principal", "user:" + "a" * 251), ("p_lifetime_s", 0.0), ("p_lifetime_s", float("nan")),
        ("p_lifetime_s", 315360001.0), ("p_note", "a" * 201), ("p_note", "a\n"),
    ):  # fmt: skip
        with pytest.raises(psycopg.Error) as raised:
            conn.execute(call, {**good, name: wrong})
        assert raised.value.sqlstate == "SB002", (name, wrong)
    conn.execute(call, good)
    assert len(list_tokens(conn)) == 1


@pytest.mark.conforms("X7")
def test_a_row_that_is_no_rule_ends_no_other_right(conn: Connection, caplog: pytest.LogCaptureFixture) -> None:
    allow(conn, RULE)
    conn.execute("insert into access values ('user:x', 'read', 'a/#/b', '*', 'somebody')")
    access = read_access(conn)
    assert access.rights.find_rule("user:etl", Right.JOIN, TopicFilter("orders/eu"), "team-a") == RULE
    assert access.rights.find_rule("user:x", Right.READ, TopicFilter("a/b")) is None
    (warning,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert "access rule not readable, allows nothing: granted_by='somebody': 'user:x read a/#/b *': filter" in warning
    (row,) = read_rules(conn).unreadable
    assert (row.row, row.granted_by) == ("user:x read a/#/b *", "somebody")
    (finding,) = [each for each in run_checks(conn, 0.0, 1) if each.check == "access"]
    assert (finding.state, "'user:x read a/#/b *' by somebody" in finding.detail) == (Severity.WARNING, True)
    assert conn.execute("select revoke_access('user:x', 'read', 'a/#/b', '*')").fetchone() == (True,)
    assert read_rules(conn).unreadable == []
    # Nor what Unicode has not assigned: the database takes it as printable.
    assert conn.execute("select allow_access('user:\u0378', 'read', '#', '*')").fetchone() == (True,)
    ((row,), rules) = read_rules(conn).unreadable, read_rules(conn).rules
    assert (row.row, [each.rule for each in rules]) == ("user:\u0378 read # *", [RULE])

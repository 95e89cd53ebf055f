"""What is wrong with a database, its nodes and its groups is found, and reported with what helps."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.messages.borrower_leader import PROTOCOL_VERSION
from sublet_storage.bootstrap.embedded import EmbeddedPostgres
from sublet_storage.db.connect import connect
from sublet_storage.doctor import checks
from sublet_storage.doctor.checks import DoctorCheckResult, Severity, run_checks
from sublet_storage.groups.admin.node_desired_state import set_draining
from sublet_storage.groups.coordinator.postgres_store import PostgresGroupStore
from sublet_storage.groups.model.desired_state import PauseGroup
from sublet_storage.groups.model.records import MAINTENANCE, GroupOptions
from sublet_storage.groups.status.diagnosis_queries import diagnose_group
from sublet_storage.node_directory import NodeIncarnation, register
from sublet_storage.producer import Publisher
from sublet_storage.spaces.space_changes import rollover
from tests.integration.cli_kit import a_shell
from tests.integration.log_kit import Connection
from tests.kit import eventually

GROUP = Subscription.parse("$share/g/#")
N1, N2 = (NodeIncarnation(name, f"a life of {name}", "127.0.0.1:1") for name in ("n1", "n2"))


@pytest.fixture
def conn(database: str) -> Iterator[Connection]:
    with connect(database) as conn:
        yield conn


@pytest.fixture
def store(database: str) -> Iterator[PostgresGroupStore]:
    store = PostgresGroupStore(database)
    yield store
    store.close()


def found(conn: Connection, check: str, now_s: float | None = None) -> DoctorCheckResult:
    now_s = time.time() if now_s is None else now_s
    (finding,) = [each for each in run_checks(conn, now_s, PROTOCOL_VERSION) if each.check == check]
    return finding


def check_finding(conn: Connection, check: str, state: Severity, detail: str, hint: str = "") -> None:
    """It is found, and its text and remedy have these."""
    finding = found(conn, check)
    assert finding.state is state
    assert detail in finding.detail
    assert hint in (finding.hint or "")


def is_well(finding: DoctorCheckResult) -> bool:
    return finding.state is Severity.OK and finding.hint is None


def test_a_database_that_is_looked_after_is_well(conn: Connection, store: PostgresGroupStore) -> None:
    for node in (N1, N2):
        register(conn, node, 60, PROTOCOL_VERSION)
    store.claim(MAINTENANCE, N1, 60)
    assert [each for each in run_checks(conn, time.time(), PROTOCOL_VERSION) if not is_well(each)] == []
    conn.execute("update leadership set expires_at = clock_timestamp()")
    check_finding(conn, "maintenance", Severity.WARNING, "nobody does it at present")


def test_a_lost_connection_ends_the_checks(database: str, conn: Connection) -> None:
    with connect(database) as lost:
        results = run_checks(lost, time.time(), PROTOCOL_VERSION)
        assert next(results).check == "server"
        conn.execute("select pg_terminate_backend(%s, 60000)", (lost.info.backend_pid,))
        with pytest.raises(psycopg.OperationalError):
            next(results)


def test_nodes_are_missed_counted_and_compared(conn: Connection) -> None:
    check_finding(conn, "nodes", Severity.ERROR, "", "Start one: sublet leader")
    assert found(conn, "maintenance").state is Severity.WARNING
    register(conn, N1, 60, PROTOCOL_VERSION)
    assert "nobody takes over from it" in found(conn, "nodes").detail
    register(conn, N2, 60, PROTOCOL_VERSION + 1)
    check_finding(conn, "nodes", Severity.ERROR, f"n2 ({PROTOCOL_VERSION + 1})")


def test_a_drained_node_is_named_with_the_remedy(conn: Connection) -> None:
    register(conn, N1, 60, PROTOCOL_VERSION)
    set_draining(conn, N1, True)
    undo = "lead again: sublet nodes drain n1 --undo"
    nobody = "no node is there that may lead: an operator has drained n1"
    check_finding(conn, "nodes", Severity.ERROR, nobody, f"let it {undo}")
    register(conn, N2, 60, PROTOCOL_VERSION)
    detail = "1: n2; drained: n1; nobody takes over from it"
    check_finding(conn, "nodes", Severity.WARNING, detail, f"let a drained one {undo}")
    set_draining(conn, N1, False)
    assert is_well(found(conn, "nodes"))
    set_draining(conn, N1, True)
    register(conn, NodeIncarnation("n3", "a life of n3", "127.0.0.1:1"), 60, PROTOCOL_VERSION)
    assert (is_well(found(conn, "nodes")), found(conn, "nodes").detail) == (True, "2: n2, n3; drained: n1")
    register(conn, N1, 0, PROTOCOL_VERSION)
    assert found(conn, "nodes").detail == "2: n2, n3", "it is gone"


def test_what_is_wrong_with_groups_is_named(conn: Connection, store: PostgresGroupStore) -> None:
    group_id = store.open_group(GROUP).group_id
    store.open_group(Subscription.parse("$share/other/#"))
    assert [is_well(found(conn, check)) for check in ("groups", "pauses")] == [True] * 2, "there is no consumer"
    conn.execute("update lending set status = 'held', grant_id = 1 where group_id = %s", (group_id,))
    store.claim(group_id, N1, 60)
    assert is_well(found(conn, "groups"))
    conn.execute("update leadership set expires_at = clock_timestamp()")
    assert found(conn, "groups").detail == "1 have consumers and no leader: $share/g/#"
    conn.execute("update lending set status = 'blocked' where stream_id = 1 and group_id = %s", (group_id,))
    remedy = "sublet groups reset '$share/g/#' --stream 1 --to-current"
    of_another = (
        "insert into lending_history (at, group_id, stream_id, event, reason, grant_id, position, term)"
        " values (clock_timestamp(), %s, %s, %s, 'of another', 1, 0, 1)"
    )
    for others in ((group_id + 1, 1, "block"), (group_id, 2, "block"), (group_id, 1, "command")):
        conn.execute(of_another, others)
    assert found(conn, "streams").detail == "1 are blocked: 1 of $share/g/#"
    check_finding(conn, "streams", Severity.ERROR, "1 are blocked", remedy)
    store.apply_command(GROUP, PauseGroup("why"))
    assert found(conn, "pauses").detail == "1 groups are paused: $share/g/#"
    store.delete_group(GROUP)
    assert [is_well(found(conn, check)) for check in ("groups", "streams", "pauses")] == [True] * 3


def test_a_blocked_atomic_group_is_reset_completely(conn: Connection, store: PostgresGroupStore) -> None:
    """It refuses all else."""
    group = store.declare_group(GROUP, GroupOptions(atomic=True))
    conn.execute("update lending set status = 'blocked' where stream_id = 1 and group_id = %s", (group.group_id,))
    remedy = "sublet groups reset '$share/g/#' --to-earliest"
    check_finding(conn, "streams", Severity.ERROR, "1 are blocked", f"{remedy} lets it go on")
    (blocked,) = [each for each in diagnose_group(conn, GROUP)[1] if each.stream.stream_id == 1]
    assert remedy in str(blocked.diagnosis.hint)


def test_groups_that_nobody_consumes_are_named(conn: Connection, store: PostgresGroupStore, database: str) -> None:
    store.open_group(GROUP)
    with Publisher(database) as publisher:
        publisher.publish("orders/eu", b"1").result(60)
    waiting = "groups with messages and no stream held, 1: $share/g/# (1)"
    check_finding(conn, "lag", Severity.WARNING, waiting, "sublet groups why '$share/g/#'")
    conn.execute("update lending set status = 'held', grant_id = 1 where stream_id = 1")
    assert is_well(found(conn, "lag")), "somebody is there, and may take the others"
    conn.execute("update lending set status = 'free'")
    rollover(conn, "default")
    with Publisher(database) as publisher:
        publisher.publish("orders/eu", b"2").result(60)
    assert "$share/g/# (2)" in found(conn, "lag").detail, "no leader has noticed the new streams, and none will"
    store.apply_command(GROUP, PauseGroup())
    assert is_well(found(conn, "lag")), "that it is paused is reported elsewhere"


@pytest.fixture
def reader(database: str, conn: Connection) -> Iterator[str]:
    """A user who may connect; what it may do is what a test grants."""
    user = f"reader_{conn.info.dbname}"
    conn.execute(f"create role {user} login")
    yield user
    conn.execute(f"drop owned by {user}; drop role {user}")


def test_missing_rights_are_named(conn: Connection, reader: str) -> None:
    assert is_well(found(conn, "rights"))
    conn.execute(f"grant usage on schema sublet to {reader}; grant select on space, stream, node to {reader}")
    conn.execute(f"set role {reader}")
    check_finding(conn, "rights", Severity.ERROR, f"{reader} is a member of no role of sublet's", "grant sublet_")
    denied, remedy = "permission denied for table leadership", "a member of sublet_operate"
    check_finding(conn, "maintenance", Severity.WARNING, denied, remedy)
    check_finding(conn, "transactions", Severity.WARNING, "of other users", "a member of pg_read_all_stats")
    assert not found(conn, "connections").detail.startswith("0 "), "others' are counted, too"
    conn.execute("reset role")


def test_what_is_wrong_with_a_server_is_named(
    server_url: str, database: str, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_well(found(conn, "durability"))
    conn.execute("set synchronous_commit = off")
    check_finding(conn, "durability", Severity.ERROR, "synchronous_commit off")
    for ahead_s, off in ((3600, "ahead"), (-3600, "behind")):
        clock = found(conn, "clock", time.time() + ahead_s)
        assert re.search(rf" 3[56]\d\d\.\d s {off}", clock.detail)
        assert clock.state is Severity.WARNING
    assert is_well(found(conn, "connections"))
    monkeypatch.setattr(checks, "MAX_CONNECTION_SHARE", 0.0)
    assert found(conn, "connections").state is Severity.WARNING
    monkeypatch.setattr(checks, "MAX_TRANSACTION_S", 0.0)
    assert is_well(found(conn, "transactions")), "its own is none"
    monkeypatch.setattr(checks, "MAX_TRANSACTION_S", 0.01)
    forgotten = connect(database, application_name="a forgotten one")
    with psycopg.connect(server_url) as elsewhere, elsewhere.transaction(), forgotten as other, other.transaction():
        other.execute("select 1")
        finding = eventually(lambda: next(iter([f for f in [found(conn, "transactions")] if not is_well(f)]), None))
        assert "'a forgotten one'" in finding.detail
        assert finding.hint == f"End it: select pg_terminate_backend({other.info.backend_pid})"
    monkeypatch.setattr(checks, "MIN_VERSION", conn.info.server_version)
    assert is_well(found(conn, "server"))
    monkeypatch.setattr(checks, "MIN_VERSION", 990_000)
    assert found(conn, "server").state is Severity.ERROR


def test_a_prepared_transaction_is_named(server: EmbeddedPostgres) -> None:
    """It holds its locks without a session that could be ended."""
    with connect(server.url) as conn:
        conn.execute("alter system set max_prepared_transactions = 1")
    server.stop()
    server.start()
    with connect(server.url) as conn:
        assert is_well(found(conn, "transactions"))
        conn.execute("begin; select lock_producer('x'); prepare transaction 'a forgotten one'")
        finding = found(conn, "transactions")
        assert re.match(r"1 open .* by user \w+, prepared as 'a forgotten one'$", finding.detail)
        assert finding.hint == "End it: rollback prepared 'a forgotten one'"
        conn.execute("rollback prepared 'a forgotten one'")
        assert is_well(found(conn, "transactions"))


@pytest.mark.conforms("A8", "A9")
def test_the_command_answers_in_text_and_json(database: str, empty_database: str) -> None:
    with a_shell(SUBLET_DATABASE_URL=database) as shell:
        answer = shell.run("doctor")
        assert answer.code == 1
        assert "no leader node is there" in answer.out
        assert "nodes: Start one: sublet leader" in answer.out
        shell.leader("n1")
        eventually(lambda: shell.run("doctor", "--json").object["ok"], 60)
        listed = shell.run("nodes", "list", "--json").object["nodes"]
        assert [(each["name"], each["alive"], each["leads"]) for each in listed] == [("n1", True, 0)]
        assert "n1" in shell.run("nodes", "list").out
    with a_shell(SUBLET_DATABASE_URL=empty_database) as shell:
        answer = shell.run("doctor")
        assert answer.code == 1
        assert "sublet migrate" in answer.out
    with a_shell(SUBLET_DATABASE_URL="postgresql://nobody@127.0.0.1:1/none") as shell:
        answer = shell.run("doctor", "--json")
        assert answer.code == 1
        (finding,) = answer.object["findings"]
        assert (finding["check"], finding["state"]) == ("database", "error")


@pytest.mark.conforms("A8", "A9")
def test_the_command_works_where_it_may_read_nothing(database: str, conn: Connection, reader: str) -> None:
    conn.execute(f"grant usage on schema sublet to {reader}")
    with a_shell(SUBLET_DATABASE_URL=make_conninfo(database, user=reader)) as shell:
        answer = shell.run("doctor", "--json")
        assert (answer.code, answer.err) == (1, "")
        (finding,) = answer.object["findings"]
        assert (finding["check"], finding["state"]) == ("database", "error")
        assert "`sublet roles`" in finding["hint"]
        conn.execute(f"grant select on alembic_version to {reader}")
        findings = {each["check"]: each["state"] for each in shell.run("doctor", "--json").object["findings"]}
        assert (findings["database"], findings["rights"], findings["streams"]) == ("ok", "error", "warning")


@pytest.mark.conforms("A8")
def test_a_read_only_database_is_an_error(database: str, reader: str) -> None:
    """For new connections of the user, whose remedy works."""
    with connect(database) as admin, a_shell(SUBLET_DATABASE_URL=make_conninfo(database, user=reader)) as shell:
        admin.execute(f"grant usage on schema sublet to {reader}; grant select on alembic_version to {reader}")
        name = admin.info.dbname
        for owner, source in (
            (f"database {name}", "database"), (f"role {reader}", "user"),
            (f"role {reader} in database {name}", "database user"),
        ):  # fmt: skip
            admin.execute(f"alter {owner} set default_transaction_read_only = on")
            answer = shell.run("doctor", "--json")
            (finding, *_) = answer.object["findings"]
            assert (answer.code, finding["check"], finding["state"]) == (1, "database", "error")
            assert f"default_transaction_read_only is on, set by {source}" in finding["detail"]
            with connect(database) as owner_connection:
                owner_connection.execute(finding["hint"].partition("in psql: ")[2])
            (finding, *_) = shell.run("doctor", "--json").object["findings"]
            assert (finding["check"], finding["state"]) == ("database", "ok")
        shell.environment["SUBLET_DATABASE_URL"] = make_conninfo(
            database, options="-c default_transaction_read_only=on"
        )
        (finding, *_) = shell.run("doctor", "--json").object["findings"]
        assert (finding["check"], finding["state"]) == ("database", "error")
        assert "the options of the URL" in finding["hint"]


@pytest.mark.conforms("A7")
def test_nodes_that_are_gone_are_listed_as_such(database: str, conn: Connection) -> None:
    register(conn, N1, 0, PROTOCOL_VERSION)
    with a_shell(SUBLET_DATABASE_URL=database) as shell:
        (line,) = shell.run("nodes", "list", "--json").object["nodes"]
        assert (line["name"], line["alive"], line["address"]) == ("n1", False, "127.0.0.1:1")
        reported = shell.run("nodes", "list").out
        assert "gone" in reported
        assert " poll " in reported
        register(conn, N2, 60, PROTOCOL_VERSION, notify_endpoint="postgres:")
        reported = shell.run("nodes", "list").out
        assert (" postgres " in reported, "postgres:" in reported) == (True, False)


def test_a_listener_that_does_not_read_is_found(
    conn: Connection, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_well(found(conn, "notifications"))
    monkeypatch.setattr(checks, "MAX_QUEUE_SHARE", 0.0)
    with connect(database) as sleeper:
        sleeper.execute("listen said")
        with sleeper.transaction():
            sleeper.execute("select 1")
            for _ in range(8):  # a page of the queue is 8 kB
                conn.execute("select pg_notify('said', repeat('x', 7000) || n) from generate_series(1, 4) n")
            finding = found(conn, "notifications")
            assert (finding.state, "pg_terminate_backend" in (finding.hint or "")) == (Severity.WARNING, True)

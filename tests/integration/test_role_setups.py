"""What is documented works for users who are members of one role each, on real Postgres and with a real node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from sublet import Publisher, Session
from sublet_storage.db.connect import connect
from sublet_storage.db.roles import DatabaseRole
from sublet_storage.producer.sink_staging import SinkBatchId, commit, stage
from sublet_storage.spaces.space_changes import rollover
from tests.integration.cli_kit import Shell, a_shell, done
from tests.integration.log_kit import batch
from tests.kit import WAIT_S, eventually
from tests.kit_nodes import Fleet
from tests.role_kit import RoleWorld, a_role_world

pytestmark = pytest.mark.conforms("X6")

GROUP = "$share/billing/orders/#"


@pytest.fixture(scope="module")
def world() -> Iterator[RoleWorld]:
    with a_role_world() as world:
        yield world


@pytest.fixture(scope="module")
def fleet(world: RoleWorld, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A node that runs as a member of `sublet_node`."""
    fleet = Fleet(world.of(DatabaseRole.NODE), tmp_path_factory.mktemp("fleet"))
    try:
        fleet.serve("n1")
        yield fleet
        output = fleet.nodes["n1"].output()
        assert "permission denied" not in output, output
        assert "must be owner" not in output, output
    finally:
        fleet.close()


@pytest.fixture
def operator(world: RoleWorld) -> Iterator[Shell]:
    with a_shell(SUBLET_DATABASE_URL=world.of(DatabaseRole.OPERATE)) as shell:
        yield shell


def received(session: Session, count: int) -> list[bytes]:
    found: list[bytes] = []
    for each in session:
        found += each.table["value"].to_pylist()
        if len(found) >= count:
            break
    return sorted(found)


def stored(world: RoleWorld) -> int:
    with connect(world.of(DatabaseRole.CONSUME)) as conn:
        ((count,),) = conn.execute("select coalesce(sum(head), 0) from stream").fetchall()
        return int(count)


def test_messages_are_published_by_sql(world: RoleWorld, fleet: Fleet) -> None:
    """And moved into the log by the node."""
    before = stored(world)
    with psycopg.connect(world.of(DatabaseRole.PUBLISH), autocommit=True) as conn:
        conn.execute("select sublet.publish('orders/eu', 'text', key => 'k', headers => '{\"a\": 1}')")
        conn.execute("select sublet.publish('orders/eu', '\\x00'::bytea)")
        for refused in ("select * from sublet.outbox", "select sublet.is_fenced('p', 1)", "create table sublet.x ()"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                conn.execute(refused)
    eventually(lambda: stored(world) == before + 2, WAIT_S)


def test_a_publisher_appends_and_advances(world: RoleWorld) -> None:
    url, before = world.of(DatabaseRole.APPEND), stored(world)
    for _ in range(2):
        with Publisher(url, producer="etl") as publisher:
            publisher.publish("orders/eu", b"1", key=b"k").result(WAIT_S)
    with connect(world.owner) as owner:
        frontier = "select lower_frontier, frontier_move_count from space where name = 'default'"
        with Publisher(url, space="default", producer="hourly", epoch_lease_s=1.0) as publisher:
            publisher.advance(10)
            publisher.in_epoch(10).publish("orders/eu", b"2")
            publisher.advance(11)
            publisher.flush()
            assert owner.execute(frontier).fetchone() == ([[11]], 2)
            renewed = "select expires_at from capability"
            before_s = owner.execute(renewed).fetchone()
            eventually(lambda: owner.execute(renewed).fetchone() != before_s, WAIT_S, "its lease is renewed")
        ((lower, _),) = owner.execute(frontier).fetchall()
        assert lower == [[11]]
    assert stored(world) == before + 3


def test_a_sink_stages_and_commits(world: RoleWorld) -> None:
    """Also what was staged for streams that were closed meanwhile."""
    before, write = stored(world), SinkBatchId("nightly", 1)
    with connect(world.of(DatabaseRole.APPEND)) as conn, connect(world.of(DatabaseRole.OPERATE)) as operator:
        staged = [stage(conn, write, 0, [batch([b"a", b"b"])]), stage(conn, write, 1, [batch([b"c"])])]
        rollover(operator, "default")
        assert commit(conn, write, staged).messages == 3
        assert commit(conn, write, staged).is_duplicate
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            conn.execute("select * from staged_block")
    assert stored(world) == before + 3


@pytest.mark.conforms("X7")
def test_a_sink_commits_no_block_that_cannot_be(world: RoleWorld) -> None:
    """Whoever may stage may write any bytes."""
    before, write = stored(world), SinkBatchId("hostile", 1)
    with connect(world.of(DatabaseRole.APPEND)) as conn:
        staged = [stage(conn, write, 0, [batch([b"a"])])]
        with connect(world.owner) as owner:
            owner.execute("update staged_block set payload = repeat('x', 64)::bytea where sink = 'hostile'")
        with pytest.raises(psycopg.Error, match="begins with ffffffff"):
            commit(conn, write, staged)
    assert stored(world) == before


def test_a_consumer_reads_no_key_of_a_node(world: RoleWorld) -> None:
    with connect(world.of(DatabaseRole.CONSUME)) as conn:
        conn.execute("select name, notify_driver from node")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            conn.execute("select notify_endpoint from node")


def test_a_session_consumes_and_commits(world: RoleWorld, fleet: Fleet) -> None:
    """Exactly once too: output and progress in one transaction of the consumer's own."""
    world.execute(f"create schema if not exists reports authorization user_of_{DatabaseRole.CONSUME}")
    subscription, url = "$share/reports/reports/#", world.of(DatabaseRole.CONSUME)
    with Publisher(world.of(DatabaseRole.APPEND)) as publisher:
        for number in range(20):
            publisher.publish("reports/eu", b"%d" % number, key=b"%d" % number)
    with Session(subscription, url, starting_position="earliest", name="daily") as session:
        done_count = 0
        for each in session:
            with each.transaction() as connection:
                connection.execute("create table if not exists reports.seen (value bytea)")
                values = [(value,) for value in each.table["value"].to_pylist()]
                connection.cursor().executemany("insert into reports.seen values (%s)", values)
            done_count += len(values)
            if done_count == 20:
                break
    with connect(url) as conn:
        assert conn.execute("select count(distinct value), count(*) from reports.seen").fetchone() == (20, 20)
    with connect(world.owner) as owner:
        moved = "select sum(position) >= 20 from lending join consumer_group using (group_id) where name = 'reports'"
        assert owner.execute(moved).fetchone() == (True,)


def test_the_command_line_publishes_and_consumes(world: RoleWorld, fleet: Fleet) -> None:
    with a_shell(SUBLET_DATABASE_URL=world.of(DatabaseRole.APPEND)) as shell:
        assert shell.run("publish", "cli/eu", stdin="one\ntwo\n").code == 0
    with a_shell(SUBLET_DATABASE_URL=world.of(DatabaseRole.CONSUME)) as shell:
        tailed = shell.run("tail", "cli/#", "--from", "earliest", "--max-messages", "2", "--json")
        assert (tailed.code, len(tailed.lines)) == (0, 2), tailed.err
        arguments = ("--from", "earliest", "--max-messages", "2", "--json")
        consumed = shell.run("consume", "$share/cli/cli/#", *arguments)
        assert (consumed.code, len(consumed.lines)) == (0, 2), consumed.err
        shell.run("doctor", "--json")


def succeed(shell: Shell, *commands: str) -> None:
    for command in commands:
        answer = shell.run(*command.split(), "--json")
        assert answer.code == 0, (command, answer.err)


@pytest.mark.long
def test_an_operator_changes_groups(world: RoleWorld, fleet: Fleet, operator: Shell, tmp_path: Path) -> None:
    with Publisher(world.of(DatabaseRole.APPEND)) as publisher:
        for number in range(10):
            publisher.publish("orders/us", b"%d" % number, key=b"%d" % number)
    changed = ("pause {} --reason test", "resume {}", "weight {} nightly 2", "describe {}", "why {}", "list")
    succeed(operator, *(f"groups {each.format(GROUP)}" for each in ("create {} --from earliest", *changed)))
    with Session(GROUP, world.of(DatabaseRole.CONSUME)) as session:
        received(session, 10)
        succeed(operator, f"groups reset {GROUP} --to-earliest --yes")
    for target in ("--to-latest", "--to-time 2026-01-01T00:00:00Z", "--to-epoch 10"):
        succeed(operator, f"groups reset {GROUP} {target} --yes")
    succeed(operator, f"groups clone {GROUP} $share/copy/orders/#", "groups delete $share/copy/orders/# --yes")
    assert "reset" in operator.run("groups", "history", GROUP).out
    exported = operator.run("groups", "export", GROUP)
    assert exported.code == 0, exported.err
    (tmp_path / "progress.json").write_text(exported.out)
    succeed(operator, f"groups delete {GROUP} --yes", f"groups import {tmp_path / 'progress.json'}")


def test_an_operator_changes_spaces_and_nodes(world: RoleWorld, fleet: Fleet, operator: Shell) -> None:
    succeed(operator, "spaces create metrics metrics/# --shards 2", "spaces alter metrics --compression zstd")
    succeed(operator, "spaces alter metrics --retention 30d")
    succeed(operator, "spaces rollover metrics", "spaces reshard metrics 4", "spaces drop metrics --force --yes")
    succeed(operator, "spaces list", "nodes list", "nodes step-down n1 --force", "nodes drain n1 --force")
    succeed(operator, "nodes drain n1 --undo")
    answer = operator.run("doctor", "--json")
    unread = [each for each in answer.object["findings"] if "cannot be looked at" in each["detail"]]
    assert unread == []


def test_an_operator_gives_access(world: RoleWorld, operator: Shell) -> None:
    """And neither reads a credential nor writes the history."""
    succeed(operator, "access allow user:etl publish orders/#")
    token = done(operator.run("access", "token", "user:etl", "--json"))["token_id"]
    succeed(operator, "access list", "access tokens", "access check user:etl publish orders/eu")
    succeed(operator, f"access revoke-token {token}", "access revoke user:etl publish orders/#")
    with connect(world.owner) as owner:
        owner.execute("insert into session_epoch values ($$$share/g/#$$, 'nightly', 1, now(), 'user:etl')")
    succeed(operator, "access release-session $share/g/# nightly")
    with connect(world.of(DatabaseRole.OPERATE)) as conn:
        user = f"database user user_of_{DatabaseRole.OPERATE}"
        events = conn.execute("select event from access_history where by = %s order by number", (user,)).fetchall()
        assert [event for (event,) in events] == ["allow", "token", "revoke-token", "revoke", "release-session"]
        for refused in (
            "select digest from token",
            "select grant_key from lending",
            "select notify_endpoint from node",
            "insert into access_history (event, principal, object) values ('allow', 'x', 'y')",
            "insert into access (principal, may, filter, granted_by) values ('user:x', 'operate', '#', 'nobody')",
            "select payload from block",
            "select value from outbox",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                conn.execute(refused)


def test_an_atomic_group_is_consumed(world: RoleWorld, fleet: Fleet, operator: Shell) -> None:
    """Epochs come from a publisher; progress counts them."""
    group = "$share/hours/hours/#"
    succeed(operator, "spaces create hours hours/# --shards 1", f"groups create {group} --from earliest --atomic")
    with Publisher(world.of(DatabaseRole.APPEND), space="hours", producer="clock") as publisher:
        publisher.advance(1)
        publisher.in_epoch(1).publish("hours/eu", b"1")
        publisher.advance(2)
        with Session(group, world.of(DatabaseRole.CONSUME), name="daily") as session:
            each = next(iter(session))
            assert each.table["value"].to_pylist() == [b"1"]
            each.ack()
    with connect(world.owner) as owner:
        consumed = "select least from consumed_frontier join space using (space_id) where name = 'hours'"
        eventually(lambda: owner.execute(consumed).fetchall() == [([[2]],)], WAIT_S, fleet.nodes["n1"].output)


def test_payloads_are_moved_and_read(world: RoleWorld, fleet: Fleet, operator: Shell, tmp_path: Path) -> None:
    """The node moves them as a member of its role, and a consumer reads them where they are."""
    place, value = (tmp_path / "payloads").as_uri(), b"x" * 5000
    (tmp_path / "payloads").mkdir()
    succeed(operator, f"spaces create far far/# --shards 1 --payload-location {place}")
    with Publisher(world.of(DatabaseRole.APPEND)) as publisher:
        publisher.publish("far/eu", value).result(WAIT_S)
    succeed(operator, "spaces rollover far")
    with connect(world.owner) as owner:
        inside = "select count(*) from block where topics = '{far/eu}' and payload is not null"
        eventually(lambda: owner.execute(inside).fetchone() == (0,), WAIT_S, fleet.nodes["n1"].output)
    with Session("$share/far/far/#", world.of(DatabaseRole.CONSUME), starting_position="earliest") as session:
        assert received(session, 1) == [value]


def test_clients_without_a_database_have_rules(world: RoleWorld, operator: Shell, tmp_path: Path) -> None:
    """Through a node that is a member of its role and authenticates callers; it notes when a token was used."""
    node = Fleet(world.of(DatabaseRole.NODE), tmp_path, extra={"SUBLET_AUTH": "required"})
    for right in ("publish", "read", "join"):
        succeed(operator, f"access allow user:afar {right} afar/#")
    made = done(operator.run("access", "token", "user:afar", "--json"))
    try:
        node.serve("n2")
        with connect(world.of(DatabaseRole.CONSUME)) as conn:
            ((address,),) = conn.execute("select address from node where name = 'n2'").fetchall()
        with a_shell(SUBLET_TOKEN=made["token"]) as shell:
            through = ("--node", str(address))
            assert shell.run("publish", "afar/eu", *through, stdin="one\ntwo\n").code == 0
            arguments = (*through, "--from", "earliest", "--max-messages", "2", "--json")
            for command in (("tail", "afar/#"), ("consume", "$share/afar/afar/#")):
                answer = shell.run(*command, *arguments)
                assert (answer.code, len(answer.lines)) == (0, 2), answer.err
        with connect(world.owner) as owner:
            used = "select last_used is not null from token where token_id = %s"
            eventually(lambda: owner.execute(used, (made["token_id"],)).fetchone() == (True,), WAIT_S)
        assert "permission denied" not in node.nodes["n2"].output()
    finally:
        node.close()


@pytest.mark.long
def test_a_node_drops_what_retention_has_taken(world: RoleWorld, fleet: Fleet, operator: Shell) -> None:
    """It makes the partitions of new generations, and detaches and drops those that are too old."""
    succeed(operator, "spaces create short short/# --retention 1s --rollover 1s")
    with connect(world.owner) as owner:
        generations = "select generation_id from generation join space using (space_id) where name = 'short'"
        ((first,),) = owner.execute(generations).fetchall()
        with Publisher(world.of(DatabaseRole.APPEND)) as publisher:
            publisher.publish("short/eu", b"1").result(WAIT_S)
        dropped = f"select to_regclass('block_{first}') is null"
        eventually(lambda: owner.execute(dropped).fetchone() == (True,), WAIT_S, fleet.nodes["n1"].output)
        owners = "select distinct tableowner::text from pg_tables where schemaname = 'sublet'"
        assert owner.execute(owners).fetchall() == [("keeper",)]

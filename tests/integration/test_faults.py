"""The database, or the machine of a node, takes no more: read-only, full, errors out of the blue, no descriptors.

Meanwhile it is named, afterwards all go on by themselves, and nothing is lost.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import psycopg
import pytest

from sublet_borrower.consumer.dead_letter import publish_dead_letter
from sublet_borrower.consumer.runner import RetryPolicy, run
from sublet_borrower.consumer.session import Session
from sublet_borrower.settings import BorrowerSettings
from sublet_borrower.streams.batch import Batch
from sublet_protocol.domain.errors import SubletError, Unavailable
from sublet_storage.bootstrap.embedded import EmbeddedPostgres
from sublet_storage.bootstrap.embedded.data_directory_and_user import find_server_user
from sublet_storage.bootstrap.migrate import migrate
from sublet_storage.db.connect import connect
from sublet_storage.producer import Publisher
from tests.integration.http_kit import Http
from tests.integration.sharing_kit import Stage
from tests.kit import WAIT_S, eventually
from tests.kit_nodes import SPEED, Fleet
from tests.postgres_proxy import PostgresProxy

BORROWER = BorrowerSettings().scaled(SPEED)
WAL_SEGMENT_BYTES = "16777216"
READ_ONLY = r"read-only.*default_transaction_read_only off.*Publish it again"


@pytest.fixture
def database(server: EmbeddedPostgres) -> str:
    """Return the database of a server of the test's own."""
    return server.url


@pytest.fixture
def stage_settings() -> dict[str, str]:
    return {"SUBLET_HTTP": "yes"}


def readiness(node: Http) -> tuple[int, str]:
    """Status of `/readyz`, and its detail."""
    answer = node.ask("/readyz")
    return answer.status, str(answer.object.get("detail", ""))


def not_ready(node: Http, *causes: str) -> bool:
    """Return whether the node's probe reports that it cannot serve, for one of these causes."""
    status, detail = readiness(node)
    return status == 503 and any(cause in detail for cause in causes)


def all_live(stage: Stage) -> bool:
    return all(process.alive for process in (*stage.fleet.nodes.values(), *stage.fleet.consumers.values()))


# --- the database -----------------------------------------------------------------------------------------------------


def set_read_only(url: str, value: str) -> None:
    """Set the entire server read-only, also for open connections."""
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute(f"alter system set default_transaction_read_only = {value}")
        admin.execute("select pg_reload_conf()")
    eventually(lambda: read_only_setting(url) == value, WAIT_S)  # a new process has it when all others were notified


def read_only_setting(url: str) -> str:
    with psycopg.connect(url) as fresh:
        return str(fresh.execute("show default_transaction_read_only").fetchall()[0][0])


@pytest.mark.long
@pytest.mark.conforms("W1", "E13", "A8")
def test_a_read_only_database_is_waited_for(stage: Stage, database: str) -> None:
    stage.serve("n1")
    node = Http.of(stage.fleet.nodes["n1"])
    stage.share("a", "b")
    with stage.scene.load():
        stage.more()
        set_read_only(database, "on")
        with pytest.raises(Unavailable, match=READ_ONLY), Publisher(database, delivery_timeout_s=1) as publisher:
            publisher.publish("other", b"x")
        eventually(lambda: not_ready(node, "read-only"), WAIT_S, stage.said)
        eventually(lambda: stage.scene.claim().remaining_s < 0, WAIT_S, stage.said)
        set_read_only(database, "off")
        stage.more(40)
    stage.verdict()
    eventually(lambda: readiness(node)[0] == 200, WAIT_S, stage.said)
    assert all_live(stage)


def write(connection: psycopg.Connection[object], batch: Batch) -> None:
    connection.execute("insert into public.output select generate_series(1, %s)", (len(batch),))


def publish(connection: psycopg.Connection[object], batch: Batch) -> None:
    publish_dead_letter(connection, "dead", batch.table, batch.stream_id, "it is bad")


@pytest.mark.parametrize(
    "work", [write, publish, lambda connection, batch: None], ids=["output", "a dead letter", "progress alone"]
)
def test_a_function_waits_for_a_read_only_database(
    fleet: Fleet, database: str, work: Callable[[psycopg.Connection[object], Batch], None]
) -> None:
    """Also where it meets the transaction of a batch."""
    with connect(database) as admin, Publisher(database) as publisher:
        admin.execute("create table public.output (number bigint)")
        publisher.publish("g/t", b"x").result(WAIT_S)
    calls = 0
    with Session("$share/g/#", database, settings=BORROWER, starting_position="earliest") as session:

        def process(batch: Batch) -> None:
            nonlocal calls
            calls += 1
            set_read_only(database, "on" if calls <= 4 else "off")
            with batch.transaction() as connection:
                work(connection, batch)
            session.drain()

        summary = run(session, process, policy=RetryPolicy(max_attempts=1, backoff_s=0.0))
    assert (calls, summary.failures, summary.messages) == (5, 0, 1)


def limit_files(server: EmbeddedPostgres, size: str) -> None:
    """Limit the size of the server's files: larger ones fail, as if the disk was full."""
    user = find_server_user(server.data_dir)  # nobody else may, root neither
    postmaster = psutil.Process(int((server.data_dir / "pg" / "postmaster.pid").read_text().split()[0]))
    for process in (postmaster, *postmaster.children()):
        command = [str(shutil.which("prlimit")), f"--pid={process.pid}", f"--fsize={size}:"]
        ended = subprocess.run(command if user is None else user.command(command), check=False)
        assert ended.returncode == 0 or not process.is_running()  # those of connections come and go


def publish_until_refused(publisher: Publisher) -> tuple[int, SubletError]:
    """Messages of a megabyte: how many were acknowledged, and what came of the next."""
    acknowledged = 0
    while True:
        try:
            publisher.publish(f"t/{acknowledged}", os.urandom(1_000_000)).result(WAIT_S)
        except SubletError as error:
            return acknowledged, error
        acknowledged += 1


@pytest.mark.conforms("W1", "E13", "E29")
def test_a_full_disk_loses_nothing_acknowledged(stage: Stage, server: EmbeddedPostgres) -> None:
    stage.serve("n1")
    stage.share("a", "b")
    stage.scene.publish(200)
    limit_files(server, WAL_SEGMENT_BYTES)
    publisher = Publisher(server.url)
    acknowledged, refusal = publish_until_refused(publisher)
    assert "could not extend file" in str(refusal)
    assert "Check free disk space" in str(refusal)
    limit_files(server, "unlimited")
    publisher.publish("t", b"after").result(WAIT_S)
    with pytest.raises(SubletError, match="could not extend file"):
        publisher.close()
    stage.scene.publish(200)
    assert sum(stage.scene.heads().values()) == 401 + acknowledged
    stage.verdict()
    assert all_live(stage)


@pytest.fixture
def small_disk(server_home: Path) -> Iterator[Path]:
    """A file system of its own, which can be filled."""
    folder = server_home / "disk"
    folder.mkdir(mode=0o755)
    mount = ["mount", "-t", "tmpfs", "-o", "size=160m,mode=0755", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("who runs this may not mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(file: Path) -> None:
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(65536))


def ends_for_lack_of_wal(server: EmbeddedPostgres) -> bool:
    """Begin new segments until there is no room for one; whether the server is gone then, and cannot be started."""
    with contextlib.suppress(psycopg.OperationalError), psycopg.connect(server.url, autocommit=True) as admin:
        for number in itertools.count():
            admin.execute(f"create table of_{number} (nothing int)")
            admin.execute("select pg_switch_wal()")
    return "server not restarted, retrying" in (server.data_dir / "pg" / "server.log").read_text()


@pytest.mark.long
@pytest.mark.conforms("W1", "W2", "E13")
def test_a_server_ended_by_a_full_disk_comes_back(small_disk: Path, tmp_path: Path) -> None:
    with EmbeddedPostgres(small_disk / "data") as server:
        migrate(server.url)
        stage = Stage(server.url, tmp_path)
        reported = server.data_dir / "pg" / "server.log"
        try:
            stage.serve("n1", "n2")
            stage.share("a", "b")
            with stage.scene.load():
                stage.more()
                fill(small_disk / "filler")
                eventually(lambda: ends_for_lack_of_wal(server), WAIT_S, reported.read_text)
                assert "No space left on device" in reported.read_text()
                (small_disk / "filler").unlink()
                stage.more(40)
            stage.verdict()
            stage.written_by_one_at_a_time()
            assert all_live(stage)
        finally:
            stage.close()


FAULTS = """
create sequence sublet.{table}_faults;
create function sublet.fail_{table}() returns trigger language plpgsql as $$
declare
  codes text[] := array['40001', '40P01', '53000', '53100', '53200', '55P03', '57014', '58030'];
  count int := nextval('sublet.{table}_faults');
begin
  if count <= array_length(codes, 1) then
    raise 'the fault of {table}' using errcode = codes[1 + mod(count, array_length(codes, 1))];
  end if;
  return new;
end $$;
create trigger fail before insert or update on sublet.{table} for each row execute function sublet.fail_{table}()"""
"""Serialization, deadlock, resources, disk full, memory, lock, canceled, input or output: each once in a table."""


@pytest.mark.long
@pytest.mark.conforms("W1", "W2", "E13")
def test_passing_errors_are_tried_again(stage: Stage) -> None:
    tables = ("stream", "lending", "leadership")
    stage.serve("n1", "n2")
    stage.share("a", "b")
    with stage.scene.load():
        stage.more()
        for table in tables:
            stage.scene.connection.execute(FAULTS.format(table=table))
        all_raised = " union all ".join(f"select last_value > 8 from sublet.{table}_faults" for table in tables)
        eventually(lambda: stage.scene.ask(all_raised) == [(True,)] * len(tables), WAIT_S, stage.said)
        stage.more(40)
    stage.verdict()
    stage.written_by_one_at_a_time()
    assert all_live(stage)
    assert "the fault of leadership" in "".join(node.output() for node in stage.fleet.nodes.values())


@pytest.mark.conforms("W1", "W2")
def test_a_publisher_in_a_deadlock_goes_on(stage: Stage, database: str) -> None:
    """With somebody who locks streams in another order, and whom the server spares. (Leaders skip what is locked.)"""
    deadlocks = "select deadlocks from pg_stat_database where datname = current_database()"
    waits = "select from pg_stat_activity where application_name = 'sublet publisher' and wait_event_type = 'Lock'"

    def collide() -> bool:
        with connect(database, application_name="the other") as other:
            other.execute("set deadlock_timeout = '1h'")
            other.execute("begin")
            other.execute("select from stream where stream_id = (select max(stream_id) from stream) for update")
            eventually(lambda: stage.scene.ask(waits), WAIT_S)
            other.execute("select from stream for update")
        return bool(stage.scene.ask(deadlocks) > [(0,)])

    with stage.scene.load() as load:
        eventually(collide, WAIT_S, every_s=1.0)
        least = load.acknowledged + 20
        eventually(lambda: load.acknowledged > least, WAIT_S)


# --- the machine of a node --------------------------------------------------------------------------------------------


def limit_descriptors(pid: int, count: int) -> None:
    """Limit its descriptors from now on; open ones stay open."""
    _, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (count, most))


@pytest.mark.long
@pytest.mark.conforms("E13", "E16", "A8")
def test_a_node_without_descriptors_goes_on_afterwards(stage: Stage, database: str) -> None:
    with PostgresProxy(database) as one, PostgresProxy(database) as two:
        paths = {"n1": one, "n2": two}
        for name, way in paths.items():
            stage.serve(name, url=way.url)
        stage.share("a", "b")
        with stage.scene.load():
            before, leader = stage.leader()
            enough, _ = resource.prlimit(leader.pid, resource.RLIMIT_NOFILE)
            limit_descriptors(leader.pid, 3)
            stage.more()
            paths[before.node.name].hang_up()
            stage.next_leader(before)
            stage.fleet.consumer("c", "$share/g/#")
            eventually(lambda: stage.scene.shares() == [5, 5, 6], WAIT_S, stage.said)
            eventually(lambda: "opens no more (Too many open files)" in leader.output(), WAIT_S, leader.output)
            limit_descriptors(leader.pid, enough)
            stage.more(40)
            eventually(lambda: readiness(Http.of(leader))[0] == 200, WAIT_S, leader.output)
            after, other = stage.leader()
            assert other.stop() == 0
            assert stage.next_leader(after).node.name == before.node.name
            stage.more()
        stage.verdict()
    stage.written_by_one_at_a_time()

"""From one version of the schema to the next and back, while nodes, a publisher and consumers are at work."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psycopg
import pytest

from sublet_protocol.domain.errors import InvalidSetting, SchemaMismatch, Unavailable
from sublet_storage.bootstrap import migrate as migrations
from sublet_storage.bootstrap.migrate import current_version, downgrade, migrate
from sublet_storage.db import connect as module
from sublet_storage.db.connect import SCHEMA_VERSION, check_schema, connect
from sublet_storage.node_directory import NodeIncarnation, register
from tests.integration.cli_kit import Shell, refused
from tests.integration.log_kit import Connection, waiting_for_locks
from tests.integration.sharing_kit import Stage
from tests.kit import WAIT_S, eventually
from tests.kit_nodes import ROOT, Process

NEXT, LATER = (f"{int(SCHEMA_VERSION) + more:04}" for more in (1, 2))

ADDITIVE = """
from alembic import op

revision, down_revision, branch_labels, depends_on = "{revision}", "{before}", None, None
compatible_from = "{before}"


def upgrade() -> None:
    for table in ("lending", "stream", "consumer_group", "node", "leadership"):
        op.execute(f"alter table {{table}} add column from_{revision} int not null default 7")


def downgrade() -> None:
    for table in ("lending", "stream", "consumer_group", "node", "leadership"):
        op.execute(f"alter table {{table}} drop column from_{revision}")
"""


@pytest.fixture
def newer(tmp_path: Path) -> Path:
    """Scripts of a release that adds columns, and of one after it that does too: programs of the release before each
    work with them, says each."""
    folder = tmp_path / "migrations"
    shutil.copytree(ROOT / "migrations", folder, ignore=shutil.ignore_patterns("__pycache__"))
    for revision, before in ((NEXT, SCHEMA_VERSION), (LATER, NEXT)):
        text = ADDITIVE.format(revision=revision, before=before)
        (folder / "versions" / f"{revision}_more.py").write_text(text)
    return folder


@pytest.fixture
def knows_more(newer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has the newer releases' scripts."""
    monkeypatch.setattr(migrations, "scripts_path", lambda: newer)


class Releases:
    """Two releases on one stage: each may run nodes and commands."""

    def __init__(self, stage: Stage, newer: Path, directory: Path) -> None:
        self.stage, self._directory = stage, directory
        self._codecs = {SCHEMA_VERSION: ROOT / "migrations", NEXT: newer}
        self._count = 0

    def run(self, version: str, *arguments: str) -> Process:
        """A command of a release's."""
        self._count += 1
        log = self._directory / f"command-{self._count}.log"
        url = ("--database-url", self.stage.scene.url)
        return Process("tests.processes.release", str(self._codecs[version]), version, *arguments, *url, log=log)

    def does(self, version: str, *arguments: str) -> str:
        """Return the output of a command that succeeds."""
        process = self.run(version, *arguments)
        eventually(lambda: not process.alive, WAIT_S, process.output)
        assert process.stop() == 0, process.output()
        return process.output()

    def serve(self, version: str, *names: str) -> None:
        """Nodes of a release's, each in place of the one of its name that may be there."""
        for name in names:
            if name in self.stage.fleet.nodes:
                assert self.stage.fleet.nodes[name].stop() == 0
            node = self.run(version, "leader", "--name", name, "--listen", "127.0.0.1:0")
            self.stage.fleet.nodes[name] = node
            eventually(partial(_serves, node), WAIT_S, node.output)


def _serves(node: Process) -> bool:
    assert node.alive, node.output()
    return "serves on" in node.output()


@pytest.mark.long
@pytest.mark.conforms("A10", "E8", "E16")
def test_up_and_down_under_load_loses_nothing(stage: Stage, newer: Path, tmp_path: Path) -> None:
    """Nothing is repeated either."""
    releases = Releases(stage, newer, tmp_path)
    releases.serve(SCHEMA_VERSION, "n1", "n2")
    stage.share("a")
    with stage.scene.load():
        stage.more()
        assert f"version {NEXT} (before: {SCHEMA_VERSION})" in releases.does(NEXT, "migrate", "--to", NEXT)
        stage.more()
        releases.serve(SCHEMA_VERSION, "n1")  # an old one that is restarted meanwhile does as well
        stage.share("b")
        releases.serve(NEXT, "n1", "n2")
        stage.more(of="b")
        releases.serve(SCHEMA_VERSION, "n2", "n1")
        stage.more()
        reported = releases.does(NEXT, "migrate", "--to", SCHEMA_VERSION, "--downgrade")
        assert f"version {SCHEMA_VERSION} (before: {NEXT})" in reported
        stage.more(40)
    assert stage.verdict().explained == []
    assert not any(line.is_forced for line in stage.scene.history())
    assert current_version(stage.scene.url) == SCHEMA_VERSION


@pytest.mark.conforms("A10")
@pytest.mark.usefixtures("knows_more")
def test_a_schema_records_which_programs_fit_it(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with connect(database) as conn:
        assert migrate(database, to=NEXT) == NEXT == check_schema(conn)
        assert migrate(database, to=LATER) == LATER
        with pytest.raises(SchemaMismatch, match=rf"{LATER}, newer than.*programs of version {NEXT} and later"):
            check_schema(conn)
        downgrade(database, to=NEXT)
        assert check_schema(conn) == NEXT
        monkeypatch.setattr(module, "SCHEMA_VERSION", LATER)
        with pytest.raises(SchemaMismatch, match=f"{NEXT}, older than this program's {LATER}. Run `sublet migrate`"):
            check_schema(conn)


@pytest.mark.conforms("A10")
def test_a_release_leaves_a_newer_schema_alone(database: str, newer: Path) -> None:
    """It does so if that schema says that it works with it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(migrations, "scripts_path", lambda: newer)
        migrate(database, to=NEXT)
    assert migrate(database) == NEXT, "as `sublet leader --migrate` of a node that is restarted"
    with pytest.raises(SchemaMismatch, match=f"{NEXT}, newer than the {SCHEMA_VERSION} this program knows"):
        migrate(database, to=SCHEMA_VERSION)


@pytest.mark.usefixtures("knows_more")
def test_the_command_line_shows_where_an_upgrade_is(database: str, shell: Shell) -> None:
    """The command is of the older release."""
    migrate(database, to=NEXT)
    found = shell.run("doctor", "--json").object["findings"][0]
    assert (found["check"], found["state"]) == ("database", "warning")
    assert f"at {NEXT}, newer than this release's {SCHEMA_VERSION}" in found["detail"]
    assert shell.run("migrate", "--json").object == {"schema": "sublet", "from": NEXT, "to": NEXT}
    refused(shell.run("migrate", "--downgrade"), 2, "it has to be said how far")
    refused(shell.run("migrate", "--to", "77"), 2, "version '77': this program knows")


@pytest.mark.usefixtures("knows_more")
def test_an_empty_database_can_get_an_older_version(empty_database: str) -> None:
    assert migrate(empty_database, to=SCHEMA_VERSION) == SCHEMA_VERSION
    with connect(empty_database) as conn:
        assert conn.execute("select name, shards from space").fetchall() == [("default", 16)]
    assert migrate(empty_database) == LATER


def be_at_work(conn: Connection) -> None:
    """Have a node n1 in the directory."""
    register(conn, NodeIncarnation("n1", "a life", "127.0.0.1:1"), 60, 1)


@pytest.mark.conforms("A10")
@pytest.mark.usefixtures("knows_more")
def test_what_would_break_programs_at_work_is_refused(database: str) -> None:
    with connect(database) as conn:
        be_at_work(conn)
        with pytest.raises(SchemaMismatch, match=f"version {LATER}: .*present {SCHEMA_VERSION}.*n1. Stop all nodes"):
            migrate(database)
        assert migrate(database, to=NEXT) == NEXT
        conn.execute("delete from node")
        assert migrate(database) == LATER
        be_at_work(conn)
        for compatible in (None, NEXT):
            conn.execute("update alembic_version set compatible_from = %s", (compatible,))
            with pytest.raises(SchemaMismatch, match=f"version {SCHEMA_VERSION}: .*present {LATER}.*Stop all nodes"):
                downgrade(database, to=SCHEMA_VERSION)
        assert current_version(database) == LATER
        downgrade(database, to=NEXT)
        downgrade(database, to=SCHEMA_VERSION)
        assert current_version(database) == SCHEMA_VERSION


@pytest.mark.conforms("A10")
@pytest.mark.usefixtures("knows_more")
def test_a_node_begun_while_a_migration_waits_is_seen(database: str) -> None:
    with psycopg.connect(database) as reader, connect(database) as conn, ThreadPoolExecutor(1) as pool:
        reader.execute("select count(*) from sublet.stream")
        migrating = pool.submit(migrate, database)
        eventually(lambda: waiting_for_locks(database), WAIT_S)
        be_at_work(conn)
        reader.rollback()
        with pytest.raises(SchemaMismatch, match="at work: n1"):
            migrating.result(WAIT_S)
    assert current_version(database) == SCHEMA_VERSION


@pytest.mark.conforms("A10")
@pytest.mark.usefixtures("knows_more")
@pytest.mark.long
def test_a_migration_in_a_deadlock_is_tried_again(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrations, "TABLE_TIMEOUT_S", 3.0)  # it is found after a second
    with psycopg.connect(database) as other, ThreadPoolExecutor(1) as pool:
        other.execute("set deadlock_timeout = '1min'; select from sublet.stream limit 1")
        migrating = pool.submit(migrate, database, None, NEXT)
        eventually(lambda: waiting_for_locks(database), WAIT_S)
        other.execute("select from sublet.lending limit 1")  # which the migration has changed by now
        other.rollback()
        assert migrating.result(WAIT_S) == NEXT


@pytest.mark.usefixtures("knows_more")
def test_wrong_directions_and_versions_are_refused(database: str) -> None:
    with pytest.raises(InvalidSetting, match=f"version '0999': this program knows .*{SCHEMA_VERSION}, {NEXT}, {LATER}"):
        migrate(database, to="0999")
    with pytest.raises(SchemaMismatch, match=f"{SCHEMA_VERSION}, and {NEXT} is not older. Leave out --downgrade"):
        downgrade(database, to=NEXT)
    migrate(database, to=NEXT)
    with pytest.raises(SchemaMismatch, match=f"{NEXT}, and {NEXT} is not older. Leave out --downgrade"):
        downgrade(database, to=NEXT)
    with pytest.raises(SchemaMismatch, match=r"To go back, bring every node.*add --downgrade"):
        migrate(database, to=SCHEMA_VERSION)
    assert current_version(database) == NEXT


@pytest.mark.conforms("A10")
@pytest.mark.usefixtures("knows_more")
def test_a_migration_waits_briefly_for_locks(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long transaction does not make it hold up everybody else."""
    monkeypatch.setattr(migrations, "TABLE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(migrations, "ATTEMPTS", 2)
    with psycopg.connect(database) as reader, connect(database, lock_timeout_s=5) as other:
        reader.execute("select count(*) from sublet.stream")  # as a dump does: the lock stays
        with pytest.raises(Unavailable, match=r"in use for all of 2 tries.*nothing was changed"):
            migrate(database, to=NEXT)
        assert current_version(database) == SCHEMA_VERSION
        other.execute("update stream set head = head")
        reader.rollback()
        assert migrate(database, to=NEXT) == NEXT

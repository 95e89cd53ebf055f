"""PgBouncer in transaction mode between sublet and Postgres: what does not work says so, what does works."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest
from psycopg import sql

from sublet_borrower.consumer.session import Session
from sublet_borrower.settings import BorrowerSettings
from sublet_protocol.domain.errors import InvalidSetting
from sublet_storage.db.connect import connect
from sublet_storage.producer import Publisher
from tests.integration.cli_kit import a_shell, refused
from tests.integration.feed_kit import address_of
from tests.integration.log_kit import Connection
from tests.integration.session_kit import free_port
from tests.integration.test_sql_publish import Writer, all_moved, exactly_once_in_order
from tests.kit import WAIT_S, eventually
from tests.kit_nodes import SPEED, Fleet
from tests.postgres_proxy import PostgresProxy

PROGRAM = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no pgbouncer here: apt-get install pgbouncer")

USAGE = 2
REFUSED = r"drops the startup options .* PgBouncer\. Give the address of the server itself; .* nodes, or publish by SQL"
CONFIGURATION = """
[databases]
* = host=127.0.0.1 port={server_port} user={user} pool_size=1
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
"""


def pooled(url: str, stack: ExitStack, more: str = "") -> str:
    """The URL of a PgBouncer that has one connection to the server, whatever number of clients."""
    server, port = stack.enter_context(PostgresProxy(url)), free_port()
    parts = urlsplit(server.url)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sublet-tests-")))
    folder.chmod(0o755)  # it refuses to run as root
    file = folder / "pgbouncer.ini"
    file.write_text(CONFIGURATION.format(server_port=server.port, user=parts.username, port=port) + more)
    user = ["-u", "nobody"] if os.geteuid() == 0 else []
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([str(PROGRAM), *user, str(file)], stdout=log, stderr=subprocess.STDOUT)
    stack.callback(process.wait)
    stack.callback(process.kill)
    address = f"postgresql://{parts.username}@127.0.0.1:{port}{parts.path}"

    def answers() -> bool:
        try:
            with psycopg.connect(address) as connection:
                return connection.execute("select 1").fetchone() == (1,)
        except psycopg.OperationalError:
            return False

    eventually(answers, WAIT_S, (folder / "log").read_text)
    return address


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(params=["", "ignore_startup_parameters = options"], ids=["refuses options", "drops options"])
def pooler(database: str, stack: ExitStack, request: pytest.FixtureRequest) -> str:
    """Return a pooler with its default configuration, and one configured as its error suggests."""
    return pooled(database, stack, request.param)


@pytest.mark.conforms("A9", "W9")
def test_what_needs_a_session_is_refused(database: str, pooler: str) -> None:
    """Also where the database gives each session what ours ask for: what is prepared on one is missing on the next."""
    with psycopg.connect(database, autocommit=True) as admin:
        name = sql.Identifier(admin.info.dbname)
        for setting in ("search_path to sublet", "default_transaction_isolation to 'read committed'"):
            admin.execute(sql.SQL("alter database {} set " + setting).format(name))
    for opening in (connect, Publisher, partial(Session, "$share/g/#")):
        with pytest.raises(InvalidSetting, match=REFUSED):
            opening(pooler)
    with a_shell(SUBLET_DATABASE_URL=pooler) as shell:
        for command in (["leader", "--name", "n1"], ["groups", "list"], ["publish", "t"]):
            refused(shell.run(*command), USAGE, "drops the startup options", "PgBouncer")
        assert "drops the startup options" in shell.run("doctor", "--json").out


@pytest.mark.conforms("W7")
def test_sql_publishing_works(database: str, conn: Connection, pooler: str, fleet: Fleet) -> None:
    """While the connection to the server is shared by all of them, transaction by transaction."""
    with Writer(pooler, "a") as one, Writer(pooler, "b") as other:
        one.more(200)
        other.more(200)
    all_moved(conn, fleet)
    exactly_once_in_order(conn, one, other)


@pytest.mark.conforms("E25")
def test_progress_moves_in_ones_own_transaction(database: str, pooler: str, fleet: Fleet) -> None:
    with Publisher(database) as publisher:
        publisher.publish("t", b"x")
    settings = BorrowerSettings().scaled(SPEED)
    address_of(fleet.nodes["n1"])
    with Session("$share/g/#", database, starting_position="earliest", settings=settings) as session:
        batch = session.poll(WAIT_S)
        assert batch is not None
        moved = (batch.stream_id, batch.grant_id, batch.next_offset, batch.grant_key.reveal())
        with psycopg.connect(pooler, prepare_threshold=None) as user:
            (group,) = user.execute("select group_id from sublet.lending where status = 'held'").fetchall()[0]
            user.execute("select sublet.advance(%s, %s, %s, %s, %s)", (group, *moved))
            user.rollback()
            position = "select position from sublet.lending where stream_id = %s"
            assert user.execute(position, moved[:1]).fetchone() == (0,)
            user.execute("select sublet.advance(%s, %s, %s, %s, %s)", (group, *moved))
            user.commit()
            assert user.execute(position, moved[:1]).fetchone() == (1,)
        batch.ack()

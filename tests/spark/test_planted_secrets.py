"""Passwords and tokens are planted; then a node, a session, commands and a Spark application do what they do."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from psycopg.conninfo import make_conninfo

from sublet_storage.db.connect import connect
from sublet_storage.producer import Publisher
from tests.integration.http_kit import Http
from tests.integration.test_gate_http import GETS
from tests.kit import eventually
from tests.kit_nodes import ROOT, Process, environment
from tests.spark.planted import COUNT
from tests.spark.stage import SPEED

pytestmark = [pytest.mark.spark, pytest.mark.conforms("X3")]

PLANTED = "pl4nted"
"""In each secret."""
WAIT_S = 240.0
COMMANDS = (["groups", "list", "--debug"], ["doctor", "--json"], ["tail", "#", "--no-follow"], ["migrate", "--debug"])


@contextlib.contextmanager
def command_lines() -> Iterator[set[bytes]]:
    """Those of all processes that are seen meanwhile, of whomever."""
    seen: set[bytes] = set()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            for process in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    seen.add(process.read_bytes())

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield seen
    finally:
        over.set()
        watching.join()


def store_pages(node: Http, place: Path) -> None:
    """Store all that a node's HTTP port shows, with the headers of its answers."""
    place.mkdir()
    for number, (path, _) in enumerate(GETS.values()):
        answer = node.ask(path.replace("billing/orders/%23", "resident/t"))
        assert answer.status == 200, (path, answer.body)
        (place / str(number)).write_bytes(repr(answer.headers).encode() + answer.body)


def store_tables(database: str, place: Path) -> None:
    """Store each table's rows, as text."""
    place.mkdir()
    with connect(database) as conn:
        tables = "select tablename from pg_tables where schemaname = current_schema"
        for (name,) in conn.execute(tables).fetchall():
            rows = conn.execute(f"select t::text from {name} as t".encode()).fetchall()
            (place / name).write_text("\n".join(row for (row,) in rows))


@pytest.mark.long
def test_no_planted_secret_is_anywhere(database: str, tmp_path: Path) -> None:
    url = make_conninfo(database, password=f"{PLANTED}-p@ss", sslpassword=f"{PLANTED}-ssl")
    extra = {"SUBLET_DATABASE_URL": url, "SUBLET_ADMIN_TOKEN": f"{PLANTED}-0123456789", "PGPASSWORD": f"{PLANTED}-env"}
    extra["SUBLET_TOKEN"] = f"sub_aaaaaaaa_{PLANTED:x<43}"
    variables = environment(SPEED, extra)
    with Publisher(database) as publisher:
        for number in range(COUNT):
            publisher.publish("t", str(number))
    with command_lines() as lines:
        arguments = (
            "--name",
            "n1",
            "--listen",
            "127.0.0.1:0",
            "--http",
            "127.0.0.1:0",
            "--log-format",
            "json",
            "--debug",
        )
        node = Process("sublet.cli", "leader", *arguments, log=tmp_path / "node.log", speed=SPEED, extra=extra)
        try:
            node.await_serving()
            for number, command in enumerate([*COMMANDS, ["groups", "list", "--database-url", "postgresql://x/y"]]):
                with (tmp_path / f"command-{number}.log").open("wb") as log:
                    how = [sys.executable, "-m", "sublet.cli", *command]
                    subprocess.run(how, stdout=log, stderr=log, env=variables, cwd=ROOT, check=False)
            application = Process(
                "tests.spark.planted", str(tmp_path), log=tmp_path / "spark.log", speed=SPEED, extra=extra
            )
            try:
                eventually(lambda: not application.alive, WAIT_S, application.output)
            finally:
                application.kill()
            store_pages(Http.of(node), tmp_path / "http")
            store_tables(database, tmp_path / "tables")
        finally:
            node.stop()
    output = application.output()
    for done in (f"history {COUNT}", f"guarded {COUNT}", f"resident {COUNT}", "done"):
        assert done in output, output[-5000:]
    for logged in ("logged in a worker: ***", "ValueError: raised in a worker: ***", "ended a task: ***"):
        assert logged in output, output[-5000:]
    assert output.count("refused: ") == 2 == output.count("or by credentials file:PATH"), output[-5000:]
    assert any(b"tests.spark.planted" in line for line in lines)
    assert not [line for line in lines if PLANTED.encode() in line]
    files = {str(file.relative_to(tmp_path)): file for file in tmp_path.rglob("*") if file.is_file()}
    assert {name.partition("/")[0] for name in files} >= {
        *("events", "guarded", "copies", "ui", "http", "tables", "node.log", "spark.log"),
    }
    assert [name for name, file in files.items() if PLANTED.encode() in file.read_bytes()] == []

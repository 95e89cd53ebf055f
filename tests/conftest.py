"""Fixtures of all tests: one Postgres for the run, a database for each test."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from sublet_storage.bootstrap.embedded import EmbeddedPostgres
from sublet_storage.bootstrap.migrate import migrate
from sublet_storage.db.connect import connect
from sublet_storage.notify import publisher
from sublet_storage.spaces.space_changes import reshard
from tests.fork_server import FORK_SERVER
from tests.kit import REMARKS, database_of, server_directory
from tests.leftovers import Leftovers
from tests.run_results import RunCosts, RunResults
from tools.source_path import source_path

TEMPLATE = "sublet_template"
LONGEST = ("spark", "simulation")
"""Folders with the slowest tests. All tests of a file run in one worker, as they share a JVM or a thousand seeds."""
SPARK_TIMEOUT_S = 1200.0
"""Limit for a Spark test without a limit of its own: some start five JVMs."""
_numbers = itertools.count(1)

settings.register_profile("untimed", deadline=None)  # examples may be slow on a busy machine
settings.load_profile("untimed")


def pytest_configure(config: pytest.Config) -> None:
    """Set PYTHONPATH to the folders of this checkout, and let SIGINT end the run. A worker of pytest-xdist has its own
    sys.path in PYTHONPATH, which every process that a test starts would inherit. A background job ignores SIGINT, and
    so would all processes that tests start and interrupt."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):
        os.environ["PYTHONPATH"] = source_path(Path(__file__).parents[1])
    else:
        config.pluginmanager.register(Leftovers())
        config.pluginmanager.register(RunCosts(config))
        config.pluginmanager.register(RunResults(config))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the slowest files first, so that no worker runs them alone at the end."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.path.parent.name not in LONGEST)
    for item in items:
        if item.path.parent.name == "spark":
            item.add_marker(pytest.mark.timeout(SPARK_TIMEOUT_S))


def pytest_collection_finish() -> None:
    """Take all that was imported and collected out of later garbage collections: each looked at 400 000 objects."""
    gc.collect()
    gc.freeze()


class OneSpark(LoadFileScheduling):  # type: ignore[misc]
    """Distributes files to the workers one by one, but all of Spark's to one worker: each that gets one starts a
    JVM."""

    def _split_scope(self, nodeid: str) -> str:
        file = str(super()._split_scope(nodeid))
        return str(Path(file).parent) if Path(file).parent.name == "spark" else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneSpark | None:
    """Return the scheduler for runs without long tests: those of Spark take too long for one worker."""
    return OneSpark(config, log) if config.option.markexpr == "not long" else None


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send a worker's remarks to the process that shows them."""
    handed_over = getattr(session.config, "workeroutput", None)
    if handed_over is not None:
        handed_over["remarks"] = session.config.stash.get(REMARKS, [])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash.setdefault(REMARKS, []).extend(getattr(node, "workeroutput", {}).get("remarks", []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for remark in terminalreporter.config.stash.get(REMARKS, []):
        terminalreporter.write_line(remark)


@pytest.fixture(scope="session", autouse=True)
def _fork_server_ends() -> Iterator[None]:
    """Stop the fork server after the tests: a run without workers would wait for it, and then fail."""
    yield
    FORK_SERVER.close()


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    """Yield the URL of a real Postgres server for the whole run; tests must not stop it."""
    directory = server_directory()
    try:
        with EmbeddedPostgres(directory / "data") as server:
            yield server.url
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def _template(server_url: str) -> str:
    with psycopg.connect(server_url, autocommit=True) as conn:
        conn.execute(f"create database {TEMPLATE}")
    migrate(database_of(server_url, TEMPLATE))
    return TEMPLATE


@pytest.fixture
def empty_database(server_url: str) -> Iterator[str]:
    """Yield the URL of a database without our schema, dropped after the test."""
    yield from _database(server_url, "template0")


@pytest.fixture
def database(server_url: str, _template: str) -> Iterator[str]:
    """Yield the URL of a fresh, migrated database with the space `default`, dropped after the test."""
    yield from _database(server_url, _template)


@pytest.fixture
def conn(database: str, request: pytest.FixtureRequest) -> Iterator[psycopg.Connection[Any]]:
    """Yield a connection; the space `default` has two streams, or as many as the mark `shards` says."""
    mark = request.node.get_closest_marker("shards")
    with connect(database) as connection:
        reshard(connection, "default", mark.args[0] if mark else 2)
        yield connection


@pytest.fixture(scope="module")
def shared_database(server_url: str, _template: str) -> Iterator[str]:
    """Yield the URL of such a database for all tests of a file, which begin by emptying it."""
    yield from _database(server_url, _template)


@pytest.fixture
def server_home() -> Iterator[Path]:
    """Yield a directory for embedded servers of the test; those still running afterwards are stopped."""
    directory = server_directory()
    yield directory
    for lock_file in directory.rglob("postmaster.pid"):
        with contextlib.suppress(ProcessLookupError, ValueError):
            os.kill(int(lock_file.read_text().split()[0]), signal.SIGQUIT)
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the developer's own SUBLET_ settings from the environment."""
    for name in [name for name in os.environ if name.startswith("SUBLET_")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _no_publisher_is_left() -> Iterator[None]:
    """Close the process's notification publishers, which exist once per URL, all at the same time."""
    before = set(publisher.shared_publishers)
    yield
    for url in publisher.shared_publishers.keys() - before:
        publisher.shared_publishers.pop(url).close(0)


def _database(server_url: str, template: str) -> Iterator[str]:
    name = f"test_{next(_numbers)}"
    with psycopg.connect(server_url, autocommit=True) as conn:
        conn.execute(f"create database {name} template {template} strategy file_copy")  # half the work of WAL
        url = database_of(server_url, name)
        yield url
        conn.execute(f"drop database {name} with (force)")


class _SilentPublisher:
    may_announce = False

    def publish_heads(self, heads: object) -> None:
        """Send nothing."""


@pytest.fixture
def without_notifications(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the publishers' notifications, for tests that cut or count connections: only that of the appends is
    left."""
    monkeypatch.setattr("sublet_storage.producer.sender.shared_publisher", lambda url: _SilentPublisher())

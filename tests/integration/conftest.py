"""What many of these tests begin with. A test that wants it otherwise has a fixture of its own by that name."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sublet_storage.bootstrap.embedded import EmbeddedPostgres
from sublet_storage.bootstrap.migrate import migrate
from tests.integration.async_kit import Scene
from tests.integration.cli_kit import Shell, a_shell
from tests.integration.log_kit import Connection
from tests.integration.sharing_kit import Stage
from tests.integration.tls_kit import Certificates
from tests.kit import server_directory
from tests.kit_nodes import Fleet
from tests.payload_kit import LocalWorld

if TYPE_CHECKING:
    from tests.integration.query_kit import Checkpoint, Run, Start


@pytest.fixture
def ours(tmp_path: Path) -> Certificates:
    """An authority, and the certificates that it issues."""
    return Certificates(tmp_path / "ours")


@pytest.fixture
def trusted(ours: Certificates, monkeypatch: pytest.MonkeyPatch) -> Certificates:
    """The authority that clients of this process trust."""
    monkeypatch.setenv("SUBLET_TLS_CA", str(ours.ca))
    return ours


@pytest.fixture(scope="session")
def made_cluster() -> Iterator[Path]:
    """The data directory of a server that has run once and has our schema, to be copied: to make one takes seconds."""
    directory = server_directory()
    with EmbeddedPostgres(directory / "data") as server:
        migrate(server.url)
    yield directory / "data"
    shutil.rmtree(directory)


@pytest.fixture
def made_home(server_home: Path, made_cluster: Path) -> Path:
    """A directory for embedded servers, with a copy of that as `data`."""
    subprocess.run(["cp", "-a", made_cluster, server_home / "data"], check=True)
    return server_home


@pytest.fixture
def server(made_home: Path) -> Iterator[EmbeddedPostgres]:
    """One of the test's own, to be ended or hurt."""
    with EmbeddedPostgres(made_home / "data") as server:
        yield server


@pytest.fixture
def empty_fleet(database: str, tmp_path: Path) -> Iterator[Fleet]:
    """Processes on a database, none to begin with."""
    fleet = Fleet(database, tmp_path)
    yield fleet
    fleet.close()


@pytest.fixture
def fleet(empty_fleet: Fleet) -> Fleet:
    """Processes on a database, a node to begin with."""
    empty_fleet.node("n1")
    return empty_fleet


@pytest.fixture
def stage_settings() -> dict[str, str]:
    """Return the settings of the processes of `stage`, beside their times."""
    return {}


@pytest.fixture
def stage(database: str, tmp_path: Path, stage_settings: dict[str, str]) -> Iterator[Stage]:
    """A group, and processes that act in it; none runs yet."""
    stage = Stage(database, tmp_path, stage_settings)
    yield stage
    stage.close()


@pytest.fixture
def start(database: str, fleet: Fleet, conn: Connection) -> Iterator[Start]:
    """Starts processes of a query, which are stopped at the end; a node runs."""
    from tests.integration.query_kit import Checkpoint, Run  # which imports Spark

    with contextlib.ExitStack() as runs:

        def start(checkpoint: Checkpoint | None = None, **options: object) -> Run:
            run = Run(checkpoint or Checkpoint(), database, **options)
            runs.callback(run.stop)
            return run

        yield start


@pytest.fixture
def world(tmp_path: Path) -> LocalWorld:
    """A place for payloads."""
    return LocalWorld(tmp_path)


@pytest.fixture
def shell(database: str) -> Iterator[Shell]:
    """The command line on a database."""
    with a_shell(SUBLET_DATABASE_URL=database) as shell:
        yield shell


@pytest.fixture(scope="module")
def idle_fleet(shared_database: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Processes on the database that all tests of a file share; none runs yet."""
    with contextlib.closing(Fleet(shared_database, tmp_path_factory.mktemp("fleet"))) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def shared_fleet(idle_fleet: Fleet) -> Fleet:
    """A node on that database."""
    idle_fleet.serve("n1")
    return idle_fleet


_numbers = itertools.count(1)


@pytest.fixture
def scene(shared_fleet: Fleet, request: pytest.FixtureRequest) -> Iterator[Scene]:
    """A space of 16 streams, or as many as the mark `shards` says, for an `AsyncSession`; other tests use its node."""
    mark = request.node.get_closest_marker("shards")
    with contextlib.closing(Scene(shared_fleet, f"s{next(_numbers)}", mark.args[0] if mark else 16)) as scene:
        yield scene

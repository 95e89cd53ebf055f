"""The database, or the machine of a node, takes no more: read-only, full, errors out of the blue, no descriptors.

Meanwhile it is named, afterwards all go on by themselves, and nothing is lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from sublet_protocol.domain.errors import Unavailable
from sublet_storage.bootstrap.embedded import EmbeddedPostgres
from sublet_storage.bootstrap.migrate import migrate
from sublet_storage.producer import Publisher
from tests.integration.http_kit import Http
from tests.integration.sharing_kit import WAIT_S, Stage
from tests.kit import eventually

READ_ONLY = r"read-only.*default_transaction_read_only off.*Publish it again"


@pytest.fixture
def server(server_home: Path) -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(server_home / "data") as server:
        migrate(server.url)
        yield server


@pytest.fixture
def database(server: EmbeddedPostgres) -> str:
    """Of a server of the test's own."""
    return server.url


@pytest.fixture
def stage_settings() -> dict[str, str]:
    return {"SUBLET_HTTP": "yes"}


def readiness(node: Http) -> tuple[int, str]:
    """Status of `/readyz`, and its detail."""
    answer = node.ask("/readyz")
    return answer.status, str(answer.object.get("detail", ""))


def not_ready(node: Http, *causes: str) -> bool:
    """Whether a probe sees that the node cannot serve, and why."""
    status, detail = readiness(node)
    return status == 503 and any(cause in detail for cause in causes)


def all_live(stage: Stage) -> bool:
    return all(process.alive for process in (*stage.fleet.nodes.values(), *stage.fleet.consumers.values()))


# --- the database -----------------------------------------------------------------------------------------------------


def set_read_only(url: str, value: str) -> None:
    """Of the entire server, for connections that are open as well."""
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute(f"alter system set default_transaction_read_only = {value}")
        admin.execute("select pg_reload_conf()")


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

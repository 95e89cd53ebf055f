"""A stream whose messages retention has taken from under a session: said once, given back, and all else goes on."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator

import pytest

from sublet_borrower.consumer.session import Session
from sublet_borrower.settings import BorrowerSettings
from sublet_storage.spaces.retention import apply_retention
from sublet_storage.spaces.space_changes import rollover
from tests.integration.feed_kit import address_of
from tests.integration.log_kit import Connection, put, stream_of, with_a_short_lived_space
from tests.kit import WAIT_S, eventually
from tests.kit_nodes import SPEED, Fleet

GROUP = "$share/g/#"


@pytest.fixture
def conn(database: str) -> Iterator[Connection]:
    with with_a_short_lived_space(database) as connection:
        yield connection


def status_of(conn: Connection, stream_id: int) -> str:
    row = conn.execute("select status from lending where stream_id = %s", (stream_id,)).fetchone()
    return "" if row is None else str(row[0])


def reads(session: Session, seen: list[tuple[int, int]], until: Callable[[], object]) -> None:
    """Batch by batch, (stream, offset), until that is true."""

    def look() -> object:
        batch = session.poll(0.2)
        if batch is not None:
            seen.extend((batch.stream_id, offset) for offset in range(batch.first, batch.end))
        return until()

    eventually(look, WAIT_S)


@pytest.mark.conforms("W4")
def test_a_gone_stream_is_given_back_others_go_on(
    conn: Connection, fleet: Fleet, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    doomed, other = stream_of(conn, "eu"), stream_of(conn, "default")
    node = fleet.nodes["n1"]
    address_of(node)
    settings = BorrowerSettings().scaled(SPEED)
    with Session(GROUP, database, starting_position="earliest", max_batch_bytes=1, settings=settings) as session:
        seen: list[tuple[int, int]] = []
        reads(session, seen, lambda: {doomed, other} <= set(session.assignment()))
        for number in range(10):
            put(conn, doomed, b"%d" % number, topic="eu/1")
        reads(session, seen, lambda: (doomed, 0) in seen)
        rollover(conn, "eu")
        conn.execute("update generation set closed_at = closed_at - interval '101 s' where state = 'closed'")
        with caplog.at_level(logging.WARNING, "sublet_borrower.fetch.stream_fetcher"):
            node.signal(signal.SIGSTOP)  # or it may take the stream back before the session has noticed
            assert apply_retention(conn)
            reads(session, seen, lambda: caplog.records)
            node.signal(signal.SIGCONT)
            reads(session, seen, lambda: status_of(conn, doomed) == "blocked")
            reads(session, seen, lambda: doomed not in session.assignment())
            for number in range(5):
                put(conn, other, b"%d" % number, topic="us")
            reads(session, seen, lambda: (other, 4) in seen)
    assert [offset for stream, offset in seen if stream == other] == [0, 1, 2, 3, 4]
    taken = [offset for stream, offset in seen if stream == doomed]
    assert taken == list(range(len(taken)))
    assert len(taken) < 10
    said = [record.getMessage() for record in caplog.records if "is gone" in record.getMessage()]
    assert len(said) == 1
    assert f"subscription={GROUP} stream_id={doomed}: stream {doomed}: offset {len(taken)} is gone" in said[0]

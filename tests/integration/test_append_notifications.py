"""What notifications cost whoever appends: nothing in his transactions, few messages however much he appends (D11)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from psycopg import sql

from sublet_storage.db.connect import connect, resolve_schema_name
from sublet_storage.db.roles import DatabaseRole
from sublet_storage.notify.changes import ChangeNotification, ObjectChange, stream_change
from sublet_storage.notify.codec import decode
from sublet_storage.notify.drivers.postgres import channel_name, decode_payload
from sublet_storage.producer import Publisher
from sublet_storage.producer.delivery import Position
from tests.integration.log_kit import Connection
from tests.integration.notify_kit import listening
from tests.kit import eventually
from tests.role_kit import a_role_world

FEW_PER_S = 5
"""Far fewer than appends."""


@contextmanager
def watching_notifications(url: str) -> Iterator[Connection]:
    """A connection that receives every NOTIFY of this database, and who sent it."""
    with connect(url) as conn:
        conn.execute(sql.SQL("listen {}").format(sql.Identifier(channel_name(resolve_schema_name()))))
        yield conn


def senders(listener: Connection) -> set[str]:
    pids = {said.pid for said in listener.notifies(timeout=0)}
    return {_application(listener, pid) for pid in pids}


def payloads(listener: Connection, application: str) -> list[bytes]:
    said = [(said.pid, decode_payload(said.payload.encode())) for said in listener.notifies(timeout=0)]
    return [payload for pid, payload in said if payload is not None and _application(listener, pid) == application]


def _application(conn: Connection, pid: int) -> str:
    row = conn.execute("select application_name from pg_stat_activity where pid = %s", (pid,)).fetchone()
    return str(row[0]) if row else "gone"


@pytest.mark.conforms("D11")
def test_no_append_notifies_in_its_transaction(caplog: pytest.LogCaptureFixture) -> None:
    """Where a notification is refused, what was appended is there."""
    with a_role_world() as world:
        world.execute("revoke execute on function pg_notify from public")
        with listening(world.admin) as received, Publisher(world.of(DatabaseRole.APPEND)) as publisher:

            def is_refused() -> bool:
                publisher.publish("t", b"value").result(60)
                return "notifications rejected by Postgres" in caplog.text

            eventually(is_refused)
            first, *_, last = (publisher.publish("t", b"value").result(60) for _ in range(20))
            assert last.offset == first.offset + 19
            assert not received.of("stream", str(last.stream))


@pytest.mark.conforms("D3", "D11")
def test_a_lone_append_is_announced_behind_it(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the publisher's own connection, with the head that the stream has then."""
    monkeypatch.setenv("SUBLET_NOTIFY_MAX_SENDS_PER_S", "1000")
    with (
        listening(database) as received,
        watching_notifications(database) as listener,
        Publisher(database) as publisher,
        Publisher(database) as other,
    ):
        heads: dict[Publisher, list[ObjectChange]] = {other: [], publisher: []}
        announced: list[ObjectChange] = []

        def are_announced() -> bool:
            for each, its_heads in heads.items():
                last = each.publish("t", b"value").result(60)
                its_heads.append(stream_change(last.stream, last.offset + 1, closed=False))
            head = heads[publisher][-1]
            eventually(lambda: received.subscriber.get("stream", head.key) == head)
            for message in map(decode, payloads(listener, "sublet publisher")):
                assert isinstance(message, ChangeNotification)
                announced.extend(message.changes)
            return sum(change in announced for change in heads[publisher]) >= 5

        eventually(are_announced)
        assert all(change in heads[other] + heads[publisher] for change in announced)
        assert received.subscriber.counters()["expired_gaps"] == 0, "no number is missing"


@pytest.mark.conforms("D3")
def test_what_the_append_cannot_announce_is_sent(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where its user may not read the stream's row."""
    nothing = "select 1 / 0 from stream where $1::text <> $2::text and stream_id = $3::bigint"
    monkeypatch.setattr("sublet_storage.producer.sender.NOTIFY_HEAD", nothing)
    with listening(database) as received, Publisher(database) as publisher:
        for number in range(100):
            last = publisher.publish("t", b"%d" % number).result(60)
            head = stream_change(last.stream, last.offset + 1, closed=False)
            eventually(lambda h=head: received.subscriber.get("stream", h.key) == h)  # type: ignore[misc]


@pytest.mark.conforms("D11")
def test_many_appends_cause_few_notifications(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBLET_NOTIFY_MAX_SENDS_PER_S", str(FEW_PER_S))
    with listening(database), watching_notifications(database) as listener, Publisher(database) as publisher:

        def is_notified() -> bool:
            publisher.publish("t", b"value").result(60)
            return bool(senders(listener))

        assert eventually(is_notified)
        began = time.monotonic()
        for _ in range(300):
            publisher.publish("t", b"more").result(60)
        last = publisher.publish("t", b"last").result(60)
        said = count_to(listener, last)
        assert said <= FEW_PER_S * (time.monotonic() - began) + 2


def count_to(listener: Connection, last: Position) -> int:
    """Return how many notifications arrive, up to the one for this message."""
    change = stream_change(last.stream, last.offset + 1, closed=False)
    for number, said in enumerate(listener.notifies(timeout=10), 1):
        message = decode(decode_payload(said.payload.encode()) or b"")
        if isinstance(message, ChangeNotification) and change in message.changes:
            return number
    raise AssertionError(f"no notification of {last}")

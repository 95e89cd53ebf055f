"""News from publishers straight to sessions: who may listen, what is heard, and that nothing rests on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from borrower.session import Session
from borrower.settings import BorrowerSettings
from borrower.shortcut import hear
from storage.connect import connect
from storage.groups.model import NodeRef
from storage.log import Append, append
from storage.nodes import register, remove
from storage.notify.model import NotifySettings
from storage.notify.shortcut import MOST_STREAMS, PLACES, heads_of, listeners, say, take_place
from storage.notify.teller import shared
from storage.publish import Publisher, sender
from storage.spaces import reshard
from tests.integration.log_kit import block, put, read, stream_of
from tests.integration.notify_kit import NODE
from tests.integration.sharing_kit import WAIT_S, Stage
from tests.kit import eventually
from tests.kit_nodes import SPEED
from tests.postgres_proxy import PostgresProxy

Connection = psycopg.Connection[Any]


@pytest.fixture
def conn(database: str) -> Iterator[Connection]:
    with connect(database) as conn:
        yield conn


@pytest.fixture
def listened(conn: Connection) -> None:
    """Some node is told by LISTEN and NOTIFY."""
    register(conn, NODE, 600, 1, notify="postgres:")


@contextmanager
def heard(url: str) -> Iterator[dict[int, int]]:
    """{stream: head} as told to this process so far."""
    heads: dict[int, int] = {}
    stop = hear(url, heads.update)
    try:
        yield heads
    finally:
        stop()


def speaking(url: str) -> bool:
    """Whether publishers of this process know that somebody hears them."""
    shared(url).tell_heads({1: 0})
    return shared(url).listeners > 0


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Publishers look soon again who listens."""
    monkeypatch.setenv("SUBLET_NOTIFY_TELL_LOOK_S", "0.1")


def connections(conn: Connection) -> int:
    """Of this process, to listen."""
    row = conn.execute(
        "select count(*) from pg_stat_activity where application_name = 'sublet shortcut'"
        " and datname = current_database()"
    ).fetchone()
    return 0 if row is None else int(row[0])


@pytest.mark.conforms("D1", "D11")
def test_only_so_many_listen_and_only_where_a_node_hears_the_same_way(database: str, conn: Connection) -> None:
    register(conn, NodeRef("other", "x", "h:1"), 600, 1, notify="poll:")
    with connect(database) as one:
        assert not take_place(one)
    register(conn, NODE, 600, 1, notify="postgres:")
    with ExitStack() as places:
        for _ in range(PLACES):
            assert take_place(places.enter_context(connect(database)))
        assert listeners(conn) == PLACES
        with connect(database) as late:
            assert not take_place(late)
    eventually(lambda: listeners(conn) == 0)
    with connect(database) as next_one:
        assert take_place(next_one)
    remove(conn, NODE)
    with connect(database) as one:
        assert not take_place(one)


@pytest.mark.usefixtures("listened")
def test_behind_a_pooler_nobody_listens(database: str) -> None:
    with PostgresProxy(database) as proxy:
        with connect(proxy.url) as direct:
            assert take_place(direct)
        proxy.pool()
        with connect(proxy.url) as pooled:
            assert not take_place(pooled)


@pytest.mark.usefixtures("listened", "quick_looks")
def test_what_is_published_is_heard_at_once_by_who_listens_and_nothing_stays_behind(
    database: str, conn: Connection
) -> None:
    with heard(database) as heads, Publisher(database) as publisher:
        eventually(lambda: speaking(database))
        position = publisher.publish("t", b"news").result(10)
        assert eventually(lambda: heads.get(position.stream)) == position.offset + 1
        assert connections(conn) == 1
        with heard(database) as others:
            publisher.publish("t", b"more").result(10)
            assert eventually(lambda: others.get(position.stream)) == position.offset + 2
            assert connections(conn) == 1
        last = publisher.publish("t", b"last").result(10)
        eventually(lambda: heads[position.stream] == last.offset + 1)
    eventually(lambda: connections(conn) == 0)
    eventually(lambda: not speaking(database))


@pytest.mark.usefixtures("listened")
def test_a_connection_that_is_lost_is_made_again(database: str, conn: Connection) -> None:
    stream = stream_of(conn, "default")
    put(conn, stream, b"one")

    def is_told(heads: dict[int, int]) -> Callable[[], bool]:
        def told() -> bool:
            say(conn, [stream])
            return bool(heads)

        return told

    with PostgresProxy(database) as proxy, heard(proxy.url) as heads:
        eventually(is_told(heads))
        proxy.hang_up()
        eventually(lambda: listeners(conn) == 0)
        heads.clear()
        eventually(is_told(heads))


@pytest.mark.usefixtures("listened")
def test_of_many_streams_some_are_told_of(database: str, conn: Connection) -> None:
    reshard(conn, "default", 2 * MOST_STREAMS)
    streams = [row[0] for row in conn.execute("select stream_id from stream")]
    conn.execute("update stream set head = 9223372036854775806")
    with connect(database) as ear:
        assert take_place(ear)
        say(conn, streams)
        (said,) = ear.notifies(timeout=10, stop_after=1)
    assert len(heads_of(said.payload.encode())) == MOST_STREAMS


@pytest.mark.usefixtures("listened")
def test_who_finds_another_speaking_does_not_wait(database: str, conn: Connection) -> None:
    stream = stream_of(conn, "default")
    with connect(database) as other, connect(database) as ear:
        assert take_place(ear)
        with other.transaction():
            assert say(other, [stream]).rowcount == 1
            assert say(conn, [stream]).rowcount == 0
            assert not list(ear.notifies(timeout=0))
        assert [said.payload for said in ear.notifies(timeout=10, stop_after=1)] == [f"{stream}:0"]
        assert say(conn, [stream]).rowcount == 1
        assert listeners(conn) == 1, "who speaks does not listen"


@pytest.mark.parametrize("count", [1, 2])
def test_what_is_said_is_of_the_transaction_of_the_append(conn: Connection, count: int) -> None:
    stream = stream_of(conn, "default")
    appends = [Append(stream, block(b"a"))] * count
    seen: list[psycopg.Cursor[Any]] = []
    state = sql.SQL("select head, pg_current_xact_id_if_assigned() from stream where stream_id = {}").format(stream)
    answers = append(conn, appends, beside=lambda: seen.append(conn.execute(state)))
    ((head, transaction),) = seen.pop().fetchall()
    assert head == answers[-1].end_offset
    assert conn.execute("select pg_xact_status(%s::text::xid8)", (str(transaction),)).fetchone() == ("committed",)
    with pytest.raises(psycopg.errors.DivisionByZero):
        append(conn, appends, beside=lambda: conn.execute("select 1 / 0"))
    assert len(read(conn, stream)) == count


@pytest.mark.usefixtures("listened", "quick_looks")
def test_notifications_that_fail_for_all_do_not_fail_an_append(
    database: str, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = []

    def full(connection: Connection, stream_ids: set[int]) -> psycopg.Cursor[Any]:
        said.append(stream_ids)
        return connection.execute("do $$ begin raise exception using errcode = 'program_limit_exceeded'; end $$")

    monkeypatch.setattr(sender, "say", full)
    with heard(database), Publisher(database) as publisher:
        eventually(lambda: speaking(database))
        stream = publisher.publish("t", b"1").result(10).stream
        publisher.publish("t", b"2").result(10)
    assert said
    assert [message["value"] for message in read(conn, stream)] == [b"1", b"2"]


@pytest.mark.conforms("D1", "P5")
def test_an_invention_makes_a_session_look_once_and_it_goes_on(database: str, tmp_path: Path) -> None:
    news = NotifySettings().scaled(SPEED)
    extra = {f"SUBLET_NOTIFY_{name.upper()}": str(getattr(news, name)) for name in news.__dataclass_fields__}
    stage = Stage(database, tmp_path, extra={**extra, "SUBLET_NOTIFY": "postgres"})
    try:
        stage.serve("n1")
        with (
            Session("$share/g/t", database, settings=BorrowerSettings().scaled(SPEED)) as session,
            connect(database) as conn,
            Publisher(database) as publisher,
        ):
            eventually(lambda: session.next_batch(0.1) is None and session.held(), WAIT_S)
            eventually(lambda: listeners(conn) == 1)
            stream = publisher.publish("t", b"1").result(10).stream
            assert [batch.table["value"].to_pylist() for batch in [session.next_batch(10)] if batch] == [[b"1"]]

            def is_believed() -> bool:
                session.next_batch(0.05)
                before = session.news.pushed
                with conn.transaction():
                    conn.execute("update stream set head = head + 1000 where stream_id = %s", (stream,))
                    say(conn, [stream])
                    conn.execute("update stream set head = head - 1000 where stream_id = %s", (stream,))
                session.next_batch(0.05)
                return session.news.pushed > before

            eventually(is_believed)
            publisher.publish("t", b"2").result(10)
            batch = session.next_batch(10)
            assert batch is not None
            assert batch.table["value"].to_pylist() == [b"2"]
    finally:
        stage.close()

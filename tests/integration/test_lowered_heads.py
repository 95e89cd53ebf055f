"""A stream loses its last blocks under readers that live and are quiet, on the timeline on which they began: by hand in
the database here. None goes on at its position in silence, though others append, and the stream gets there again."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from sublet_borrower.consumer.session import Session
from sublet_borrower.node_client.feed_client import Feed
from sublet_borrower.settings import BorrowerSettings
from sublet_protocol.domain.errors import PositionBeyondHead
from sublet_protocol.domain.subscriptions import StartingPosition, Subscription
from sublet_protocol.messages.borrower_leader import PROTOCOL_VERSION
from sublet_storage.doctor.checks import run_checks
from sublet_storage.groups.admin.admin import create_group
from sublet_storage.groups.model.records import GroupOptions
from sublet_storage.groups.status import diagnosis_queries
from sublet_storage.groups.status.overview import describe_group
from sublet_storage.spaces.space_changes import reshard
from tests.integration.cli_kit import Shell
from tests.integration.epoch_kit import A, EpochBlocks
from tests.integration.feed_kit import Serving, address_of, read_values, serving
from tests.integration.http_kit import Http
from tests.integration.log_kit import Connection, put
from tests.integration.query_kit import Checkpoint, Run
from tests.kit import WAIT_S, eventually
from tests.kit_nodes import SPEED, Fleet

GROUP = "$share/g/#"
SUBSCRIPTION = Subscription.parse(GROUP)
SETTINGS = BorrowerSettings().scaled(SPEED)
REASON = "offset 10 is beyond the head 5"


@pytest.fixture
def streams(conn: Connection) -> list[int]:
    """Two, each with two blocks of five messages."""
    found = [stream for (stream,) in conn.execute("select stream_id from stream where state = 'open' order by 1")]
    for stream in found:
        for first in (0, 5):
            put(conn, stream, *(b"%d" % number for number in range(first, first + 5)))
    return found


@pytest.fixture
def served(database: str, tmp_path: Path) -> Iterator[Fleet]:
    """A node with an HTTP port."""
    with closing(Fleet(database, tmp_path, extra={"SUBLET_HTTP": "1"})) as fleet:
        fleet.serve("n1")
        yield fleet


def lower_head(conn: Connection, stream: int) -> None:
    """Lower the head to 5, at which its first block ends."""
    with conn.transaction():
        conn.execute("update stream set head = 5 where stream_id = %s", (stream,))
        conn.execute("delete from block where stream_id = %s and end_offset > 5", (stream,))


def undo(conn: Connection, stream: int) -> None:
    """Delete the stream, as a restore of an older state of the database does."""
    with conn.transaction():
        conn.execute("delete from block where stream_id = %s", (stream,))
        conn.execute("delete from stream where stream_id = %s", (stream,))


def rows(conn: Connection) -> dict[int, tuple[str, int]]:
    """Return {stream: (status, position)} of those that are not finished."""
    found = conn.execute("select stream_id, status, position from lending where status <> 'finished'").fetchall()
    return {stream: (status, position) for stream, status, position in found}


class Reader:
    """A session and what it was given: (stream, offset, value)."""

    def __init__(self, session: Session) -> None:
        self.session, self.seen = session, list[tuple[int, int, bytes]]()

    def until(self, fact: Callable[[], object]) -> None:
        def look() -> object:
            if (batch := self.session.poll(0.1)) is not None:
                table = batch.table
                columns = (table.column(name).to_pylist() for name in ("stream", "offset", "value"))
                self.seen.extend(zip(*columns, strict=True))
            return fact()

        eventually(look, WAIT_S, lambda: str(self.seen))


@pytest.mark.conforms("P10", "E23")
@pytest.mark.parametrize("via_nodes", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_quiet_holders_stream_is_blocked(
    database: str, conn: Connection, served: Fleet, streams: list[int], shell: Shell, via_nodes: bool
) -> None:
    """It says so wherever an operator looks, with what helps, and stays so when the head has passed the position."""
    lowered, other = streams
    way: dict[str, Any] = (
        {"nodes": [address_of(served.nodes["n1"])], "transport": "nodes"} if via_nodes else {"url": database}
    )
    with Session(GROUP, starting_position="earliest", settings=SETTINGS, **way) as session:
        reader = Reader(session)
        reader.until(lambda: rows(conn) == {lowered: ("held", 10), other: ("held", 10)})
        lower_head(conn, lowered)
        reader.until(lambda: rows(conn)[lowered] == ("blocked", 10) and lowered not in session.assignment())
        put(conn, lowered, *(b"new" for _ in range(20)))
        put(conn, other, b"other")
        reader.until(lambda: (other, 10, b"other") in reader.seen and rows(conn)[other] == ("held", 11))
        assert rows(conn)[lowered] == ("blocked", 10)

        (line,) = [each for each in describe_group(conn, SUBSCRIPTION).streams if each.stream_id == lowered]
        assert line.blocked_reason is not None
        assert REASON in line.blocked_reason
        (stalled,) = [
            each.diagnosis
            for each in diagnosis_queries.diagnose_group(conn, SUBSCRIPTION)[1]
            if each.stream.stream_id == lowered
        ]
        reset = ("groups", "reset", GROUP, "--stream", str(lowered), "--to-offset", "5")
        assert f"sublet groups reset '{GROUP}' --stream {lowered} --to-offset 5" in str(stalled.hint)
        (finding,) = [each for each in run_checks(conn, 0.0, PROTOCOL_VERSION) if each.check == "streams"]
        assert REASON in finding.detail
        assert f"{lowered} --to-offset 5 lets it go on" in str(finding.hint)
        for command in ("why", "describe"):
            assert REASON in shell.run("groups", command, GROUP, "--json").out
        http = Http.of(served.nodes["n1"])
        assert REASON in str(http.get("/api/v1/group", subscription=GROUP))
        assert http.metric("sublet_consumergroup_streams", subscription=GROUP, status="blocked") == 1

        answer = shell.run(*reset, "--yes")
        assert answer.code == 0, answer.err
        reader.until(lambda: rows(conn)[lowered] == ("held", 25))
    assert [(offset, value) for stream, offset, value in reader.seen if stream == lowered] == [
        *((number, b"%d" % number) for number in range(10)),
        *((number, b"new") for number in range(5, 25)),
    ]


def publish_more(conn: Connection, lowered: int, other: int) -> None:
    put(conn, lowered, *(b"new" for _ in range(20)))
    put(conn, other, b"other")


@pytest.mark.conforms("P10")
def test_what_only_its_holder_saw_is_blocked(
    database: str, conn: Connection, served: Fleet, streams: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """The head has passed the position again before any leader looks."""
    lowered, other = streams
    with Session(GROUP, database, starting_position="earliest", settings=SETTINGS) as session:
        reader = Reader(session)
        reader.until(lambda: rows(conn) == {lowered: ("held", 10), other: ("held", 10)})
        with caplog.at_level(logging.WARNING, "sublet_borrower.fetch.stream_fetcher"):
            served.nodes["n1"].signal(signal.SIGSTOP)
            lower_head(conn, lowered)
            reader.until(lambda: REASON in caplog.text)
            publish_more(conn, lowered, other)
            served.nodes["n1"].signal(signal.SIGCONT)
        reader.until(lambda: rows(conn)[lowered] == ("blocked", 10) and (other, 10, b"other") in reader.seen)
    assert b"new" not in {value for _, _, value in reader.seen}
    (line,) = [each for each in describe_group(conn, SUBSCRIPTION).streams if each.stream_id == lowered]
    assert REASON in str(line.blocked_reason)


@pytest.mark.conforms("P10", "E23")
def test_a_holder_that_does_not_poll_loses_it(
    database: str, conn: Connection, served: Fleet, streams: list[int]
) -> None:
    """Its leader sees it."""
    lowered, other = streams
    with Session(GROUP, database, starting_position="earliest", settings=SETTINGS) as session:
        Reader(session).until(lambda: rows(conn) == {lowered: ("held", 10), other: ("held", 10)})
        lower_head(conn, lowered)
        eventually(lambda: rows(conn) == {lowered: ("blocked", 10), other: ("held", 10)}, WAIT_S)
        eventually(lambda: lowered not in session.assignment(), WAIT_S)


@pytest.mark.conforms("P10", "E23")
def test_atomic_groups_are_blocked_too(database: str, conn: Connection, served: Fleet) -> None:
    """Also where the position is of an epoch that is not completed, and what is consumed lies behind it."""
    reshard(conn, "default", 1)
    story = EpochBlocks(conn)
    (stream,) = story.streams()
    create_group(database, SUBSCRIPTION, GroupOptions(StartingPosition.EARLIEST, atomic=True))
    story.advance(A, 0)
    story.publish(A, 2, 0)
    story.publish(A, 0, 1)
    story.advance(A, 2)
    with Session(GROUP, database, settings=SETTINGS) as session:
        reader = Reader(session)
        upto = "select consumed -> 'upto' from lending where stream_id = %s and status = 'held'"
        reader.until(lambda: conn.execute(upto, (stream,)).fetchall() == [(4,)])
        assert rows(conn)[stream] == ("held", 0)
        with conn.transaction():
            conn.execute("update stream set head = 2 where stream_id = %s", (stream,))
            conn.execute("delete from block where stream_id = %s and end_offset > 2", (stream,))
        reader.until(lambda: rows(conn)[stream] == ("blocked", 0))
    (line,) = [each for each in describe_group(conn, SUBSCRIPTION).streams if each.stream_id == stream]
    assert line.blocked_reason == "offset 4 is beyond the head 2"


@pytest.mark.conforms("P10", "E23")
def test_a_quiet_querys_stream_is_blocked(database: str, conn: Connection, served: Fleet, streams: list[int]) -> None:
    lowered, other = streams
    run = Run(Checkpoint(), database)
    run.until(20)
    eventually(lambda: not run.step() and rows(conn) == {lowered: ("held", 10), other: ("held", 10)}, WAIT_S)
    lower_head(conn, lowered)
    eventually(lambda: not run.step() and rows(conn)[lowered] == ("blocked", 10), WAIT_S)
    publish_more(conn, lowered, other)
    run.until(21)
    assert b"new" not in run.checkpoint.values()
    run.stop()


@pytest.mark.conforms("P10")
def test_what_only_a_query_saw_is_blocked(
    database: str, conn: Connection, served: Fleet, streams: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    lowered, other = streams
    run = Run(Checkpoint(), database)
    run.until(20)
    eventually(lambda: not run.step() and rows(conn) == {lowered: ("held", 10), other: ("held", 10)}, WAIT_S)
    served.nodes["n1"].signal(signal.SIGSTOP)
    lower_head(conn, lowered)
    eventually(lambda: not run.step() and REASON in caplog.text, WAIT_S)
    publish_more(conn, lowered, other)
    served.nodes["n1"].signal(signal.SIGCONT)
    run.until(21)
    eventually(lambda: not run.step() and rows(conn)[lowered] == ("blocked", 10), WAIT_S)
    assert b"new" not in run.checkpoint.values()
    run.stop()


def await_known_heads(served: Serving, *choices: dict[int, int]) -> None:
    eventually(lambda: {s: h.head for s, h in served.feed.head_poller.heads.items()} in choices, WAIT_S)


@pytest.mark.conforms("P10")
def test_a_feed_busy_with_others_ends_by_name(database: str, conn: Connection, streams: list[int]) -> None:
    """Its node waits for a slow client, which is to take what another stream has, until the head has passed the
    position again; or the client's buffers took all, and the node ends the call and knows no heads any more."""
    lowered, other = streams
    with serving(database) as served, Feed(served.address) as feed, feed.follow(starting_position="earliest") as reader:
        assert len(read_values(reader, 20, WAIT_S)) == 20
        for _ in range(60):
            put(conn, other, b"x" * 200_000)
        await_known_heads(served, {lowered: 10, other: 70})
        lower_head(conn, lowered)
        await_known_heads(served, {lowered: 5, other: 70}, {})
        publish_more(conn, lowered, other)
        await_known_heads(served, {lowered: 25, other: 71}, {})
        seen = set[bytes]()

        def read_on() -> None:
            while (table := reader.read(WAIT_S)) is not None:
                seen.update(table.column("value").to_pylist())

        with pytest.raises(PositionBeyondHead, match=f"stream {lowered}: {REASON}"):
            read_on()
        assert b"new" not in seen


@pytest.mark.conforms("P10", "A9")
@pytest.mark.parametrize("arguments", [(), ("--epochs",), ("--node",)])
@pytest.mark.parametrize(("lose", "head"), [(lower_head, 5), (undo, 0)])
def test_a_quiet_tail_ends_by_name(
    conn: Connection,
    request: pytest.FixtureRequest,
    streams: list[int],
    shell: Shell,
    arguments: tuple[str, ...],
    lose: Callable[[Connection, int], None],
    head: int,
) -> None:
    if arguments == ("--node",):
        shell.environment.pop("SUBLET_DATABASE_URL", None)
        arguments = ("--node", address_of(request.getfixturevalue("served").nodes["n1"]))
    live = shell.start("tail", "#", "--from", "earliest", "--json", *arguments)
    eventually(lambda: live.out.count('"value"') == 20, WAIT_S, lambda: live.out + live.err)
    lose(conn, streams[-1])
    answer = live.end()
    assert answer.code == 4, answer.err
    assert f"stream {streams[-1]}: offset 10 is beyond the head {head}." in answer.err

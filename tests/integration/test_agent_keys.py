"""Who knows another agent's id can do nothing with it: a real node, and a client written with the proto alone."""

from __future__ import annotations

import base64
import hashlib
import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import grpc
import pytest

import sublet
from sublet_protocol.messages.borrower_leader import PROTOCOL_VERSION
from sublet_protocol.pubsub.agent_side_events import ConnectionStatus
from sublet_protocol.pubsub.model import Channel
from sublet_protocol.v1 import sublet_pb2 as pb
from sublet_protocol.v1 import sublet_pb2_grpc
from tests.deliveries import DeliveryVerdict
from tests.integration.http_kit import served
from tests.integration.session_kit import a_node, an_agent, proven, until
from tests.integration.sharing_kit import ALL, Stage
from tests.kit import WAIT_S, eventually, in_loop

pytestmark = pytest.mark.conforms("X5")

PAGES = (
    "/", "/healthz", "/readyz", "/metrics", "/api/v1/node", "/api/v1/nodes", "/api/v1/groups",
    "/api/v1/group?subscription=$share/g/%23", "/api/v1/group/history?subscription=$share/g/%23",
)  # fmt: skip


@pytest.fixture
def stage_settings() -> dict[str, str]:
    return {"SUBLET_HTTP": "yes"}


class VictimGrant(NamedTuple):
    """A stream that the victim holds: all that can be read of it by others."""

    stream: int
    grant: int
    agent: str
    borrower: str
    head: int


def held(stage: Stage) -> list[VictimGrant]:
    statement = "select stream_id, grant_id, agent, borrower_id, head from lending join stream using (stream_id)"
    return [VictimGrant(*row) for row in stage.scene.ask(f"{statement} where status = 'held' order by stream_id")]


def forged(streams: list[VictimGrant], term: int, wanted: dict[str, Any]) -> Iterator[pb.ToLeader]:
    """Yield all messages that can be sent in the name of the holder of these."""
    who = streams[0].borrower
    ends, finals = (
        [pb.StreamProgress(stream_id=one.stream, grant_id=one.grant, position=one.head, final=final) for one in streams]
        for final in (False, True)
    )
    yield pb.ToLeader(ping=pb.Ping(borrower_ids=[who], sent_at=1.0))
    yield pb.ToLeader(update_progress=pb.UpdateProgress(borrower_id=who, term=term, streams=ends))
    yield pb.ToLeader(update_progress=pb.UpdateProgress(borrower_id=who, term=term, streams=finals))
    for one in streams:
        finished = pb.RevokeFinished(borrower_id=who, term=term, stream_id=one.stream, grant_id=one.grant)
        yield pb.ToLeader(revoke_finished=finished)
    reclaim = [pb.HeldGrant(stream_id=one.stream, grant_id=one.grant, position=one.head) for one in streams]
    yield pb.ToLeader(leader_wanted=pb.LeaderWanted(**wanted, predecessor=who, reclaim=reclaim))
    yield pb.ToLeader(disconnect=pb.Disconnect(borrower_id=who, term=term, streams=finals))
    yield pb.ToLeader(disconnect=pb.Disconnect(borrower_id=who, term=0))


def wanted(borrower_id: str) -> dict[str, Any]:
    return {
        "borrower_id": borrower_id, "subscription": ALL, "weight": 1.0, "leaving": True,
        "starting_position": "earliest", "borrower_number": 99,
    }  # fmt: skip


@contextmanager
def stub_of(stage: Stage, node: str, stub: type[Any] = sublet_pb2_grpc.SessionStub) -> Iterator[Any]:
    ((address,),) = stage.scene.ask("select address from node where name = %s", (node,))
    with grpc.insecure_channel(address) as channel:
        yield stub(channel)


def agent_of(named: dict[str, Any]) -> str:
    """Return the id of an agent by the fields of its requests."""
    return str(named["subscriber_id"]).rpartition(".")[0]


def refusal(call: Any, request: Any) -> str:
    with pytest.raises(grpc.RpcError) as raised:
        call(request, timeout=WAIT_S)
    assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
    return str(raised.value.details())


def test_an_agents_id_moves_nothing_without_its_key(stage: Stage) -> None:
    """At the node that leads, at one that has never met the agent, and under the id of the thief's own agent too."""
    stage.serve("n1", "n2")
    stage.scene.publish(4_000)
    stage.share("a", pause_s=0.05)
    stage.more(5)
    streams, term = held(stage), stage.scene.claim().term
    own = proven("thief")
    texts = set()
    commands = [pb.Command(message=one) for one in forged(streams, term, wanted(streams[0].borrower))]
    for node in ("n1", "n2"):
        with stub_of(stage, node) as stub:
            for agent in (streams[0].agent, "host:1:" + "a" * 26):
                for life in ("1", "2"):
                    for key in (b"", own["agent_key"], agent.encode()):
                        named = own | {"subscriber_id": f"{agent}.{life}", "agent_key": key}
                        texts.add(refusal(stub.Poll, pb.PollRequest(**named)))
                        texts.add(refusal(stub.Commands, pb.CommandBatch(**named, number=1, commands=commands)))
    (text,) = texts
    assert "the agent key is not that of the subscriber id" in text
    with stub_of(stage, stage.scene.claim().node.name) as stub:
        foreign, mine = wanted(f"{streams[0].agent}/2"), wanted(f"{agent_of(own)}/1")
        messages = [*forged(streams, term, foreign), *forged(streams, term, mine)]
        batch = pb.CommandBatch(**own, number=1, commands=[pb.Command(message=one) for one in messages])
        assert not stub.Commands(batch).errors
        answers = stub.Poll(pb.PollRequest(**own, hold_ms=5_000)).messages
    kinds = {one.to_borrower.WhichOneof("message") for one in answers}
    assert "invalidate" in kinds
    assert kinds <= {"invalidate", "leader_connect_response", "revoked"}
    assert [one[:4] for one in held(stage)] == [one[:4] for one in streams]
    assert stage.verdict() == DeliveryVerdict(), "nothing is skipped, and nothing comes twice"
    assert [line for line in stage.scene.history() if line.is_forced] == []


def test_an_invented_epoch_takes_no_sessions_name(stage: Stage, database: str) -> None:
    """A stranger with the proto alone draws for another name, and invents epochs: who bears the name goes on, and so
    does its next process."""
    stage.serve("n1")
    stage.scene.publish(100)
    named = proven("thief")
    with sublet.Session(ALL, database, name="etl", starting_position="earliest") as session:
        assert session.poll(WAIT_S) is not None
        eventually(lambda: stage.scene.shares() == [16], WAIT_S, stage.said)
        before = held(stage)
        with stub_of(stage, "n1") as stub, stub_of(stage, "n1", sublet_pb2_grpc.FeedStub) as feed:
            other = feed.SessionEpoch(
                pb.SessionEpochRequest(protocol_version=PROTOCOL_VERSION, subscription=ALL, session="other")
            )
            for number, epoch in enumerate((other.epoch, other.epoch + 10**12, 2**63 - 1), 1):
                asked = pb.LeaderWanted(
                    **wanted(f"{agent_of(named)}/{number}") | {"leaving": False}, session="etl", session_epoch=epoch
                )
                command = pb.Command(message=pb.ToLeader(leader_wanted=asked))
                assert not stub.Commands(pb.CommandBatch(**named, number=number, commands=[command])).errors
            denied: list[Any] = []
            while len(denied) < 3:
                answer = stub.Poll(pb.PollRequest(**named, hold_ms=5_000, acknowledged=len(denied)), timeout=WAIT_S)
                denied += [one.to_borrower.invalidate for one in answer.messages]
        assert {(one.reason, "the last that was drawn" in one.detail) for one in denied} == {(pb.END_DENIED, True)}
        assert held(stage) == before
        session.poll(0.1)
    with sublet.Session(ALL, database, name="etl") as session:
        stage.scene.publish(100)
        assert session.poll(WAIT_S) is not None


def forms(key: bytes) -> list[bytes]:
    """Return the forms in which a key might be shown."""
    request = str(pb.PollRequest(agent_key=key)).strip().removeprefix("agent_key: ").strip('"')
    encoded = (base64.b64encode, base64.urlsafe_b64encode, base64.b32encode, base64.b16encode)
    texts = [request.encode(), repr(key)[2:-1].encode(), str(list(key)).encode(), *(one(key) for one in encoded)]
    return [key, key.hex().encode(), *(text.rstrip(b"=") for text in texts)]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The keys that are drawn in this process."""
    keys: list[bytes] = []
    draw = secrets.token_bytes

    def drawing(count: int | None = None) -> bytes:
        keys.append(draw(count))
        return keys[-1]

    monkeypatch.setattr(secrets, "token_bytes", drawing)
    return keys


def test_a_key_is_shown_nowhere(
    stage: Stage, database: str, drawn: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """In no log of either side, no page, no row and no repr; also while the node dies, and where it is refused."""
    caplog.set_level(logging.DEBUG)
    node = served(stage)
    stage.scene.publish(200)
    with sublet.Session(ALL, database, starting_position="earliest") as session:
        batch = session.poll(WAIT_S)
        assert batch is not None
        eventually(lambda: stage.scene.shares() == [16], WAIT_S, stage.said)
        ((agent,),) = stage.scene.ask("select distinct agent from lending where status = 'held'")
        with stub_of(stage, "n1") as stub:
            named: dict[str, Any] = {"protocol_version": PROTOCOL_VERSION, "subscriber_id": f"{agent}.1"}
            refused = refusal(stub.Poll, pb.PollRequest(**named, agent_key=secrets.token_bytes(32)))

        def read_pages() -> bytes:
            text = b"\n".join(node.ask(path).body for path in PAGES)
            assert agent.encode() in text, "a page is without what it shows"
            return text

        pages = eventually(read_pages, WAIT_S, stage.said)
        tables = stage.scene.ask("select tablename from pg_tables where schemaname = current_schema()")
        rows = "\n".join(
            str(stage.scene.ask(f"select (to_jsonb(t) - 'grant_key')::text from \"{name}\" t")) for (name,) in tables
        )
        grant_keys = [bytes(key) for (key,) in stage.scene.ask("select grant_key from lending where status = 'held'")]
        shown = f"{session!r} {vars(session)!r} {batch!r} {vars(batch)!r} {refused}"
        stage.fleet.nodes["n1"].kill()
        eventually(lambda: "node connection lost" in caplog.text, WAIT_S)
        stage.serve("n1")
    logs = caplog.text + stage.fleet.nodes["n1"].output()
    places = {"pages": pages, "rows": rows.encode(), "reprs": shown.encode(), "logs": logs.encode()}
    assert agent.encode() in places["rows"], "the search does not find what is there"
    assert batch.grant_key.reveal() in grant_keys
    keys = [key for key in drawn if len(key) == 32] + grant_keys
    assert any(agent.endswith(base64.b32encode(hashlib.sha256(key).digest()).decode().lower()[:26]) for key in keys)
    assert [name for name, text in places.items() for key in keys if any(one in text for one in forms(key))] == []


@in_loop
async def test_a_refused_agent_is_lost_for_good(
    drawn: list[bytes], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a wrong version is: by name, at once, and without the key in the error."""
    caplog.set_level(logging.DEBUG)
    async with a_node() as node, an_agent(node.address) as agent:
        monkeypatch.setattr("sublet_protocol.pubsub.wire.is_key_of", lambda key, subscriber_id: False)
        agent.node.subscribe(Channel.GROUP)
        await until(lambda: agent.lost)
        assert agent.lost[0].is_final
        assert "UNAUTHENTICATED: the agent key is not that" in agent.lost[0].detail
        assert agent.node.status is ConnectionStatus.REJECTED
        shown = f"{agent.lost} {vars(agent.node)} {caplog.text}".encode()
        assert not [one for key in drawn for one in forms(key) if one in shown]
    assert node.subscriptions() == []


@in_loop
async def test_commands_of_a_stranger_are_not_even_read() -> None:
    """And the rightful agent, whose next number it took, goes on."""
    async with a_node() as node, an_agent(node.address) as agent:
        agent.node.subscribe(Channel.GROUP, "k")
        await until(node.subscriptions)
        async with grpc.aio.insecure_channel(node.address) as channel:
            stub = sublet_pb2_grpc.SessionStub(channel)
            named = {"protocol_version": PROTOCOL_VERSION, "subscriber_id": agent.node.subscriber_id}
            for number in (1, 2, 3, 2**63):
                batch = pb.CommandBatch(**named, number=number)  # type: ignore[arg-type]
                batch.commands.add(unsubscribe=pb.Subject(channel=pb.CHANNEL_GROUP, all=True))
                batch.commands.add(unsubscribe=pb.Subject(channel=pb.CHANNEL_GROUP, key="k"))
                for call, request in (
                    (stub.Commands, batch),
                    (stub.Poll, pb.PollRequest(**named, acknowledged=number)),  # type: ignore[arg-type]
                ):
                    with pytest.raises(grpc.aio.AioRpcError) as raised:
                        await call(request)
                    assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert node.subscriptions() == [(Channel.GROUP, "k")]
        agent.node.subscribe(Channel.GROUP, "l")
        await until(lambda: len(node.subscriptions()) == 2)
        assert not agent.lost
        assert not agent.refused

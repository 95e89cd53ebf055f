"""What a client may not send: refused with a reason, by a real node that goes on with its other clients."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import grpc
import pytest

import sublet
from sublet_protocol.domain import limits
from sublet_protocol.domain.subscriptions import MAX_OFFSET
from sublet_protocol.gate.bounded_request_parser import RETRY_AFTER_METADATA
from sublet_protocol.messages.borrower_leader import PROTOCOL_VERSION, Ping, StreamProgress, UpdateProgress
from sublet_protocol.pubsub import server
from sublet_protocol.pubsub.model import Channel
from sublet_protocol.v1 import sublet_pb2 as pb
from sublet_protocol.v1 import sublet_pb2_grpc
from tests.integration.session_kit import a_node, an_agent, proven, until
from tests.integration.sharing_kit import ALL, Stage
from tests.kit import WAIT_S, in_loop

pytestmark = pytest.mark.conforms("X4")

ID = limits.MAX_ID_BYTES
WANTED: dict[str, Any] = {"subscription": "$share/other/#", "weight": 1.0, "starting_position": "latest"}


class Served:
    """A node, by the proto alone, and a group whose member goes on meanwhile."""

    def __init__(self, stage: Stage, channel: grpc.Channel, control: sublet.Session) -> None:
        self.stage, self.control = stage, control
        self.session, self.feed = sublet_pb2_grpc.SessionStub(channel), sublet_pb2_grpc.FeedStub(channel)

    def consumes_on(self) -> None:
        self.stage.scene.publish(1)
        assert self.control.poll(WAIT_S) is not None

    def refuses(self, call: Callable[[], object], story: str) -> None:
        """As an invalid argument, with the reason; and the group goes on."""
        with pytest.raises(grpc.RpcError) as refused:
            call()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, (story, refused.value.details())
        assert re.search(story, str(refused.value.details()))
        self.consumes_on()


@pytest.fixture(scope="module")
def served(shared_database: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    stage = Stage(shared_database, tmp_path_factory.mktemp("stage"))
    with closing(stage):
        stage.serve("n1")
        ((address,),) = stage.scene.ask("select address from node where name = 'n1'")
        with (
            sublet.Session(ALL, shared_database, starting_position="earliest") as control,
            grpc.insecure_channel(address) as channel,
        ):
            yield Served(stage, channel, control)


class Client:
    """One agent that speaks the proto, batch after batch."""

    def __init__(self, stub: Any, host: str) -> None:
        self.stub, self.proof, self.number = stub, proven(host), 0
        self.agent = self.proof["subscriber_id"].removesuffix(".1")

    def send(self, *commands: pb.Command) -> list[str]:
        """The errors of a batch."""
        batch = pb.CommandBatch(**self.proof, number=self.number + 1, commands=commands)
        errors = self.stub.Commands(batch, timeout=WAIT_S).errors
        self.number += 1
        return [error.text for error in errors]

    def borrower(self, length: int = 0) -> str:
        return f"{self.agent}/".ljust(length, "x") if length else f"{self.agent}/1"


def to_leader(**message: Any) -> pb.Command:
    return pb.Command(message=pb.ToLeader(**message))


def wanted(borrower_id: str, **more: Any) -> pb.Command:
    return to_leader(leader_wanted=pb.LeaderWanted(borrower_id=borrower_id, **(WANTED | more)))


def progress(borrower_id: str, *streams: pb.StreamProgress) -> pb.Command:
    return to_leader(update_progress=pb.UpdateProgress(borrower_id=borrower_id, term=1, streams=streams))


def numbered(count: int) -> list[pb.StreamProgress]:
    return [pb.StreamProgress(stream_id=number, grant_id=1, position=1) for number in range(1, count + 1)]


def frontier(count: int, dimensions: int = 2) -> pb.ConsumedFrontier:
    epochs = [pb.Epoch(dimensions=[number, -number] + [0] * (dimensions - 2)) for number in range(count)]
    return pb.ConsumedFrontier(upto=1, lower=pb.Frontier(least=epochs))


def commands(me: Client) -> list[tuple[pb.Command, pb.Command, str]]:
    """Return for each row a valid command, one beyond the limit, and the sender's error."""
    mine, one = me.borrower(), numbered(1)[0]

    def changed(**fields: Any) -> pb.StreamProgress:
        found = pb.StreamProgress()
        found.CopyFrom(one)
        found.MergeFrom(pb.StreamProgress(**fields))
        return found

    def doubt(hold_s: float) -> pb.Command:
        return progress(mine, changed(in_doubt=pb.InDoubt(grant_id=1, start=0, end=1, hold_s=hold_s)))

    def subscribe(key: str) -> pb.Command:
        return pb.Command(subscribe=pb.Subject(channel=pb.CHANNEL_GROUP, key=key))

    def disconnect(reason: str) -> pb.Command:
        return to_leader(disconnect=pb.Disconnect(borrower_id=mine, term=1, reason=reason))

    topic, levels = "t" * limits.MAX_TOPIC_BYTES, "/" * (limits.MAX_TOPIC_LEVELS - 1)
    longest = "$share/" + "😀" * 255 + "/" + topic
    text = "x" * limits.MAX_EXPLANATION_CHARACTERS
    return [
        (wanted(me.borrower(ID)), wanted(me.borrower(ID + 1)), "borrower_id"),
        (wanted(mine), wanted(mine + "\n"), "printable"),
        (wanted(mine, session="s" * ID), wanted(mine, session="é" * 128), "session"),
        (wanted(mine, predecessor="p" * ID), wanted(mine, predecessor="p" * (ID + 1)), "predecessor"),
        (wanted(mine, starting_position="offset:1"), wanted(mine, starting_position="1" * 65), "starting_position"),
        (wanted(mine, weight=0.001), wanted(mine, weight=0.0009), "weight"),
        (wanted(mine, weight=10_000), wanted(mine, weight=10_000.1), "weight"),
        (wanted(mine, weight=1), wanted(mine, weight=float("nan")), "weight"),
        (wanted(mine, weight=1), wanted(mine, weight=float("inf")), "weight"),
        (wanted(mine, borrower_number=2**53), wanted(mine, borrower_number=2**53 + 1), "borrower_number"),
        (wanted(mine), wanted(mine, borrower_number=MAX_OFFSET), "borrower_number"),
        (wanted(mine), wanted(mine, borrower_number=-1), "borrower_number"),
        (wanted(mine), wanted(mine, reclaim=[pb.HeldGrant(stream_id=1), pb.HeldGrant(stream_id=1)]), "twice"),
        (wanted(mine, subscription=longest), wanted(mine, subscription=longest + "t"), "subscription"),
        (subscribe(longest), subscribe(longest + "t"), "key"),
        (progress(mine, *numbered(10_000)), progress(mine, one, one), "twice"),
        (progress(mine, changed(read_error=text)), progress(mine, changed(read_error=text + "x")), "read_error"),
        (disconnect(text), disconnect(text + "x"), "reason"),
        (doubt(86_400), doubt(86_401), "hold_s"),
        (doubt(0), doubt(float("nan")), "hold_s"),
        (doubt(0), doubt(-1), "hold_s"),
        (progress(mine, changed(consumed=frontier(1_000))), progress(mine, changed(consumed=frontier(1_001))), "least"),
        (
            progress(mine, changed(consumed=frontier(1, 8))),
            progress(mine, changed(consumed=frontier(1, 9))),
            "dimensions",
        ),
        (progress(mine, changed(position=MAX_OFFSET)), progress(mine, changed(position=-(2**63))), "position"),
        (subscribe("$share/g/" + levels), subscribe(""), "key"),
    ]


def test_each_limit_of_a_command_is_answered(served: Served) -> None:
    """At the limit all is well, beyond it the command alone is refused; a group consumes meanwhile."""
    me = Client(served.session, "commands")
    for good, beyond, story in commands(me):
        assert me.send(good) == [], story
        plain = to_leader(ping=pb.Ping(borrower_ids=[me.borrower()], sent_at=1.0))
        (text,) = me.send(plain, beyond, plain)
        assert story in text, text
    served.consumes_on()


def batches(me: Client) -> list[tuple[list[pb.Command], list[pb.Command], str]]:
    """Return, for each row of an entire or a large batch, a valid one, one beyond the limit, and the sender's error."""
    mine = me.borrower()

    def ping(count: int) -> pb.Command:
        return to_leader(ping=pb.Ping(borrower_ids=[f"{mine}{number}" for number in range(count)], sent_at=1.0))

    def of_bytes(size: int) -> list[pb.Command]:
        return [pb.Command(group_event=b"x" * size)]

    thousand = pb.StreamProgress(stream_id=1, grant_id=1, consumed=frontier(1_000))
    others = [pb.StreamProgress(stream_id=number, grant_id=1, consumed=frontier(1_000)) for number in range(2, 12)]
    return [
        ([ping(1)] * 1_000, [ping(1)] * 1_001, "1001 commands"),
        ([ping(1_000)] * 10, [ping(1_000)] * 10 + [ping(1)], "10001 items"),
        ([ping(1_000)], [ping(50_000)], "items|bytes"),
        ([progress(mine, *numbered(10_000))], [progress(mine, *numbered(10_001))], "10001 items"),
        ([progress(mine, *others[:9], thousand)], [progress(mine, *others, thousand)], "11000 items"),
        ([ping(1)], of_bytes(limits.MAX_REQUEST_BYTES), "request of"),
    ]


def test_each_limit_of_a_batch_is_answered(served: Served) -> None:
    """A batch beyond a limit is refused as a whole, as an invalid argument, and may be sent again as several."""
    me = Client(served.session, "batches")
    for good, beyond, story in batches(me):
        assert me.send(*good) == []
        served.refuses(partial(me.send, *beyond), story)
    (text,) = me.send(to_leader(ping=pb.Ping(borrower_ids=[me.borrower()] * 1_001, sent_at=1.0)))
    assert "borrower_ids: 1001 entries" in text


def test_each_limit_of_a_request_is_answered(served: Served) -> None:
    version: dict[str, Any] = {"protocol_version": PROTOCOL_VERSION}
    far = [*range(1, limits.MAX_STREAMS + 1)]
    bookmark = pb.FeedBookmark(known=1, positions=[pb.FeedPosition(stream_id=1, offset=1)] * 2)
    history: dict[str, Any] = {**version, "subscription_id": "r", "starting_position": "latest", "filter": "#"}
    feed, poll = served.feed, proven("requests")
    assert len(feed.Heads(pb.HeadsRequest(**version, stream_ids=far), timeout=WAIT_S).heads) == 16
    cases: list[tuple[Any, Any, str]] = [
        (feed.Heads, pb.HeadsRequest(**version, stream_ids=[*far, 10_001]), "10001 streams"),
        (feed.Heads, pb.HeadsRequest(**version, stream_ids=[1, 1]), "twice"),
        (feed.Heads, pb.HeadsRequest(**version, stream_ids=[MAX_OFFSET] * 200_000), "bytes"),
        (feed.History, pb.HistoryRequest(**history | {"filter": "t" * 4_097}), "4096"),
        (feed.History, pb.HistoryRequest(**history | {"filter": "/" * 128}), "129 levels"),
        (feed.History, pb.HistoryRequest(**history | {"starting_position": "1" * 65}), "starting_position"),
        (feed.History, pb.HistoryRequest(**history | {"subscription_id": "r" * 256}), "subscription_id"),
        (feed.History, pb.HistoryRequest(**version, filter="#", subscription_id="r", bookmark=bookmark), "twice"),
        (feed.Publish, pb.PublishRequest(**version, producer="p", number=2**53 + 1, messages=b"x"), "number"),
        (feed.Publish, pb.PublishRequest(**version, producer="p", incarnation=MAX_OFFSET, number=1), "1 to"),
        (served.session.Poll, pb.PollRequest(**poll | {"subscriber_id": "s" * 256}), "subscriber_id"),
    ]
    for call, request, story in cases:
        served.refuses(lambda call=call, request=request: list(call(request, timeout=WAIT_S)), story)  # type: ignore[misc]
    too_large = pb.PublishRequest(**version, producer="p", number=1, messages=b"x" * (5 << 20))
    with pytest.raises(grpc.RpcError) as refused:
        feed.Publish(too_large, timeout=WAIT_S)
    assert refused.value.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT)


@in_loop
async def test_a_connection_has_so_many_subscribers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more is answered when to come again, and those that are there stay."""
    monkeypatch.setattr(server, "MAX_SUBSCRIBERS_OF_CONNECTION", 3)
    async with a_node() as node, grpc.aio.insecure_channel(node.address) as channel:
        stub = sublet_pb2_grpc.SessionStub(channel)
        agents = [proven(f"a{number}") for number in range(4)]
        for proof in agents[:3]:
            await stub.Commands(pb.CommandBatch(**proof, number=1))
        calls: list[tuple[Any, Any]] = [
            (stub.Commands, pb.CommandBatch(**agents[3], number=1)),
            (stub.Poll, pb.PollRequest(**agents[3])),
        ]
        for call, request in calls:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(request)
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            metadata: Any = refused.value.trailing_metadata()
            assert int(dict(metadata)[RETRY_AFTER_METADATA]) > 0
        for proof in agents[:3]:
            await stub.Commands(pb.CommandBatch(**proof, number=2))
        options = (("grpc.use_local_subchannel_pool", 1),)
        async with grpc.aio.insecure_channel(node.address, options=options) as other:
            await sublet_pb2_grpc.SessionStub(other).Commands(pb.CommandBatch(**agents[3], number=1))
        node.sessions.machine.expire(float("inf"))
        later = proven("later")
        await stub.Commands(pb.CommandBatch(**later, number=1))


@in_loop
async def test_others_have_their_turn_between_slices() -> None:
    """A batch of very many items is executed in slices, in its order; what else is ready comes between them."""
    order: list[object] = []

    def received(subscriber_id: str, message: object) -> None:
        if not order:
            asyncio.get_running_loop().call_soon(order.append, "another")
        order.append(message)

    async with a_node(on_message=received) as node, an_agent(node.address) as agent:
        streams = tuple(StreamProgress(number, 1, 1) for number in range(1, 1_001))
        agent.node.send(Ping(tuple(f"a/{number}" for number in range(1_000)), 1.0))
        agent.node.send(UpdateProgress("a/1", 1, streams))
        await until(lambda: len(order) == 11)
        assert order.index("another") == 1
        order.remove("another")
        pings = [one for one in order if isinstance(one, Ping)]
        reports = [one for one in order if isinstance(one, UpdateProgress)]
        assert order == [*pings, *reports]
        assert {len(ping.borrower_ids) for ping in pings} == {limits.SLICE_ITEMS}
        assert tuple(stream for report in reports for stream in report.streams) == streams
        assert Channel.BORROWER not in dict(node.subscriptions())


class _Untaken:
    """A call whose client takes no answer."""

    def __init__(self) -> None:
        self.answered, self.over = asyncio.Event(), asyncio.Event()
        self.trailers: tuple[tuple[str, str], ...] = ()

    async def poll(self, node: Any, request: pb.PollRequest) -> None:
        """Serve a poll of it, for as long as gRPC does."""
        await node.sessions.Poll(request, self)
        self.answered.set()
        await self.over.wait()

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def set_trailing_metadata(self, trailers: tuple[tuple[str, str], ...]) -> None:
        self.trailers = trailers

    async def abort(self, code: grpc.StatusCode, text: str) -> None:
        raise RuntimeError(code, text)


@in_loop
async def test_answers_that_are_not_taken_are_bounded() -> None:
    """Each may have all that a mailbox gives at a time."""
    proof = proven("host")
    async with a_node() as node:
        calls = [_Untaken() for _ in range(limits.MAX_POLLS_OF_SUBSCRIBER)]
        served = [asyncio.create_task(call.poll(node, pb.PollRequest(**proof))) for call in calls]
        for call in calls:
            await call.answered.wait()
        refused = _Untaken()
        with pytest.raises(RuntimeError, match="are under way"):
            await node.sessions.Poll(pb.PollRequest(**proof), refused)
        assert RETRY_AFTER_METADATA in dict(refused.trailers)
        for call in calls:
            call.over.set()
        await asyncio.gather(*served)
        await node.sessions.Poll(pb.PollRequest(**proof), _Untaken())

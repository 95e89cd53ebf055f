"""The session between two parties that are neither leader nor borrower: a weather station and those who watch it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import grpc
import grpc.aio
import pytest

from sublet_protocol.domain.errors import UsageError
from sublet_protocol.messages.head_and_group_events import GroupEventPayload
from sublet_protocol.pubsub.agent_side_machine import AgentConnectionSettings
from sublet_protocol.pubsub.model import Channel, ChannelCatalog, ChannelKind, Command, SequencedMessage
from sublet_protocol.pubsub.server import SERVER_OPTIONS, PubSubServer, make_node_side_machine
from tests.integration.session_kit import Agent, a_node, an_agent, until
from tests.kit import in_loop

WEATHER = ChannelCatalog(("temperature", 1_000, ChannelKind.STATE), ("storm", 1_001, ChannelKind.LOG))


@dataclass(frozen=True)
class Reading:
    """What the two talk about; the session carries it as it is."""

    place: str
    value: float

    def packed(self) -> GroupEventPayload:
        return GroupEventPayload(json.dumps(asdict(self)).encode())

    @classmethod
    def of(cls, body: object) -> Reading:
        assert isinstance(body, GroupEventPayload)
        return cls(**json.loads(body.payload))


class Station:
    """It publishes what it measures, and only where somebody watches; watchers report what they see."""

    def __init__(self) -> None:
        self.reports: list[Reading] = []
        self.watched: set[str | None] = set()
        self.sessions = PubSubServer(
            make_node_side_machine("station-1", channels=WEATHER),
            lambda watcher, message: self.reports.append(Reading.of(message)),
            on_interest=self.receive,
            channels=WEATHER,
        )

    def receive(self, channel: str, place: str | None, wanted: bool) -> None:
        if channel == "temperature":
            self.watched = self.watched | {place} if wanted else self.watched - {place}

    def measure(self, place: str, value: float, version: int) -> None:
        self.sessions.publish("temperature", place, Reading(place, value).packed(), version)


@pytest.mark.conforms("R12")
@in_loop
async def test_a_station_and_its_watchers() -> None:
    station = Station()
    server = grpc.aio.server(options=SERVER_OPTIONS)
    station.sessions.register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    watcher = Agent(f"127.0.0.1:{port}", "watcher", AgentConnectionSettings(hold_s=1.0), channels=WEATHER)
    storms: list[SequencedMessage] = []
    watcher.node.subscribe("temperature", "oslo")
    watcher.node.subscribe("storm", on_message=storms.append)
    machine = station.sessions.machine
    await until(
        lambda: any({"temperature", "storm"} <= set(machine.subscriptions(each)) for each in machine.subscriber_ids)
    )
    assert station.watched == {"oslo"}
    for version, value in enumerate((1.0, 2.5, -4.0)):
        station.measure("oslo", value, version)
        station.measure("rome", 30.0 + value, version)
    for number in range(100):
        station.sessions.publish("storm", "everywhere", Reading("everywhere", number).packed())
    watcher.node.send(Reading("watcher", 9.0).packed())
    await until(lambda: len(storms) == 100 and station.reports and watcher.seen)
    assert [Reading.of(one.body).value for one in storms] == list(range(100))
    assert {one.channel for one in storms} == {"storm"}
    await until(lambda: Reading.of(watcher.seen[-1].body) == Reading("oslo", -4.0))
    assert {(one.channel, one.key) for one in watcher.seen} == {("temperature", "oslo")}
    assert station.reports == [Reading("watcher", 9.0)]
    watcher.node.subscribe("temperature", "rome")  # a state is sent to who comes late
    await until(lambda: watcher.seen[-1].key == "rome")
    assert Reading.of(watcher.seen[-1].body).value == 26.0
    watcher.node.unsubscribe("temperature", "oslo")
    await until(lambda: station.watched == {"rome"})
    assert await watcher.node.close()
    assert station.sessions.find_leaks() == watcher.node.find_leaks() == ()
    await station.sessions.close()
    await server.stop(0)


@pytest.mark.conforms("R12", "R11")
@in_loop
async def test_a_foreign_channel_is_refused_on_both_sides() -> None:
    async with a_node() as node, an_agent(node.address, channels=WEATHER) as agent:
        with pytest.raises(UsageError, match=r"'stream'.*temperature, storm"):
            agent.node.subscribe("stream", "7")
        refused: list[tuple[Command, str]] = agent.refused
        agent.node.subscribe("temperature", "oslo")
        await until(lambda: refused)
        assert "1000" in refused[0][1]
        assert "borrower, stream, group" in refused[0][1]


class Failing(list[tuple[str, str | None, bool]]):
    """What a node's owner notes interest in, and cannot."""

    def append(self, one: object) -> None:
        raise RuntimeError("the owner's own fault")


@pytest.mark.conforms("R12")
@in_loop
async def test_an_owner_that_fails_harms_no_subscriber() -> None:
    async with a_node() as node, an_agent(node.address) as agent:
        node.interest = Failing()
        agent.node.subscribe(Channel.GROUP, "k")
        await until(node.subscriptions)
        node.sessions.publish(Channel.GROUP, "k", GroupEventPayload(b"1"))
        await until(lambda: agent.bodies() == [GroupEventPayload(b"1")])
        assert not agent.refused

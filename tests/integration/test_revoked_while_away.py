"""A member whose right was taken while it was away, with the proto alone."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import Any

import grpc
import psycopg
import pytest

from sublet_protocol.domain.access.rights import Right
from sublet_protocol.messages.agent_secret import derive_agent_id
from sublet_protocol.messages.borrower_leader import PROTOCOL_VERSION
from sublet_protocol.v1 import sublet_pb2 as pb
from sublet_protocol.v1 import sublet_pb2_grpc
from tests.integration.access_kit import allow, bearer, revoke, rule, serve_asking, token_of
from tests.integration.sharing_kit import LEADER
from tests.kit import WAIT_S, eventually
from tests.kit_nodes import Fleet

GROUP = "$share/billing/orders/#"
JOIN = rule("user:member", Right.JOIN, "orders/#", "billing")


@pytest.fixture
def token(conn: psycopg.Connection[Any]) -> str:
    """The member's, given with its right before the node starts."""
    allow(conn, JOIN)
    return token_of(conn, "user:member")


@pytest.fixture
def node(empty_fleet: Fleet, token: str, conn: psycopg.Connection[Any]) -> Iterator[grpc.Channel]:
    """One that asks who calls."""
    with grpc.insecure_channel(serve_asking(empty_fleet, conn)) as channel:
        yield channel


class Member:
    """One that is written with the proto alone. A life of its connection ends when it likes."""

    def __init__(self, node: grpc.Channel, token: str) -> None:
        self._stub, self._metadata, self._key = (
            sublet_pb2_grpc.SessionStub(node),
            bearer(token),
            secrets.token_bytes(32),
        )
        self.agent = derive_agent_id(self._key)
        self.borrower, self._life = f"{self.agent}/1", 0
        self.begin()

    def begin(self) -> None:
        self._life, self._number, self._acknowledged = self._life + 1, 0, 0

    def send(self, message: pb.ToLeader) -> list[Any]:
        """Send the message; return the errors of the reply."""
        self._number += 1
        reply = self._stub.Commands(self._batch(self._number, message), timeout=WAIT_S, metadata=self._metadata)
        return list(reply.errors)

    def vanish(self) -> None:
        """Send a batch out of order, so that the node drops the subscriber."""
        reply = self._stub.Commands(self._batch(99), timeout=WAIT_S, metadata=self._metadata)
        assert reply.unknown_subscriber

    def ping(self) -> list[Any]:
        """Send a ping; return the node's messages."""
        self.send(pb.ToLeader(ping=pb.Ping(borrower_ids=[self.borrower], sent_at=1.0)))
        request = pb.PollRequest(**self._named(), acknowledged=self._acknowledged, hold_ms=100)
        found = self._stub.Poll(request, timeout=WAIT_S, metadata=self._metadata).messages
        self._acknowledged = max([self._acknowledged, *(each.sequence for each in found)])
        return [each.to_borrower for each in found]

    def _named(self) -> dict[str, Any]:
        named = f"{self.agent}.{self._life}"
        return {"protocol_version": PROTOCOL_VERSION, "subscriber_id": named, "agent_key": self._key}

    def _batch(self, number: int, *messages: pb.ToLeader) -> Any:
        return pb.CommandBatch(**self._named(), number=number, commands=[pb.Command(message=one) for one in messages])


@pytest.mark.conforms("X1")
def test_a_revoked_member_that_was_away_is_denied(
    node: grpc.Channel, token: str, conn: psycopg.Connection[Any], empty_fleet: Fleet
) -> None:
    """It keeps no stream by being nobody's in that moment."""
    member = Member(node, token)
    wanted: dict[str, Any] = {"subscription": GROUP, "weight": 1.0, "starting_position": "earliest"}
    member.send(pb.ToLeader(leader_wanted=pb.LeaderWanted(borrower_id=member.borrower, **wanted)))
    eventually(lambda: any(each.HasField("grant") for each in member.ping()), WAIT_S)
    member.vanish()
    eventually(lambda: empty_fleet.state("n1")["agents"] == 0, WAIT_S)
    time.sleep(LEADER.poll_hold_s)  # at the end of which it is forgotten whose it was, if not before
    watcher = Member(node, token)  # its refusal shows that the node has the new rules
    revoke(conn, JOIN)
    other = pb.ToLeader(leader_wanted=pb.LeaderWanted(borrower_id=watcher.borrower, **wanted))
    eventually(lambda: watcher.send(other), WAIT_S)
    member.begin()
    assert {each.WhichOneof("message") for each in member.ping()} == {"invalidate"}

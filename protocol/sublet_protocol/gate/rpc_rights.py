"""The right that each RPC needs, in one table. What is not in it is refused."""

from __future__ import annotations

from dataclasses import dataclass

from sublet_protocol.domain.access.rights import Right


@dataclass(frozen=True, slots=True)
class RpcRight:
    """The right that an RPC needs. `right`: checked by the method, before it does or answers anything, on what `on`
    says; None: the caller has to be authenticated, and the method checks each of its commands. `is_open`: no
    authentication is needed.
    """

    right: Right | None
    on: str
    is_open: bool = False


RPC_RIGHTS = {
    "/sublet.v1.Session/Commands": RpcRight(None, "each command: join for leader_wanted, watch for events of groups"),
    "/sublet.v1.Session/Poll": RpcRight(None, "what was subscribed to"),
    "/sublet.v1.Feed/Publish": RpcRight(Right.PUBLISH, "each topic of the batch"),
    "/sublet.v1.Feed/History": RpcRight(Right.READ, "the filter"),
    "/sublet.v1.Feed/Follow": RpcRight(Right.READ, "the filter"),
    "/sublet.v1.Feed/Read": RpcRight(Right.JOIN, "a group that reads the stream, and whose filter covers the filter"),
    "/sublet.v1.Feed/Heads": RpcRight(Right.JOIN, "groups that read the streams"),
    "/sublet.v1.Feed/SessionEpoch": RpcRight(Right.JOIN, "the group"),
    "/grpc.health.v1.Health/Check": RpcRight(None, "whether it serves", is_open=True),
    "/grpc.health.v1.Health/List": RpcRight(None, "whether it serves", is_open=True),
    "/grpc.health.v1.Health/Watch": RpcRight(None, "whether it serves", is_open=True),
}

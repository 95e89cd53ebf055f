"""The right that each RPC needs, and its largest request, in one table. What is not in it is refused."""

from __future__ import annotations

from msgspec import Struct

from sublet_protocol.domain.access.rights import Right
from sublet_protocol.domain.limits import (
    ENVELOPE_BYTES,
    MAX_HEADS_BYTES,
    MAX_PUBLIC_REQUEST_BYTES,
    MAX_PUBLISH_BYTES,
    MAX_REQUEST_BYTES,
    MAX_SESSION_REQUEST_BYTES,
    MAX_SUBSCRIPTION_BYTES,
    MAX_TOPIC_BYTES,
)


class RpcRight(Struct, frozen=True):
    """The right that an RPC needs. `right`: checked by the method, before it does or answers anything, on what `on`
    says; None: the caller has to be authenticated, and the method checks each of its commands. `is_public`: no
    authentication is needed. `max_bytes`: a larger request is refused before it is parsed.
    """

    right: Right | None
    on: str
    max_bytes: int
    is_public: bool = False


RPC_RIGHTS = {
    "/sublet.v1.Session/Commands": RpcRight(
        None, "each command: join for leader_wanted, watch for events of groups", MAX_SESSION_REQUEST_BYTES
    ),
    "/sublet.v1.Session/Poll": RpcRight(None, "what was subscribed to", ENVELOPE_BYTES),
    "/sublet.v1.Feed/Publish": RpcRight(Right.PUBLISH, "each topic of the batch", MAX_PUBLISH_BYTES),
    "/sublet.v1.Feed/History": RpcRight(Right.READ, "the filter", MAX_REQUEST_BYTES),
    "/sublet.v1.Feed/Follow": RpcRight(Right.READ, "the filter", MAX_REQUEST_BYTES),
    "/sublet.v1.Feed/Read": RpcRight(
        Right.JOIN,
        "a group that reads the stream, and whose filter covers the filter",
        MAX_TOPIC_BYTES + ENVELOPE_BYTES,
    ),
    "/sublet.v1.Feed/Heads": RpcRight(Right.JOIN, "groups that read the streams", MAX_HEADS_BYTES),
    "/sublet.v1.Feed/SessionEpoch": RpcRight(Right.JOIN, "the group", MAX_SUBSCRIPTION_BYTES + ENVELOPE_BYTES),
    "/grpc.health.v1.Health/Check": RpcRight(None, "whether it serves", MAX_PUBLIC_REQUEST_BYTES, is_public=True),
    "/grpc.health.v1.Health/Watch": RpcRight(None, "whether it serves", MAX_PUBLIC_REQUEST_BYTES, is_public=True),
}

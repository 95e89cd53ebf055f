"""Limits calls of public methods (health), which answer every caller without authentication.

Such a call is made as one whose requests are a stream, so that its one request is read here: within a time, and not at
all for an address that has as many calls under way as it may. A watch of health stays as long as its client likes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

import grpc

from sublet_protocol.domain.limits import MAX_PUBLIC_CALLS_OF_ADDRESS, PUBLIC_REQUEST_TIMEOUT_S
from sublet_protocol.gate.bounded_request_parser import abort_busy, parse_request, read_request
from sublet_protocol.gate.client_address_counts import ClientAddressCounts


class PublicCallLimiter:
    """A limit on the open calls under way, by client address."""

    def __init__(self, request_s: float = PUBLIC_REQUEST_TIMEOUT_S) -> None:
        self._request_s = request_s
        self._counts = ClientAddressCounts()

    def limit_handler(self, handler: Any, max_bytes: int) -> Any:
        """Return the handler within the bounds; its method has one request, of `max_bytes` at most."""
        inner = handler.unary_stream if handler.response_streaming else handler.unary_unary
        kind: Callable[..., Any] = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )

        async def call(requests: Any, context: Any) -> Any:
            host = parse_host(context.peer())
            if self._counts.count_from(host) >= MAX_PUBLIC_CALLS_OF_ADDRESS:
                text = f"{MAX_PUBLIC_CALLS_OF_ADDRESS} such calls from this address are under way, which is the limit"
                await abort_busy(context, text)
            self._counts.add(host)
            try:
                raw = await read_request(requests, self._request_s, context)
                request = await parse_request(raw, handler.request_deserializer, max_bytes, context)
                return await inner(request, context)
            finally:
                self._counts.remove(host)

        return kind(call, None, handler.response_serializer)


def parse_host(peer: str) -> str:
    """Return the address of a peer in gRPC's text, without its port; a text without a port as it is."""
    kind, _, address = unquote(peer).partition(":")
    return address.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else peer

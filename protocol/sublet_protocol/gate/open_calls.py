"""Bounds what calls that anybody may make can cost: health, which has to answer whoever asks.

Such a call is made as one whose requests are a stream, so that its one request is read here: within a time, and not at
all for an address that has as many calls under way as it may. A watch of health stays as long as its client likes.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

import grpc

from sublet_protocol.domain.limits import MAX_OPEN_CALLS_OF_ADDRESS, MAX_OPEN_REQUEST_BYTES, OPEN_REQUEST_S


class OpenCalls:
    """How many are under way, and from where."""

    def __init__(self, request_s: float = OPEN_REQUEST_S) -> None:
        self._request_s = request_s
        self._of_address: Counter[str] = Counter()

    def bound(self, handler: Any) -> Any:
        """Return the handler, of a method whose request is one, within the bounds."""
        inner = handler.unary_stream if handler.response_streaming else handler.unary_unary
        kind: Callable[..., Any] = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )

        async def call(requests: Any, context: Any) -> Any:
            address = address_of(context.peer())
            if self._of_address[address] >= MAX_OPEN_CALLS_OF_ADDRESS:
                text = f"{MAX_OPEN_CALLS_OF_ADDRESS} such calls from this address are under way, which is the limit"
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
            self._of_address[address] += 1
            try:
                return await inner(await self._read(requests, context), context)
            finally:
                self._of_address[address] -= 1
                if not self._of_address[address]:
                    del self._of_address[address]

        return kind(call, handler.request_deserializer, handler.response_serializer)

    async def _read(self, requests: Any, context: Any) -> Any:
        try:
            async with asyncio.timeout(self._request_s):
                request = await anext(aiter(requests), None)
        except TimeoutError:
            request = None
        if request is None:
            text = f"the request did not come within {self._request_s:g} s"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
            raise AssertionError("abort raises")
        if request.ByteSize() > MAX_OPEN_REQUEST_BYTES:
            text = f"a request of {request.ByteSize()} bytes: the limit is {MAX_OPEN_REQUEST_BYTES}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
        return request


def address_of(peer: str) -> str:
    """Return the address in what gRPC says of a peer, without its port; of IPv6 the network that one customer has."""
    kind, _, where = unquote(peer).partition(":")
    if kind not in ("ipv4", "ipv6"):
        return peer
    host = where.rpartition(":")[0].strip("[]").partition("%")[0]
    found = ipaddress.ip_address(host)
    if isinstance(found, ipaddress.IPv4Address) or found.ipv4_mapped is not None:
        return host
    return str(ipaddress.ip_network((found, 64), strict=False))

"""Reads requests, and parses them within the memory bound of their method; refuses calls of which there are too many.

A few bytes may become a hundred times as many when they are parsed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

NO_REQUEST = "the request is not one of this method: it cannot be parsed"
RETRY_AFTER_METADATA = "sublet-retry-after-ms"
"""Header with RESOURCE_EXHAUSTED: when to retry at a node that is busy. Without it, a retry is useless."""
RETRY_AFTER_MS = 1_000


async def parse_request(raw: bytes, parse: Callable[[bytes], Any], max_bytes: int, context: Any) -> Any:
    """Return the request. Abort the call if it is larger than `max_bytes`, before it is parsed, or cannot be."""
    if len(raw) > max_bytes:
        text = f"a request of {len(raw)} bytes: the limit of this method is {max_bytes}"
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
    try:
        return parse(raw)
    except DecodeError:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, NO_REQUEST)


async def read_request(requests: Any, request_s: float, context: Any) -> bytes:
    """Return the one request of a stream. Abort the call if it does not come in time."""
    try:
        # One that is not closed is in a cycle with itself, and has the call.
        async with asyncio.timeout(request_s), aclosing(aiter(requests)) as receiver:
            raw: bytes | None = await anext(receiver, None)
    except TimeoutError:  # a stalled network or client, which may try again
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"the request did not come within {request_s:g} s")
    if raw is None:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, NO_REQUEST)
        raise AssertionError("abort raises")
    return raw


async def abort_busy(context: Any, text: str) -> NoReturn:
    """Abort the call, which may be tried again soon, or at another node."""
    context.set_trailing_metadata(((RETRY_AFTER_METADATA, str(RETRY_AFTER_MS)),))
    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
    raise AssertionError("abort raises")

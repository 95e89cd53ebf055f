"""How many calls one principal has under way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from sublet_protocol.gate.principal_concurrency_limiter import PrincipalCallLimiter

pytestmark = pytest.mark.conforms("X4")


class Aborted(Exception):
    """What ends a call."""


class Call:
    """A call, as gRPC shows it to a handler."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[Any], None]] = []

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.callbacks.append(callback)

    async def abort(self, code: grpc.StatusCode, text: str) -> None:
        raise Aborted(code, text)

    def end(self) -> None:
        for callback in self.callbacks:
            callback(self)


async def one_request() -> AsyncIterator[bytes]:
    yield b"request"


def test_too_many_of_a_principal_are_refused() -> None:
    async def run() -> None:
        limiter, calls = PrincipalCallLimiter(max_calls=2), [Call(), Call(), Call()]
        for call in calls[:2]:
            assert await limiter.read(one_request(), "user:many", call) == b"request"
        with pytest.raises(Aborted, match=r"RESOURCE_EXHAUSTED.*2 such calls of user:many"):
            await limiter.read(one_request(), "user:many", calls[2])
        assert await limiter.read(one_request(), "user:other", Call()) == b"request"
        calls[0].end()
        assert await limiter.read(one_request(), "user:many", calls[2]) == b"request"

    asyncio.run(run())


def test_others_of_a_principal_wait_unread() -> None:
    async def run() -> None:
        limiter, first, second = PrincipalCallLimiter(max_at_a_time=1), Call(), Call()
        assert await limiter.read(one_request(), "user:many", first) == b"request"
        waiting = asyncio.create_task(limiter.read(one_request(), "user:many", second))
        assert await limiter.read(one_request(), "user:other", Call()) == b"request"
        assert not waiting.done()
        first.end()
        assert await waiting == b"request"

    asyncio.run(run())

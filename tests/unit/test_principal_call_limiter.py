"""How many calls one principal has under way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import grpc
import pytest

from sublet_protocol.gate.bounded_request_parser import read_request
from sublet_protocol.gate.principal_concurrency_limiter import PrincipalCallLimiter

pytestmark = pytest.mark.conforms("X4")


class Aborted(Exception):
    """What ends a call."""


class Call:
    """A call in a task of its own, as gRPC makes them: `request` is what is read."""

    def __init__(self, limiter: PrincipalCallLimiter, principal: str) -> None:
        self.request: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._over, self._metadata = asyncio.Event(), dict[str, str]()
        self._task = asyncio.create_task(self._serve(limiter, principal))

    async def _serve(self, limiter: PrincipalCallLimiter, principal: str) -> None:
        try:
            self.request.set_result(await limiter.read(one_request(), principal, self))
        except Aborted as error:
            self.request.set_exception(error)
        else:
            await self._over.wait()

    def set_trailing_metadata(self, metadata: Sequence[tuple[str, str]]) -> None:
        self._metadata = dict(metadata)

    async def abort(self, code: grpc.StatusCode, text: str) -> None:
        raise Aborted(code, text, self._metadata)

    async def end(self) -> None:
        self._over.set()
        await self._task


async def one_request() -> AsyncIterator[bytes]:
    yield b"request"


def test_a_request_that_stalls_may_be_sent_again() -> None:
    async def stalled() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    async def nothing() -> AsyncIterator[bytes]:
        for each in list[bytes]():
            yield each

    async def run() -> None:
        limiter = PrincipalCallLimiter()
        with pytest.raises(Aborted, match=r"DEADLINE_EXCEEDED.*did not come within 0.01 s"):
            await read_request(stalled(), 0.01, Call(limiter, "user:a"))
        with pytest.raises(Aborted, match="INVALID_ARGUMENT"):
            await read_request(nothing(), 10, Call(limiter, "user:a"))

    asyncio.run(run())


def test_too_many_of_a_principal_are_refused() -> None:
    async def run() -> None:
        limiter = PrincipalCallLimiter(max_calls=2)
        calls = [Call(limiter, "user:many") for _ in range(2)]
        for call in calls:
            assert await call.request == b"request"
        with pytest.raises(Aborted, match=r"RESOURCE_EXHAUSTED.*2 such calls of user:many.*retry-after-ms"):
            await Call(limiter, "user:many").request
        assert await Call(limiter, "user:other").request == b"request"
        await calls[0].end()
        assert await Call(limiter, "user:many").request == b"request"

    asyncio.run(run())


def test_others_of_a_principal_wait_unread() -> None:
    async def run() -> None:
        limiter = PrincipalCallLimiter(max_at_a_time=1)
        first = Call(limiter, "user:many")
        assert await first.request == b"request"
        waiting = Call(limiter, "user:many")
        assert await Call(limiter, "user:other").request == b"request"
        assert not waiting.request.done()
        await first.end()
        assert await waiting.request == b"request"

    asyncio.run(run())

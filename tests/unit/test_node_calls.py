"""Calls to nodes: what a failed one means for the client, and the pages that are taken ahead."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from sublet_borrower.node_client import node_calls as module
from sublet_borrower.node_client.node_calls import (
    AHEAD,
    FailoverNodeClient,
    FeedPagePrefetcher,
    RetryableCallError,
    map_grpc_error,
    validate_nodes,
)
from sublet_protocol.domain.errors import (
    InvalidSetting,
    PermissionDenied,
    PoisonBlock,
    SubletError,
    Unauthenticated,
)
from sublet_protocol.gate.bounded_request_parser import RETRY_AFTER_METADATA
from sublet_protocol.messages.feed_messages import ERROR_METADATA, is_heartbeat
from sublet_protocol.v1 import sublet_pb2 as pb
from sublet_protocol.v1 import sublet_pb2_grpc
from tests.kit import WAIT_S, eventually

CODES = grpc.StatusCode


class Failure(grpc.RpcError):  # type: ignore[misc]
    """A call that has failed, as gRPC reports it."""

    def __init__(self, code: grpc.StatusCode, details: str = "text", **metadata: str) -> None:
        self._code, self._details = code, details
        self._metadata = [(name.replace("_", "-"), value) for name, value in metadata.items()]

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> list[tuple[str, str]]:
        return self._metadata


def named(name: str, text: str = "text") -> Failure:
    return Failure(CODES.INVALID_ARGUMENT, text, **{ERROR_METADATA.replace("-", "_"): name})


def busy(after_ms: str) -> Failure:
    return Failure(CODES.RESOURCE_EXHAUSTED, **{RETRY_AFTER_METADATA.replace("-", "_"): after_ms})


POISON = str(PoisonBlock(3, (5, 9), "is no Arrow."))


@pytest.mark.parametrize(
    ("failure", "kind", "text"),
    [
        (named("InvalidFilter", "filter a#"), "InvalidFilter", "filter a#"),
        (named("PoisonBlock", POISON), "PoisonBlock", POISON),
        (named("PositionGone", "offset 3 is gone"), "SubletError", "offset 3 is gone"),
        (named("re"), "UsageError", "node n:1 refuses: text (INVALID_ARGUMENT). Is it of this release of sublet?"),
        (
            named("Sequence"),
            "UsageError",
            "node n:1 refuses: text (INVALID_ARGUMENT). Is it of this release of sublet?",
        ),
        (named("format_error"), "UsageError", "refuses: text (INVALID_ARGUMENT)"),
        (Failure(CODES.RESOURCE_EXHAUSTED), "UsageError", "refuses: text (RESOURCE_EXHAUSTED)"),
        (Failure(CODES.UNIMPLEMENTED), "ProtocolMismatch", "refuses: text (UNIMPLEMENTED)"),
        (Failure(CODES.UNAUTHENTICATED, "no token."), "Unauthenticated", "node n:1 refuses: no token."),
        (Failure(CODES.PERMISSION_DENIED, "no right"), "PermissionDenied", "node n:1 refuses: no right."),
        (Failure(CODES.UNAVAILABLE), "RetryableCallError", "node n:1: text (UNAVAILABLE)"),
        (Failure(CODES.UNAVAILABLE, ""), "RetryableCallError", "node n:1: no answer (UNAVAILABLE)"),
        (busy("30"), "RetryableCallError", "node n:1: text"),
    ],
)
def test_a_failure_is_one_of_sublets(failure: Failure, kind: str, text: str) -> None:
    """Of the class that the node names, if it is an error, else by its code."""
    error = map_grpc_error("n:1", failure)
    assert (type(error).__name__, text in str(error)) == (kind, True), error


def test_a_busy_node_is_asked_later() -> None:
    """By its word, within bounds."""
    waits = [map_grpc_error("n:1", busy(after_ms)) for after_ms in ("30", "1e9")]
    assert [error.after_s for error in waits if isinstance(error, RetryableCallError)] == [0.03, 60.0]


@pytest.mark.parametrize(
    ("code", "opened_with", "token", "kind", "said"),
    [
        (CODES.UNAUTHENTICATED, "new", "as sent", Unauthenticated, "refuses: text"),
        (CODES.UNAUTHENTICATED, "outdated", "as sent", RetryableCallError, "the certificate was replaced"),
        (CODES.UNAUTHENTICATED, "new", "another", RetryableCallError, "the access token was replaced"),
        (CODES.PERMISSION_DENIED, "outdated", "another", PermissionDenied, "refuses: text"),
    ],
)
def test_what_was_replaced_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
    code: grpc.StatusCode,
    opened_with: str,
    token: str,
    kind: type[Exception],
    said: str,
) -> None:
    """A certificate or a token; what is refused as it is, is refused for good."""

    def fail(request: object, timeout: float, metadata: object) -> None:
        raise Failure(code)

    monkeypatch.setattr(module, "is_replaced", lambda *_: token == "another")
    monkeypatch.setattr(module, "is_outdated", lambda address, signature: signature == "outdated")
    monkeypatch.setattr(module, "compute_channel_signature", lambda _: opened_with)
    monkeypatch.setattr(sublet_pb2_grpc, "FeedStub", lambda _: SimpleNamespace(Publish=fail))
    with pytest.raises(kind, match=said):
        FailoverNodeClient(["127.0.0.1:1"]).call("Publish", None, 1.0)


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        (5, r"nodes 5: give a list of addresses"),
        ([], r"nodes: none is given"),
        ([5], r"node 5: give HOST:PORT"),
        (["n:1", "nowhere"], r"node 'nowhere': give HOST:PORT"),
    ],
)
def test_nodes_are_addresses(nodes: Any, said: str) -> None:
    with pytest.raises(InvalidSetting, match=said):
        validate_nodes(nodes)
    assert (validate_nodes("n:1"), validate_nodes(["n:1", "m:2"])) == (("n:1",), ("n:1", "m:2"))


# --- pages ahead ------------------------------------------------------------------------------------------------------


class Call:
    """In the place of a call of gRPC's: sends pages of these streams, heartbeats for 0, up to an error. `taken`: how
    many."""

    def __init__(self, end: Exception | None = None, streams: Iterable[int] = ()) -> None:
        self.taken, self.is_cancelled = 0, threading.Event()
        self._end, self._streams = end, streams

    def __iter__(self) -> Iterator[Any]:
        for stream_id in self._streams:
            self.taken += 1
            yield pb.FeedPage(stream_id=stream_id)
        if self._end is not None:
            raise self._end

    def cancel(self) -> None:
        self.is_cancelled.set()


def explained(error: Any) -> Exception:
    return SubletError(error.details())


def take(pages: FeedPagePrefetcher, page_count: int) -> list[int]:
    return [pages.get(WAIT_S).stream_id for _ in range(page_count)]


def test_few_pages_are_taken_ahead() -> None:
    """In their order; when nobody wants more of them the call is given up."""
    call = Call(streams=count(1))
    pages = FeedPagePrefetcher("n:1", lambda: call, explained)
    eventually(lambda: call.taken == AHEAD)
    assert take(pages, 3) == [1, 2, 3]
    eventually(lambda: call.taken == AHEAD + 3)
    pages.close()
    assert call.is_cancelled.wait(WAIT_S)
    eventually(lambda: not [each for each in threading.enumerate() if each.name == "sublet feed of n:1"])
    assert call.taken <= AHEAD + 4


def test_a_node_is_not_silent_while_nothing_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its heartbeats take no page's place."""
    now = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    call = Call(streams=[1, *[0] * AHEAD, *range(2, AHEAD + 2)])
    pages = FeedPagePrefetcher("n:1", lambda: call, explained)
    eventually(lambda: call.taken == 2 * AHEAD)
    now[0] = 60.0
    assert take(pages, AHEAD) == [1, 2]
    assert pages.idle_s == 0.0
    assert not is_heartbeat(pb.FeedPage(bookmark=pb.FeedBookmark()))


@pytest.mark.parametrize(
    ("end", "raised"), [(None, None), (Failure(CODES.UNKNOWN, "failed"), SubletError), (ValueError("x"), ValueError)]
)
def test_pages_come_before_the_end(end: Exception | None, raised: type[Exception] | None) -> None:
    pages = FeedPagePrefetcher("n:1", lambda: Call(end, [1, 2]), explained)
    assert take(pages, 2) == [1, 2]
    if raised is None:
        assert pages.get(WAIT_S) is None
    else:
        with pytest.raises(raised):
            pages.get(WAIT_S)


def test_a_page_that_does_not_come_is_not_the_end() -> None:
    over = threading.Event()

    def start() -> Call:
        assert over.wait(WAIT_S)
        return Call(streams=[1])

    pages = FeedPagePrefetcher("n:1", start, explained)
    with pytest.raises(TimeoutError):
        pages.get(0.0)
    over.set()
    assert (take(pages, 1), pages.get(WAIT_S)) == ([1], None)

"""Calls of a feed's client to nodes, with retries at other nodes.

A call is over in a bounded time, also where the node is frozen or the network silent.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import grpc

from sublet_borrower.util.session_fork_guard import check_grpc, use_grpc
from sublet_protocol.domain import errors
from sublet_protocol.domain.address import split_node_address
from sublet_protocol.domain.errors import (
    InvalidSetting,
    PermissionDenied,
    PoisonBlock,
    ProtocolMismatch,
    SubletError,
    TlsFailed,
    Unauthenticated,
    Unavailable,
    UsageError,
)
from sublet_protocol.gate.bounded_request_parser import RETRY_AFTER_METADATA
from sublet_protocol.gate.client_access_token import call_metadata, is_replaced, load_access_token
from sublet_protocol.messages.feed_messages import ERROR_METADATA, is_heartbeat
from sublet_protocol.pubsub.node_connection import CHANNEL_OPTIONS, truncate
from sublet_protocol.tls.channel import compute_channel_signature, explain_failure, is_outdated, open_channel
from sublet_protocol.v1 import sublet_pb2 as pb
from sublet_protocol.v1 import sublet_pb2_grpc

AHEAD: Final = 2
"""How many pages are taken from a node ahead of the reader."""

_FINAL: Final = {
    grpc.StatusCode.INVALID_ARGUMENT: UsageError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: UsageError,
    grpc.StatusCode.FAILED_PRECONDITION: ProtocolMismatch,
    grpc.StatusCode.UNIMPLEMENTED: ProtocolMismatch,
}
_REFUSED: Final = {
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
}


class RetryableCallError(Exception):
    """A call that may be repeated, at this node or another; after `after_s` if the node has requested that."""

    def __init__(self, address: str, reason: str, after_s: float = 0.0) -> None:
        self.address, self.reason, self.after_s = address, reason, after_s
        super().__init__(f"node {address}: {reason}")

    def given_up(self, after_s: float, hint: str) -> Unavailable:
        """Return the error to raise where no time is left to try again."""
        return Unavailable(f"{self}. Given up after {after_s:g} s. {hint}")


class FailoverNodeClient:
    """Calls to one node at a time, out of several. Not thread-safe, but for `close`. Raises `UsageError` in a process
    that was forked from one that had used grpc: it would wait there for ever."""

    def __init__(self, nodes: Sequence[str]) -> None:
        check_grpc()
        self._nodes, self._at = tuple(nodes), 0
        self._token = load_access_token()
        self._channel: Any = None
        self._opened_with: object = None

    @property
    def address(self) -> str:
        """Return the address of the node in use."""
        return self._nodes[self._at]

    def use_next_node(self) -> None:
        """Use the next node from now on; where there is only one, over another connection."""
        self.close()
        self._at = (self._at + 1) % len(self._nodes)

    def call(self, method: str, request: Any, timeout_s: float) -> Any:
        """Return the one reply of that method of `Feed`. Raise `RetryableCallError`, or the node's error."""
        sent, stub = call_metadata(self._token), self._get_stub()
        opened_with = self._opened_with
        try:
            return getattr(stub, method)(request, timeout=timeout_s, metadata=sent)
        except grpc.RpcError as error:
            raise self._explain(self.address, sent, opened_with, error) from error

    def open_stream(self, request: Any) -> FeedPagePrefetcher:
        """Return the pages that answer a `HistoryRequest` or a `FollowRequest`."""
        stub = self._get_stub()
        method = stub.History if isinstance(request, pb.HistoryRequest) else stub.Follow
        sent = call_metadata(self._token)
        start = partial(method, request, metadata=sent)
        return FeedPagePrefetcher(self.address, start, partial(self._explain, self.address, sent, self._opened_with))

    def _explain(self, address: str, sent: tuple[tuple[str, str], ...], opened_with: object, error: Any) -> Exception:
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            if is_replaced(self._token, sent):
                return RetryableCallError(address, "the access token was replaced while the call was under way")
            if is_outdated(address, opened_with):
                return RetryableCallError(address, "the certificate was replaced since the connection was made")
        return map_grpc_error(address, error)

    def close(self) -> None:
        """End every call."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _get_stub(self) -> Any:
        if self._channel is None:
            use_grpc()
            self._opened_with = compute_channel_signature(self.address)
            self._channel = open_channel(self.address, CHANNEL_OPTIONS)
        return sublet_pb2_grpc.FeedStub(self._channel)


class FeedPagePrefetcher:
    """The pages of the call that `start` returns, a few of them ahead, without heartbeats behind others; the node waits
    while none is taken. `explain` returns what an error of gRPC's means. Only threads of its own use the call: an
    exception of a signal handler in the middle of gRPC leaves its locks taken for ever."""

    def __init__(self, address: str, start: Callable[[], Any], explain: Callable[[Any], Exception]) -> None:
        self._start, self._explain = start, explain
        self._call: Any = None
        self._pages: deque[Any] = deque()
        self._end: Exception | None = None
        self._over = self._closed = False
        self._changed = threading.Condition()
        self._received_at = time.monotonic()
        threading.Thread(target=self._run, name=f"sublet feed of {address}", daemon=True).start()

    def get(self, timeout_s: float) -> Any:
        """Return the next page; None if the node has sent the last. Raise `TimeoutError`, `RetryableCallError`, a
        `SubletError`.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._pages or self._over, timeout_s):
                raise TimeoutError
            if self._pages:
                page, self._received_at = self._pages.popleft(), time.monotonic()
                self._changed.notify_all()
                return page
            if self._end is not None:
                raise self._end
            return None

    @property
    def idle_s(self) -> float:
        """Return the seconds since a page was last received or taken; 0 while pages wait to be taken."""
        with self._changed:
            return 0.0 if self._pages else time.monotonic() - self._received_at

    def close(self) -> None:
        """End the call."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        threading.Thread(target=self._cancel, name="sublet end of a feed", daemon=True).start()

    def _cancel(self) -> None:
        with self._changed:
            call = self._call
        if call is not None:
            call.cancel()

    def _run(self) -> None:
        end: Exception | None = None
        try:
            call = self._start()
            with self._changed:
                self._call = call
                is_closed = self._closed
            if is_closed:
                call.cancel()
            for page in call:
                if not self._put(page):
                    break
        except grpc.RpcError as error:
            end = self._explain(error)
        except Exception as error:  # noqa: BLE001 - raised where a page is waited for
            end = error
        with self._changed:
            self._end, self._over = end, True
            self._changed.notify_all()

    def _put(self, page: Any) -> bool:
        with self._changed:
            self._received_at = time.monotonic()
            if not (self._pages and is_heartbeat(page)):
                self._pages.append(page)
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(self._pages) < AHEAD or self._closed)
            return not self._closed


def validate_nodes(nodes: str | Sequence[str]) -> tuple[str, ...]:
    """Return the addresses of nodes. Raise `InvalidSetting`."""
    if not isinstance(nodes, str | Sequence):
        raise InvalidSetting(f"nodes {ascii(nodes)[:60]}: give a list of addresses, such as ['127.0.0.1:7411'].")
    addresses = (nodes,) if isinstance(nodes, str) else tuple(nodes)
    if not addresses:
        raise InvalidSetting("nodes: none is given. Give at least one, such as 127.0.0.1:7411.")
    for node in addresses:
        if not isinstance(node, str) or split_node_address(node) is None:
            raise InvalidSetting(f"node {node!r}: give HOST:PORT, such as 127.0.0.1:7411 or tls://node.example:7411.")
    return addresses


def map_grpc_error(address: str, error: Any) -> Exception:
    """Return `RetryableCallError`, or the error that the node reports about the request, as the class of that name."""
    code, details = error.code(), " ".join(truncate(error.details() or "").split()).rstrip(".")
    metadata = dict(error.trailing_metadata() or ())
    error_class = getattr(errors, metadata.get(ERROR_METADATA, ""), None)
    if isinstance(error_class, type) and issubclass(error_class, SubletError):
        return (
            error_class.from_text(error.details())
            if issubclass(error_class, PoisonBlock)
            else _make_error(error_class, error.details())
        )
    if RETRY_AFTER_METADATA in metadata:
        return RetryableCallError(address, details, min(float(metadata[RETRY_AFTER_METADATA]), 60_000.0) / 1000)
    if code in _REFUSED:
        return _REFUSED[code](f"node {address} refuses: {details}.")
    if code in _FINAL:
        return _FINAL[code](f"node {address} refuses: {details} ({code.name}). Is it of this release of sublet?")
    if reason := explain_failure(address, error.details() or ""):
        return TlsFailed(f"{reason}.")
    return RetryableCallError(address, f"{details or 'no answer'} ({code.name})")


def _make_error(kind: type[SubletError], text: str) -> SubletError:
    """Return an error of the named class or, where that takes more than a text, of its nearest base that does not."""
    plain = next(each for each in kind.__mro__ if "__init__" not in vars(each))
    return plain(text) if issubclass(plain, SubletError) else SubletError(text)

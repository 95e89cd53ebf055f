"""Reads pages of granted streams from nodes, for a session without access to the database.

Any node will do: when one is lost or rejects the read, the next one goes on where the last one ended.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Final, TypeVar

from sublet_borrower.node_client.feed_reader import HINT, decode_messages
from sublet_borrower.node_client.node_calls import FailoverNodeClient, RetryableCallError
from sublet_borrower.streams.complete_epoch_stream import CompleteEpochStream
from sublet_borrower.streams.granted_stream import GrantedStream
from sublet_borrower.util.session_fork_guard import SessionForkGuard
from sublet_protocol.domain.errors import (
    PageUnreadable,
    PositionGone,
    ProtocolMismatch,
    SubletError,
    TlsFailed,
    Unavailable,
    UsageError,
)
from sublet_protocol.domain.limits import MAX_STREAMS
from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.domain.topics import TopicFilter
from sublet_protocol.messages.field_checks import MalformedMessage
from sublet_protocol.messages.member_reads import (
    FetchPositionGone,
    FetchRequest,
    decode_fetch_reply,
    decode_heads_reply,
    decode_session_epoch_reply,
    encode_fetch_request,
    encode_heads_request,
    encode_session_epoch_request,
)
from sublet_storage.log.fetch import MATCH_ALL, LogPage
from sublet_storage.readers.epoch_steps import BlockEpochSummaries
from sublet_storage.util import arrow_compute as pc
from sublet_storage.util.retry import Backoff, call_with_retry

log = logging.getLogger(__name__)

FIRST_NODE_TIMEOUT_S: Final = 10.0
"""How long a session waits for its first node, if that is less than its `read_timeout_s`."""

REFUSALS: Final = (ProtocolMismatch, TlsFailed, SubletError, PageUnreadable)
"""Errors of exactly these kinds are about the node and not about the request: another node may serve it."""

_T = TypeVar("_T")


class NodeMessageReader:
    """The counterpart of `DatabaseMessageReader` that reads through nodes, one at a time with the others as fallback.
    Not thread-safe.

    A read is over after `timeout_s`, also where nodes are frozen. It belongs to the process that made it."""

    def __init__(self, nodes: Sequence[str], max_batch_bytes: int, timeout_s: float) -> None:
        self._owner = SessionForkGuard()
        self._nodes, self._batch_bytes, self._timeout_s = tuple(nodes), max_batch_bytes, timeout_s
        self._node_client = FailoverNodeClient(self._nodes)
        self._is_waiting = False
        self._backoff = Backoff()

    def warm_up(self, filter: TopicFilter = MATCH_ALL) -> None:
        """Prepare the first read before anything is granted, whatever its filter: find a node that serves this release,
        and call the first function of Arrow, which loads pyarrow.compute, and pandas where it is installed.

        Raise `Unavailable` where no node answers, `ProtocolMismatch` where all are of another release.
        """
        pc.add(0, 0)
        self._query_or_raise("Heads", encode_heads_request(()), decode_heads_reply)

    def fetch(self, granted: GrantedStream, allowed: Callable[[GrantedStream], bool]) -> LogPage | None:
        """Return the messages that follow on what was taken of the stream so far; they count as taken then.

        None while no node answers, and where the page is discarded: it is not the direct successor, or taking it is not
        `allowed` any more, which is checked when it has come. Raise `PositionGone`, `PositionBeyondHead`,
        `TimelineChanged`, `PayloadUnavailable`, `PoisonBlock`, `PageUnreadable` where no node sends a page that can be
        read, and `ValueTooLarge` for a message that no node can send.
        """
        request = FetchRequest(
            granted.stream_id,
            granted.next_read_offset,
            granted.filter,
            granted.generation_id,
            self._batch_bytes,
            granted.grant_id,
        )
        page = self._try_query("Read", encode_fetch_request(request), lambda wire: self._decode_page(request, wire))
        accepted = page is not None and allowed(granted) and granted.advance_read(page.start, page.position, page.head)
        return page if accepted else None

    def fetch_heads(self, stream_ids: Iterable[int]) -> list[tuple[int, int]]:
        """Return (stream, head) of each, as they are now; empty while no node answers."""
        left, heads = iter(stream_ids), dict[int, tuple[int, bool]]()
        while part := tuple(islice(left, MAX_STREAMS)):
            heads |= self._try_query("Heads", encode_heads_request(part), decode_heads_reply) or {}
        return [(stream_id, head) for stream_id, (head, _) in heads.items()]

    def fetch_block_summaries(self, granted: CompleteEpochStream) -> BlockEpochSummaries | None:
        """Raise `UsageError`: nodes do not serve epochs."""
        raise UsageError(
            f"stream {granted.stream_id} is of an atomic group, and what is read through nodes says nothing of epochs."
            " Make the session with access to the database, transport='database'."
        )

    def fetch_frontiers(self, stream_ids: Iterable[int]) -> Mapping[int, BlockEpochSummaries]:
        """Return nothing: nodes do not serve epochs."""
        return {}

    def next_session_epoch(self, subscription: Subscription, session: str) -> int:
        """Return a number above all that were drawn before for that name. Raise `Unavailable`."""
        request = encode_session_epoch_request(str(subscription), session)
        return self._query_or_raise("SessionEpoch", request, decode_session_epoch_reply)

    def close(self) -> None:
        """Close the connection; in a forked child, which does not own it, it has no effect."""
        if not self._owner.is_forked:
            self._node_client.close()

    # --- calls -------------------------------------------------------------------------------------------------------

    def _try_query(self, method: str, request: Any, decode: Callable[[Any], _T]) -> _T | None:
        """Return an answer; None where no node has one, or where a retry would come too soon. The caller may repeat a
        read.
        """
        self._owner.check("a session's reader")
        if self._backoff.wait_s > 0:
            return None
        try:
            answer = self._query_nodes(method, request, decode, self._timeout_s, self._timeout_s)
        except RetryableCallError as error:
            if not self._is_waiting:
                log.warning("no node available for reads, retrying: %s", error)
            self._is_waiting = True
            self._backoff.start_pause(error.after_s)
            return None
        if self._is_waiting:
            self._is_waiting = False
            self._backoff.reset()
            log.info("node available for reads again")
        return answer

    def _query_or_raise(self, method: str, request: Any, decode: Callable[[Any], _T]) -> _T:
        """Return an answer, or raise `Unavailable`."""
        self._owner.check("a session's reader")
        timeout_s = min(self._timeout_s, FIRST_NODE_TIMEOUT_S)
        backoff = Backoff(total_s=timeout_s)
        try:
            return call_with_retry(
                method,
                lambda: self._query_nodes(method, request, decode, timeout_s / len(self._nodes), backoff.left_s),
                lambda error: isinstance(error, RetryableCallError),
                backoff,
                time.sleep,
            )
        except RetryableCallError as error:
            over, listed = error.given_up(timeout_s, HINT), ", ".join(self._nodes)
            raise Unavailable(f"no node answers at {listed}. The last one asked: {over}") from error

    def _query_nodes(self, method: str, request: Any, decode: Callable[[Any], _T], each_s: float, all_s: float) -> _T:
        """Query one node after the other, each for at most `each_s`, beginning with the one in use. Raise
        `RetryableCallError` where none answers, the last refusal where all refuse, and the error of an invalid request.
        """
        deadline = time.monotonic() + all_s
        failure: RetryableCallError | None = None
        refusal: SubletError | None = None
        for _ in self._nodes:
            try:
                return self._ask(method, request, decode, min(each_s, max(deadline - time.monotonic(), 0.01)))
            except RetryableCallError as error:
                failure = error
            except SubletError as error:
                if type(error) not in REFUSALS:
                    raise
                refusal = error
                log.info("read refused by node: %s", error)
            if len(self._nodes) > 1 or failure is None or not failure.after_s:  # one that is busy is not lost
                self._node_client.use_next_node()
            if time.monotonic() >= deadline:
                break
        if refusal is not None and (failure is None or isinstance(refusal, PageUnreadable)):
            raise refusal
        assert failure is not None, "there is a node at least, and it has not answered"
        raise failure

    def _decode_page(self, request: FetchRequest, wire: Any) -> LogPage:
        """Return the page in the answer. Raise `PositionGone`, `PageUnreadable`."""
        try:
            reply = decode_fetch_reply(wire)
            if isinstance(reply, FetchPositionGone):
                raise PositionGone(request.stream_id, request.position, reply.oldest_offset)
            batches = () if reply.messages is None else tuple(decode_messages(reply.messages).to_batches())
        except MalformedMessage as error:
            node = self._node_client.address
            text = f"stream {request.stream_id}: node {node} sends, from offset {request.position} on, {error}"
            raise PageUnreadable(text) from error
        return LogPage(batches, reply.start, reply.position, reply.head, reply.is_closed)

    def _ask(self, method: str, request: Any, decode: Callable[[Any], _T], timeout_s: float) -> _T:
        wire = self._node_client.call(method, request, timeout_s)
        try:
            return decode(wire)
        except MalformedMessage as error:
            raise RetryableCallError(self._node_client.address, f"an answer that cannot be ({error})") from error

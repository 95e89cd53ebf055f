"""The machine of one subscription's connection to one leader; it is replaced, never repaired."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from sublet_borrower.machine.borrowed_streams import BorrowedStream, BorrowedStreams
from sublet_borrower.machine.events import (
    AssignmentUpdate,
    BorrowerEnded,
    BorrowerOutcome,
    Event,
    GroupFrontiersAdvanced,
    LeaderMessageReceived,
    LeaveRequested,
    NodeLost,
    ProgressReported,
    RevokeStarted,
    SavedProgress,
    Send,
    StreamGranted,
    StreamRemoved,
)
from sublet_borrower.machine.message_splitter import split_into_parts
from sublet_borrower.machine.transitions import (
    ACTIONS,
    ALLOWED_TRANSITIONS,
    BorrowedStreamStatus,
    BorrowerEventKind,
    BorrowerStatus,
)
from sublet_borrower.settings import BorrowerSettings
from sublet_protocol.messages.borrower_leader import (
    BorrowerEndReason,
    Disconnect,
    Grant,
    GrantEndOutcome,
    Invalidate,
    LeaderConnectResponse,
    LeaderWanted,
    Ping,
    PingResponse,
    ProgressSaved,
    Revoke,
    Revoked,
    RevokeFinished,
    ToLeader,
    UpdateProgress,
)
from sublet_protocol.tick import Tick

_KINDS: dict[type, BorrowerEventKind] = {
    PingResponse: BorrowerEventKind.PING_RESPONSE,
    Grant: BorrowerEventKind.GRANT,
    Revoke: BorrowerEventKind.REVOKE,
    Revoked: BorrowerEventKind.REVOKED,
    ProgressSaved: BorrowerEventKind.PROGRESS_SAVED,
    Invalidate: BorrowerEventKind.INVALIDATE,
    NodeLost: BorrowerEventKind.NODE_LOST,
    ProgressReported: BorrowerEventKind.SESSION_PROGRESS,
    LeaveRequested: BorrowerEventKind.UNSUBSCRIBE,
    Tick: BorrowerEventKind.TICK,
}


class SubscriptionRequest(Struct, frozen=True):
    """The parameters of a subscription, the same for every borrower made for it. See `LeaderWanted` for the fields."""

    subscription: str
    weight: float = 1.0
    session: str | None = None
    starting_position: str = "latest"
    session_epoch: int = 0


class InheritedState(Struct, frozen=True):
    """The state that a borrower takes over from its invalidated predecessor.

    `streams` have how long user calls may start under the predecessor's grants. `leave_deadline`: set for one that is
    made to leave.
    """

    group_id: int | None = None
    streams: tuple[BorrowedStream, ...] = ()
    leave_deadline: float | None = None
    predecessor: str | None = None
    leave_reason: str = ""


class _OutcomeBuilder(Struct):
    """An outcome in the making."""

    sends: list[Send] = field(default_factory=list)
    updates: list[AssignmentUpdate] = field(default_factory=list)
    ended: BorrowerEnded | None = None


class Borrower:
    """The pure machine of one subscription at one leader; see the package's docstring. `start` it once. Not
    thread-safe.
    """

    def __init__(
        self,
        borrower_id: str,
        request: SubscriptionRequest,
        settings: BorrowerSettings,
        successor_state: InheritedState | None = None,
        number: int = 0,
        holds_lock: bool = False,
    ) -> None:
        inherited = successor_state or InheritedState()
        self.borrower_id, self.request, self.settings, self.number = borrower_id, request, settings, number
        self.holds_lock = holds_lock
        self.status = BorrowerStatus.NEW
        self.group_id = inherited.group_id
        self.term = 0
        self.node: str | None = None
        self.streams = BorrowedStreams(inherited.streams)
        self.trusted_until = float("-inf")
        self._without: frozenset[tuple[int, int]] = frozenset()
        self._leave_deadline = inherited.leave_deadline
        self._predecessor, self._leave_reason = inherited.predecessor, inherited.leave_reason
        self._final_by: float | None = None
        self._ask_at = self._ping_at = self._report_at = self._disconnect_at = float("inf")
        self._lost_at, self._reported_at = float("inf"), float("-inf")
        self._is_disconnect_sent = False
        self._out = _OutcomeBuilder()

    # --- entry point ------------------------------------------------------------------------------------------------

    def start(self, now: float) -> BorrowerOutcome:
        """Look for the leader."""
        self._out = _OutcomeBuilder()
        self._move(BorrowerStatus.CONNECTING)
        self._ask(now)
        return self._outcome()

    def decide(self, event: Event, now: float) -> BorrowerOutcome:
        """Apply one event, and return the outcome. Messages for other borrowers or of another term than the leader's
        have no effect, nor has anything on one that has not begun or is over.
        """
        self._out = _OutcomeBuilder()
        row = ACTIONS.get(self.status)
        kind, item = self._classify(event)
        if row is not None and kind is not None:
            getattr(self, row[kind].value)(item, now)
        return self._outcome()

    def _outcome(self) -> BorrowerOutcome:
        return BorrowerOutcome(tuple(self._out.sends), tuple(self._out.updates), self._out.ended, self._wake_at())

    def successor_state(self) -> InheritedState:
        """Return what its successor is made with. A borrower that has disconnected may start nothing more: its streams
        may be granted to others."""
        streams = self.streams.inherit(self.trusted_until)
        if self._is_disconnect_sent:
            streams = tuple(replace(stream, inherited_until=float("-inf")) for stream in streams)
        return InheritedState(self.group_id, streams, self._leave_deadline, self.borrower_id, self._leave_reason)

    def may_start_call(self, stream_id: int, grant_id: int, now: float) -> bool:
        """Return whether a user call on this stream may begin now.

        Only while a leader would not yet have evicted this borrower; and a stream that its own leader has not confirmed
        may be worked on only as long as the predecessor's leader allowed.
        """
        stream = self.streams.find(stream_id, grant_id)
        if stream is None or stream.status is BorrowedStreamStatus.REVOKING:
            return False
        return self.may_continue(stream_id, grant_id, now)

    def may_continue(self, stream_id: int, grant_id: int, now: float) -> bool:
        """Return whether another user call may begin on messages given out already; also on a stream about to be
        revoked.

        Not after the disconnect: its receiver may give the stream to another.
        """
        if self.status is BorrowerStatus.DESTROYED or (
            self.status is BorrowerStatus.UNSUBSCRIBING and self._final_by is None
        ):
            return False
        stream = self.streams.find(stream_id, grant_id)
        return stream is not None and now < stream.good_until(self.trusted_until)

    def _classify(self, event: Event) -> tuple[BorrowerEventKind | None, object]:
        if not isinstance(event, LeaderMessageReceived):
            return _KINDS[type(event)], event
        message = event.message
        if message.borrower_id != self.borrower_id:
            return None, event
        if isinstance(message, LeaderConnectResponse):
            return BorrowerEventKind.CONNECT_RESPONSE, event
        # Only a node without a known leader sends under no term, and then only that this borrower is over.
        if self.term and message.term != self.term and not (isinstance(message, Invalidate) and message.term == 0):
            return None, event
        return _KINDS[type(message)], message

    def _wake_at(self) -> float | None:
        if self.status is BorrowerStatus.DESTROYED:
            return None
        bounds = [self._ask_at, self._ping_at, self._report_at, self._disconnect_at, self._lost_at]
        bounds += [at for at in (self._leave_deadline, self._final_by) if at is not None]
        soonest = min(bounds)
        return None if soonest == float("inf") else soonest

    def _move(self, status: BorrowerStatus) -> None:
        if status not in ALLOWED_TRANSITIONS[self.status]:
            raise AssertionError(f"{self.borrower_id}: {self.status} must not go to {status}; MOVES is the rule")
        self.status = status

    def _send(self, message: ToLeader) -> None:
        self._out.sends.append(Send(self.node, message))

    def _destroy(self, reason: BorrowerEndReason, detail: str) -> None:
        self._move(BorrowerStatus.DESTROYED)
        if self._leave_deadline is not None and reason is BorrowerEndReason.RETRY and not len(self.streams):
            reason = BorrowerEndReason.DONE
        self._out.ended = BorrowerEnded(reason, detail)

    # --- looking for a leader ---------------------------------------------------------------------------------------

    def _ignore(self, _: object, now: float) -> None:
        """Ignore an event that the table gives no effect here."""

    def _ask(self, now: float) -> None:
        w = self.request
        leaving = self._leave_deadline is not None
        *parts, last = tuple(split_into_parts(self.streams.held())) or ((),)
        fields = (self.borrower_id, w.subscription, self.group_id, w.weight, w.session, leaving, last)
        request = LeaderWanted(*fields, w.starting_position, self._predecessor, w.session_epoch, self.number)
        request = replace(request, lock_valid_s=self.settings.lock_valid_s * self.holds_lock)
        for message in (*(replace(request, reclaim=part, more=True) for part in parts), request):
            self._send(message)
        self._ask_at = now + self.settings.leader_lookup_interval_s

    def _retry_leader_wanted(self, _: object, now: float) -> None:
        if self._leave_deadline is not None and now >= self._leave_deadline:
            self._destroy(BorrowerEndReason.DONE, "no leader confirmed the last progress in time")
        elif now >= self._ask_at:
            self.node = None
            self._ask(now)

    def _try_other_node(self, event: object, now: float) -> None:
        assert isinstance(event, NodeLost)
        if self.node in (None, event.node):
            # Of a lost node soon, but not at once: others redirect to a dead leader until one has taken over.
            self.node = None
            pause_s = self.settings.leader_lookup_interval_s / 4 if event.node else 0.0
            self._ask_at = min(self._ask_at, now + pause_s)

    def _connect(self, event: object, now: float) -> None:
        assert isinstance(event, LeaderMessageReceived)
        answer = event.message
        assert isinstance(answer, LeaderConnectResponse)
        if answer.address:
            self.node = answer.address
            self._ask(now)
            return
        self.node, self.term, self.group_id = event.node, answer.term, answer.group_id
        self._ask_at = float("inf")
        self._lost_at = now + self.settings.ping_timeout_s
        self._ping(now)
        if self._leave_deadline is None:
            self._move(BorrowerStatus.CONNECTED)
            self._report_at = now + self.settings.resend_interval_s
        else:
            self._start_leaving(now)

    def _confirm_connected(self, event: object, now: float) -> None:
        assert isinstance(event, LeaderMessageReceived)
        answer = event.message
        assert isinstance(answer, LeaderConnectResponse)
        if not answer.address and answer.term > self.term:
            self._destroy(BorrowerEndReason.RETRY, f"term {answer.term} answered while connected under {self.term}")

    # --- keeping in touch -------------------------------------------------------------------------------------------

    def _ping(self, now: float) -> None:
        self._send(Ping((self.borrower_id,), now))
        self._ping_at = now + self.settings.ping_interval_s

    def _accept_ping_response(self, message: object, now: float) -> None:
        assert isinstance(message, PingResponse)
        # What counts is when the ping was sent: the leader may have answered long before the reply got here.
        sent_at = min(message.sent_at, now)
        self._lost_at = max(self._lost_at, sent_at + self.settings.ping_timeout_s)
        self._without = frozenset(message.without)
        for stream in self.streams:
            if (stream.stream_id, stream.grant_id) in self._without:
                stream.ends_at = min(stream.ends_at, self.trusted_until)
        self.trusted_until = max(self.trusted_until, sent_at + message.valid_for_s)
        if message.epochs:
            self._out.updates.append(GroupFrontiersAdvanced(message.epochs))

    def _ping_and_resend(self, _: object, now: float) -> None:
        if now >= self._lost_at:
            self._destroy(BorrowerEndReason.RETRY, f"no ping answered within {self.settings.ping_timeout_s} s")
            return
        if now >= self._ping_at:
            self._ping(now)
        if now >= self._report_at:
            self._report(now)

    def _lose_leader(self, event: object, now: float) -> None:
        assert isinstance(event, NodeLost)
        if event.node == self.node:
            self._destroy(BorrowerEndReason.RETRY, f"the connection to {event.node} is dead")

    def _end(self, message: object, now: float) -> None:
        assert isinstance(message, Invalidate)
        if message.reason is BorrowerEndReason.FENCED:
            # The receiver need not wait until the right to begin calls is over. The sender may be another node than
            # the leader, for which this borrower is a member with calls under way.
            self._send_final_progress(message.detail)
        self._destroy(message.reason, message.detail)

    # --- streams ----------------------------------------------------------------------------------------------------

    def _add_stream(self, grant: object, now: float) -> None:
        assert isinstance(grant, Grant)
        if self.streams.is_grant_ended(grant.stream_id, grant.grant_id):
            self._refuse(grant.stream_id, grant.grant_id)
            return
        held = self.streams.find_any_grant(grant.stream_id)
        if held is not None and held.grant_id > grant.grant_id:
            return
        if held is not None and held.grant_id == grant.grant_id:
            held.is_confirmed = True
            self._update(now, (held,))
            return
        if held is not None:
            self._forget(held.stream_id, held.grant_id, GrantEndOutcome.LOST)
        stream = self.streams.add(grant)
        if (grant.stream_id, grant.grant_id) in self._without:
            stream.ends_at = float("-inf")
        self._out.updates.append(StreamGranted(grant))
        self._update(now, (stream,))

    def _stop_stream(self, revoke: object, now: float) -> None:
        assert isinstance(revoke, Revoke)
        stream = self.streams.find(revoke.stream_id, revoke.grant_id)
        if stream is None:
            self._forget_older(revoke.stream_id, revoke.grant_id)
            self._refuse(revoke.stream_id, revoke.grant_id)
        elif stream.status is BorrowedStreamStatus.GRANTED:
            stream.is_confirmed = True
            self._stop(stream)
        elif stream.is_final:
            self._update(now, (stream,))

    def _drop_stream(self, revoked: object, now: float) -> None:
        assert isinstance(revoked, Revoked)
        self._forget_older(revoked.stream_id, revoked.grant_id)
        self._forget(revoked.stream_id, revoked.grant_id, revoked.reason)
        self._refuse(revoked.stream_id, revoked.grant_id)

    def _forget_older(self, stream_id: int, grant_id: int) -> None:
        """Note from a message about a newer grant that the grant held here is over."""
        held = self.streams.find_any_grant(stream_id)
        if held is not None and held.grant_id < grant_id:
            self._forget(stream_id, held.grant_id, GrantEndOutcome.LOST)

    def _forget(self, stream_id: int, grant_id: int, reason: GrantEndOutcome) -> None:
        if self.streams.drop(stream_id, grant_id) is not None:
            self._out.updates.append(StreamRemoved(stream_id, grant_id, reason))

    def _refuse(self, stream_id: int, grant_id: int) -> None:
        self.streams.drop(stream_id, grant_id)
        self._send(RevokeFinished(self.borrower_id, self.term, stream_id, grant_id))

    # --- progress ---------------------------------------------------------------------------------------------------

    def _record_progress(self, event: object, now: float) -> BorrowedStream | None:
        """Record the progress; return the stream, None if it is not held, or has no news."""
        assert isinstance(event, ProgressReported)
        stream = self.streams.find(event.stream_id, event.grant_id)
        if stream is None or not stream.record_progress(event):
            return None
        stream.send_at = now
        return stream

    def _report_progress(self, event: object, now: float) -> None:
        stream = self._record_progress(event, now)
        if stream is None or not stream.is_confirmed:
            return
        awaited = stream.is_final or stream.in_doubt not in (None, stream.saved_in_doubt)
        awaited |= stream.read_error != stream.sent_read_error
        if awaited or now >= self._reported_at + self.settings.progress_interval_s:
            self._update(now, (stream,))
        else:
            self._report_at = min(self._report_at, self._reported_at + self.settings.progress_interval_s)

    def _update(self, now: float, streams: Sequence[BorrowedStream]) -> None:
        self._reported_at = now
        for stream in streams:
            stream.sent_read_error, stream.send_at = stream.read_error, now + self.settings.resend_interval_s
        for part in split_into_parts(s.to_progress() for s in streams):
            self._send(UpdateProgress(self.borrower_id, self.term, part))
        self._report_at = min(self._report_at, now + self.settings.resend_interval_s)

    def _report(self, now: float) -> None:
        """Send what moved since it was last sent, and what was sent a while ago and never confirmed; also what the
        leader has not mentioned, which it will confirm or report as lost."""
        unsaved = [s for s in self.streams if not s.is_settled]
        later = (s.send_at for s in unsaved if s.send_at > now)
        self._report_at = min(later, default=now + self.settings.resend_interval_s)
        if due := [s for s in unsaved if s.send_at <= now]:
            self._update(now, due)

    def _mark_saved(self, message: object, now: float) -> None:
        assert isinstance(message, ProgressSaved)
        stream = self.streams.find(message.stream_id, message.grant_id)
        if stream is not None and stream.mark_saved(message.position, message.consumed, message.in_doubt):
            stream.is_confirmed = True
            m = message
            self._out.updates.append(SavedProgress(m.stream_id, m.grant_id, m.position, m.in_doubt, m.consumed))

    # --- leaving ----------------------------------------------------------------------------------------------------

    def _leave(self, unsubscribe: object, now: float) -> None:
        assert isinstance(unsubscribe, LeaveRequested)
        self._leave_reason = unsubscribe.reason
        self._leave_deadline = now + self.settings.unsubscribe_timeout_s + self.settings.disconnect_timeout_s
        self._start_leaving(now)

    def _leave_unconnected(self, unsubscribe: object, now: float) -> None:
        """Leave before a leader has answered: look for it on as long as there are streams to hand over; else
        disconnect, as it may be granting some to this borrower, and end."""
        assert isinstance(unsubscribe, LeaveRequested)
        if self._leave_deadline is not None:
            return
        self._leave_reason = unsubscribe.reason
        self._leave_deadline = now + self.settings.unsubscribe_timeout_s + self.settings.disconnect_timeout_s
        if len(self.streams):
            self._stop_all()
            self._ask(now)
        else:
            self._send(Disconnect(self.borrower_id, 0, ()))
            self._destroy(BorrowerEndReason.DONE, "left before a leader was found")

    def _start_leaving(self, now: float) -> None:
        self._move(BorrowerStatus.UNSUBSCRIBING)
        self._report_at = float("inf")
        self._final_by = now + self.settings.unsubscribe_timeout_s
        self._stop_all()
        self._disconnect(now)

    def _stop_all(self) -> None:
        for stream in self.streams:
            self._stop(stream)

    def _stop(self, stream: BorrowedStream) -> None:
        """Hand the stream over."""
        stream.status = BorrowedStreamStatus.REVOKING
        if not stream.is_final:
            self._out.updates.append(RevokeStarted(stream.stream_id, stream.grant_id))

    def _collect_final(self, event: object, now: float) -> None:
        self._record_progress(event, now)
        self._disconnect(now)

    def _disconnect(self, now: float) -> None:
        """Report all final progress once that of every stream is known or the time is over; repeat it until it is
        confirmed.
        """
        complete = all(s.is_final for s in self.streams)
        if not complete and self._final_by is not None and now < self._final_by:
            return
        self._send_final_progress(self._leave_reason)
        self._final_by, self._disconnect_at = None, now + self.settings.resend_interval_s
        self._is_disconnect_sent = True

    def _send_final_progress(self, reason: str) -> None:
        *parts, last = tuple(split_into_parts(stream.to_final_progress() for stream in self.streams)) or ((),)
        disconnect = Disconnect(self.borrower_id, self.term, last, reason)
        for message in (*(replace(disconnect, streams=part, more=True) for part in parts), disconnect):
            self._send(message)

    def _send_disconnect(self, _: object, now: float) -> None:
        assert self._leave_deadline is not None
        if now >= self._leave_deadline:
            self._destroy(BorrowerEndReason.DONE, "the leader did not confirm the last progress in time")
            return
        if now >= self._lost_at:
            self._destroy(BorrowerEndReason.RETRY, f"no ping answered within {self.settings.ping_timeout_s} s")
            return
        if now >= self._ping_at:
            self._ping(now)
        due = self._final_by if self._final_by is not None else self._disconnect_at
        if now >= due:
            self._disconnect(now)

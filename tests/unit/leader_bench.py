"""A group's leader on a bench: the machine, the memory twin as its database, a clock that only tests move."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from msgspec.structs import replace

from sublet_leader.group.events import (
    BorrowerMessageReceived,
    Event,
    ForcedRevokeRequested,
    GroupOutcome,
    WritesCommitted,
    WritesNotCommitted,
)
from sublet_leader.group.machine import GroupLeader
from sublet_leader.group.stream_table import StreamAssignment
from sublet_leader.settings import LeaderSettings
from sublet_protocol.domain.in_doubt_range import InDoubtRange
from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.messages.borrower_leader import (
    BorrowerEndReason,
    Disconnect,
    GrantEndOutcome,
    HeldGrant,
    Invalidate,
    LeaderWanted,
    Revoked,
    RevokeFinished,
    StreamProgress,
    ToBorrower,
    ToLeader,
    UpdateProgress,
)
from sublet_protocol.tick import Tick
from sublet_storage.groups.model.lending_row import LendingRow
from sublet_storage.groups.model.records import (
    GroupOptions,
    GroupWrites,
    HistoryRecord,
    LendingChange,
    LendingStatus,
    StartingPosition,
)
from sublet_storage.node_directory import NodeIncarnation
from tests.support.memory_store.catalogue import MemoryCatalogue
from tests.support.memory_store.groups import MemoryGroupStore

EPOCH_US = 1_700_000_000_000_000
SUBSCRIPTION = Subscription.parse("$share/bench/#")
AGENT, BORROWER = "a", "a/1"
HEAD = 100
HOLD_S = 60.0
"""For how long what a session has planned is reserved for it."""

M = TypeVar("M")


class Bench:
    """One group of `shards` streams with `HEAD` messages each. What the leader wants written waits for `commit`."""

    def __init__(
        self, shards: int = 1, settings: LeaderSettings | None = None, options: GroupOptions | None = None
    ) -> None:
        self.now = 0.0
        self.settings = settings or LeaderSettings()
        self.streams = MemoryCatalogue()
        self.streams.add_space(shards=shards)
        self.store = MemoryGroupStore(self.streams, lambda: EPOCH_US + round(self.now * 1_000_000))
        for stream_id in self.streams.streams:
            self.streams.append(stream_id, HEAD)
        self.group = self.store.declare_group(SUBSCRIPTION, options or GroupOptions(StartingPosition.EARLIEST))
        self._lives, self.term = 0, 0
        self.ref = NodeIncarnation("n", "n#0", "n:1")
        self.lead()

    def lead(self, previous_leader_until: float = float("-inf")) -> None:
        """A leader under a new term; what the one before it had not written is lost."""
        if self._lives:
            self.store.release(self.ref, {self.group.group_id: self.term})
        self._lives += 1
        self.ref = NodeIncarnation("n", f"n#{self._lives}", "n:1")
        self.term = self.store.claim(self.group.group_id, self.ref, 1e6).term
        rows = self.store.load(self.group.group_id, self.term)
        self.leader = GroupLeader(self.group, self.term, rows, self.settings, self.now, previous_leader_until)
        self.entries: list[LendingChange] = []
        self.renew = False
        self.sent: list[tuple[str, ToBorrower]] = []
        self.wake_at = self.now
        self.stopped: str | None = None
        self.stories: list[str] = []
        self.reported: list[HistoryRecord] = []
        self.give(Tick())
        self.settle()

    # --- in ---------------------------------------------------------------------------------------------------------

    def give(self, event: Event) -> GroupOutcome:
        """One event; what comes of it is kept."""
        outcome = self.leader.decide(event, self.now)
        self.entries += outcome.changes
        self.renew = self.renew or outcome.needs_stream_sync
        self.sent += outcome.sends
        self.stopped = self.stopped or outcome.stop_reason
        self.stories += outcome.invariant_violations
        self.reported += outcome.history
        self.wake_at = self.now + 1.0 if outcome.wake_at is None else outcome.wake_at
        return outcome

    def receive(self, message: ToLeader, agent: str = AGENT) -> None:
        """A message comes in."""
        self.give(BorrowerMessageReceived(agent, message))

    def write(self) -> WritesCommitted:
        """Write what waits, in one transaction; the answer is still on its way."""
        writes = GroupWrites(self.group.group_id, self.term, tuple(self.entries), self.renew)
        self.entries, self.renew = [], False
        return WritesCommitted(self.store.commit([writes])[0])

    def commit(self) -> None:
        """Write what waits, and bring the answer."""
        self.give(self.write())

    def fail(self) -> None:
        """The transaction did not happen."""
        lost, self.entries, self.renew = tuple(self.entries), [], False
        self.give(WritesNotCommitted(GroupWrites(self.group.group_id, self.term, lost)))

    def settle(self) -> None:
        """Commit until nothing waits."""
        while self.entries or self.renew:
            self.commit()

    def tick(self, seconds: float = 0.0) -> None:
        """Let time pass in one step."""
        self.now += seconds
        self.give(Tick())

    def pass_time(self, seconds: float, *pinging: str) -> None:
        """Let time pass, waking the leader when it wants to be woken, writing at once; `pinging` borrowers stay."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, max(self.wake_at, self.now + 0.0005))
            for borrower_id in pinging:
                member = self.leader.members.get(borrower_id)
                if member is not None:
                    member.last_message_at = self.now
            self.give(Tick())
            self.settle()

    def debounce(self) -> None:
        """Let the debounce end; what is decided then is not written yet."""
        self.tick(self.settings.rebalance_debounce_s)

    def share(self, *pinging: str) -> None:
        """Let the debounce end, and write what is decided then."""
        self.pass_time(self.settings.rebalance_debounce_s + 0.01, *pinging)

    def evict(self) -> None:
        """Let so much time pass in one step that whoever is silent is put out."""
        self.tick(self.settings.eviction_timeout_s + 1)

    # --- what borrowers say -----------------------------------------------------------------------------------------

    def join(self, borrower_id: str = BORROWER, agent: str | None = None, **wanted: object) -> None:
        """Ask for the leader; nobody waits for the streams yet."""
        asker = agent or borrower_id.partition("/")[0]
        message = LeaderWanted(borrower_id, str(SUBSCRIPTION))
        self.receive(replace(message, **wanted), asker)

    def joined(self, *borrower_ids: str) -> None:
        """Join and get streams, which are written but not yet confirmed."""
        for borrower_id in borrower_ids or (BORROWER,):
            self.join(borrower_id)
        self.share()

    def named(self, borrower_id: str, name: str, epoch: int = 1) -> None:
        """A process of that name joins and gets what there is for it."""
        self.join(borrower_id, session=name, session_epoch=epoch)
        self.share(borrower_id)
        self.confirm()

    def report(self, *reported: StreamProgress, borrower_id: str = BORROWER) -> None:
        """`update_progress`."""
        self.receive(UpdateProgress(borrower_id, self.term, reported), borrower_id.partition("/")[0])

    def progress(
        self, position: int, stream_id: int = 1, *, final: bool = False, borrower_id: str = BORROWER, **more: object
    ) -> None:
        """Progress under the grant in force."""
        self.report(self.said(position, stream_id, final=final, **more), borrower_id=borrower_id)

    def plan(self, borrower_id: str = BORROWER) -> InDoubtRange:
        """Its session plans a part of its stream, which is in doubt from then on."""
        doubt = InDoubtRange(self.grant_id(), 2, 5, HOLD_S)
        self.progress(2, borrower_id=borrower_id, in_doubt=doubt)
        return doubt

    def save(self, position: int, stream_id: int = 1, *, final: bool = False, borrower_id: str = BORROWER) -> None:
        """Progress that is written."""
        self.progress(position, stream_id, final=final, borrower_id=borrower_id)
        self.settle()

    def confirm(self) -> None:
        """Every granted stream's borrower says that it has it."""
        for entry in self.leader.streams:
            if entry.assignment is not None:
                row = entry.lending
                self.progress(row.position, row.stream_id, borrower_id=entry.assignment.borrower_id)
        self.settle()

    def finished(self, stream_id: int = 1, grant_id: int | None = None, borrower_id: str = BORROWER) -> None:
        """`revoke_finished`."""
        grant = self.grant_id(stream_id) if grant_id is None else grant_id
        self.receive(RevokeFinished(borrower_id, self.term, stream_id, grant), borrower_id.partition("/")[0])

    def leave(self, *positions: StreamProgress, borrower_id: str = BORROWER) -> None:
        """`disconnect`."""
        self.receive(Disconnect(borrower_id, self.term, positions), borrower_id.partition("/")[0])

    def hand_over(self, borrower_id: str = BORROWER) -> None:
        """Leave with everything where it stands, which is written."""
        rows = [self.row(stream_id) for stream_id in self.streams_of(borrower_id)]
        self.leave(*(self.said(row.position, row.stream_id) for row in rows), borrower_id=borrower_id)
        self.settle()

    def revoke(self, *stream_ids: int) -> None:
        """An operator takes streams back."""
        self.give(ForcedRevokeRequested(stream_ids or (1,), "operator"))

    # --- what is seen -----------------------------------------------------------------------------------------------

    def row(self, stream_id: int = 1) -> LendingRow:
        """The row as the database has it."""
        return self.store.rows(self.group.group_id)[stream_id]

    def change_row(self, stream_id: int = 1, **values: object) -> None:
        """Somebody else changes the row: an operator, a reset."""
        life = self.store._lives[self.group.group_id]
        life.rows[stream_id] = dataclasses.replace(life.rows[stream_id], **values)  # type: ignore[arg-type]

    def grant_id(self, stream_id: int = 1) -> int:
        """The grant id in force."""
        return self.row(stream_id).grant_id

    def assignment(self, stream_id: int = 1) -> StreamAssignment | None:
        """Who has it, as the leader sees it."""
        entry = self.leader.streams.get(stream_id)
        return entry.assignment if entry else None

    def received(self, kind: type[M], agent: str | None = None) -> list[M]:
        """Messages of one type sent (to that agent) since the last look at any."""
        said: list[object] = [m for to, m in self.sent if agent in (None, to)]
        self.sent.clear()
        return [m for m in said if isinstance(m, kind)]

    def ends(self) -> list[BorrowerEndReason]:
        """Why borrowers were ended, since the last look at any message."""
        return [message.reason for message in self.received(Invalidate)]

    def losses(self) -> list[GrantEndOutcome]:
        """Why streams were said to be gone, since the last look at any message."""
        return [message.reason for message in self.received(Revoked)]

    def holders(self) -> dict[int, str | None]:
        """Who holds what, by the rows."""
        rows = self.store.rows(self.group.group_id).values()
        return {row.stream_id: row.borrower_id for row in rows if row.status is LendingStatus.HELD}

    def streams_of(self, borrower_id: str) -> set[int]:
        return {stream_id for stream_id, holder in self.holders().items() if holder == borrower_id}

    def history(self, *events: str) -> list[HistoryRecord]:
        """The lines of history of these events, or all."""
        return [line for line in self.store.history(self.group.group_id) if not events or line.event in events]

    def forced(self) -> list[HistoryRecord]:
        """The moves of the history after which messages may be seen twice."""
        return [line for line in self.history() if line.is_forced]

    def held(self, stream_id: int = 1, position: int = 0) -> HeldGrant:
        """What a successor would reclaim."""
        return HeldGrant(stream_id, self.grant_id(stream_id), position)

    def said(self, position: int, stream_id: int = 1, *, final: bool = True, **more: object) -> StreamProgress:
        """Progress under the grant in force, final as for `leave`."""
        return replace(StreamProgress(stream_id, self.grant_id(stream_id), position, final), **more)


def unwritten() -> Bench:
    """A borrower has joined, and the grant of its stream is decided and not written yet."""
    bench = Bench()
    bench.join()
    bench.debounce()
    return bench


def granted(shards: int = 1, *borrower_ids: str, options: GroupOptions | None = None) -> Bench:
    """All streams are granted to these borrowers, who have confirmed them; what was sent until then is put away."""
    bench = Bench(shards, options=options)
    bench.joined(*borrower_ids)
    bench.confirm()
    bench.sent.clear()
    return bench

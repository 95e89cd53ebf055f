"""What must be true whatever happens, judged from outside: from what users did and what the store answered.

Each module looks at one thing and knows nothing of the code that it judges: `authority` (terms, grant ids, positions),
`deliveries` (what users got, in which order and how often, and what they wrote in their own transactions), `epochs`
(what atomic groups got, and how far they say that they are), `record` (lending_history), `names` (stable sessions),
`rest` (how it all must end). `lives` is the memory of the groups that they share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from sublet_borrower.machine.events import ProgressReported
from sublet_leader.node.events import NodeOutcome
from sublet_protocol.domain.subscriptions import StartingPosition
from sublet_storage.groups.admin.progress_transfer import ExportedProgress
from sublet_storage.groups.model.lending_row import LendingRow
from sublet_storage.groups.model.records import (
    GrantStream,
    Group,
    GroupWriteResult,
    GroupWrites,
    Leadership,
    LendingChangeResult,
    LendingOutcome,
    LendingStatus,
    ReleaseStream,
)
from tests.simulation.checkers.authority import Authority
from tests.simulation.checkers.deliveries import Deliveries, Transactions
from tests.simulation.checkers.epochs import Epochs
from tests.simulation.checkers.lives import Continued, Life, Lives, Violation
from tests.simulation.checkers.names import Names
from tests.simulation.checkers.record import Record

if TYPE_CHECKING:
    from tests.simulation.processes import SimulatedNode
    from tests.simulation.sessions import Work
    from tests.simulation.simulation import Simulation

__all__ = ["Checkers", "Life", "Violation"]


class Checkers:
    """Fed while the world runs, and asked at its end. Every method of theirs may raise `Violation`."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.lives = Lives(simulation.world, simulation.streams, simulation.journal)
        self.record = Record(simulation.world, simulation.store, self.lives)
        self.authority = Authority(simulation, self.lives)
        self.epochs = Epochs(simulation, self.lives, self.record)
        self.deliveries = Deliveries(simulation, self.lives, self.record, self.epochs)
        self.names = Names(simulation, self.lives)
        self.transactions = Transactions(self.deliveries)

    # --- the database -----------------------------------------------------------------------------------------------

    def opened(self, group: Group, before: Group | None = None, progress: ExportedProgress | None = None) -> None:
        """A group was opened or declared, perhaps for the first time; or imported, with what `before` had."""
        rows = self._simulation.store.rows(group.group_id)
        continued = None if before is None or progress is None else self._continued(before, progress)
        if self.lives.opened(group, rows, continued) and group.options.atomic:
            self.epochs.opened(group, rows, before)

    def _continued(self, before: Group, progress: ExportedProgress) -> Continued:
        """Who goes on from an export wants what the group before wanted: no export is further than its users were, and
        a stream that it leaves out was consumed, or wanted by nobody, or comes from its beginning."""
        life, places = self.lives[before.group_id], {place.stream_id: place.position for place in progress.positions}
        over = set()
        for stream_id, stream in self._simulation.streams.streams.items():
            missing = self.deliveries.first_missing(before.group_id, stream_id)
            if missing is not None and places.get(stream_id, 0) > missing:
                raise Violation(
                    f"{before} is exported at {places[stream_id]} of stream {stream_id}, and {missing} lost"
                )
            if life.start(stream_id) is None or (stream.closed and missing is None and stream_id not in places):
                over.add(stream_id)
        return Continued(places, frozenset(over))

    def deleted(self, group_id: int) -> None:
        self.lives.deleted(group_id)
        self.record.deleted(group_id)

    def was_reset(
        self, group: Group, rows: Mapping[int, LendingRow], moves: Mapping[int, int], taken: Iterable[int]
    ) -> None:
        """An operator has set these streams of it to these positions, and taken those back from whoever had them."""
        for stream_id, position in moves.items():
            if rows[stream_id].position != position:
                raise Violation(f"{group} was reset, stream {stream_id} to {position}, but is at {rows[stream_id]}")
        streams = self._simulation.streams.streams
        deleted = {s: each.head for s, each in streams.items() if each.generation.deleted and group.options.atomic}
        self.lives.was_reset(group, {**deleted, **moves})  # it begins anew, and what is no more does not come again
        self.record.read_on()
        for stream_id in taken:
            self.authority.was_seized((group.group_id, stream_id))
            self.names.was_taken_back((group.group_id, stream_id))
        for stream_id, position in moves.items():
            at = group.group_id, stream_id
            self.authority.was_reset(at, position)
            self.deliveries.was_reset(at, position, rows[stream_id].grant_id)
            self.transactions.was_reset(at, position)
        if group.options.atomic:
            self.epochs.was_reset(group, rows)

    def retired(self, generation_id: int) -> None:
        """Retention has taken it, by its age: no group that is waited for had anything of it to come."""
        for life in self.lives.live():
            if life.group.subscription.kind == "queue" and (unread := self.unread(life, generation_id)):
                raise Violation(f"retention takes {unread}, which {life.group} has not consumed")

    def unread(self, life: Life, generation_id: int) -> list[int]:
        """The streams of which the group wants more."""
        own = self._simulation.streams.generations[generation_id].stream_ids
        wanted = [stream_id for stream_id in own if life.start(stream_id) is not None]
        return [each for each in wanted if not self.deliveries.is_consumed(life.group.group_id, each)]

    def compacted(self, stream_id: int) -> None:
        """Blocks were merged: a window by time is what publishers know it to be, for each time there is."""
        stream, journal = self._simulation.streams.streams[stream_id], self._simulation.journal
        for at_us in {at_us + by for _, at_us in journal.appended[stream_id] for by in (0, 1)}:
            begins, wanted = stream.position_of(StartingPosition("time", at_us)), journal.since(stream_id, at_us)
            if begins != wanted:
                raise Violation(f"stream {stream_id} from {at_us} on begins at {begins}, once merged, not at {wanted}")

    def saved(self) -> tuple[Any, ...]:
        """What they know of the database, as a standby has it."""
        output = self.deliveries.saved(), self.transactions.saved(), self.epochs.saved()
        return self.lives.saved(), self.record.saved(), self.authority.saved(), self.names.saved(), output

    def failed_over(self, saved: tuple[Any, ...], fenced: bool) -> None:
        """The database is as it was then, and its streams are; `fenced`: with its timeline every term is over."""
        lives, record, authority, names, (deliveries, transactions, epochs) = saved
        self.lives.failed_over(lives)
        self.record.failed_over(record, fenced)
        self.authority.failed_over(authority)
        self.names.failed_over(names, fenced)
        self.deliveries.failed_over(deliveries, fenced)
        self.transactions.failed_over(transactions)
        self.epochs.failed_over(epochs)

    def live_groups(self) -> list[Group]:
        return [life.group for life in self.lives.live()]

    def claimed(self, before: Leadership | None, claim: Leadership) -> None:
        """Somebody asked to lead; that is what the row said before and says now."""
        self.record.claimed(before, claim)

    def committed(self, batch: Sequence[GroupWrites], results: Sequence[GroupWriteResult]) -> None:
        """A transaction of a leader, or of an operator's hand, with its answers."""
        results = [replace(each, results=tuple(chain.from_iterable(map(_steps, each.results)))) for each in results]
        self.authority.committed(batch, results)
        for writes, result in zip(batch, results, strict=True):
            for answer in result.results:
                self.names.answered(writes.group_id, answer)
                row = answer.lending
                if (
                    isinstance(answer.change, GrantStream)
                    and answer.outcome is LendingOutcome.APPLIED
                    and row is not None
                ):
                    self.deliveries.order.check_grant((writes.group_id, row.stream_id), row.grant_id)
        self.record.read_on()
        for result in results:
            self.epochs.committed(result)
            for row in result.synced:
                self.names.read(result.group_id, row)
            rows = {a.lending.stream_id: a.lending for a in result.results if a.lending is not None}
            rows |= {row.stream_id: row for row in result.synced}  # the renewal came after the entries
            self.record.compare(result.group_id, rows.values())

    # --- processes --------------------------------------------------------------------------------------------------

    def node_acted(self, node: SimulatedNode, outcome: NodeOutcome) -> None:
        if outcome.invariant_violations:
            raise Violation("\n".join(outcome.invariant_violations))
        self.record.reported(outcome.history)
        self.authority.node_acted(node)

    def reported(self, work: Work, reported: ProgressReported) -> None:
        """A session says how far it is under this grant."""
        self.authority.reported(work)
        self.epochs.reported(work, reported)

    def removed(self, work: Work, lost: bool) -> None:
        """A stream taken off a session that had not finished is a loss that is reported to it."""
        if work.busy and not lost:
            raise Violation(f"{work} was taken off in the middle of a call, and not called lost")


def _steps(answer: LendingChangeResult) -> tuple[LendingChangeResult, ...]:
    """Return an answer as those of two changes, where a release has granted its stream to another: what holds for one
    after the other holds for both in one transaction."""
    change, row = answer.change, answer.lending
    if not isinstance(change, ReleaseStream) or change.successor is None or row is None:
        return (answer,)
    if answer.outcome is not LendingOutcome.APPLIED or row.status is not LendingStatus.HELD:
        return (answer,)
    nobody = {"borrower_id": None, "agent": None, "session": None, "session_epoch": None, "grant_key": None}
    free = replace(row, status=LendingStatus.FREE, grant_id=row.grant_id - 1, **nobody)
    return replace(answer, lending=free), replace(answer, change=change.successor)

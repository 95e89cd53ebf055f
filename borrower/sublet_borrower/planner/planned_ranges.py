"""The planned ranges of a stream: their status, and how far the stream has come."""

from __future__ import annotations

from enum import Enum

from msgspec import Struct

from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier
from sublet_protocol.domain.errors import PoisonBlock, PositionBeyondHead
from sublet_protocol.domain.in_doubt_range import InDoubtRange
from sublet_protocol.messages.borrower_leader import Grant
from sublet_storage.groups.consumer_progress import LastPlannedRange
from sublet_storage.readers.epoch_steps import EpochStep, EpochStepPlanner


class PlannedRange(Struct, frozen=True):
    """Messages [start, end) of a stream, planned under `grant_id`, as stored in a checkpoint.

    `consumed_frontier`: in an atomic group, the epochs that are consumed once the range is. The range then has messages
    behind `end` as well, and not all of those before it.
    """

    stream_id: int
    grant_id: int
    start: int
    end: int
    consumed_frontier: ConsumedFrontier | None = None

    @classmethod
    def from_in_doubt(cls, stream_id: int, doubt: InDoubtRange) -> PlannedRange:
        """Return the range that the lending row has in doubt."""
        return cls(stream_id, doubt.grant_id, doubt.start, doubt.end, doubt.consumed)

    def matches(self, doubt: InDoubtRange) -> bool:
        """Return whether this is the range that the lending row has in doubt."""
        return PlannedRange.from_in_doubt(self.stream_id, doubt) == self

    @property
    def cut(self) -> InDoubtRange:
        """Return the row's entry of a range put off to a later batch: empty, at the start, so not in doubt or done."""
        return InDoubtRange(self.grant_id, self.start, self.start, 0.0)

    def is_put_off(self, doubt: InDoubtRange) -> bool:
        """Return whether the lending row's entry says that this range was put off to a later batch."""
        return doubt == self.cut

    def is_passed(self, position: int, consumed: ConsumedFrontier | None) -> bool:
        """Return whether the group's progress has passed the range."""
        return not InDoubtRange(self.grant_id, self.start, self.end, 0.0, self.consumed_frontier).is_pending(
            position, consumed
        )

    def was_done_under(self, reached: int, is_finished: bool) -> bool:
        """Return whether the range's grant, which has ended, ended behind the range.

        For entire epochs that is known only at the end of a stream.
        """
        return is_finished or (self.consumed_frontier is None and reached >= self.end)

    def is_superseded_by(self, last: LastPlannedRange) -> bool:
        """Return whether `last`, which the session has planned of the stream since, is a later range that is done. Of
        an atomic group, whose ranges overlap, that is not known.
        """
        return last.is_done and last.in_doubt.start >= self.end and self.consumed_frontier is None


class PlannedRangeStatus(Enum):
    """The status of a range that was started, from the group's rows. Only an open one can come back with a grant."""

    OPEN = "open"  # reserved for its session, or held by it: it comes back, or is reported as done
    DONE = "done"  # progress has passed it
    PUT_OFF = "put off"  # it has a block that cannot be decoded: what lies before that comes in a later batch
    LOST = "lost"  # something else was planned after it, or another member has it, or may get it


def resolve_outcome(planned: PlannedRange, last: LastPlannedRange | None) -> PlannedRangeStatus:
    """Return the status of a started range; `last`: what was planned last of the stream, if that was the session's."""
    if last is not None and planned.is_put_off(last.in_doubt):
        return PlannedRangeStatus.PUT_OFF
    if last is None or not planned.matches(last.in_doubt) or (last.is_pending and not last.is_ours):
        return PlannedRangeStatus.LOST
    return PlannedRangeStatus.OPEN if last.is_pending else PlannedRangeStatus.DONE


class RunnablePlannedRange(Struct, frozen=True):
    """Messages that may be started: those planned from `position` on that match the filter; in an atomic group those of
    the step. `grant_id`: under which the stream is held now.
    """

    planned: PlannedRange
    grant_id: int
    position: int
    generation_id: int
    filter: str
    step: EpochStep | None = None


class PlanLimits(Struct, frozen=True):
    """The maximum of a plan: messages, and bytes as they are stored, approximately. None: no limit."""

    max_messages: int | None = None
    max_bytes: int | None = None


class PlannerStream(Struct, eq=False):
    """A stream under one grant. `head`: where it ended when last looked at; None: not looked at yet. `has_head_hint`: a
    later head was hinted at since. `plannable_end`: up to where may be planned now.

    `in_doubt`: what is planned and not acknowledged. `is_plan_saved`: whether that is durable. `released_in_doubt`: it
    was planned under an earlier grant, and is not settled yet. `last_planned_turn`: when it was planned of last.

    `step_planner`: in a group that is atomic, what is known of its epochs. `step`: what of them is planned; None: it is
    not known yet, of what was planned under an earlier grant. `goal`: what a finite plan consumes of them; None: the
    stream was not looked at yet. `space_id`: of its space, once it was looked at to its head; None: not yet, or it
    could not be. `is_gone`: retention has taken what comes next.

    `poison`: a block that cannot be decoded; nothing is planned behind where it begins. `beyond_head`: the stream was
    found to end before what is planned of it. `is_at_end`: nor is anything left before that, so that the stream is
    handed back.
    """

    grant: Grant
    position: int
    head: int | None = None
    has_head_hint: bool = False
    plannable_end: int = 0
    in_doubt: InDoubtRange | None = None
    is_plan_saved: bool = False
    released_in_doubt: InDoubtRange | None = None
    is_stopping: bool = False
    last_planned_turn: int = 0
    step_planner: EpochStepPlanner | None = None
    step: EpochStep | None = None
    goal: ConsumedFrontier | None = None
    space_id: int | None = None
    is_gone: bool = False
    poison: PoisonBlock | None = None
    beyond_head: PositionBeyondHead | None = None
    is_at_end: bool = False

    @property
    def is_idle(self) -> bool:
        """Return whether nothing is planned of it."""
        return self.in_doubt is None and self.released_in_doubt is None

    @property
    def may_be_planned(self) -> bool:
        """Return whether nothing is planned of it, and this session may plan it."""
        return self.is_idle and not self.is_ending

    @property
    def is_ending(self) -> bool:
        """Return whether nothing more will be planned of it."""
        return self.is_stopping or self.is_at_end

    @property
    def to_runnable(self) -> RunnablePlannedRange | None:
        """Return what is planned and saved; None if nothing is."""
        if self.in_doubt is None or not self.is_plan_saved or (self.step_planner is not None and self.step is None):
            return None
        grant, planned = self.grant, PlannedRange.from_in_doubt(self.grant.stream_id, self.in_doubt)
        return RunnablePlannedRange(
            planned, grant.grant_id, self.position, grant.generation_id, grant.filter, self.step
        )

    @property
    def known_end(self) -> int:
        """Return the offset up to which it is planned or, in an atomic group, looked at."""
        if self.step_planner is not None:
            return self.step_planner.scanned
        return self.position if self.in_doubt is None else max(self.position, self.in_doubt.end)

    def is_caught_up(self, target: int) -> bool:
        """Return whether all is done before `target` that it has; in whole epochs, what was completed when it was first
        looked at.
        """
        if self.step_planner is not None:
            # A stream with nothing left is not moved on with its space's epochs: it may stay before its goal.
            is_done = not self.step_planner.is_waiting or not self.is_behind(self.position, self.goal)
            return self.is_idle and self.goal is not None and is_done
        return self.is_idle and self.position >= (target if self.head is None else min(target, self.head))

    def is_behind(self, position: int, consumed: ConsumedFrontier | None) -> bool:
        """Return whether more is done than is known here."""
        if self.step_planner is None or self.step_planner.consumed.max_of(consumed) == self.step_planner.consumed:
            return position > self.position
        return True

    def advance(self, position: int, consumed: ConsumedFrontier | None) -> None:
        """Move the position and what is consumed on; neither moves back."""
        self.position = max(self.position, position)
        if self.step_planner is not None:
            self.step_planner.seek(self.position, self.step_planner.consumed.max_of(consumed))

"""What a session that plans ahead was lent: what it has planned of each stream, what is written down, what is done.

Plain bookkeeping, no I/O. Whoever plans does the work elsewhere and hears of its end late, as a Spark query does with
its micro-batches. So a range is planned, written down as in doubt, and only then begun; when it is done it is
acknowledged, and the next may be planned. A stream has one range at a time. What was in doubt when an earlier grant
ended, of this process or of an earlier one of the same session, comes with the next grant: what was begun is done
again, and nothing else is planned of that stream before.

What the agent says is heard on the agent's thread, at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import assert_never

from sublet_borrower.machine.events import Announced, Install, Progressed, Remove, Saved, Stop, Tell
from sublet_borrower.machine.read_failure import plain
from sublet_borrower.planner.micro_batch import Begun, Lent, Planned
from sublet_protocol.domain.epochs import ConsumedFrontier
from sublet_protocol.domain.errors import PoisonBlock
from sublet_protocol.domain.in_doubt import InDoubt
from sublet_protocol.messages.messages import RevokedReason
from sublet_storage.readers.epoch_steps import Step, WholeEpochs


class Planning:
    """All streams of one session. `take` is for the agent's thread, the rest for the session's; `report` for both.

    `hold_s`: how long what is in doubt is kept for this session if it is lost. `moved_at`: when a stream last came or
    went (time.monotonic).
    """

    def __init__(self, report: Callable[[Progressed], None], hold_s: float) -> None:
        self._report, self._hold_s = report, hold_s
        self._lent: dict[int, Lent] = {}
        self._done: dict[int, Planned] = {}
        self._begun: dict[int, Planned] = {}
        self._untold: dict[int, Lent] = {}
        self._recalled = self._leaving = False
        self._turn = 0
        self.moved_at = float("-inf")
        self.changed = threading.Condition(threading.RLock())

    def take(self, tell: Tell) -> None:
        """Act on what the agent says."""
        with self.changed:
            match tell:
                case Install(grant):
                    whole = None if grant.consumed is None else WholeEpochs(grant.position, grant.consumed)
                    lent = Lent(grant, grant.position, left=grant.in_doubt, whole=whole)
                    self._lent[grant.stream_id] = lent
                    self.moved_at = time.monotonic()
                    self._settle(lent)
                case Stop(stream_id, grant_id):
                    self._stop(stream_id, grant_id)
                case Remove(stream_id, grant_id, reason):
                    self._remove(stream_id, grant_id, reason)
                case Saved():
                    self._note_saved(tell)
                case Announced():
                    pass
                case _:
                    assert_never(tell)
            self.changed.notify_all()

    def _stop(self, stream_id: int, grant_id: int) -> None:
        if (lent := self._under(stream_id, grant_id)) is not None:
            lent.stopping = True
            if lent.is_idle or self._leaving:
                self._tell(lent)

    def _remove(self, stream_id: int, grant_id: int, reason: RevokedReason) -> None:
        if self._under(stream_id, grant_id) is not None:
            del self._lent[stream_id]
            self._untold.pop(stream_id, None)
            self.moved_at = time.monotonic()
            if reason is not RevokedReason.LOST:
                self._done.pop(stream_id, None)

    def _note_saved(self, saved: Saved) -> None:
        lent = self._under(saved.stream_id, saved.grant_id)
        if lent is None:
            return
        done = self._done.get(saved.stream_id)
        if done is not None and done.is_passed(saved.position, saved.consumed):
            del self._done[saved.stream_id]
        if lent.doubt is None or lent.doubt != saved.in_doubt or lent.saved:
            return
        if lent.is_behind(saved.position, saved.consumed):
            # An earlier process of this session has done a part of it before it was written down: plan anew.
            lent.doubt, lent.step = None, None
            lent.go_on(saved.position, saved.consumed)
        else:
            lent.saved = True

    # --- how far the streams go -------------------------------------------------------------------------------------

    def ends(self) -> dict[int, tuple[int, int]]:
        """{stream: (grant id, head)} of those planned to where they ended when last looked at."""
        with self.changed:
            return {
                stream_id: (lent.grant.grant_id, lent.known)
                for stream_id, lent in self._lent.items()
                if not lent.stopping and lent.head == lent.known
            }

    def note_heads(self, heads: Iterable[tuple[int, int]]) -> None:
        """(stream, head), as the log says."""
        with self.changed:
            for stream_id, head in heads:
                lent = self._lent.get(stream_id)
                if lent is not None:
                    lent.head, lent.told = max(head, lent.head or 0, lent.known), False
                    lent.target = lent.head if lent.target is None else lent.target

    def note_said(self, heads: Iterable[tuple[int, int]]) -> None:
        """(stream, head), as somebody says who may be wrong: only what the log has is planned."""
        with self.changed:
            for stream_id, head in heads:
                lent = self._lent.get(stream_id)
                if lent is not None:
                    lent.told = head > (lent.head or 0)

    def unseen(self) -> list[int]:
        """Streams that were not looked at yet, or not since somebody said that they go on."""
        with self.changed:
            return [stream_id for stream_id, lent in self._lent.items() if lent.head is None or lent.told]

    def lags(self) -> dict[int, tuple[int, int]]:
        """{stream: (next offset to acknowledge, head)} of all that were looked at."""
        with self.changed:
            return {s: (lent.position, lent.head) for s, lent in self._lent.items() if lent.head is not None}

    # --- what is left of before -------------------------------------------------------------------------------------

    def recall(self, done: Iterable[Planned], begun: Iterable[Planned]) -> None:
        """What the checkpoint says of this session's earlier processes: what they had `done` and progress may not have
        passed, and what was `begun` and is to be done again. What else they had planned was never begun."""
        with self.changed:
            self._done = {planned.stream_id: planned for planned in done}
            self._begun = {planned.stream_id: planned for planned in begun}
            self._recalled = True
            for lent in self._lent.values():
                self._settle(lent)

    def again(self, planned: Planned) -> Begun | None:
        """What was begun, as it is to be done again, if its stream is ours."""
        with self.changed:
            lent = self._lent.get(planned.stream_id)
            begun = None if lent is None else lent.begun
            return begun if begun is not None and begun.planned == planned else None

    def forget(self, planned: Planned) -> None:
        """What was begun is not ours any more."""
        with self.changed:
            self._begun.pop(planned.stream_id, None)

    def put_off(self, poison: Mapping[Planned, PoisonBlock]) -> None:
        """What was begun is not done again, as it has a block that cannot be decoded. What lies before that block may
        be planned anew, once the rows say this."""
        with self.changed:
            for planned, problem in poison.items():
                self._begun.pop(planned.stream_id, None)
                lent = self._lent.get(planned.stream_id)
                if lent is not None and lent.doubt is not None and planned.is_of(lent.doubt):
                    lent.doubt, lent.step, lent.saved, lent.poison = None, None, False, problem
                    self._tell(lent, planned.cut)

    def hand_back(self) -> None:
        """Give up streams of which all is done that lies before a block that cannot be decoded: their group decides
        what becomes of them."""
        with self.changed:
            for lent in self._lent.values():
                if lent.poison is None or lent.whole is not None:
                    continue  # of whole epochs the next step shows it
                if lent.may_be_planned and lent.position >= lent.poison.offsets[0]:
                    self._end(lent)

    def _end(self, lent: Lent) -> None:
        lent.at_poison = True
        self._tell(lent)

    def _settle(self, lent: Lent) -> None:
        """Decide what becomes of what was left."""
        left, stream_id = lent.left, lent.grant.stream_id
        if not self._recalled:
            return
        done, begun = self._done.get(stream_id), self._begun.get(stream_id)
        if done is not None and (left is None or not done.is_of(left)):
            done = None
            del self._done[stream_id]
        if left is None:
            return
        lent.left = None
        if begun is not None and begun.is_of(left):
            lent.doubt, lent.saved = left, True
            return
        if done is not None:
            lent.go_on(left.end, left.consumed)
        nothing = InDoubt(lent.grant.grant_id, lent.position, lent.position, 0.0)
        self._tell(lent, nothing)

    # --- planning ---------------------------------------------------------------------------------------------------

    def idle(self, allowed: Callable[[Lent], bool], *, finite: bool = False) -> list[Lent]:
        """Streams of which something may be planned by offsets, and is there; the one that has waited longest first.
        `finite`: it was there when they were first looked at."""
        with self.changed:
            for lent in self._lent.values():
                lent.reach = (lent.target if finite else lent.head) or 0
                if lent.poison is not None:
                    lent.reach = min(lent.reach, lent.poison.offsets[0])
            found = [
                lent
                for lent in self._lent.values()
                if lent.whole is None and lent.may_be_planned and lent.reach > lent.position and allowed(lent)
            ]
            return sorted(found, key=lambda lent: lent.turn)

    def idle_whole(self, allowed: Callable[[Lent], bool]) -> list[tuple[Lent, WholeEpochs]]:
        """Streams of groups that are atomic, of which something may be planned."""
        with self.changed:
            return [
                (lent, lent.whole)
                for lent in self._lent.values()
                if lent.whole is not None and lent.may_be_planned and allowed(lent)
            ]

    def has_plain(self) -> bool:
        """Whether there is a stream of a group that is not atomic."""
        with self.changed:
            return any(lent.whole is None for lent in self._lent.values())

    def unprepared(self) -> list[tuple[Lent, WholeEpochs, ConsumedFrontier]]:
        """Streams of groups that are atomic of which something is planned, and up to where, without a step to do it."""
        with self.changed:
            return [
                (lent, lent.whole, lent.doubt.consumed)
                for lent in self._lent.values()
                if lent.whole is not None and lent.step is None and lent.doubt is not None and lent.doubt.consumed
            ]

    def is_through(self) -> bool:
        """All is done that was there when the streams were first looked at."""
        with self.changed:
            return all(
                lent.is_idle and lent.target is not None and lent.reached >= lent.target for lent in self._lent.values()
            )

    def plan(self, ends: Mapping[int, int]) -> None:
        """Plan up to these offsets, each behind its stream's position; it may be begun when it is `written`."""
        with self.changed:
            self._turn += 1
            for stream_id, end in ends.items():
                lent = self._lent.get(stream_id)
                if lent is None or not lent.may_be_planned:
                    continue  # it was taken away meanwhile
                self._plan(lent, InDoubt(lent.grant.grant_id, lent.position, end, self._hold_s))

    def plan_steps(self, steps: Mapping[int, Step]) -> None:
        """The same of groups that are atomic. A step without messages is done at once."""
        with self.changed:
            for stream_id, step in steps.items():
                lent = self._lent.get(stream_id)
                if lent is None or not lent.may_be_planned:
                    continue
                if lent.poison is not None and step.reads(*lent.poison.offsets):
                    self._end(lent)
                    continue
                if not step.runs:
                    lent.go_on(step.position, step.consumed)
                    self._tell(lent)
                    continue
                lent.step = step
                grant_id, hold_s = lent.grant.grant_id, self._hold_s
                self._plan(lent, InDoubt(grant_id, lent.position, step.position, hold_s, step.consumed))

    def _plan(self, lent: Lent, doubt: InDoubt) -> None:
        lent.doubt, lent.saved, lent.turn = doubt, False, self._turn
        self._tell(lent)

    def unwritten(self) -> bool:
        """Whether something is planned and not written down yet."""
        with self.changed:
            return any(lent.doubt is not None and not lent.saved for lent in self._lent.values())

    def begin(self) -> list[Begun]:
        """What is planned and written down, by stream. It is begun by this."""
        with self.changed:
            ready = [lent.begun for _, lent in sorted(self._lent.items()) if lent.begun is not None]
            self._begun.update({begun.planned.stream_id: begun.planned for begun in ready})
            return ready

    def acknowledge(self, done: Iterable[Planned]) -> None:
        """These are done for good: reported with what is planned next of their streams, or by `tell`. Said again, it
        changes nothing."""
        with self.changed:
            for planned in done:
                if self._begun.get(planned.stream_id) != planned:
                    continue
                del self._begun[planned.stream_id]
                self._done[planned.stream_id] = planned
                lent = self._lent.get(planned.stream_id)
                if lent is not None and lent.doubt is not None and planned.is_of(lent.doubt):
                    lent.go_on(planned.end, planned.consumed)
                    lent.doubt, lent.step, lent.saved = None, None, False
                    self._untold[planned.stream_id] = lent

    def unsaved(self) -> tuple[Planned, ...]:
        """What is done, and for all that is known here progress has not passed it: whoever comes after this process
        must know, or would do it again."""
        with self.changed:
            return tuple(self._done.values())

    def forget_done(self, planned: Planned) -> None:
        """It will not come back with a grant: see `Fate`."""
        with self.changed:
            if self._done.get(planned.stream_id) == planned:
                del self._done[planned.stream_id]

    def tell(self) -> None:
        """Report what was acknowledged and was not reported with a plan."""
        with self.changed:
            for lent in tuple(self._untold.values()):
                self._tell(lent)

    def leave(self) -> None:
        """Nothing more will be acknowledged: of what is in doubt the last word is where it begins."""
        with self.changed:
            self._leaving = True
            for lent in self._lent.values():
                if lent.stopping:
                    self._tell(lent)

    def _tell(self, lent: Lent, in_doubt: InDoubt | None = None) -> None:
        """Report how far it is: the last word once nothing more will be planned and nothing is in doubt, or will be
        decided."""
        self._untold.pop(lent.grant.stream_id, None)
        grant, final = lent.grant, lent.is_ending and (lent.is_idle or self._leaving)
        lag = None if lent.head is None else max(lent.head - lent.position, 0)
        doubt = in_doubt or lent.doubt
        consumed = None if lent.whole is None else lent.whole.consumed
        said = Progressed(
            grant.stream_id, grant.grant_id, lent.position, final, lag=lag, consumed=consumed, in_doubt=doubt
        )
        if lent.at_poison and lent.poison is not None:
            said = replace(said, trouble=plain(str(lent.poison)), poison=lent.poison.offsets[1])
        self._report(said)

    def _under(self, stream_id: int, grant_id: int) -> Lent | None:
        lent = self._lent.get(stream_id)
        return lent if lent is not None and lent.grant.grant_id == grant_id else None

"""What a session that plans ahead says of a stream: what is planned, what may be begun, and how far it has come."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sublet_protocol.domain.epochs import ConsumedFrontier
from sublet_protocol.domain.errors import PoisonBlock
from sublet_protocol.domain.in_doubt import InDoubt
from sublet_protocol.messages.messages import Grant
from sublet_storage.groups.fencing import LastPlan
from sublet_storage.readers.epoch_steps import Step, WholeEpochs


@dataclass(frozen=True, slots=True)
class Planned:
    """Messages [start, end) of a stream, planned under `grant_id`: what a checkpoint remembers.

    `consumed`: in a group that is atomic, what is consumed in whole epochs behind it. Then messages behind `end` are
    among them, and some before it are not.
    """

    stream_id: int
    grant_id: int
    start: int
    end: int
    consumed: ConsumedFrontier | None = None

    @classmethod
    def of(cls, stream_id: int, doubt: InDoubt) -> Planned:
        """What is in doubt."""
        return cls(stream_id, doubt.grant_id, doubt.start, doubt.end, doubt.consumed)

    def is_of(self, doubt: InDoubt) -> bool:
        """Whether it is what is in doubt."""
        return Planned.of(self.stream_id, doubt) == self

    @property
    def cut(self) -> InDoubt:
        """What the row says instead once nothing of it is to be done: none of it is in doubt, nor is it done."""
        return InDoubt(self.grant_id, self.start, self.start, 0.0)

    def is_put_off(self, doubt: InDoubt) -> bool:
        """Whether that says so."""
        return doubt == self.cut

    def is_passed(self, position: int, consumed: ConsumedFrontier | None) -> bool:
        """Whether progress has come behind it."""
        return not InDoubt(self.grant_id, self.start, self.end, 0.0, self.consumed).is_open(position, consumed)


class Fate(Enum):
    """What became of a range that was begun, as the group's rows say. Only what is open can come back with a grant."""

    OPEN = "open"  # kept for its session, or held by it: it comes back, or is reported as done
    DONE = "done"  # progress has passed it
    PUT_OFF = "put off"  # it has a block that cannot be decoded: what lies before that comes in a later batch
    LOST = "lost"  # something else was planned after it, or others have got it, or may get it


def fate(planned: Planned, last: LastPlan | None, session: str) -> Fate:
    """Of what a session by that name has begun; `last`: what was planned last of the stream."""
    if last is not None and planned.is_put_off(last.in_doubt):
        return Fate.PUT_OFF
    if last is None or not planned.is_of(last.in_doubt) or (last.is_open and last.session != session):
        return Fate.LOST
    return Fate.OPEN if last.is_open else Fate.DONE


@dataclass(frozen=True, slots=True)
class Begun:
    """What may be begun: messages of what is planned from `position` on that match the filter; of a group that is
    atomic those of the step."""

    planned: Planned
    position: int
    generation_id: int
    filter: str
    step: Step | None = None


@dataclass(frozen=True, slots=True)
class Most:
    """What a plan has at most in all: so many messages, about so many bytes as they are stored. None: no limit."""

    messages: int | None = None
    bytes: int | None = None


@dataclass(slots=True, eq=False)
class Lent:
    """A stream under one grant. `head`: where it ended when last looked at; None: not looked at yet. `told`: somebody
    has said since that it goes on. `target`: where it ended when first looked at. `reach`: up to where may be planned
    now.

    `doubt`: what is planned and not acknowledged. `saved`: that is written down. `left`: it was planned under an
    earlier grant, and it is not decided yet what becomes of it. `turn`: when it was planned of last.

    `whole`: in a group that is atomic, what is known of its epochs. `step`: what of them is planned; None: it is not
    known yet, of what was planned under an earlier grant.

    `poison`: a block that cannot be decoded; nothing is planned behind where it begins. `at_poison`: nor is anything
    left before it, so that the stream is handed back.
    """

    grant: Grant
    position: int
    head: int | None = None
    told: bool = False
    target: int | None = None
    reach: int = 0
    doubt: InDoubt | None = None
    saved: bool = False
    left: InDoubt | None = None
    stopping: bool = False
    turn: int = 0
    whole: WholeEpochs | None = None
    step: Step | None = None
    poison: PoisonBlock | None = None
    at_poison: bool = False

    @property
    def is_idle(self) -> bool:
        """Nothing is planned of it."""
        return self.doubt is None and self.left is None

    @property
    def may_be_planned(self) -> bool:
        """Nothing is planned of it, and it is ours to plan."""
        return self.is_idle and not self.is_ending

    @property
    def is_ending(self) -> bool:
        """Nothing more will be planned of it."""
        return self.stopping or self.at_poison

    @property
    def begun(self) -> Begun | None:
        """What is planned and written down."""
        if self.doubt is None or not self.saved or (self.whole is not None and self.step is None):
            return None
        grant, planned = self.grant, Planned.of(self.grant.stream_id, self.doubt)
        return Begun(planned, self.position, grant.generation_id, grant.filter, self.step)

    @property
    def known(self) -> int:
        """Up to where it is planned, or looked at."""
        if self.whole is not None:
            return self.whole.scanned
        return self.position if self.doubt is None else max(self.position, self.doubt.end)

    @property
    def reached(self) -> int:
        """Up to where it is done; in whole epochs, as far as they are completed."""
        return self.position if self.whole is None else self.whole.scanned

    def is_behind(self, position: int, consumed: ConsumedFrontier | None) -> bool:
        """Whether more is done than is known here."""
        if (
            self.whole is not None
            and consumed is not None
            and self.whole.consumed.later(consumed) != self.whole.consumed
        ):
            return True
        return position > self.position

    def go_on(self, position: int, consumed: ConsumedFrontier | None) -> None:
        """So much is done."""
        self.position = max(self.position, position)
        if self.whole is not None and consumed is not None:
            self.whole.reach(self.position, self.whole.consumed.later(consumed))

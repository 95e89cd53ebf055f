"""A session whose work is done elsewhere, a part at a time: what it plans of its streams, and hears the end of later.

It plans nothing of which it could not say later whether it was done: what is planned is written down in the group's
rows first, and `plan` waits for that. See `borrower.planning`. One thread uses it; an agent's thread keeps it in touch.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Sequence
from enum import Enum
from pathlib import Path

from borrower.agent import AgentThread
from borrower.inbox import Inbox
from borrower.lookout import Lookout
from borrower.machine.agent import Closed
from borrower.machine.events import Progressed
from borrower.machine.following import FollowId, Pushed
from borrower.planning import Lent, Planned, Planning
from borrower.reader import Reader
from borrower.settings import BorrowerSettings
from borrower.ways import by_database
from protocol.errors import SubscriptionEnded
from protocol.messages import EndReason, Grant
from protocol.words import Subscription
from storage import fence

log = logging.getLogger(__name__)

WRITTEN_S = 5.0
"""How long `plan` waits at most until what it planned is written down; what is later comes with the next."""
LOOK_S = 0.25
"""Between two looks at the database for what became of what was begun."""


class Verdict(Enum):
    """What became of something that was begun by an earlier process of the session, or under an earlier grant."""

    AGAIN = "again"  # it is ours: it is to be done again, under its old number
    DONE = "done"  # it was done, and that is durable
    LOST = "lost"  # others have got it, or may have


class Planner:
    """See the module's page. `name` is the session's, which stays the same from process to process. `hold_s`: for how
    long what is in doubt is kept for it when it is lost. The rest is as for `Session`.

    Raises what `Session` raises.
    """

    def __init__(
        self,
        subscription: str,
        url: str | None = None,
        *,
        name: str,
        hold_s: float,
        data_dir: Path | str | None = None,
        nodes: Sequence[str] | None = None,
        weight: float = 1.0,
        start: str = "latest",
        settings: BorrowerSettings | None = None,
    ) -> None:
        self.subscription, self.name = str(Subscription.parse(subscription)), name
        self.settings = settings or BorrowerSettings.from_env()
        self._planning = Planning(self._report, hold_s)
        self._inbox = Inbox(self._planning.take)
        self._group: int | None = None
        self._over = self._leaving = False
        with contextlib.ExitStack() as opened:
            way = by_database(opened, url, data_dir, nodes, 1, self.settings.read_timeout_s, lambda: self._group or 0)
            assert isinstance(way.reader, Reader)
            self._reader = way.reader
            self._agent = AgentThread(way.find_nodes, self.settings)
            opened.callback(self._agent.close)
            epoch = way.draw_epoch()
            self._resources = opened.pop_all()
        self._lookout = Lookout(self._planning, self._reader.heads, self._follow, self._unfollow)
        self._handle = self._agent.subscribe(
            self.subscription, self._inbox, weight=weight, session=name, start=start, session_epoch=epoch
        )

    # --- after a restart --------------------------------------------------------------------------------------------

    def recall(self, done: Iterable[Planned], begun: Iterable[Planned] = ()) -> None:
        """What is known of earlier processes of this session: see `Planning.recall`. Say it once, first of all."""
        self._planning.recall(done, begun)

    def decide(self, begun: Iterable[Planned]) -> dict[Planned, tuple[Verdict, Grant | None]]:
        """Wait until it is known what became of each; of those that are to be done again, the grant to read by.

        A leader that cannot be reached is waited for: what was begun is kept for the session meanwhile. Raises
        `SubscriptionEnded`.
        """
        open = set(begun)
        found: dict[Planned, tuple[Verdict, Grant | None]] = {}
        while open:
            self._digest()
            for planned in tuple(open):
                if (grant := self._planning.grant_of(planned)) is not None:
                    found[planned] = (Verdict.AGAIN, grant)
                    open.discard(planned)
            for planned, verdict in self._look(open).items():
                self._planning.forget(planned)
                found[planned] = (verdict, None)
                open.discard(planned)
            if open:
                with self._planning.changed:
                    self._planning.changed.wait(LOOK_S)
        return found

    def _look(self, begun: set[Planned]) -> dict[Planned, Verdict]:
        """Of which the rows say that they will not come back to us."""
        group_id = self._agent.group_id(self._handle)
        if group_id is None or not begun:
            return {}
        streams = [planned.stream_id for planned in begun]
        plans = self._reader.ask(lambda connection: fence.last_plans(connection, group_id, streams))
        if plans is None:
            return {}
        verdicts = {}
        for planned in begun:
            plan = plans.get(planned.stream_id)
            if plan is None or not planned.is_of(plan.in_doubt):
                verdicts[planned] = Verdict.LOST
            elif not plan.is_open:
                verdicts[planned] = Verdict.DONE
            elif plan.session != self.name:
                verdicts[planned] = Verdict.LOST
        return verdicts

    # --- batch by batch ---------------------------------------------------------------------------------------------

    def acknowledge(self, done: Iterable[Planned]) -> None:
        """These are done for good."""
        self._planning.acknowledge(done)

    def plan(self, most_messages: int | None = None) -> list[tuple[Planned, Grant]]:
        """What is to be done next, and by which grants it is read: of about so many messages in all. Empty: nothing.

        What was planned before and is not acknowledged is among it. Raises `SubscriptionEnded`.
        """
        self._digest()
        if not self._leaving:
            self._see()
            self._planning.plan(shares(self._planning.idle(self._may_start), most_messages))
        with self._planning.changed:
            self._planning.changed.wait_for(lambda: not self._planning.unwritten(), WRITTEN_S)
        return self._planning.begin()

    def lags(self) -> dict[int, tuple[int, int]]:
        """{stream: (next offset to acknowledge, head)}, as they were when last looked at."""
        return self._planning.lags()

    def close(self, timeout_s: float | None = None) -> None:
        """Leave the group: what is in doubt stays reserved for the session, all else is free at once."""
        wait_s = self.settings.unsubscribe_timeout_s + self.settings.farewell_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + wait_s
        if not (self._over or self._leaving):
            self._leaving = True
            self._planning.leave()
            self._agent.unsubscribe(self._handle)
        while not self._over and time.monotonic() < deadline:
            with contextlib.suppress(SubscriptionEnded):
                self._digest(0.1)
        self._over = True
        self._resources.close()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _see(self) -> None:
        """Learn how far the streams go: at once of those that were never looked at, and of all while there is work."""
        if self._lookout.wait_s == 0:
            self._lookout.look()
        if unseen := self._planning.unseen():
            self._planning.note_heads(self._reader.heads(unseen))

    def _digest(self, wait_s: float = 0.0) -> None:
        for news in self._inbox.take(wait_s):
            if isinstance(news, Pushed):
                self._lookout.pushed(news)
                continue
            assert isinstance(news, Closed), "what is told of streams has been heard"
            self._over = True
            if news.reason is not EndReason.DONE:
                raise SubscriptionEnded(self.subscription, news.reason.value, news.detail)

    def _may_start(self, lent: Lent) -> bool:
        return self._agent.may_start(self._handle, lent.grant.stream_id, lent.grant.grant_id)

    def _report(self, progress: Progressed) -> None:
        self._agent.progress(self._handle, progress)

    def _follow(self, follow: FollowId) -> None:
        self._agent.follow(self._handle, follow)

    def _unfollow(self, follow: FollowId) -> None:
        self._agent.unfollow(self._handle, follow)


def shares(waiting: Sequence[Lent], most_messages: int | None) -> dict[int, int]:
    """{stream: up to which offset} of so many messages in all, at least one. Who has few leaves its share to the
    others, and where there are more streams than messages the first of those that wait get one each."""
    wanted = [(lent.head - lent.position, lent) for lent in waiting[:most_messages] if lent.head is not None]
    wanted.sort(key=lambda pair: pair[0])
    left = sum(lag for lag, _ in wanted) if most_messages is None else most_messages
    ends = {}
    for others, (lag, lent) in zip(range(len(wanted), 0, -1), wanted, strict=True):
        share = min(lag, left // others)
        left -= share
        ends[lent.grant.stream_id] = lent.position + share
    return ends

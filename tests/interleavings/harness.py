"""Runs real functions against Postgres side by side, and steers which of them sends its next statement.

Each participant has a thread and a connection of its own, which stops before every statement. The scheduler lets one
go on at a time, and sees by `pg_blocking_pids` whether its statement waits for a lock of another. So a *schedule* is a
list of choices, which can be replayed; all are tried, depth first, each from the same state of the database.

What opens a transaction or changes a setting is sent along with the next statement: it neither sees nor changes
anything. Two statements that follow each other, and neither of which writes a table that the other touches, are not
tried the other way round. A pipeline is taken apart: the server runs its statements one by one anyway.

In the manner of Postgres' own isolation tester, and of Hermitage.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import Any, ParamSpec, TypeVar

import psycopg
from psycopg.pq import TransactionStatus

from sublet_storage.db.bounded_connection import BoundedConnection
from sublet_storage.db.connect import connect
from tests.interleavings.footprint import Footprint, Footprints
from tests.interleavings.state import State
from tests.kit import eventually

Connection = BoundedConnection
Work = Callable[[Connection], Any]
P = ParamSpec("P")
T = TypeVar("T")

MAX_SCHEDULES = 3000
STUCK_S = 60.0

_OPENS = re.compile(r"_enter_gen|begin|set |savepoint|select set_config|select current_setting", re.IGNORECASE)


@dataclass(slots=True)
class Step:
    """A statement of a participant; `waits`: it had to wait for a lock of another. `error`: what came of it. At its end
    a transaction `touches` all that was touched in it."""

    who: str
    statement: str
    touches: Footprint = Footprint()  # noqa: RUF009 - it is frozen
    waits: bool = False
    error: str = ""

    def __str__(self) -> str:
        ends = ("  (waits)" if self.waits else "") + (f"  -> {self.error}" if self.error else "")
        return f"{self.who:>12}: {self.statement[:150]}{ends}"


@dataclass(slots=True)
class Run:
    """One schedule as it went: {participant: what it returned, or the error that it raised}."""

    conn: Connection
    steps: list[Step] = field(default_factory=list)
    answers: dict[str, Any] = field(default_factory=dict)

    @property
    def errors(self) -> list[object]:
        """Return the errors raised, and the deadlocks that Postgres had to end, even if they were retried."""
        raised = [answer for answer in self.answers.values() if isinstance(answer, Exception)]
        return [*raised, *(step.error for step in self.steps if step.error == "DeadlockDetected")]

    def places(self, who: str) -> list[int]:
        """Return the places in the schedule at which its statements were sent."""
        return [place for place, step in enumerate(self.steps) if step.who == who]

    def __str__(self) -> str:
        reported = "\n".join(map(str, self.steps))
        return f"the schedule:\n{reported}\nthe answers: {self.answers}"


def check_errors(run: Run) -> None:
    """Check that nothing was raised."""
    assert not run.errors


def in_transaction(work: Callable[P, T]) -> Callable[P, T]:
    """Return the work, whose last argument is a connection, as one transaction."""

    @wraps(work)
    def done(*arguments: P.args, **more: P.kwargs) -> T:
        conn: Any = arguments[-1]
        with conn.transaction():
            return work(*arguments, **more)

    return done


class _Abandoned(BaseException):
    """Ends a participant whose schedule is given up."""


class _Participant:
    """A thread that stops before each statement until the test lets it go on."""

    def __init__(self, name: str, work: Work, conn: Connection, run: Run, footprints: Footprints) -> None:
        self.name, self.step, self.is_over = name, Step(name, ""), False
        self._work, self._conn, self._run = work, conn, run
        self._footprints, self._touched = footprints, Footprint()
        self.arrived, self._go, self._given_up = threading.Event(), threading.Event(), False
        self._thread = threading.Thread(target=self._live, name=name, daemon=True)
        self._real_wait = type(conn).wait
        vars(conn).update(wait=self._wait, pipeline=nullcontext)
        self.pid = conn.info.backend_pid
        self._thread.start()

    def go_on(self) -> None:
        self.arrived.clear()
        self._go.set()

    def go_to(self, text: str) -> None:
        assert self.arrived.wait(STUCK_S)
        while text not in self.step.statement:
            assert not self.is_over, f"{self.name} has no statement with {text}"
            self.go_on()
            assert self.arrived.wait(STUCK_S)

    def give_up(self) -> None:
        self._given_up = True
        self._go.set()
        self._conn.cancel_safe()
        self._thread.join(STUCK_S)

    def _live(self) -> None:
        try:
            self._run.answers[self.name] = self._work(self._conn)
        except Exception as error:  # noqa: BLE001 - an answer like another, for the judge
            self._run.answers[self.name] = error
        except _Abandoned:
            pass
        finally:
            self.is_over = True
            self.arrived.set()

    def _wait(self, gen: Any, *limits: Any, **more: Any) -> Any:
        frame = gen.gi_frame.f_locals
        statement = " ".join(_text(frame.get("query", gen.__name__)).split())
        if self._conn.info.transaction_status == TransactionStatus.IDLE:
            self._touched = Footprint()
        if _OPENS.match(statement):
            return self._real_wait(self._conn, gen, *limits, **more)
        if statement == "_exit_gen":
            self.step = Step(self.name, "end of transaction", self._touched)
        else:
            self.step = Step(self.name, statement, self._footprints.of(statement))
            self._touched |= self.step.touches
        self.arrived.set()
        self._go.wait()
        self._go.clear()
        if self._given_up:
            gen.close()
            raise _Abandoned
        self._run.steps.append(self.step)
        try:
            return self._real_wait(self._conn, gen, *limits, **more)
        except psycopg.Error as error:
            self.step.error = type(error).__name__
            raise


def _text(query: Any) -> str:
    return query.decode() if isinstance(query, bytes) else query if isinstance(query, str) else query.as_string(None)


@dataclass(slots=True)
class _Decision:
    """Whom one could have let go on, and who was."""

    names: list[str]
    chosen: int = 0


class Interleavings:
    """All schedules of some participants over one database, whose state before the first is where each begins."""

    def __init__(self, url: str) -> None:
        self._url, self._retained = url, dict[str, Connection]()
        self._watcher = self._connect("watcher")

    @cached_property
    def _state(self) -> State:
        return State(self._watcher)

    @cached_property
    def _footprints(self) -> Footprints:
        return Footprints(self._watcher)

    def explore(
        self,
        participants: Mapping[str, Work],
        judge: Callable[[Run], None] = check_errors,
        ahead: Mapping[str, str] | None = None,
    ) -> int:
        """Run them in every order, and `judge` what came of it; return how many orders there are. `ahead`: these have
        come, each alone and one after the other, to their first statement with that text in it. Raise AssertionError if
        there is one order: participants that never meet prove nothing."""
        path: list[_Decision] = []
        for tried in range(1, MAX_SCHEDULES + 1):
            run = self._once(participants, path, ahead or {})
            try:
                judge(run)
            except AssertionError as error:
                error.add_note(f"order {tried}, {run}")
                raise
            while path and path[-1].chosen + 1 == len(path[-1].names):
                path.pop()
            if not path:
                assert tried > 1, f"there is one order, {run}"
                return tried
            path[-1].chosen += 1
        raise AssertionError(f"more than {MAX_SCHEDULES} orders: let the participants do less")

    def __enter__(self) -> Interleavings:
        return self

    def __exit__(self, *_: object) -> None:
        for conn in (*self._retained.values(), self._watcher):
            conn.close()

    def _once(self, participants: Mapping[str, Work], path: list[_Decision], ahead: Mapping[str, str]) -> Run:
        self._state.restore()
        run = Run(self._watcher)
        threads = [
            _Participant(name, work, self._connection(name), run, self._footprints)
            for name, work in participants.items()
        ]
        try:
            for name, text in ahead.items():
                next(each for each in threads if each.name == name).go_to(text)
            self._schedule(threads, path, run)
        except BaseException as error:
            error.add_note(str(run))
            raise
        finally:
            for each in threads:
                if not each.is_over:
                    each.give_up()
        return run

    def _schedule(self, threads: list[_Participant], path: list[_Decision], run: Run) -> None:
        # Whose next statement was sent here in a schedule before, and makes no difference to what was sent since. Where
        # that is so of all, each order that follows was tried already: this one is ended in some order.
        depth, tried, is_known = 0, set[str](), False
        while not all(each.is_over for each in threads):
            for each in threads * 2:  # twice, as one that waited for the end of a later one's transaction goes on
                eventually(lambda each=each: self._is_settled(each, threads), STUCK_S, every_s=0.0005)  # type: ignore[misc]
            ready = [each for each in threads if each.arrived.is_set() and not each.is_over]
            if not ready:
                continue  # all wait for each other, until Postgres ends one
            is_known = is_known or all(each.name in tried for each in ready)
            allowed = ready[:1] if is_known else [each for each in ready if each.name not in tried]
            chosen, before = allowed[0], allowed[:0]
            if len(allowed) > 1:
                if depth == len(path):
                    path.append(_Decision([each.name for each in allowed]))
                decision, depth = path[depth], depth + 1
                assert decision.names == [each.name for each in allowed], "a schedule cannot be repeated"
                chosen, before = allowed[decision.chosen], allowed[: decision.chosen]
            earlier = [each for each in ready if each in before or each.name in tried]
            tried = {
                each.name for each in earlier if each is not chosen and each.step.touches.commutes(chosen.step.touches)
            }
            chosen.go_on()

    def _is_settled(self, one: _Participant, threads: list[_Participant]) -> bool:
        """Return whether it has reached its next statement, or waits for another's lock."""
        step = one.step
        if one.arrived.wait(0.002):
            return True
        found = self._watcher.execute("select pg_blocking_pids(%s)", (one.pid,)).fetchone()
        assert found is not None
        waits = bool({each.pid for each in threads} & set(found[0]))
        if waits:
            step.waits = True
        return waits

    def _connection(self, name: str) -> Connection:
        retained = self._retained.get(name) or self._connect(name)
        if retained.closed or retained.info.transaction_status != TransactionStatus.IDLE:
            retained.close()
            retained = self._connect(name)
        self._retained[name] = retained
        return retained

    def _connect(self, name: str) -> Connection:
        conn = connect(self._url, application_name=name, idle_in_transaction_timeout_s=None)
        conn.execute("set deadlock_timeout = '10ms'")
        return conn

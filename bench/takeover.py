"""Time of a group without a leader after kill -9, and of a dead consumer's streams until others have them.

`python -m bench takeover --kills 10`. Two nodes, two consumers and a publisher with default settings. The node that
leads is killed at a random moment between two renewals, and started again once the other has taken over. Then as many
consumers join, one after the other, and are killed with the streams that they hold; and as many together with the node
that leads. What was delivered, recorded by the consumers, is compared with what was published.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from bench import _postgres as postgres
from bench import _report as report
from bench._report import Beside, quantile
from sublet_borrower.settings import BorrowerSettings
from sublet_leader.settings import LeaderSettings
from sublet_storage.groups.model.records import Leadership
from sublet_storage.producer import Publisher
from tests.deliveries import judge
from tests.integration.sharing_kit import ALL, Scene
from tests.kit import eventually
from tests.kit_nodes import Delivered, Fleet

STREAMS = 16
WAIT_S = 60.0
INTERVAL_S = 0.2
MESSAGES = 320
PAUSE_S = 0.005
"""Processing time of a consumer per batch, which is one block of at most 50 messages."""
CONSUMERS = ("a", "b")
GRACE = "grace + look + debounce"
BOTH = "two looks + the same"
PATIENCE = "the same - (good for - ping)"
"""Name of the peer: the last answered ping was sent at most one `ping_interval_s` before the kill."""

_PROGRESS = """
select (extract(epoch from min(l.updated_at)) * 1000000)::bigint
  from lending l join unnest(%s::bigint[], %s::bigint[]) as before (stream_id, position) using (stream_id)
 where l.group_id = %s and l.term = %s and l.position > before.position"""

PROSE = """{kills} times kill -9 of the node that leads a group of {streams} streams, at a random moment between two
renewals, with default settings (lease {lease:g} s, retry {retry:g} s, ping {ping:g} s, looks {looks:g} s apart),
under a load of {rate:,.0f} messages/s that two consumers share. The other node was started anew after the kill
before, and is old enough by then to act on a free lock ({age:g} s). Measured is the time to the first progress that
is written under the next term. Consumers go on meanwhile with what they hold, until the word of the dead leader is
no longer good, {good:g} s after the last ping that it answered; the last two figures are of the longest time around
each kill in which nobody was given a batch.

The same number of times a third consumer joins, gets its share of the streams, and is killed. Measured is the time
until all of them are granted to the others, beside the reconnect grace ({grace:g} s), one look and the debounce of
changes among members. And the same number of times such a consumer and the node that leads are killed at once: two
looks of the other node come before. What the dead consumer had in hand is delivered again, as its forced moves say."""


class Load:
    """Messages under many keys, published by a thread during the `with` block; at its end all of them are durable."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._publish)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _publish(self) -> None:
        keys = [b"%d" % number for number in range(MESSAGES)]
        try:
            with Publisher(self._url, block_messages=50) as publisher:
                while not self._stop.wait(INTERVAL_S):
                    publisher.publish_batch({"topic": "t", "value": [b"x" * 100] * MESSAGES, "key": keys})
                    publisher.flush()
        except BaseException as error:  # noqa: BLE001 reported at the end
            self._failure = error


@dataclass(frozen=True, slots=True)
class Kill:
    """Times in seconds since 1970, by the machine's clock, which is also the database's."""

    at: float
    claimed: float
    progressed: float


class Group:
    """The group under measurement, its nodes and its consumers."""

    def __init__(self, url: str, directory: Path, speed: float) -> None:
        self.scene, self.fleet = Scene(url), Fleet(url, directory, speed)

    def close(self) -> None:
        """End the processes."""
        self.fleet.close()
        self.scene.close()

    def begin(self) -> None:
        """Start both nodes, and wait until both consumers have their share."""
        for name in ("n1", "n2"):
            self.serve(name)
        for name in CONSUMERS:
            self.fleet.consumer(name, ALL, PAUSE_S)
        share = [STREAMS // len(CONSUMERS)] * len(CONSUMERS)
        eventually(lambda: self.scene.shares() == share, WAIT_S, self._said, 0.05)

    def serve(self, name: str) -> None:
        """Start a node and wait until it serves."""
        log = self.fleet.directory / f"node-{name}.log"
        before = log.read_text().count("serves on") if log.exists() else 0
        node = self.fleet.node(name)
        eventually(lambda: node.output().count("serves on") > before, WAIT_S, self._said, 0.05)

    def kill(self) -> Kill:
        """Kill the leading node, wait for progress under the next term, and start it again."""
        leader = self.scene.claim()
        self.fleet.nodes[leader.node.name].kill()
        at = time.time()
        before, after = self._wait_for_claim(leader)
        progressed = eventually(lambda: self._progressed(before, after), WAIT_S, self._said, 0.002)
        self.serve(leader.node.name)
        eventually(lambda: self._is_reclaimed(after), WAIT_S, self._said, 0.05)
        return Kill(at, after.term / 1e6, progressed)

    def kill_consumer(self, name: str, *, with_leader: bool = False) -> float:
        """Have a consumer join, kill it once it has its share and its lock, perhaps at once with the node that leads,
        and return the seconds until others have all of its streams."""
        others = self._agents()
        consumer = self.fleet.consumer(name, ALL, PAUSE_S)
        agent = eventually(lambda: next(iter(self._agents() - others), None), WAIT_S, self._said, 0.05)
        eventually(lambda: self._count(agent) == STREAMS // (len(CONSUMERS) + 1), WAIT_S, self._said, 0.05)
        time.sleep(random.uniform(0.5, 1.5))
        leader = self.scene.claim()
        consumer.kill()
        if with_leader:
            self.fleet.nodes[leader.node.name].kill()
        at = time.monotonic()
        eventually(lambda: not self._count(agent) and self._held() == STREAMS, WAIT_S, self._said, 0.005)
        taken_s = time.monotonic() - at
        if with_leader:
            self.serve(leader.node.name)
        return taken_s

    def _agents(self) -> set[str]:
        return {agent for _, status, _, agent in self.scene.rows() if status == "held" and agent is not None}

    def _count(self, agent: str) -> int:
        return sum(status == "held" and holder == agent for _, status, _, holder in self.scene.rows())

    def _held(self) -> int:
        return sum(status == "held" for _, status, _, _ in self.scene.rows())

    def _wait_for_claim(self, leader: Leadership) -> tuple[dict[int, int], Leadership]:
        """Return {stream: position} just before another node led, and that leadership."""
        deadline = time.monotonic() + WAIT_S
        before = self._positions()
        while time.monotonic() < deadline:
            positions, claim = self._positions(), self.scene.claim()
            if claim.term > leader.term:
                return before, claim
            before = positions
            time.sleep(0.01)
        raise AssertionError(f"nobody leads {WAIT_S} s after the kill{self._said()}")

    def _positions(self) -> dict[int, int]:
        return {stream: position for stream, _, position, _ in self.scene.rows()}

    def _progressed(self, before: dict[int, int], after: Leadership) -> float | None:
        group_id = self.scene.group().group_id
        found = self.scene.ask(_PROGRESS, (list(before), list(before.values()), group_id, after.term))
        return found[0][0] / 1e6 if found[0][0] is not None else None

    def _is_reclaimed(self, leader: Leadership) -> bool:
        rows = self.scene.ask("select 1 from lending where status = 'held' and term = %s", (leader.term,))
        return len(rows) == STREAMS

    def _said(self) -> str:
        processes = {**self.fleet.nodes, **self.fleet.consumers}
        return "".join(f"\n--- {name}:\n{process.output()[-1500:]}" for name, process in processes.items())


def main(arguments: list[str] | None = None) -> None:
    """Run, write the JSON and the page, print the tables."""
    parser = argparse.ArgumentParser(prog="bench takeover", description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--speed", type=float, default=1.0, help="divides all times, for a quick look: not for figures")
    parser.add_argument("--json", type=Path, default=None, help="where the results go")
    parser.add_argument("--page", type=Path, default=report.PAGE)
    options = parser.parse_args(arguments)
    leader, borrower = LeaderSettings().scaled(options.speed), BorrowerSettings().scaled(options.speed)
    kills: list[Kill] = []
    moves: list[float] = []
    both: list[float] = []
    with postgres.place() as (url, directory), contextlib.closing(Group(url, directory, options.speed)) as group:
        group.begin()
        started = time.time()
        with Load(group.scene.url):
            for number in range(options.kills):
                time.sleep(leader.lock_watch_age_s + random.uniform(0.0, leader.lease_renew_interval_s))
                kills.append(group.kill())
                print(f"kill {number + 1} of {options.kills}: {kills[-1].progressed - kills[-1].at:.2f} s", flush=True)
            for number in range(options.kills):
                moves.append(group.kill_consumer(f"c{number}"))
                print(f"consumer {number + 1} of {options.kills}: {moves[-1]:.2f} s", flush=True)
            for number in range(options.kills):
                time.sleep(leader.lock_watch_age_s + random.uniform(0.0, leader.lease_renew_interval_s))
                both.append(group.kill_consumer(f"d{number}", with_leader=True))
                print(f"both {number + 1} of {options.kills}: {both[-1]:.2f} s", flush=True)
        eventually(group.scene.consumed, WAIT_S, lambda: f"{group.scene.rows()}", 0.1)
        seconds, heads, delivered = time.time() - started, group.scene.heads(), group.fleet.delivered()
        verdict = judge(heads, delivered, group.scene.history())
    figures = _figures(kills, delivered, leader, borrower) + _compare_moves(moves, both, leader)
    counts = {
        "published": sum(heads.values()),
        "lost": len(verdict.lost),
        "repeated": len(verdict.unexplained),
        "repeated_of_the_dead": len(verdict.explained),
    }
    settings = {
        "kills": options.kills,
        "speed": options.speed,
        "lease_duration_s": leader.lease_duration_s,
        "claim_retry_interval_s": leader.claim_retry_interval_s,
    }
    body = {"figures": [figure.judged() for figure in figures], **counts}
    report.save("takeover", settings, body, options.json)
    section = report.table(figures) + _counted(options.kills, counts)
    prose = PROSE.format(
        kills=options.kills,
        streams=STREAMS,
        lease=leader.lease_duration_s,
        retry=leader.claim_retry_interval_s,
        ping=borrower.ping_interval_s,
        looks=leader.lock_recheck_delay_s,
        age=leader.lock_watch_age_s,
        good=leader.ping_valid_for_s,
        grace=leader.reconnect_grace_s,
        rate=counts["published"] / seconds,
    )
    report.page(options.page, "takeover", prose, section)
    print(section)


def _figures(
    kills: Sequence[Kill], delivered: Sequence[Delivered], leader: LeaderSettings, borrower: BorrowerSettings
) -> list[Beside]:
    taken = [kill.progressed - kill.at for kill in kills]
    found = [kill.claimed - kill.at for kill in kills]
    worked = [kill.progressed - kill.claimed for kill in kills]
    pauses = [longest_pause(kill, delivered) for kill in kills]
    bound = leader.lease_duration_s + leader.claim_retry_interval_s
    looks = leader.lock_check_interval_s + leader.lock_recheck_delay_s
    patient = bound - (leader.ping_valid_for_s - borrower.ping_interval_s)
    return [
        Beside("kill to first progress, median", quantile(taken, 0.5), "s", "lease + retry", bound, 1.0),
        Beside("kill to first progress, longest", max(taken), "s", "lease + retry", bound, 1.0),
        Beside("of the median: kill to claim", quantile(found, 0.5), "s", "two looks", looks),
        Beside(
            "of the median: claim to first progress", quantile(worked, 0.5), "s", "retry", leader.claim_retry_interval_s
        ),
        Beside("nobody was given a batch, median", quantile(pauses, 0.5), "s", PATIENCE, patient),
        Beside("nobody was given a batch, longest", max(pauses), "s", PATIENCE, patient),
    ]


def _compare_moves(moves: Sequence[float], both: Sequence[float], leader: LeaderSettings) -> list[Beside]:
    bound = leader.reconnect_grace_s + leader.lock_recheck_delay_s + leader.rebalance_debounce_s
    longer = bound + leader.lock_check_interval_s + leader.lock_recheck_delay_s
    return [
        Beside("consumer killed to its streams with others, median", quantile(moves, 0.5), "s", GRACE, bound),
        Beside("consumer killed to its streams with others, longest", max(moves), "s", GRACE, bound),
        Beside("consumer and leader killed to its streams with others, median", quantile(both, 0.5), "s", BOTH, longer),
        Beside("consumer and leader killed to its streams with others, longest", max(both), "s", BOTH, longer),
    ]


def longest_pause(kill: Kill, delivered: Sequence[Delivered]) -> float:
    """Return the longest time between two batches of any consumer from the kill to the first progress; `delivered` is
    sorted by time."""
    times = [batch.at for batch in delivered]
    before = [at for at in times if at <= kill.at][-1:] or [kill.at]
    after = [at for at in times if at > kill.progressed][:1] or [kill.progressed]
    around = [*before, *(at for at in times if kill.at < at <= kill.progressed), *after]
    return max(end - begin for begin, end in pairwise(around))


def _counted(kills: int, counts: dict[str, int]) -> str:
    verdict = "**missed**" if counts["lost"] or counts["repeated"] else "holds"
    return (
        "\n| kills | messages published | lost | delivered twice | 0 and 0 | again, that the dead had in hand |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
        f"| {kills}, {kills}, {kills} | {counts['published']:,} | {counts['lost']:,} | {counts['repeated']:,} | "
        f"{verdict} | {counts['repeated_of_the_dead']:,} |\n"
    )


if __name__ == "__main__":
    main()

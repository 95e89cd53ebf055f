"""Latency from `publish()` to `poll()`, under each notification driver and beside peers.

`python -m bench latency --rounds 5`. A publisher and a consumer, each a process, and the servers between them, all on
this machine; the systems take turns, each with a fresh server, and only one of them runs at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import _report as report
from bench._report import read_lines, significant
from bench.peers.known import SYSTEMS
from bench.peers.load import MESSAGE_BYTES, RESULT_LINES, Load
from bench.peers.processes import module
from bench.peers.system import Role, System, SystemUnavailable
from tests.kit import eventually

RATES = (100, 10_000)
WAIT_S = 180.0
"""Timeout of a start or an end, in addition to the time of the load."""
STORED = 0.95
"""A system that publishes less than this share of the rate has a queue, and its latency is the queue's length."""
TARGETS = {100: ("postgres-alone", 1.7), 10_000: ("redis-always", 1.8)}
"""{messages a second: (system, how many times its p50 sublet's may be)}."""
PUSHED = ("sublet-postgres", "sublet-zmq")
IN_SPARK, OF_SESSION = ("sublet-postgres-spark", "sublet-postgres"), 1.5
"""How many times the second's p50 the first's may be."""
PROSE = """One publisher and one consumer, processes on the machine of the servers; messages of {bytes} bytes, one per
call of *publish*, for {seconds:g} s after {warm_up:g} s that do not count; calls are due each millisecond or less
often, for every system alike. Measured is the time from just before the call to the message, as bytes, in the
consumer's hands, by the clock that both processes have in common; each figure is the median of {rounds} rounds in which
the systems took turns with fresh servers. Every system acknowledges each message to the publisher, which does not wait
for one before it sends the next, and the consumer acknowledges what it has. *sublet* has one Postgres with fsync and
synchronous_commit on, one node, `Publisher` and `Session` as they are, under each notification driver of the node.
*Postgres alone* is the limit of what is kept there: with no more than psycopg the publisher's thread inserts what waits
and says NOTIFY in the same transaction, and the consumer selects what is new when it is notified, for itself alone and
without an acknowledgement. *Redis Streams*: XADD, XREADGROUP with BLOCK, and XACK in the same round trip. *NATS
JetStream*: a stream in files, explicit acknowledgements, and a consumer that is pushed each message or one that pulls
up to 1,000. *PgQue*: its functions for sending, receiving and acknowledging batches, a notification of each tick, and a
loop that ticks. Durable are sublet under every driver, PgQue, Redis with appendfsync always and NATS with sync_interval
always; the others may lose a second, or two minutes, of what they have acknowledged, when the machine stops. A system
that published fewer than {stored:.0%} of the rate is shown with what it published, and measures nobody. The targets are
of sublet's p50 with the better of its drivers that push: at 100/s beside Postgres alone, the limit of what is durable
there; at 10,000/s beside Redis with appendfsync always. *In a task of Spark* the consumer is a function
in the one task of `sublet.spark.consume`; its target is beside a session with the same driver, without Spark."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Result of one system at one rate in one round."""

    p50_ms: float
    p99_ms: float
    rate: float


@dataclass(frozen=True, slots=True)
class Line:
    """Medians of one system at one rate over all rounds."""

    system: System
    rate: int
    turns: tuple[Turn, ...]

    def median(self, name: str) -> float:
        """Return the median of a field of `Turn`."""
        return float(statistics.median(getattr(turn, name) for turn in self.turns))

    @property
    def keeps_rate(self) -> bool:
        """Return whether it published at the rate asked for."""
        return self.median("rate") >= STORED * self.rate

    def judged(self, measure: Line | None) -> dict[str, Any]:
        """Return the medians as JSON, compared with the best durable peer."""
        ratio = self.median("p50_ms") / measure.median("p50_ms") if measure else None
        p50s = [turn.p50_ms for turn in self.turns]
        return {
            "rate": self.rate,
            "system": self.system.name,
            "setting": self.system.setting,
            "durable": self.system.is_durable,
            "p50_ms": significant(self.median("p50_ms")),
            "p50_ms_lowest": significant(min(p50s)),
            "p50_ms_highest": significant(max(p50s)),
            "p99_ms": significant(self.median("p99_ms")),
            "published_per_s": significant(self.median("rate")),
            "keeps_rate": self.keeps_rate,
            "ratio": None if ratio is None else significant(ratio),
        }


def main(arguments: list[str] | None = None) -> None:
    """Run, write the JSON and the page, print the table."""
    options = _options(arguments)
    left_out = {key: why for key in options.systems if (why := SYSTEMS[key].missing())}
    turns: dict[tuple[str, int], list[Turn]] = {}
    for number in range(options.rounds):
        present = [key for key in options.systems if key not in left_out]
        for key in reversed(present) if number % 2 else present:
            try:
                _run(SYSTEMS[key], options, turns)
            except SystemUnavailable as reason:
                left_out[key] = str(reason)
        print(f"round {number + 1} of {options.rounds}", flush=True)
    lines = [Line(SYSTEMS[key], rate, tuple(found)) for (key, rate), found in turns.items()]
    _publish_report(options, lines, left_out)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench latency", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rates", type=int, nargs="+", default=list(RATES), help="messages per second")
    parser.add_argument("--seconds", type=float, default=5.0, help="of measuring, for each system, rate and round")
    parser.add_argument("--warm-up", type=float, default=5.0, help="seconds before that")
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS), metavar="SYSTEM")
    parser.add_argument("--json", type=Path, default=None, help="where the results go")
    parser.add_argument("--page", type=Path, default=report.PAGE)
    return parser.parse_args(arguments)


def _run(system: System, options: argparse.Namespace, turns: dict[tuple[str, int], list[Turn]]) -> None:
    """Run one system's round."""
    with tempfile.TemporaryDirectory(prefix="sublet-bench-") as name:
        directory = Path(name)
        with system.serve(directory) as address:
            for rate in options.rates:
                load = Load(rate, options.warm_up, options.seconds)
                turns.setdefault((system.key, rate), []).append(_turn(system, address, load, directory))


def _turn(system: System, address: str, load: Load, directory: Path) -> Turn:
    topic, record = f"rate{load.rate}", directory / f"rate{load.rate}.jsonl"
    consuming = ("consume", system.key, address, topic, str(record))
    publishing = ("publish", system.key, address, topic, str(load.rate), str(load.warm_up_s), str(load.seconds))
    with contextlib.ExitStack() as ends:

        def said(count: int) -> list[dict[str, Any]] | None:
            for process in processes:
                process.check()
            found = read_lines(record)
            return found if len(found) >= count else None

        processes = [ends.enter_context(module("bench._end", *consuming, log=directory / f"{topic}-consumer.log"))]
        eventually(lambda: said(1), WAIT_S, processes[0].said, 0.05)
        publisher = ends.enter_context(module("bench._end", *publishing, log=directory / f"{topic}-publisher.log"))
        processes.append(publisher)
        timeout_s = WAIT_S + load.warm_up_s + load.seconds
        result = eventually(lambda: said(RESULT_LINES), timeout_s, lambda: "".join(p.said() for p in processes), 0.05)[
            1
        ]
    if result["lost"] or result["repeated"]:
        print(f"{system.key} at {load.rate}/s: {result['lost']} lost, {result['repeated']} delivered again", flush=True)
    return Turn(result["p50_ms"], result["p99_ms"], result["messages"] / load.seconds)


# --- results --------------------------------------------------------------------------------------------------------


def best_durable_peer(lines: Sequence[Line], rate: int) -> Line | None:
    """Return the durable peer with the least p50 of those that keep the rate; None if there is none."""
    peers = [line for line in lines if line.rate == rate and line.system.role is Role.PEER and line.system.is_durable]
    return min((line for line in peers if line.keeps_rate), key=lambda line: line.median("p50_ms"), default=None)


def claims_of(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Return for each target the ratio of sublet, by the better of its push drivers, to that system; and of sublet in a
    task of Spark to sublet without."""
    claims = []
    for rate in sorted({line.rate for line in lines}):
        here = {line.system.key: line for line in lines if line.rate == rate}
        key, at_most = TARGETS.get(rate, ("", 0.0))
        pushed = [here[each] for each in PUSHED if each in here]
        best = min(pushed, key=lambda line: line.median("p50_ms"), default=None)
        in_spark, session = map(here.get, IN_SPARK)
        claims += [(best, here.get(key), at_most), (in_spark, session, OF_SESSION)]
    return [_claim(ours, other, at_most) for ours, other, at_most in claims if ours and other and other.keeps_rate]


def _claim(ours: Line, other: Line, at_most: float) -> dict[str, Any]:
    ratio = ours.median("p50_ms") / other.median("p50_ms")
    subject = other.system.setting if other.system.role is Role.OURS else other.system.name
    return {
        "what": f"p50 at {ours.rate:,}/s: sublet {ours.system.setting} / {subject}",
        "ratio": significant(ratio),
        "at_most": at_most,
        "holds": ours.keeps_rate and ratio <= at_most,
    }


def _publish_report(options: argparse.Namespace, lines: Sequence[Line], left_out: dict[str, str]) -> None:
    claims = claims_of(lines)
    judged = [
        line.judged(best_durable_peer(lines, rate)) for rate in options.rates for line in lines if line.rate == rate
    ]
    settings = {
        "rounds": options.rounds,
        "seconds": options.seconds,
        "warm_up_s": options.warm_up,
        "message_bytes": MESSAGE_BYTES,
    }
    report.save("latency", settings, {"figures": judged, "claims": claims, "left_out": left_out}, options.json)
    section = table(judged, claims) + "".join(f"\n{key} is left out: {why}\n" for key, why in left_out.items())
    prose = PROSE.format(
        bytes=MESSAGE_BYTES, seconds=options.seconds, warm_up=options.warm_up, rounds=options.rounds, stored=STORED
    )
    report.page(options.page, "latency", prose, section)
    print(section)


def table(judged: Sequence[dict[str, Any]], claims: Sequence[dict[str, Any]]) -> str:
    """Return the table of the page."""
    lines = [
        "| messages/s | system | setting | durable | p50 ms | p99 ms | p50 / best durable peer's |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in judged:
        rate = f"{one['rate']:,}" if one["keeps_rate"] else f"{one['rate']:,} (published {one['published_per_s']:,.0f})"
        ratio = "" if one["ratio"] is None else f"{one['ratio']:g}"
        lines.append(
            f"| {rate} | {one['system']} | {one['setting']} | {'yes' if one['durable'] else 'no'} "
            f"| {one['p50_ms']:g} | {one['p99_ms']:g} | {ratio} |"
        )
    if claims:
        lines += ["", "| target | ratio | at most | |", "| --- | --- | --- | --- |"]
    for claim in claims:
        verdict = "holds" if claim["holds"] else "**missed**"
        lines.append(f"| {claim['what']} | {claim['ratio']:g} | {claim['at_most']:g} | {verdict} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

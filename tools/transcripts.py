"""`python -m tools.transcripts`: runs the commands of docs/operations.md and inserts their output.

In a `console` block a line `$ sublet ...` is run, on a Postgres of the page's own; its output follows, and its exit
code if that is not 0. A comment `<!-- scene: NAME -->` prepares a situation first: see `SCENES`. `--check` writes
nothing: it fails if a command exits otherwise than the page says, or if the columns of a table or the fields of an
object differ. Numbers, ids and times are not compared.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from typing import Any

from sublet_storage.db.connect import connect
from tools.stage import ROOT, Stage, stage

PAGE = ROOT / "docs" / "operations.md"
SETTINGS = {
    "SUBLET_LEASE_DURATION_S": "3",
    "SUBLET_LEASE_RENEW_INTERVAL_S": "1",
    "SUBLET_LEASE_MARGIN_S": "0.9",
    "SUBLET_POLL_HOLD_S": "1",
    "SUBLET_PING_INTERVAL_S": "0.5",
    "SUBLET_PING_TIMEOUT_S": "2",
    "SUBLET_EVICTION_TIMEOUT_S": "4",
    "SUBLET_RECLAIM_GRACE_S": "4",
    "SUBLET_MIN_GRANT_DURATION_S": "0.2",
}
"""Short times, so that the page does not take long; the prose has the defaults."""
GROUP, AUDIT = "$share/billing/orders/#", "$share/audit/orders/#"
_PART = re.compile(r"^<!-- scene: (?P<scene>[^>]*?) -->$|^```console\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
_EXIT = re.compile(r"\[exit code (\d+)\]")


def _settle(play: Stage, consumers: int) -> None:
    """Wait until that number of consumers hold all streams of the group and have consumed them."""
    play.until(
        f"select count(distinct agent) = {consumers} and count(*) = 4 and bool_and(position = head)"
        " from lending join stream using (stream_id) join consumer_group g using (group_id)"
        " where g.name = 'billing' and lending.status = 'held'"
    )


def _publish(play: Stage, count: int) -> None:
    """Publish `count` orders of many customers."""
    records = (json.dumps({"key": f"customer-{n % 97}", "value": {"id": n}}) for n in range(count))
    play.run("sublet publish orders/eu/created --format ndjson", "\n".join(records).encode())


def _begin(play: Stage) -> None:
    play.run("sublet spaces create orders 'orders/#' --shards 4")
    play.run(f"sublet groups create '{AUDIT}' --from offset:0")
    play.serve("n1", "n2")
    _publish(play, 2000)
    _return(play)


def _return(play: Stage) -> None:
    for name in ("a", "b"):
        play.start(name, "consume", GROUP, "--from", "offset:0", "--name", name)
    _settle(play, 2)


def _away(play: Stage) -> None:
    play.end("a", "b")
    _publish(play, 500)


def _crash(play: Stage) -> None:
    play.end("a", kill=True)
    play.until("select count(*) = 2 from lending_history where forced")
    _settle(play, 1)
    play.start("a", "consume", GROUP, "--name", "a")
    _settle(play, 2)


def _leaderless(play: Stage) -> None:
    play.end("n1", "n2", kill=True)
    play.until("select not exists (select from node where expires_at > clock_timestamp())")


def _block(play: Stage) -> None:
    """Set a position beyond the end of a stream, as after a restore of an older backup."""
    with connect(play.url) as connection:
        connection.execute(
            "update lending set position = 100000 where (group_id, stream_id) = (select group_id, min(stream_id)"
            " from lending join consumer_group using (group_id) where consumer_group.name = 'audit' group by group_id)"
        )
    play.start("auditor", "consume", AUDIT)
    play.until("select exists (select from lending where status = 'blocked')")


def _pause(play: Stage) -> None:
    play.until("select not exists (select from lending where status = 'held' and group_id ="
                " (select group_id from consumer_group where name = 'billing'))")  # fmt: skip


SCENES: dict[str, Callable[[Stage], None]] = {
    "two nodes, two consumers": _begin,
    "the consumers are away": _away,
    "the consumers are back": _return,
    "a consumer is killed": _crash,
    "no node is there": _leaderless,
    "the nodes are back": lambda play: play.serve("n1", "n2"),
    "a stream is blocked": _block,
    "it is paused": _pause,
    "it goes on": lambda play: _settle(play, 2),
}


def played(page: str, play: Stage) -> str:
    """Return the page with the current output of its commands."""

    def part(found: re.Match[str]) -> str:
        if found["scene"] is not None:
            SCENES[found["scene"]](play)
            return found[0]
        commands = [line for line in found["text"].splitlines() if line.startswith("$ ")]
        return "```console\n" + "\n".join(f"{line}\n{play.run(line[2:])}" for line in commands) + "```"

    return _PART.sub(part, page)


def shapes(page: str) -> list[tuple[str, Any]]:
    """Return (command, its exit code and the shape of its output) of each transcript."""
    found = []
    for block in re.findall(r"^```console\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        for text in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, answer = text.partition("\n")
            found.append((command, (_EXIT.findall(answer), _shape(answer))))
    return found


def _shape(answer: str) -> Any:
    """Return the fields of an object, else the words of the first line without those that contain digits."""
    first = answer.partition("\n")[0]
    if first.startswith("{"):
        return _fields(json.loads(first))
    return re.sub(r"\d+", "#", first).split()[:4]


def _fields(thing: Any) -> Any:
    if isinstance(thing, dict):
        return {name: _fields(value) for name, value in thing.items() if isinstance(value, dict | list)} | {
            name: None for name, value in thing.items() if not isinstance(value, dict | list)
        }
    return [_fields(thing[0])] if isinstance(thing, list) and thing else None


def main(arguments: list[str] | None = None) -> int:
    """Write the page, or with `--check` compare its shapes; return 1 if they differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args(arguments).check
    with stage(SETTINGS) as play:
        now = played(PAGE.read_text(), play)
    if not check:
        PAGE.write_text(now)
        return 0
    differ = [(old, new) for old, new in zip(shapes(PAGE.read_text()), shapes(now), strict=True) if old != new]
    for old, new in differ:
        print(f"docs/operations.md: $ {old[0]}\n  says {old[1]}\n  now  {new[1]}\nRun python -m tools.transcripts.")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())

"""`sublet groups why`: why streams of a group stand still, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sublet.cli.base import values
from sublet.cli.base.command import Cli
from sublet.cli.base.values import GroupName
from sublet.cli.groups.names import named

if TYPE_CHECKING:
    from sublet_storage.groups.status.diagnosis_queries import Answer


def why(
    cli: Cli,
    subscription: GroupName,
    stream: Annotated[str | None, typer.Option(metavar="N", help="Of this stream only.")] = None,
) -> None:
    """Say why streams stand still, and what helps.

    All that are not being consumed right now are told of, those with the same reason together; those that are
    consumed to their ends are counted. The answer comes from the database: it is there without a leader and without
    members.

    Examples:

    \b
      sublet groups why '$share/billing/orders/#'
      sublet groups why '$share/billing/orders/#' --stream 12
    """
    from sublet_storage.groups.status import diagnosis_queries
    from sublet_storage.groups.status.diagnosis_model import Reason

    wanted = named(cli, subscription)
    stream_id = None if stream is None else values.whole("--stream", stream)
    with cli.connection() as connection:
        group, answers = diagnosis_queries.why(connection, wanted, stream_id)
    at_work = [answer for answer in answers if answer.ruling.reason is Reason.CONSUMING]
    if cli.json:
        told = {"subscription": str(wanted), "group_id": group.group_id, "consuming": len(at_work)}
        cli.emit({**told, "streams": [_as_json(answer) for answer in answers]})
        return
    if stream_id is not None:
        cli.tell(_prose(answers))
        return
    cli.tell([_in_all(str(wanted), answers, len(at_work))])
    well = (Reason.CONSUMING, Reason.CAUGHT_UP, Reason.FINISHED)
    for found in _alike([each for each in answers if each.ruling.reason not in well]):
        cli.tell(["", *_prose(found)])


def _in_all(wanted: str, answers: Sequence[Answer], at_work: int) -> str:
    """A group that is well must not sound ill: nobody is missed where nothing waits."""
    behind = sum(answer.line.lag != 0 for answer in answers)
    if behind:
        where = f"{behind} of {len(answers)} streams of {wanted} are not consumed to their ends"
        return f"{where}. Being consumed right now: {at_work}."
    held, finished = (sum(each.line.status == status for each in answers) for status in ("held", "finished"))
    over = f", finished: {finished}" if finished else ""
    return f"Nothing waits: all {len(answers)} streams of {wanted} are consumed to their ends. Held: {held}{over}."


def _alike(answers: Iterable[Answer]) -> Iterator[Sequence[Answer]]:
    """Those with one and the same answer together, in the order of their reasons."""
    from sublet_storage.groups.status.diagnosis_model import Reason

    order = list(Reason)

    def key(answer: Answer) -> tuple[int, str, str]:
        ruling = answer.ruling
        return order.index(ruling.reason), ruling.because, ruling.remedy or ""

    for _, found in groupby(sorted(answers, key=key), key=key):
        yield list(found)


def _prose(answers: Sequence[Answer]) -> list[str]:
    ruling = answers[0].ruling
    ids = values.ranges(answer.line.stream_id for answer in answers)
    lines = [f"{ruling.reason}: stream{'s' * (len(answers) > 1)} {ids}", f"  {ruling.because}"]
    return lines if ruling.remedy is None else [*lines, f"  -> {ruling.remedy}"]


def _as_json(answer: Answer) -> dict[str, Any]:
    line, ruling = answer.line, answer.ruling
    return {
        "stream_id": line.stream_id,
        "reason": ruling.reason.value,
        "because": ruling.because,
        "remedy": ruling.remedy,
        "status": line.status,
        "position": line.position,
        "head": line.head,
        "lag": line.lag,
        "age_s": line.age_s,
        "owner": line.session or line.agent,
    }

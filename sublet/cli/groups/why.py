"""`sublet groups why`: why streams of a group are stalled, and the hint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sublet.cli.base import text_conversion
from sublet.cli.base.command import CliCommandContext
from sublet.cli.base.text_conversion import GroupName
from sublet.cli.groups.names import resolve_subscription

if TYPE_CHECKING:
    from sublet_storage.groups.status.diagnosis_queries import StreamDiagnosis


def why(
    cli: CliCommandContext,
    subscription: GroupName,
    stream: Annotated[str | None, typer.Option(metavar="N", help="Of this stream only.")] = None,
) -> None:
    """Show why streams stand still, and what to do.

    All that are not being consumed right now are shown, those with the same reason together; those that are consumed to
    their ends are counted. The answer comes from the database: it is there without a leader and without members.

    Examples:

    \b
      sublet groups why '$share/billing/orders/#'
      sublet groups why '$share/billing/orders/#' --stream 12
    """
    from sublet_storage.groups.status import diagnosis_queries
    from sublet_storage.groups.status.diagnosis_facts import StallReason

    resolved_subscription = resolve_subscription(cli, subscription)
    stream_id = None if stream is None else text_conversion.parse_int("--stream", stream)
    with cli.open_connection() as connection:
        group, answers = diagnosis_queries.diagnose_group(connection, resolved_subscription, stream_id)
    at_work = [answer for answer in answers if answer.diagnosis.reason is StallReason.CONSUMING]
    if cli.json:
        summary = {"subscription": str(resolved_subscription), "group_id": group.group_id, "consuming": len(at_work)}
        cli.print_json({**summary, "streams": [_to_json(answer) for answer in answers]})
        return
    if stream_id is not None:
        cli.print_lines(_format_diagnosis(answers))
        return
    cli.print_lines([_format_summary(str(resolved_subscription), answers, len(at_work))])
    well = (StallReason.CONSUMING, StallReason.CAUGHT_UP, StallReason.FINISHED)
    for similar_answers in _group_by_diagnosis([each for each in answers if each.diagnosis.reason not in well]):
        cli.print_lines(["", *_format_diagnosis(similar_answers)])


def _format_summary(subscription: str, answers: Sequence[StreamDiagnosis], at_work: int) -> str:
    """Return the summary. A group with nothing to read needs no members, so it has no problem."""
    behind = sum(answer.stream.lag != 0 for answer in answers)
    if behind:
        text = f"{behind} of {len(answers)} streams of {subscription} are not consumed to their ends"
        return f"{text}. Being consumed right now: {at_work}."
    held_count, finished_count = (
        sum(each.stream.status == status for each in answers) for status in ("held", "finished")
    )
    over = f", finished: {finished_count}" if finished_count else ""
    return (
        f"Nothing waits: all {len(answers)} streams of {subscription} are consumed to their ends. "
        f"Held: {held_count}{over}."
    )


def _group_by_diagnosis(answers: Iterable[StreamDiagnosis]) -> Iterator[Sequence[StreamDiagnosis]]:
    """Yield the answers with the same diagnosis together, in the order of their reasons."""
    from sublet_storage.groups.status.diagnosis_facts import StallReason

    order = list(StallReason)

    def key(answer: StreamDiagnosis) -> tuple[int, str, str]:
        diagnosis = answer.diagnosis
        return order.index(diagnosis.reason), diagnosis.detail, diagnosis.hint or ""

    for _, similar_answers in groupby(sorted(answers, key=key), key=key):
        yield list(similar_answers)


def _format_diagnosis(answers: Sequence[StreamDiagnosis]) -> list[str]:
    diagnosis = answers[0].diagnosis
    ids = text_conversion.format_ranges(answer.stream.stream_id for answer in answers)
    lines = [f"{diagnosis.reason}: stream{'s' * (len(answers) > 1)} {ids}", f"  {diagnosis.detail}"]
    return lines if diagnosis.hint is None else [*lines, f"  -> {diagnosis.hint}"]


def _to_json(answer: StreamDiagnosis) -> dict[str, Any]:
    stream, diagnosis = answer.stream, answer.diagnosis
    return {
        "stream_id": stream.stream_id,
        "reason": diagnosis.reason.value,
        "detail": diagnosis.detail,
        "hint": diagnosis.hint,
        "status": stream.status,
        "position": stream.position,
        "head": stream.head,
        "lag": stream.lag,
        "age_s": stream.age_s,
        "owner": stream.session or stream.agent,
    }

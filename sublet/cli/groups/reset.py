"""`sublet groups reset`: sets the positions of a group, with or without members."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import asdict

from sublet.cli.base import text_conversion
from sublet.cli.base.command import CliCommandContext
from sublet.cli.base.text_conversion import GroupName
from sublet.cli.groups.names import resolve_subscription
from sublet_protocol.domain.errors import UsageError
from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.groups.admin.reset_target import ResetTarget

if TYPE_CHECKING:
    from sublet_storage.groups.admin.reset_transaction import PositionChange


def reset(
    cli: CliCommandContext,
    subscription: GroupName,
    to_earliest: Annotated[bool, typer.Option("--to-earliest", help="All that retention has left.")] = False,
    to_latest: Annotated[bool, typer.Option("--to-latest", help="The ends of all streams.")] = False,
    to_current: Annotated[
        bool, typer.Option("--to-current", help="Where it is: streams that were blocked are granted again.")
    ] = False,
    to_offset: Annotated[int | None, typer.Option(metavar="N", help="Offset N of each stream, or its end.")] = None,
    to_time: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="What was stored then or later, with its time zone: 2026-01-31T12:00:00Z."),
    ] = None,
    by_duration: Annotated[
        str | None, typer.Option(metavar="DURATION", help="What was stored within the last 90s, 15m, 6h, 7d.")
    ] = None,
    shift_by: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="N messages on; with a negative N back. Not beyond the ends, nor in streams that ended before "
            "the group began.",
        ),
    ] = None,
    to_epoch: Annotated[
        str | None, typer.Option(metavar="EPOCH", help="From that epoch on: 7, or 3,1 where epochs are pairs.")
    ] = None,
    from_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What `groups export` wrote, or --dry-run --json: stream by stream."),
    ] = None,
    stream: Annotated[
        list[int] | None, typer.Option(metavar="ID", help="This stream only; may be given several times.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Show what would be done, and do nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    timeout: Annotated[
        str,
        typer.Option(
            metavar="DURATION",
            help="How long members may take to hand over what they have. A leader without notifications looks for the "
            "pause every 5 s only: give more.",
        ),
    ] = "2m",
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Do not wait for members: what they have in hand may be seen twice, and history says so."
        ),
    ] = False,
) -> None:
    """Let a group go on from elsewhere: earlier, later, or from the same position again.

    A live group is paused first: its members hand over what they have, and nothing is given out under an old position
    afterwards. Then all positions are set in one transaction, and it goes on. A group that was paused stays paused.
    Streams that were consumed to their end are consumed again, parents before children.

    Examples:

    \b
      sublet groups reset '$share/billing/orders/#' --to-earliest --dry-run
      sublet groups reset '$share/billing/orders/#' --to-time 2026-11-21T10:00:00Z --yes
      sublet groups reset '$share/billing/orders/#' --shift-by 1 --stream 12
    """
    from sublet_storage.db.bounded_connection import get_timeline
    from sublet_storage.db.connect import connect
    from sublet_storage.groups.admin import live_reset as live_reset
    from sublet_storage.groups.admin import reset_transaction
    from sublet_storage.groups.coordinator import group_lifecycle

    resolved_subscription = resolve_subscription(cli, subscription)
    target = _parse_target(
        to_earliest,
        to_latest,
        to_current,
        to_offset,
        to_time,
        by_duration,
        shift_by,
        to_epoch,
        from_file,
        resolved_subscription,
    )
    streams, drain_timeout_s = frozenset(stream or ()), text_conversion.parse_seconds(timeout)
    with cli.open_database() as database, connect(database.url, application_name="sublet cli") as connection:
        group, timeline = group_lifecycle.get_live(connection, resolved_subscription), get_timeline(connection)
        moves = reset_transaction.plan_reset(connection, group, target, streams)
        if not cli.json:
            _show(cli, moves)
        if not dry_run:
            if not yes:
                cli.confirm(
                    f"Reset {len(moves)} streams of {resolved_subscription} to {target}?", "Nothing was changed."
                )
            moves = live_reset.reset_live_group(
                database.url,
                connection,
                group,
                target,
                streams,
                force=force,
                drain_timeout_s=drain_timeout_s,
                waiting=lambda held: (
                    None if cli.json else cli.print_info(f"waiting for members to hand over {held} streams")
                ),
            )
    if cli.json:
        summary = {
            "subscription": str(resolved_subscription),
            "group_id": group.group_id,
            "target": str(target),
            "done": not dry_run,
        }
        cli.print_json({**summary, "timeline": timeline, "streams": [asdict(move) for move in moves]})
    else:
        cli.print_info(
            f"{len(moves)} streams of {resolved_subscription} {'would go' if dry_run else 'go'} on from {target}."
        )


def _parse_target(
    earliest: bool,
    latest: bool,
    current: bool,
    offset: int | None,
    moment: str | None,
    duration: str | None,
    shift: int | None,
    epoch: str | None,
    file: Path | None,
    subscription: Subscription,
) -> ResetTarget:
    targets = [
        *([ResetTarget.earliest()] if earliest else []),
        *([ResetTarget.latest()] if latest else []),
        *([ResetTarget.current()] if current else []),
        *([] if offset is None else [ResetTarget.offset(offset)]),
        *([] if moment is None else [ResetTarget.time(text_conversion.parse_time("--to-time", moment))]),
        *(
            []
            if duration is None
            else [ResetTarget.time(text_conversion.parse_ago("--by-duration", duration, "--to-earliest"))]
        ),
        *([] if shift is None else [ResetTarget.shift(shift)]),
        *([] if epoch is None else [ResetTarget.at_epoch(parse_epoch(epoch))]),
        *([] if file is None else [read_reset_file(file, subscription)]),
    ]
    if len(targets) != 1:
        raise UsageError(
            f"{len(targets)} positions to go on from: give one of --to-earliest, --to-latest, --to-current, "
            "--to-offset, --to-time, --by-duration, --shift-by, --to-epoch and --from-file."
        )
    return targets[0]


def parse_epoch(text: str) -> tuple[int, ...]:
    """Return the epoch of `--to-epoch`. Raise `UsageError` for another text."""
    try:
        return tuple(int(part) for part in text.strip("()").split(","))
    except ValueError:
        raise UsageError(
            f"--to-epoch {text!r}: give a number, or several with commas between them: 7, or 3,1."
        ) from None


def read_reset_file(file: Path, subscription: Subscription) -> ResetTarget:
    """Return each stream's `position`, or the result of a reset: `after`. Raise `UsageError` for another group's
    positions."""
    document = text_conversion.read_json_file(f"--from-file {file}", file)
    try:
        file_subscription, timeline = document.get("subscription"), document.get("timeline")
        streams = [_parse_stream_position(each) for each in document["streams"]]
        if len(dict(streams)) < len(streams):
            raise ValueError("a stream occurs twice")
        if not isinstance(timeline, str | None):
            raise ValueError(f"timeline {timeline!r}")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(
            f'--from-file {file}: not of the form {{"streams": [{{"stream_id": 1, "position": 0}}, ...]}} ({error!r}). '
            "Make one with `sublet groups export`."
        ) from None
    if file_subscription not in (None, str(subscription)):
        raise UsageError(
            f"--from-file {file}: it is of {file_subscription}, not of {subscription}. `sublet groups clone` makes a "
            'group that begins where another is; to move this one to those positions all the same, take "subscription" '
            "out of the file."
        )
    return ResetTarget.offsets(dict(streams), timeline)


def _parse_stream_position(stored: dict[str, Any]) -> tuple[int, int]:
    """Return (stream, offset), unconverted. Raise `ValueError` if one is not an integer."""
    position = stored["stream_id"], stored["after"] if "after" in stored else stored["position"]
    if any(type(number) is not int for number in position):
        raise ValueError(f"stream {position[0]!r}, position {position[1]!r}")
    return position


def _show(cli: CliCommandContext, moves: tuple[PositionChange, ...]) -> None:
    cli.print_table(
        ("STREAM>", "STATUS", "FROM>", "TO>", "HEAD>", "AGAIN>", "SKIPPED>"),
        [
            (m.stream_id, m.status or "new", m.before, m.after, m.head, m.redelivered_count, m.skipped_count)
            for m in moves
        ],
    )
    cli.print_info(
        f"In all {sum(m.redelivered_count for m in moves)} messages again, and "
        f"{sum(m.skipped_count for m in moves)} skipped."
    )
    if without := [m.stream_id for m in moves if m.has_epochs is False and m.head]:
        cli.print_info(
            f"Streams {text_conversion.format_ranges(without)} have no message in any epoch: all that they "
            "have is passed over."
        )

"""`sublet groups pause`, `resume` and `weight`: the desired state of a live group."""

from __future__ import annotations

from typing import Annotated

import typer

from sublet.cli.base import text_conversion
from sublet.cli.base.command import CliCommandContext
from sublet.cli.base.text_conversion import GroupName
from sublet.cli.groups.names import resolve_subscription
from sublet_storage.groups.model.desired_state import (
    GroupCommand,
    OverrideSessionWeight,
    PauseGroup,
    ResumeGroup,
    format_pause,
)


def pause(
    cli: CliCommandContext,
    subscription: GroupName,
    reason: Annotated[str, typer.Option(help="Why: shown by describe and history.")] = "",
) -> None:
    """Take all streams of a group back, and grant none until it is resumed.

    Its members stay: each finishes what it has in hand, up to the revoke deadline, and waits. Nothing is lost, and what
    is published meanwhile waits as well. A group may be paused before it has members.

    Example:

    \b
      sublet groups pause '$share/billing/orders/#' --reason 'the sink is repaired'
    """
    _send_command(cli, subscription, PauseGroup(reason))


def resume(cli: CliCommandContext, subscription: GroupName) -> None:
    """Grant the streams of a paused group again, from where they are.

    Example:

    \b
      sublet groups resume '$share/billing/orders/#'
    """
    _send_command(cli, subscription, ResumeGroup())


def weight(
    cli: CliCommandContext,
    subscription: GroupName,
    session: Annotated[str, typer.Argument(help="The name of a session: --name of consume, sessionName in Spark.")],
    weight: Annotated[str, typer.Argument(metavar="NUMBER|own", help="Its share; own: the one that it asks for.")],
) -> None:
    """Change the share of a named session while it consumes.

    Streams are shared by weight: a session of weight 2 gets twice what one of weight 1 gets. It holds until it is
    changed again, also for sessions of that name that are yet to come.

    Example:

    \b
      sublet groups weight '$share/billing/orders/#' nightly 0.5
    """
    from sublet_storage.groups.status.overview import describe_group

    share = None if weight == "own" else text_conversion.parse_number("weight", weight)
    _send_command(cli, subscription, OverrideSessionWeight(session, share))
    if cli.json:
        return
    with cli.open_connection() as connection:
        sessions = {
            stream.session for stream in describe_group(connection, resolve_subscription(cli, subscription)).streams
        }
    if session not in sessions:
        cli.print_info(f"No session {session!r} holds a stream at present: it is for one that is yet to get some.")


def _send_command(cli: CliCommandContext, subscription: str, command: GroupCommand) -> None:
    from sublet_storage.groups.admin.admin import send_command

    resolved_subscription = resolve_subscription(cli, subscription)
    with cli.open_database() as database:
        group, changed = send_command(database.url, resolved_subscription, command)
    if cli.json:
        desired_state = {"paused": group.desired_state.pause_reason, "weights": dict(group.desired_state.weights)}
        cli.print_json(
            {
                "subscription": str(resolved_subscription),
                "group_id": group.group_id,
                "changed": changed,
                **desired_state,
            }
        )
    else:
        is_so = format_pause(group.desired_state.pause_reason) if isinstance(command, PauseGroup) else command
        cli.print_info(
            f"{resolved_subscription}: {is_so}."
            if changed
            else f"{resolved_subscription}: {is_so}, as it was: nothing was changed."
        )

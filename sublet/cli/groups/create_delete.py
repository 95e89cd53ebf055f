"""`sublet groups create` and `delete`."""

from __future__ import annotations

from typing import Annotated

import typer

from sublet.cli.base import text_conversion
from sublet.cli.base.command import CliCommandContext
from sublet.cli.base.text_conversion import GroupName
from sublet.cli.groups.names import resolve_subscription
from sublet_protocol.domain.epoch_frontiers import format_frontier, lower_frontier_from_json
from sublet_protocol.domain.subscriptions import StartingPosition, Subscription
from sublet_storage.groups.model.options import GroupOptions, OnDataLoss, OnPoison

ROWS_TIMEOUT_S = 60.0
"""For the rows of a group, one for each stream of its filter, which may be very many."""


def create(
    cli: CliCommandContext,
    subscription: GroupName,
    start: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="WHERE",
            help="Where it begins: latest (with what comes), earliest (with all that is stored), a time such as "
            "2026-11-21T10:00:00Z, or offset:N of each stream.",
        ),
    ] = "latest",
    on_data_loss: Annotated[
        OnDataLoss,
        typer.Option(
            help="What becomes of a stream whose messages retention took before they were consumed: it is blocked "
            "until somebody decides, or goes on without them and counts them as lost."
        ),
    ] = OnDataLoss.FAIL,
    strategy: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="How streams are shared among members: even, load, or one installed here and on nodes."
        ),
    ] = "even",
    session_expiry: Annotated[
        str,
        typer.Option(
            metavar="DURATION",
            help="Keep the streams of a named consumer that has left for its return, so long: 90s, 15m, or 0.",
        ),
    ] = "0",
    atomic: Annotated[
        bool,
        typer.Option(
            "--atomic",
            help="Its consumers are given whole epochs only: none is seen in part, and each is announced once.",
        ),
    ] = False,
    on_poison: Annotated[
        OnPoison,
        typer.Option(
            help="What becomes of a stream at a block that cannot be decoded, or whose payload outside of Postgres is "
            "damaged: it is blocked until somebody decides, or goes on behind it and counts its messages as lost."
        ),
    ] = OnPoison.BLOCK,
    holds_retention: Annotated[
        bool,
        typer.Option(
            "--hold-retention",
            help="Retention takes nothing that the group has not consumed, as of a $queue group. What nobody consumes "
            "is kept until the group is deleted.",
        ),
    ] = False,
) -> None:
    """Create a group before it has consumers.

    A $queue group must be: it keeps messages for consumers to come. Creating the same group again changes nothing;
    with other options it is a conflict, since a group keeps those of its birth.

    Examples:

    \b
      sublet groups create '$queue/mail/outgoing/+'
      sublet groups create '$share/audit/#' --from 2026-11-21T10:00:00Z --on-data-loss skip
    """
    from sublet_leader.allocation.strategy_registry import load_strategy
    from sublet_storage.db.connect import connect
    from sublet_storage.groups.admin.admin import create_group
    from sublet_storage.groups.status.json_views import options_to_json
    from sublet_storage.groups.status.overview import describe_group

    parsed_subscription = Subscription.parse(subscription)
    expiry_s = text_conversion.parse_fractional_seconds(session_expiry)
    options = GroupOptions(
        StartingPosition.parse(start, "--from"), on_data_loss, strategy, expiry_s, atomic, on_poison, holds_retention
    )
    load_strategy(strategy)
    with cli.open_database() as database, connect(database.url, application_name="sublet cli") as connection:
        group, is_new = create_group(database.url, parsed_subscription, options, statement_timeout_s=ROWS_TIMEOUT_S)
        epochs = describe_group(connection, parsed_subscription).epochs if atomic else ()
    if cli.json:
        summary = {"subscription": str(parsed_subscription), "group_id": group.group_id, "created": is_new}
        cli.print_json({**summary, **options_to_json(group.options)})
    elif not is_new:
        cli.print_info(f"The group {parsed_subscription} exists already, with these options: nothing was changed.")
    else:
        cli.print_info(f"The group {parsed_subscription} exists now, and starts at {group.starting_position}.")
        for frontier in epochs:
            first = lower_frontier_from_json(frontier.consumed)
            cli.print_info(
                f"Of space {frontier.space} it is given all "
                f"epochs{'' if first is None else ' from ' + format_frontier(first)}."
            )


def delete(
    cli: CliCommandContext,
    subscription: GroupName,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a group with its progress.

    Its members end, with an error that names the deletion. A group that is created under the same name is another one,
    with a starting position of its own.

    Example:

    \b
      sublet groups delete '$share/billing/orders/#' --yes
    """
    from sublet_storage.db.connect import connect
    from sublet_storage.groups.admin.admin import delete_group
    from sublet_storage.groups.status.overview import describe_group

    resolved_subscription = resolve_subscription(cli, subscription)
    group_id: int | None = None
    with cli.open_database() as database:
        if not yes:
            with connect(database.url, application_name="sublet cli") as connection:
                overview = describe_group(connection, resolved_subscription)
            group_id = overview.group.group_id
            stream_count = sum(len(member.streams) for member in overview.members)
            cli.confirm(
                f"Delete {resolved_subscription}, its progress, and the lending of {stream_count} streams?",
                "Nothing was deleted.",
            )
        deleted = delete_group(database.url, resolved_subscription, ROWS_TIMEOUT_S, group_id)
    if cli.json:
        cli.print_json({"subscription": str(resolved_subscription), "group_id": deleted, "deleted": True})
    else:
        cli.print_info(f"The group {resolved_subscription} is deleted.")

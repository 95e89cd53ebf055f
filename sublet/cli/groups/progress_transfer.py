"""`sublet groups clone`, `export` and `import`: starts a group from another's progress."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sublet.cli.base import text_conversion
from sublet.cli.base.command import CliCommandContext
from sublet.cli.base.text_conversion import GroupName
from sublet.cli.groups.names import resolve_subscription
from sublet_protocol.domain.errors import Conflict, SubletError, UsageError
from sublet_protocol.domain.subscriptions import Subscription

if TYPE_CHECKING:
    import psycopg

    from sublet_storage.groups.admin.progress_transfer import ExportedProgress
    from sublet_storage.groups.model.options import GroupOptions
    from sublet_storage.groups.model.records import Group


Target = Annotated[str, typer.Argument(metavar="TARGET", help="The new group, with the same filter. Quote it.")]
DryRun = Annotated[bool, typer.Option("--dry-run", "-n", help="Show what would be done, and do nothing.")]


def clone(cli: CliCommandContext, subscription: GroupName, target: Target, dry_run: DryRun = False) -> None:
    """Make a group that begins where another is.

    It has its options, and its progress of this moment. The other goes on undisturbed. What its members have in
    hand is given out by the new group too; its pauses, weights and history are its own, and streams that are
    blocked there are tried once more here.

    Example:

    \b
      sublet groups clone '$share/billing/orders/#' '$share/billing-v2/orders/#'
    """
    from sublet_storage.db.clock import read_database_user
    from sublet_storage.groups.admin import progress_transfer

    source, clone_subscription = resolve_subscription(cli, subscription), Subscription.parse(target)
    if source.filter != clone_subscription.filter:
        raise UsageError(
            f"{clone_subscription}: a clone has the filter of its source, {source.filter}, since positions are in its "
            f"streams. Write '${clone_subscription.kind}/{clone_subscription.group}/{source.filter}', or create a "
            "group with a --from of its own."
        )
    with _open_transaction(cli, clone_subscription, dry_run) as connection:
        group, progress = progress_transfer.clone(
            connection, source, clone_subscription, read_database_user(connection)
        )
    _answer(cli, group, progress, dry_run, made_now=True)


def import_(
    cli: CliCommandContext,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `sublet groups export` wrote.")],
    dry_run: DryRun = False,
) -> None:
    """Make a group again from what was exported.

    It has the options and the progress of then. Where the group is there already, with the same options and at the
    same positions, nothing is changed; otherwise it is a conflict: `sublet groups reset --from-file FILE` moves a
    group that is there. An atomic group is not reset from a file: delete it, and import it then.

    Example:

    \b
      sublet groups export '$share/billing/orders/#' > billing.json
      sublet groups delete '$share/billing/orders/#'
      sublet groups import billing.json
    """
    from sublet_storage.db.clock import read_database_user
    from sublet_storage.groups.admin import progress_transfer
    from sublet_storage.groups.coordinator import group_lifecycle
    from sublet_storage.groups.model.group_errors import check_same_options
    from sublet_storage.groups.model.history_record_builder import reason_with_user

    subscription, options, progress, exported_at = read_export_file(file)
    with _open_transaction(cli, subscription, dry_run) as connection:
        live_group = group_lifecycle.find_live(connection, subscription)
        if live_group is None:
            reason = reason_with_user(f"imported, as it was at {exported_at}", read_database_user(connection))
            group = progress_transfer.create_from_progress(connection, subscription, options, progress, reason)
        else:
            group = check_same_options(live_group, options)
            _check_same(group, progress_transfer.list_moved_streams(connection, group, progress), file)
    _answer(cli, group, progress, dry_run, made_now=live_group is None)


@contextlib.contextmanager
def _open_transaction(
    cli: CliCommandContext, subscription: Subscription, dry_run: bool
) -> Iterator[psycopg.Connection[Any]]:
    """Open a transaction, which is rolled back after a dry run; notify nodes of the new group."""
    from sublet_storage.db.connect import connect
    from sublet_storage.groups.coordinator import group_lifecycle
    from sublet_storage.notify.changes import group_change
    from sublet_storage.notify.publisher import publish_once

    with cli.open_database() as database, connect(database.url, application_name="sublet cli") as connection:
        with connection.transaction(force_rollback=dry_run):
            yield connection
        if not dry_run and (group := group_lifecycle.find_live(connection, subscription)) is not None:
            publish_once(database.url, [group_change(str(subscription), group.group_id)])


def read_export_file(file: Path) -> tuple[Subscription, GroupOptions, ExportedProgress, str]:
    """Return what was exported, and when. Raise `UsageError` for another file."""
    from sublet_storage.groups.admin.progress_transfer import progress_from_json
    from sublet_storage.groups.model.options import GroupOptions

    document = text_conversion.read_json_file(str(file), file)
    try:
        options = dict(document["options"])
        start = options.pop("starting_position")
        subscription = Subscription.parse(document["subscription"])
        exported_at = datetime.fromisoformat(document["exported_at"]).isoformat()
        filter_text = document.get("filter", subscription.filter.text)
        result = subscription, GroupOptions.from_row(start, options), progress_from_json(document), exported_at
    except SubletError as error:
        raise UsageError(f"{file}: {error}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(
            f"{file}: not what `sublet groups export` writes ({type(error).__name__}: {error}). Export the group again."
        ) from None
    if filter_text != subscription.filter.text:
        raise UsageError(
            f"{file}: its positions are those of the filter {filter_text!r}, and {subscription} has another: some "
            "would be passed over. Write that filter into the file's subscription, or create a group with a --from of "
            "its own."
        )
    return result


def _check_same(group: Group, moved_streams: list[int], file: Path) -> None:
    if not moved_streams:
        return
    name, path = quote(str(group.subscription)), quote(str(file))
    hint = (  # epochs of an atomic group would be split
        f"sublet groups delete {name}, then sublet groups import {path}. To begin with an epoch: sublet groups reset "
        f"{name} --to-epoch EPOCH"
        if group.options.atomic
        else f"sublet groups reset {name} --from-file {path}"
    )
    raise Conflict(
        f"{group.subscription} exists, and is elsewhere than {file} says, in {len(moved_streams)} streams; the first "
        f"is {moved_streams[0]}. To go back to the file: {hint}"
    )


def _answer(cli: CliCommandContext, group: Group, progress: ExportedProgress, dry_run: bool, *, made_now: bool) -> None:
    from sublet_storage.groups.admin.progress_transfer import progress_to_json
    from sublet_storage.groups.status.json_views import options_to_json

    subscription = group.subscription
    if cli.json:
        summary = {"subscription": str(subscription), "group_id": None if dry_run and made_now else group.group_id}
        done = {"created": False, "would_create": made_now} if dry_run else {"created": made_now}
        cli.print_json({**summary, **done, **options_to_json(group.options), **progress_to_json(progress.to_initial)})
    elif not made_now:
        cli.print_info(
            f"The group {subscription} exists already, with these options and positions: nothing was changed."
        )
    else:
        begins = "would begin" if dry_run else "begins"
        cli.print_info(f"The group {subscription} {begins} at the positions of {len(progress.positions)} streams.")


def export(cli: CliCommandContext, subscription: GroupName) -> None:
    """Write the options of a group and its position in each stream, as JSON.

    `sublet groups reset --from-file FILE` goes back to it, unless the group is atomic, and `sublet groups import FILE`
    makes the group anew where it was deleted. For a reset, take streams that retention has taken since out of the
    file, or reset by time.

    Examples:

    \b
      sublet groups export '$share/billing/orders/#' > before.json
      sublet groups reset '$share/billing/orders/#' --from-file before.json
    """
    from sublet_storage.groups.admin import progress_transfer
    from sublet_storage.groups.coordinator import group_lifecycle
    from sublet_storage.groups.status import overview
    from sublet_storage.groups.status.json_views import options_to_json

    resolved_subscription = resolve_subscription(cli, subscription)
    with cli.open_connection() as connection, overview.snapshot_transaction(connection):
        group = group_lifecycle.get_live(connection, resolved_subscription)
        progress, streams = (
            progress_transfer.progress_to_json(progress_transfer.read_progress(connection, group)),
            overview.read_overview(connection, resolved_subscription).streams,
        )
    progress["streams"] += [
        {"stream_id": stream.stream_id, "position": stream.position, "status": stream.status}
        for stream in streams
        if stream.status == overview.NEW
    ]
    header = {
        "subscription": str(resolved_subscription),
        "filter": resolved_subscription.filter.text,
        "exported_at": datetime.now(UTC).isoformat(),
    }
    cli.print_json({**header, "options": options_to_json(group.options), **progress})

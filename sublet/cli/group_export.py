"""`sublet groups export`: where a group is, to be kept, and to be gone back to."""

from __future__ import annotations

from datetime import UTC, datetime

from sublet.cli.command import Cli
from sublet.cli.group_names import named
from sublet.cli.values import GroupName


def export(cli: Cli, subscription: GroupName) -> None:
    """Write the options of a group and its position in each stream, as JSON.

    `sublet groups reset --from-file FILE` goes back to it, and `sublet groups import FILE` makes the group anew where
    it was deleted. For a reset, take streams that retention has taken since out of the file, or reset by time.

    Examples:

    \b
      sublet groups export '$share/billing/orders/#' > before.json
      sublet groups reset '$share/billing/orders/#' --from-file before.json
    """
    from storage.groups import births, copies, overview
    from storage.groups.as_json import options_as_json

    wanted = named(cli, subscription)
    with cli.connection() as connection, overview.one_instant(connection):
        group = births.live(connection, wanted)
        told, streams = copies.to_json(copies.take(connection, group)), overview.look(connection, wanted).streams
    told["streams"] += [
        {"stream_id": line.stream_id, "position": line.position, "status": line.status}
        for line in streams
        if line.status == overview.NEW
    ]
    whole = {"subscription": str(wanted), "filter": wanted.filter.text, "exported_at": datetime.now(UTC).isoformat()}
    cli.emit({**whole, "options": options_as_json(group.options), **told})

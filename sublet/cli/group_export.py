"""`sublet groups export`: where a group is, to be kept, and to be gone back to."""

from __future__ import annotations

from datetime import UTC, datetime

from protocol.words import Subscription
from sublet.cli.command import Cli
from sublet.cli.values import GroupName


def export(cli: Cli, subscription: GroupName) -> None:
    """Write the position of each stream of a group, as JSON.

    `sublet groups reset --from-file FILE` goes back to it. Positions of streams that retention has taken since are left
    out there: take them out of the file, or reset by time.

    Example:

    \b
      sublet groups export '$share/billing/orders/#' > before.json
      sublet groups reset '$share/billing/orders/#' --from-file before.json
    """
    from storage.groups.overview import describe

    wanted = Subscription.parse(subscription)
    with cli.connection() as connection:
        overview = describe(connection, wanted)
    streams = [
        {"stream_id": line.stream_id, "position": line.position, "status": line.status} for line in overview.streams
    ]
    cli.emit({"subscription": str(wanted), "exported_at": datetime.now(UTC).isoformat(), "streams": streams})

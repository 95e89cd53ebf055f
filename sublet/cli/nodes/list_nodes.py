"""`sublet nodes list`, and the command table of `sublet nodes`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sublet.cli.base.command import CliCommandContext, command, command_group
from sublet.cli.nodes import control

if TYPE_CHECKING:
    from sublet_storage.node_directory import NodeEntry


def list_(cli: CliCommandContext) -> None:
    """List the leader nodes: their addresses, their leases, and how many groups each leads.

    A node whose lease has run out is gone, or does not reach the database; its name is free for the next.

    Example:

    \b
      sublet nodes list
    """
    from sublet_storage.node_directory import count_led_groups, list_nodes, node_to_json

    with cli.open_connection() as connection:
        entries, led = list_nodes(connection), count_led_groups(connection)
    if cli.json:
        cli.print_json({"nodes": [node_to_json(entry, led) for entry in entries]})
        return
    cli.print_table(
        ("NAME", "ADDRESS", "STATE", "LEADS>", "PROTOCOL>", "NOTIFICATIONS", "STARTED"),
        [
            (
                entry.node.name,
                entry.node.address,
                _format_state(entry),
                led.get(entry.node.incarnation, 0),
                entry.protocol_version,
                entry.notify_driver,
                entry.started_at.isoformat(timespec="seconds"),
            )
            for entry in entries
        ],
    )
    if not entries:
        cli.print_info("There are no nodes. Start one: sublet leader")


def _format_state(entry: NodeEntry) -> str:
    if entry.remaining_s <= 0:
        return "gone"
    return "draining" if entry.is_draining else "alive"


_NODES = {
    "list": command(list_),
    "drain": command(control.drain),
    "step-down": command(control.step_down),
}
COMMANDS = {"nodes": command_group("Nodes: the leaders, what each leads, and moving that.", _NODES)}

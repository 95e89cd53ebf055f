"""`sublet nodes`: the leader nodes, what each leads, and how that moves to others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sublet.cli.base.command import Cli, group, made
from sublet.cli.nodes import control

if TYPE_CHECKING:
    from sublet_storage.nodes import NodeEntry


def list_(cli: Cli) -> None:
    """List the leader nodes: their addresses, their leases, and how many groups each leads.

    A node whose lease has run out is gone, or does not reach the database; its name is free for the next.

    Example:

    \b
      sublet nodes list
    """
    from sublet_storage.nodes import as_json, led_groups, list_nodes
    from sublet_storage.notify.drivers.registry import name_of

    with cli.connection() as connection:
        entries, led = list_nodes(connection), led_groups(connection)
    if cli.json:
        cli.emit({"nodes": [as_json(entry, led) for entry in entries]})
        return
    cli.table(
        ("NAME", "ADDRESS", "STATE", "LEADS>", "PROTOCOL>", "NEWS", "STARTED"),
        [
            (
                entry.node.name,
                entry.node.address,
                _state(entry),
                led.get(entry.node.incarnation, 0),
                entry.protocol_version,
                name_of(entry.notify or "poll:"),
                entry.started_at.isoformat(timespec="seconds"),
            )
            for entry in entries
        ],
    )
    if not entries:
        cli.say("There are no nodes. Start one: sublet leader")


def _state(entry: NodeEntry) -> str:
    if entry.remaining_s <= 0:
        return "gone"
    return "drains" if entry.draining else "lives"


_NODES = {
    "list": made(list_),
    "drain": made(control.drain),
    "step-down": made(control.step_down),
}
COMMANDS = {"nodes": group("Nodes: the leaders, what each leads, and moving that.", _NODES)}

"""`sublet nodes`: the leader nodes, and what each leads."""

from __future__ import annotations

from dataclasses import asdict

import typer

from sublet.cli.command import Cli, command_group, register


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    nodes = command_group(app, "nodes", "Nodes: the leaders, where they are, and what each leads.")
    register(nodes, "list")(list_)


def list_(cli: Cli) -> None:
    """List the leader nodes: their addresses, their leases, and how many groups each leads.

    A node whose lease has run out is gone, or does not reach the database; its name is free for the next.

    Example:

    \b
      sublet nodes list
    """
    from storage.nodes import led_groups, list_nodes

    with cli.connection() as connection:
        entries, led = list_nodes(connection), led_groups(connection)
    if cli.json:
        lines = []
        for entry in entries:
            line = {**asdict(entry.node), **asdict(entry), "leads": led.get(entry.node.incarnation, 0)}
            del line["node"]
            lines.append({**line, "started_at": entry.started_at.isoformat(), "lives": entry.remaining_s > 0})
        cli.emit({"nodes": lines})
        return
    cli.table(
        ("NAME", "ADDRESS", "STATE", "LEADS>", "PROTOCOL>", "NEWS", "STARTED"),
        [
            (
                entry.node.name,
                entry.node.address,
                "lives" if entry.remaining_s > 0 else "gone",
                led.get(entry.node.incarnation, 0),
                entry.protocol_version,
                entry.notify or "poll",
                entry.started_at.isoformat(timespec="seconds"),
            )
            for entry in entries
        ],
    )

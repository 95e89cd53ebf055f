"""`sublet nodes drain` and `step-down`: moves leaders to other nodes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sublet.cli.base import text_conversion
from sublet.cli.base.command import CliCommandContext
from sublet.cli.groups.names import resolve_subscription
from sublet_protocol.domain.errors import NotFound, Unavailable

if TYPE_CHECKING:
    import psycopg

    from sublet_storage.groups.admin.node_desired_state import LedGroupRef

POLL_INTERVAL_S = 0.1

NodeName = Annotated[str, typer.Argument(metavar="NODE", help="The node, as `sublet nodes list` names it.")]
Wait = Annotated[
    str, typer.Option(metavar="DURATION", help="How long to wait until it is done; 0: only send the command.")
]
Force = Annotated[bool, typer.Option("--force", help="Also where no other node is there to take over.")]


def drain(
    cli: CliCommandContext,
    node: NodeName,
    undo: Annotated[bool, typer.Option("--undo", help="Let it lead again.")] = False,
    wait: Wait = "60s",
    force: Force = False,
) -> None:
    """Empty a node: before it is stopped, or its machine is.

    It steps down from all that it leads and leads nothing more; consumers find the other nodes, and keep their streams
    meanwhile. It lasts until the node is stopped, or --undo.

    Examples:

    \b
      sublet nodes drain n1
      sublet nodes drain n1 --undo
    """
    from sublet_storage import node_directory
    from sublet_storage.groups.admin import node_desired_state

    wait_s = text_conversion.parse_seconds(wait)
    with cli.open_connection() as connection:
        live_node = node_directory.find_live(connection, node)
        if not undo and not force:
            node_directory.check_successor(connection, node)
        led = [] if undo else node_desired_state.groups_led_by(connection, live_node.node)
        node_desired_state.set_draining(connection, live_node.node, not undo)
        changed = live_node.is_draining is undo
        if not undo and wait_s:
            _wait(
                lambda: not node_desired_state.groups_led_by(connection, live_node.node),
                wait_s,
                f"node {node} still leads groups",
            )
        new_leaders = _find_leaders(connection, led)
    if undo:
        text = f"{node} may lead again." if changed else f"{node} does not drain: nothing was changed."
    else:
        when = " any more" if wait_s else " soon"
        text = f"{node} leads nothing{when}, until it is stopped. {_format_moved(led, new_leaders)}"
    _print_result(cli, {"node": node, "draining": not undo, "changed": changed}, led, new_leaders, text)


def step_down(
    cli: CliCommandContext,
    node: NodeName,
    group: Annotated[
        list[str] | None,
        typer.Option(metavar="SUBSCRIPTION", help="Only the leader of this group. Repeatable. Quote it."),
    ] = None,
    wait: Wait = "60s",
    force: Force = False,
) -> None:
    """Move the leaders of a node to other nodes, now.

    All of them, or those of certain groups. Its consumers keep their streams. The node leaves these groups to others
    for the length of a lease, and may lead them again afterwards; to keep it empty, drain it.

    Examples:

    \b
      sublet nodes step-down n1
      sublet nodes step-down n1 --group '$share/billing/orders/#'
    """
    from sublet_storage import node_directory
    from sublet_storage.groups.admin import node_desired_state

    wait_s = text_conversion.parse_seconds(wait)
    subscriptions = {str(resolve_subscription(cli, each)) for each in group or ()}
    with cli.open_connection() as connection:
        live_node = node_directory.find_live(connection, node)
        if not force:
            node_directory.check_successor(connection, node)
        led = [
            each
            for each in node_desired_state.groups_led_by(connection, live_node.node)
            if not subscriptions or each.subscription in subscriptions
        ]
        if missing := subscriptions - {each.subscription for each in led}:
            raise NotFound(f"node {node} does not lead {min(missing)}. `sublet groups describe` says who does.")
        node_desired_state.request_step_down(connection, led)
        if wait_s:
            still = f"node {node} still leads groups"
            _wait(
                lambda: not set(led) & set(node_desired_state.groups_led_by(connection, live_node.node)), wait_s, still
            )
        new_leaders = _find_leaders(connection, led)
    text = (
        f"{node} has stepped down. {_format_moved(led, new_leaders)}"
        if wait_s
        else f"{node} steps down from {len(led)} group{'s' * (len(led) != 1)}."
    )
    _print_result(cli, {"node": node}, led, new_leaders, text)


def _find_leaders(connection: psycopg.Connection[Any], led: list[LedGroupRef]) -> dict[str, str | None]:
    """Return {subscription: the node that leads it now}; None while no consumer requests its leader, or no node has
    taken over."""
    from sublet_storage.groups.admin import node_desired_state

    leaders = node_desired_state.leaders_of(connection, (each.group_id for each in led))
    return {each.subscription: leaders.get(each.group_id) for each in led}


def _wait(done: Callable[[], bool], wait_s: float, still: str) -> None:
    deadline = time.monotonic() + wait_s
    while not done():
        if time.monotonic() >= deadline:
            raise Unavailable(
                f"{still} after {wait_s:g} s. The command stands: it is applied once the node reaches the database."
            )
        time.sleep(POLL_INTERVAL_S)


def _format_moved(led: list[LedGroupRef], new_leaders: dict[str, str | None]) -> str:
    if not led:
        return "It led no groups."
    moved_count = sum(name is not None for name in new_leaders.values())
    if len(led) == 1:
        return f"The group it led is led by another {'already' if moved_count else _AS_SOON_AS}."
    return f"Of the {len(led)} groups it led, {moved_count} are led by others already, the rest {_AS_SOON_AS}."


_AS_SOON_AS = "as soon as a consumer requests one"


def _print_result(
    cli: CliCommandContext,
    summary: dict[str, Any],
    led: list[LedGroupRef],
    new_leaders: dict[str, str | None],
    text: str,
) -> None:
    if cli.json:
        groups = [{"subscription": each.subscription, "led_by": new_leaders[each.subscription]} for each in led]
        cli.print_json({**summary, "groups": groups})
    else:
        cli.print_info(text)

"""`sublet access allow`, `list`, `revoke` and `check`, and the command table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import asdict

from sublet.cli.access import tokens
from sublet.cli.base.command import CliCommandContext, command, command_group
from sublet_protocol.domain.access.rights import AccessRule, AccessRules, Right, check_principal, parse_right
from sublet_protocol.domain.topics import TopicFilter

if TYPE_CHECKING:
    from sublet_storage.groups.admin.access_rules import AccessRuleRecord

Who = Annotated[
    str,
    typer.Argument(
        metavar="PRINCIPAL", help="user:NAME, or the URI or DNS name of a certificate; *: all that are known."
    ),
]
May = Annotated[str, typer.Argument(metavar="RIGHT", help=f"{', '.join(Right)}.")]
On = Annotated[str, typer.Argument(metavar="FILTER", help="Topics: + is one level, # the rest. Quote it.")]
Group = Annotated[
    str,
    typer.Option(
        "--group",
        metavar="NAME",
        help="Of join, watch and operate: only this group, or with team-* those that begin so.",
    ),
]


def allow(cli: CliCommandContext, principal: Who, right: May, filter: On, group: Group = "*") -> None:
    """Allow a principal a right. Nodes follow within seconds.

    What no rule allows is refused, by every node that authenticates (--auth required). publish and read are for
    topics; join is to consume as a member of a group, watch to see groups, operate to change them, and to watch. A rule
    covers whatever its filter covers; several rules do not add up.

    Examples:

    \b
      sublet access allow user:etl publish 'orders/#'
      sublet access allow user:spark join 'orders/#' --group billing
      sublet access allow user:ops operate '#'
    """
    from sublet_storage.groups.admin import access_rules

    rule = _parse_rule(principal, right, filter, group)
    with cli.open_connection() as connection:
        is_new = access_rules.allow(connection, rule)
    if cli.json:
        cli.print_json({**_to_json(rule), "changed": is_new})
    else:
        cli.print_info(f"{rule}: allowed." if is_new else f"{rule}: allowed, as it was: nothing was changed.")


def list_(
    cli: CliCommandContext,
    principal: Annotated[
        str | None, typer.Argument(metavar="PRINCIPAL", help="Only what counts for this one. Default: all.")
    ] = None,
) -> None:
    """List the rules, or those that count for one principal.

    Example:

    \b
      sublet access list user:etl
    """
    from sublet_storage.groups.admin.access_rules import read_rules

    if principal is not None:
        check_principal(principal, may_be_anybody=True)
    with cli.open_connection() as connection:
        stored = read_rules(connection, principal)
    rules = stored.rules
    if cli.json:
        cli.print_json(
            {
                "rules": [_granted_to_json(each) for each in rules],
                "unreadable": [asdict(each) for each in stored.unreadable],
            }
        )
        return
    cli.print_table(
        ("PRINCIPAL", "RIGHT", "FILTER", "GROUP", "GRANTED", "BY"),
        [
            (
                each.rule.principal,
                each.rule.right,
                each.rule.filter,
                each.rule.group if each.rule.right.is_on_groups else None,
                each.granted_at.isoformat(timespec="seconds"),
                each.granted_by,
            )
            for each in rules
        ],
    )
    for each in stored.unreadable:
        cli.print_info(f"{each.row}, by {each.granted_by}: no rule, allows nothing: {each.reason}")
    if stored.unreadable:
        cli.print_info("The function revoke_access takes such a row away, with its columns as they are stored.")
    if not rules:
        cli.print_info("There are no rules: nodes that ask who calls refuse all. Give one: sublet access allow --help")


def revoke(cli: CliCommandContext, principal: Who, right: May, filter: On, group: Group = "*") -> None:
    """Take a rule away, written as it was given. Nodes follow within seconds; who is connected loses it too.

    Example:

    \b
      sublet access revoke user:etl publish 'orders/#'
    """
    from sublet_storage.groups.admin import access_rules

    rule = _parse_rule(principal, right, filter, group)
    with cli.open_connection() as connection:
        access_rules.revoke(connection, rule)
        remaining_rule = _find(access_rules.list_rules(connection, rule.principal), rule)
    if cli.json:
        cli.print_json(
            {
                **_to_json(rule),
                "changed": True,
                "still_allowed_by": None if remaining_rule is None else _to_json(remaining_rule),
            }
        )
    else:
        cli.print_info(
            f"{rule}: revoked." + (f" It is still allowed by: {remaining_rule}" if remaining_rule is not None else "")
        )


def check(cli: CliCommandContext, principal: Who, right: May, filter: On, group: Group = "*") -> int:
    """Say whether a principal may do something.

    And which rule says so; the exit code is 0 for yes, 1 for no. FILTER is a topic, or a filter all of which is meant;
    without --group it is about all groups.

    Examples:

    \b
      sublet access check user:etl publish orders/eu
      sublet access check user:spark join 'orders/#' --group billing
    """
    from sublet_storage.groups.admin.access_rules import list_rules

    requested_rule = _parse_rule(principal, right, filter, group)
    with cli.open_connection() as connection:
        granted_rule = _find(list_rules(connection, requested_rule.principal), requested_rule)
    if cli.json:
        cli.print_json(
            {"allowed": granted_rule is not None, "rule": None if granted_rule is None else _to_json(granted_rule)}
        )
    else:
        cli.print_lines(
            [f"yes: {granted_rule}" if granted_rule is not None else f"no: no rule allows {requested_rule}"]
        )
    return 0 if granted_rule is not None else 1


def _find(rules: list[AccessRuleRecord], rule: AccessRule) -> AccessRule | None:
    group = None if rule.group == "*" else rule.group
    return AccessRules(each.rule for each in rules).find_rule(rule.principal, rule.right, rule.filter, group)


def _parse_rule(principal: str, right: str, filter: str, group: str) -> AccessRule:
    return AccessRule(principal, parse_right(right), TopicFilter.parse(filter), group)


def _to_json(rule: AccessRule) -> dict[str, Any]:
    group = rule.group if rule.right.is_on_groups else None
    return {"principal": rule.principal, "right": rule.right, "filter": rule.filter.text, "group": group}


def _granted_to_json(each: AccessRuleRecord) -> dict[str, Any]:
    return {**_to_json(each.rule), "granted_by": each.granted_by, "granted_at": each.granted_at.isoformat()}


_ACCESS = {
    "allow": command(allow),
    "list": command(list_),
    "revoke": command(revoke),
    "check": command(check),
    "token": command(tokens.token),
    "tokens": command(tokens.tokens),
    "revoke-token": command(tokens.revoke_token),
    "release-session": command(tokens.release_session),
}
COMMANDS = {"access": command_group("Access: who may do what at nodes, and the tokens that prove who it is.", _ACCESS)}

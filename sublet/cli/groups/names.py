"""Resolves a group's name: as it subscribes, or as commands print it, with escapes."""

from __future__ import annotations

import re

from sublet.cli.base.command import CliCommandContext
from sublet.cli.base.output import is_shown
from sublet_protocol.domain.errors import UsageError
from sublet_protocol.domain.subscriptions import Subscription

_ESCAPE = re.compile(r"\\(?:[nrt]|x[0-9a-f]{2}|u[0-9a-f]{4}|U000[0-9a-f]{5})")


def candidate_subscriptions(text: str) -> list[Subscription]:
    """Return the subscriptions that the text may mean, the literal one first. Raise as `Subscription.parse` does."""
    literal, unescaped = Subscription.parse(text), unescape(text)
    return [literal] if unescaped == text else [literal, Subscription.parse_stored(unescaped)]


def resolve_subscription(cli: CliCommandContext, text: str, *, or_new: bool = False) -> Subscription:
    """Return the subscription that the text means: the literal one if that group exists, else the unescaped one; with
    `or_new` the literal one if neither exists. Raise as `Subscription.parse` does."""
    from sublet_storage.groups.coordinator import group_lifecycle

    literal, *stored = candidate_subscriptions(text)
    if not stored:
        return literal
    with cli.open_connection() as connection:
        is_literal = group_lifecycle.find_live(connection, literal) is not None or (
            or_new and group_lifecycle.find_live(connection, stored[0]) is None
        )
    return literal if is_literal else stored[0]


def parse_typed(text: str) -> Subscription:
    """Return the subscription, where the database cannot be queried. Raise `UsageError` for a name with escapes as
    commands print them."""
    literal, *stored = candidate_subscriptions(text)
    if stored:
        raise UsageError(
            f"{text!r} has an escape, as commands print it, and nodes cannot be asked which group that is. Type the "
            "name itself, or consume without --node."
        )
    return literal


def unescape(text: str) -> str:
    """Return the text before it was printed: decodes the escapes of unprintable characters, and no others."""
    return _ESCAPE.sub(_decode_escape, text)


def _decode_escape(match: re.Match[str]) -> str:
    try:
        character = match[0].encode().decode("unicode_escape")
    except UnicodeDecodeError:  # beyond the last code point
        return match[0]
    is_no_escape = is_shown(character) or character == "\0" or "\ud800" <= character <= "\udfff"
    return match[0] if is_no_escape else character

"""`sublet access token`, `tokens`, `revoke-token` and `release-session`."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from msgspec.structs import asdict

from sublet.cli.base import text_conversion
from sublet.cli.base.command import CliCommandContext
from sublet.cli.groups.names import resolve_subscription
from sublet_protocol.domain.access.rights import check_principal
from sublet_protocol.domain.errors import UsageError

MAX_LIFETIME_S = 10 * 365 * 86_400
MAX_NOTE_CHARACTERS = 200


def token(
    cli: CliCommandContext,
    principal: Annotated[str, typer.Argument(metavar="PRINCIPAL", help="Whose token it is: user:NAME.")],
    expires: Annotated[str, typer.Option(metavar="DURATION", help="How long it is valid.")] = "90d",
    note: Annotated[str, typer.Option(help="For whom or what, shown by tokens.")] = "",
) -> None:
    """Make an access token for a principal.

    A client proves with it who it is, and takes it from SUBLET_TOKEN, or from the file that SUBLET_TOKEN_FILE names. It
    is the only line on stdout, and is shown this once: what is stored is its hash. Two tokens of a principal are valid
    at a time: make one, hand it out, and revoke the other.

    Example:

    \b
      sublet access token user:spark --expires 30d --note 'the nightly job'
    """
    from sublet_storage.groups.admin.access_tokens import make_token

    check_principal(principal)
    lifetime_s = text_conversion.parse_seconds(expires)
    if not 0 < lifetime_s <= MAX_LIFETIME_S:
        raise UsageError(f"--expires {expires!r}: a token is valid for more than 0 s and at most 3650d. Correct it.")
    if len(note) > MAX_NOTE_CHARACTERS or not note.isprintable():
        raise UsageError(
            f"--note {note[:40]!r}: a note has at most {MAX_NOTE_CHARACTERS} printable characters. Shorten it."
        )
    with cli.open_connection() as connection:
        issued_token, expires_at = make_token(connection, principal, lifetime_s, note)
    shown = issued_token.token.reveal()
    if cli.json:
        fields = {"token_id": issued_token.token_id, "principal": principal, "expires_at": expires_at.isoformat()}
        cli.print_json({**fields, "token": shown})
    else:
        cli.print_info(
            f"Token {issued_token.token_id} of {principal}, valid until {expires_at.isoformat(timespec='seconds')}:"
        )
        cli.write_lines([shown])


def tokens(cli: CliCommandContext) -> None:
    """List the access tokens.

    Whose each is, until when it is valid, and the day when a node last saw it. Those that are over are listed for
    SUBLET_HISTORY_RETENTION_S, and deleted then.

    Example:

    \b
      sublet access tokens
    """
    from sublet_storage.groups.admin.access_tokens import list_tokens

    with cli.open_connection() as connection:
        access_tokens = list_tokens(connection)
    if cli.json:
        cli.print_json({"tokens": [_to_json(each) for each in access_tokens]})
        return
    cli.print_table(
        ("ID", "PRINCIPAL", "STATE", "EXPIRES", "LAST USED", "MADE BY", "NOTE"),
        [
            (
                each.token_id,
                each.principal,
                "valid" if each.is_valid else "expired" if each.revoked_at is None else "revoked",
                each.expires_at.isoformat(timespec="seconds"),
                each.last_used,
                each.made_by,
                each.note,
            )
            for each in access_tokens
        ],
    )
    if not access_tokens:
        cli.print_info("There are no tokens. Make one: sublet access token user:NAME")


def revoke_token(
    cli: CliCommandContext,
    token_id: Annotated[str, typer.Argument(metavar="ID", help="As tokens shows it: the 8 characters behind sub_.")],
) -> None:
    """Let a token count no more. Nodes follow within seconds; who is connected with it loses its connection.

    Example:

    \b
      sublet access revoke-token k3q7x2ab
    """
    from sublet_storage.groups.admin import access_tokens

    with cli.open_connection() as connection:
        changed = access_tokens.revoke_token(connection, token_id)
    if cli.json:
        cli.print_json({"token_id": token_id, "changed": changed})
    else:
        cli.print_info(f"Token {token_id}: revoked." if changed else f"Token {token_id}: was revoked before.")


def release_session(
    cli: CliCommandContext,
    subscription: Annotated[str, typer.Argument(metavar="SUBSCRIPTION", help="The group. Quote it.")],
    session: Annotated[str, typer.Argument(metavar="SESSION", help="The session's name.")],
) -> None:
    """Give a session's name back, so that another principal can take it over.

    The first that comes under it has it then. The process that goes by it now goes on until then.

    Example:

    \b
      sublet access release-session '$share/billing/orders/#' etl
    """
    from sublet_storage.groups.coordinator import session_name_owners

    group = resolve_subscription(cli, subscription)
    with cli.open_connection() as connection:
        principal = session_name_owners.release(connection, group, session)
    if cli.json:
        cli.print_json({"subscription": str(group), "session": session, "principal": principal, "changed": True})
    else:
        cli.print_info(f"Session {session} of {group}: released, it was {principal}'s.")


def _to_json(entry: Any) -> dict[str, Any]:
    return {name: value.isoformat() if hasattr(value, "isoformat") else value for name, value in asdict(entry).items()}

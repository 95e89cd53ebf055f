"""The options for a space's payload location, of the commands that create and alter spaces."""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sublet.cli.base import text_conversion
from sublet.cli.base.command import CliCommandContext
from sublet_protocol.domain.errors import PayloadUnavailable, UsageError

if TYPE_CHECKING:
    from sublet_storage.spaces.routing import Space

PayloadLocation = Annotated[
    str | None,
    typer.Option(
        "--payload-location",
        metavar="URI",
        help="Move payloads of streams that are closed there: file:///DIRECTORY that all share, or s3://BUCKET/PREFIX, "
        "with ?endpoint_override=HOST:PORT&scheme=http&region=NAME as needed. Credentials are taken from the "
        "environment. Default: they stay in Postgres.",
    ),
]
TierAfter = Annotated[
    str | None,
    typer.Option(metavar="DURATION", help="Also move what is older than that, 1d say, of streams that are open."),
]
NoPayloadLocation = Annotated[
    bool, typer.Option("--no-payload-location", help="Move no more payloads out. What lies outside is read from there.")
]
Restore = Annotated[
    bool,
    typer.Option(
        "--restore-payloads", help="With --no-payload-location: bring what lies outside back into Postgres, too."
    ),
]
NoTierAfter = Annotated[bool, typer.Option("--no-tier-after", help="Move payloads of streams that are closed only.")]


def payload_changes(
    payload_location: str | None, no_payload_location: bool, restore: bool, tier_after: str | None, no_tier_after: bool
) -> dict[str, Any]:
    """Return the changes of payload location and tiering. Raise `UsageError` for options that contradict each
    other."""
    if (payload_location is not None or tier_after is not None) and no_payload_location:
        raise UsageError(
            "--no-payload-location stands alone: without a payload location nothing is moved. Leave out one "
            "or the other."
        )
    if tier_after is not None and no_tier_after:
        raise UsageError("--tier-after and --no-tier-after contradict each other. Leave one of them out.")
    if restore and not no_payload_location:
        raise UsageError(
            "--restore-payloads goes with --no-payload-location: what came back would be moved out again. Give both."
        )
    changes: dict[str, Any] = {"payload_location": None, "tier_after_s": None} if no_payload_location else {}
    if payload_location is not None:
        changes["payload_location"] = payload_location
    if tier_after is not None or no_tier_after:
        changes["tier_after_s"] = None if tier_after is None else text_conversion.parse_seconds(tier_after)
    return changes


def warn_missing_directory(cli: CliCommandContext, space: Space, requested_location: str | None) -> str | None:
    """Warn if the directory that was just given is not on this machine, and return the warning; None if it is. It may
    be right: nodes may run elsewhere. S3 is not checked."""
    from sublet_storage.objects.location import parse_location
    from sublet_storage.objects.object_stores import get_store
    from sublet_storage.objects.parallel_calls import TO_READ, run_single

    if (
        requested_location is None
        or space.payload_location is None
        or (location := parse_location(space.payload_location)).scheme != "file"
    ):
        return None
    problem = "does not answer from"
    with suppress(PayloadUnavailable):
        if run_single(
            get_store(location), TO_READ, partial(os.path.isdir, location.root)
        ):  # a location that cannot be checked counts as missing
            return None
        problem = "is not there, or not to be seen, on"
    text = (
        f"{location}: the directory {problem} this machine. Where nodes and consumers run it has to be there, and "
        f"nobody makes it: mount it, or mkdir -p {shlex.quote(location.root)}. "
        "`sublet doctor` says whether that is done."
    )
    if not cli.json:
        cli.print_info(f"Warning: {text}")
    return text


def restore_all(cli: CliCommandContext, space_id: int) -> None:
    """Restore all remote payloads of the space."""
    from sublet_storage.spaces.payload_restore import restore_payloads

    with cli.open_connection() as connection:
        cli.print_info(f"{restore_payloads(connection, space_id)} payloads are back in Postgres.")

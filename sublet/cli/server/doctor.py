"""`sublet doctor`: checks the database, the nodes and the groups."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict, replace

from sublet.cli.base.command import CliCommandContext, command
from sublet_protocol.domain.errors import SubletError
from sublet_protocol.messages.borrower_leader import PROTOCOL_VERSION

if TYPE_CHECKING:
    import psycopg

    from sublet_storage.doctor.checks import DoctorCheckResult


def doctor(cli: CliCommandContext) -> int:
    """Check the database, the nodes and the groups, and show what is wrong and what to do.

    Nothing is changed; where payloads lie outside of the database an object is written and deleted, to see that it can
    be. It ends with 1 if there is an error; what works and might not one day is a warning.

    Example:

    \b
      sublet doctor
      sublet doctor --json | jq '.findings[] | select(.state != "ok")'
    """
    import psycopg

    from sublet_storage.db.connect import check_schema
    from sublet_storage.doctor.checks import DoctorCheckResult, Severity, check_failed, find_read_only, run_checks

    findings: list[DoctorCheckResult] = []
    try:
        with cli.open_connection() as connection:
            schema = _check_schema(check_schema(connection))
            findings.append(find_read_only(connection) or schema)
            findings += run_checks(connection, time.time(), PROTOCOL_VERSION)
            findings += _check_payloads(connection)
    except psycopg.errors.InsufficientPrivilege as error:
        hint = "Make this user a member of a role: `sublet roles`, docs/roles.md."
        findings.append(replace(check_failed("database", error), state=Severity.ERROR, hint=hint))
    except SubletError as error:
        detail, _, hint = str(error).partition(". ")
        findings.append(DoctorCheckResult("database", Severity.ERROR, detail, hint or None))
    is_well = all(finding.state is not Severity.ERROR for finding in findings)
    if cli.json:
        cli.print_json({"ok": is_well, "findings": [asdict(finding) for finding in findings]})
    else:
        cli.print_table(("CHECK", "STATE", "FOUND"), [(each.check, each.state.value, each.detail) for each in findings])
        hints = [f"{each.check}: {each.hint}" for each in findings if each.hint is not None]
        cli.print_lines(["", *hints] if hints else [])
    return 0 if is_well else 1


def _check_payloads(connection: psycopg.Connection[Any]) -> list[DoctorCheckResult]:
    import psycopg

    from sublet_storage.doctor import location_checks
    from sublet_storage.doctor.checks import check_failed

    try:
        return list(location_checks.check_locations(connection))
    except psycopg.errors.InsufficientPrivilege as error:
        return [check_failed("payloads", error)]


def _check_schema(version: str) -> DoctorCheckResult:
    from sublet_storage.db.connect import SCHEMA_VERSION
    from sublet_storage.doctor.checks import DoctorCheckResult, Severity

    if version == SCHEMA_VERSION:
        return DoctorCheckResult("database", Severity.OK, "it answers, and its tables are this release's")
    detail = f"it answers; its tables are at {version}, newer than this release's {SCHEMA_VERSION}, and do for it"
    return DoctorCheckResult(
        "database", Severity.WARNING, detail, "Finish the upgrade: bring every program to the newer release."
    )


COMMANDS = {"doctor": command(doctor)}

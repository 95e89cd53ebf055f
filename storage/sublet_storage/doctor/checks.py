"""The checks of `sublet doctor` on a database, each with its hint; reads only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum
from shlex import quote
from typing import Any

import psycopg
from msgspec import Struct

from sublet_protocol.domain.address import is_loopback_host, is_tls, split_node_address
from sublet_protocol.domain.errors import format_error
from sublet_storage.db.connect import ISOLATION, resolve_schema_name
from sublet_storage.db.roles import DatabaseRole
from sublet_storage.doctor.privileges import compare_rights, list_creators
from sublet_storage.groups.admin.access_rules import read_rules
from sublet_storage.groups.coordinator import leadership
from sublet_storage.groups.model.records import MAINTENANCE
from sublet_storage.groups.status.diagnosis import suggest_reset
from sublet_storage.groups.status.lag_queries import list_unconsumed_groups
from sublet_storage.groups.status.overview import UNREADABLE_NOW
from sublet_storage.node_directory import list_nodes
from sublet_storage.util.name_list import MAX_NAMED, format_names

MIN_VERSION = 150_000
SKEW_S = 1.0
"""From which difference on a clock is reported."""
MAX_CONNECTION_SHARE = 0.8
"""Of all connections that the server allows."""
MAX_QUEUE_SHARE = 0.1
"""The share of the server's queue of notifications, which is read by all listeners, and retained for the slowest."""
MAX_TRANSACTION_S = 600.0
"""How long an open transaction may keep the server from vacuuming what was changed since."""

_READ_ONLY = """
select source, case source
         when 'database' then format('alter database %I', current_database())
         when 'user' then format('alter role %I', session_user)
         when 'database user' then format('alter role %I in database %I', session_user, current_database())
         when 'global' then 'alter role all' end
  from pg_settings where name = 'default_transaction_read_only' and setting = 'on'"""

# Age, whose, and what ends it: open for long, or prepared for a second phase, which no session's end ends.
_TRANSACTIONS = """
select extract(epoch from clock_timestamp() - xact_start)::float8 as age,
       format('%%L, process %%s', application_name, pid), format('select pg_terminate_backend(%%s)', pid)
  from pg_stat_activity
 where xact_start < clock_timestamp() - make_interval(secs => %s) and pid <> pg_backend_pid()
   and backend_type = 'client backend' and datname = current_database()
union all
select extract(epoch from clock_timestamp() - prepared)::float8, format('user %%s, prepared as %%L', owner, gid),
       format('rollback prepared %%L', gid) from pg_prepared_xacts where database = current_database()
 order by age desc"""

_SUBSCRIPTION = "'$' || g.kind || '/' || g.name || '/' || g.filter"
"""Of a group, in SQL."""

Connection = psycopg.Connection[Any]


class Severity(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    WARNING = "warning"  # it works, and will not in some foreseeable case
    ERROR = "error"  # something does not work


class DoctorCheckResult(Struct, frozen=True):
    """The result of one check: what was found, and the hint unless it is OK."""

    check: str
    state: Severity
    detail: str
    hint: str | None = None


def run_checks(connection: Connection, now_s: float, protocol_version: int) -> Iterator[DoctorCheckResult]:
    """Run all checks, one after the other. `now_s`: this machine's time; `protocol_version`: that of this release."""
    checks: dict[str, Callable[[], DoctorCheckResult]] = {
        "server": lambda: _check_server(connection),
        "rights": lambda: _check_rights(connection),
        "access": lambda: _check_access(connection),
        "durability": lambda: _check_durability(connection),
        "isolation": lambda: _check_isolation(connection),
        "clock": lambda: _check_clock(connection, now_s),
        "connections": lambda: _check_connections(connection),
        "transactions": lambda: _check_transactions(connection),
        "notifications": lambda: _check_notifications(connection),
        "nodes": lambda: _check_nodes(connection, protocol_version),
        "maintenance": lambda: _check_maintenance(connection),
        "groups": lambda: _check_leaderless_groups(connection),
        "streams": lambda: _check_blocked_streams(connection),
        "reading": lambda: _check_unreadable_streams(connection),
        "pauses": lambda: _check_paused_groups(connection),
        "lag": lambda: _check_lag(connection),
    }
    for name, check in checks.items():
        try:
            yield check()
        except psycopg.Error as error:
            if connection.broken:
                raise
            yield check_failed(name, error)


def find_read_only(connection: Connection) -> DoctorCheckResult | None:
    """Return the finding for a database in which this user cannot write; None if it can. To a standby there is no
    connection."""
    row = connection.execute(_READ_ONLY).fetchone()
    if row is None:
        return None
    source, statement = row
    detail = f"it answers, and is read-only for this user: default_transaction_read_only is on, set by {source}"
    hint = f"in psql: begin read write; {statement} reset default_transaction_read_only; commit;"
    if statement is None:
        hint = "in postgresql.conf, by alter system, or in the options of the URL."
    return DoctorCheckResult("database", Severity.ERROR, detail, f"Turn it off where it is set, {hint}")


def check_failed(check: str, error: psycopg.Error) -> DoctorCheckResult:
    """Return the finding for a check that could not be executed; the other checks still run."""
    detail = f"it cannot be looked at: {format_error(error)}"
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        hint = f"Where it matters, run this as a member of {DatabaseRole.OPERATE}."
        return DoctorCheckResult(check, Severity.WARNING, detail, hint)
    return DoctorCheckResult(check, Severity.ERROR, detail, "Try again; the server's log has more of it.")


def _check_server(connection: Connection) -> DoctorCheckResult:
    version = connection.info.server_version
    detail = f"Postgres {version // 10_000}.{version % 10_000}"
    if version < MIN_VERSION:
        return DoctorCheckResult("server", Severity.ERROR, detail, f"Upgrade it to {MIN_VERSION // 10_000} or later.")
    return DoctorCheckResult("server", Severity.OK, detail)


def _check_rights(connection: Connection) -> DoctorCheckResult:
    """Compare the user's privileges with those of its roles; the owner of the tables may do all, and nobody else may
    create in their schema."""
    if creators := ", ".join(list_creators(connection)):
        schema = resolve_schema_name()
        detail = f"{creators} may create in schema {schema}: what is made there can have its owner's rights"
        hint = f'The owner of the schema says: revoke create on schema "{schema}" from {creators}'
        return DoctorCheckResult("rights", Severity.ERROR, detail, hint)
    privileges = compare_rights(connection)
    if privileges.is_owner:
        return DoctorCheckResult(
            "rights", Severity.OK, f"{privileges.user} owns the tables, or is a superuser: it may do all"
        )
    if not privileges.roles:
        role, lacks = min(privileges.lacking.items(), key=lambda each: sum(map(len, each[1])))
        detail = f"{privileges.user} is a member of no role of sublet's. For {role} it lacks {'; '.join(lacks)}"
        hint = f'Make it a member of one: grant {role} to "{privileges.user}". `sublet roles --sql` makes the roles.'
        return DoctorCheckResult("rights", Severity.ERROR, detail, hint)
    membership_text = "is a member of" if privileges.is_member else "has, as a member of no role, the rights of"
    detail = f"{privileges.user} {membership_text} {', '.join(privileges.roles)}"
    if privileges.missing:
        detail += f", and lacks {'; '.join(privileges.missing)}"
        return DoctorCheckResult(
            "rights", Severity.ERROR, detail, "The owner of the tables runs: sublet migrate --roles"
        )
    if privileges.excess:
        detail += f", and may, beyond that, {'; '.join(privileges.excess)}"
        hint = "Revoke what was granted to it, or to PUBLIC; what its role has too much, sublet migrate --roles takes."
        return DoctorCheckResult("rights", Severity.WARNING, detail, hint)
    if privileges.drop_hint:
        detail += ", and cannot drop the messages that retention has taken"
        return DoctorCheckResult("rights", Severity.WARNING, detail, privileges.drop_hint)
    return DoctorCheckResult("rights", Severity.OK, f"{detail}, and may do no more than that")


def _check_access(connection: Connection) -> DoctorCheckResult:
    stored = read_rules(connection)
    if stored.unreadable:
        detail = f"{len(stored.unreadable)} rows of table access are no rules, and allow nothing: "
        detail += format_names([f"{each.row!r} by {each.granted_by}" for each in stored.unreadable])
        hint = "`sublet access list` says why; the function revoke_access takes one away."
        return DoctorCheckResult("access", Severity.WARNING, detail, hint)
    return DoctorCheckResult("access", Severity.OK, f"{len(stored.rules)} rules, and nodes can read all of them")


def _check_durability(connection: Connection) -> DoctorCheckResult:
    names = ("fsync", "full_page_writes", "synchronous_commit")
    rows = connection.execute(
        "select name, setting from pg_settings where name = any(%s) order by name", (list(names),)
    ).fetchall()
    off = [name for name, setting in rows if setting == "off"]
    if off:
        consequence = "what was acknowledged may be lost when the server, or its machine, stops"
        return DoctorCheckResult(
            "durability", Severity.ERROR, f"{', '.join(off)} off: {consequence}", "Set it to on in postgresql.conf."
        )
    return DoctorCheckResult("durability", Severity.OK, ", ".join(f"{name} {setting}" for name, setting in rows))


def _check_isolation(connection: Connection) -> DoctorCheckResult:
    """Check the isolation level of server, role and database: each connection of ours overrules it, so it concerns
    users' own alone."""
    rows = connection.execute(
        "select coalesce('role ' || r.rolname || coalesce(' in database ' || d.datname, ''), 'database ' || d.datname,"
        "                'every role'), c.value"
        "  from pg_db_role_setting s left join pg_roles r on r.oid = s.setrole"
        "  left join pg_database d on d.oid = s.setdatabase"
        " cross join lateral (select substr(each, strpos(each, '=') + 1) as value from unnest(s.setconfig) as u (each)"
        "                      where starts_with(each, 'default_transaction_isolation=')) c"
        " where (s.setrole = 0 or r.rolname = current_user) and (s.setdatabase = 0 or d.datname = current_database())"
        " order by 1"
    ).fetchall()
    deviations = [f"{level} of {owner}" for owner, level in rows if level != ISOLATION]
    if deviations:
        detail = f"{ISOLATION}; {format_names(deviations)} is used by nothing of sublet's"
        return DoctorCheckResult("isolation", Severity.OK, detail)
    return DoctorCheckResult("isolation", Severity.OK, ISOLATION)


def _check_clock(connection: Connection, now_s: float) -> DoctorCheckResult:
    (row,) = connection.execute("select extract(epoch from clock_timestamp())::float8").fetchall()
    ahead = now_s - row[0]
    detail = f"this machine's is {abs(ahead):.1f} s {'ahead' if ahead > 0 else 'behind'}"
    if abs(ahead) > SKEW_S:
        hint = "Leases are not concerned; messages without a timestamp get this machine's. Run a time service here."
        return DoctorCheckResult("clock", Severity.WARNING, detail, hint)
    return DoctorCheckResult("clock", Severity.OK, detail)


def _check_connections(connection: Connection) -> DoctorCheckResult:
    (row,) = connection.execute(
        "select count(*), current_setting('max_connections')::int from pg_stat_activity"
        " where coalesce(backend_type, 'client backend') = 'client backend' and usesysid is not null"
    ).fetchall()
    used, max_connections = row
    if used > MAX_CONNECTION_SHARE * max_connections:
        hint = "Raise max_connections: each session, publisher and node has a few, and each Spark worker one."
        return DoctorCheckResult("connections", Severity.WARNING, f"{used} of {max_connections} are used", hint)
    return DoctorCheckResult("connections", Severity.OK, f"{used} of {max_connections} are used")


def _check_transactions(connection: Connection) -> DoctorCheckResult:
    rows = connection.execute(_TRANSACTIONS, (MAX_TRANSACTION_S,)).fetchall()
    if rows:
        age_s, owner, command = rows[0]
        detail = f"{len(rows)} open for long or prepared, the oldest for {age_s:.0f} s, by {owner}"
        return DoctorCheckResult("transactions", Severity.WARNING, detail, f"End it: {command}")
    if connection.execute("select pg_has_role('pg_read_all_stats', 'usage')").fetchone() == (False,):
        hint = "Where it matters, run this as a member of pg_read_all_stats."
        return DoctorCheckResult("transactions", Severity.WARNING, "this user does not see those of other users", hint)
    return DoctorCheckResult("transactions", Severity.OK, "none is open for long")


def _check_notifications(connection: Connection) -> DoctorCheckResult:
    (row,) = connection.execute("select pg_notification_queue_usage()").fetchall()
    detail = f"{row[0]:.0%} of the server's queue is used"
    if row[0] > MAX_QUEUE_SHARE:
        hint = (
            "Somebody listens and does not read, in whichever database: a client that is stopped, or a transaction that"
            " stays open. Find it by state, wait_event and age in pg_stat_activity, and end it with"
            " pg_terminate_backend: in a full queue nobody's NOTIFY fits."
        )
        return DoctorCheckResult("notifications", Severity.WARNING, detail, hint)
    return DoctorCheckResult("notifications", Severity.OK, detail)


def _check_nodes(connection: Connection, protocol_version: int) -> DoctorCheckResult:
    live = [each for each in list_nodes(connection) if each.remaining_s > 0]
    nodes, drained = (
        [each for each in live if not each.is_draining],
        [each.node.name for each in live if each.is_draining],
    )
    undo = f"sublet nodes drain {quote(drained[0])} --undo" if drained else None
    if not nodes and undo:
        detail = f"no node is there that may lead: an operator has drained {format_names(drained)}"
        hint = f"Start another, sublet leader --name ANOTHER --listen HOST:PORT, or let it lead again: {undo}"
        return DoctorCheckResult("nodes", Severity.ERROR, detail, hint)
    if not nodes:
        return DoctorCheckResult("nodes", Severity.ERROR, "no leader node is there", "Start one: sublet leader")
    versions = [(each.node.name, each.protocol_version) for each in nodes]
    other_nodes = [f"{name} ({version})" for name, version in versions if version != protocol_version]
    if other_nodes:
        detail = f"of another protocol version than this release's ({protocol_version}): {format_names(other_nodes)}"
        return DoctorCheckResult("nodes", Severity.ERROR, detail, "Bring all to the same release of sublet.")
    detail = f"{len(nodes)}: {format_names([name for name, _ in versions])}"
    if plain := [f"{each.node.name} ({each.node.address})" for each in live if _is_insecure(each.node.address)]:
        detail += f"; others reach without TLS: {format_names(plain)}"
        return DoctorCheckResult("nodes", Severity.WARNING, detail, "Start them with --tls-cert and --tls-key.")
    detail += f"; drained: {format_names(drained)}" if drained else ""
    if len(nodes) == 1:
        hint = "Start a second one for safety: sublet leader --name ANOTHER --listen HOST:PORT"
        hint += f", or let a drained one lead again: {undo}" if undo else ""
        return DoctorCheckResult("nodes", Severity.WARNING, f"{detail}; nobody takes over from it", hint)
    return DoctorCheckResult("nodes", Severity.OK, detail)


def _is_insecure(address: str) -> bool:
    """Return whether other machines reach the address and nothing is encrypted. A host name counts as reachable."""
    host = (split_node_address(address) or ("", 0))[0]
    return not is_tls(address) and not is_loopback_host(host)


def _check_maintenance(connection: Connection) -> DoctorCheckResult:
    """Check that a node runs maintenance (retention, rollover, the outbox and epoch leases), which one does at a
    time."""
    leader = leadership.read_leaderships(connection, (MAINTENANCE,), None).get(MAINTENANCE)
    if leader is not None and leader.remaining_s > 0:
        return DoctorCheckResult("maintenance", Severity.OK, f"by {leader.node.name}")
    hint = "A node that does not drain takes it within its lease. If it stays so, look into the log of the nodes."
    return DoctorCheckResult("maintenance", Severity.WARNING, "nobody does it at present", hint)


class LeaderlessGroups(Struct, frozen=True):
    """Groups that have consumers and no leader: their number, and the first of them by name."""

    total: int
    names: tuple[str, ...]


def find_leaderless_groups(connection: Connection) -> LeaderlessGroups:
    """Find consumers by the rows: the holder of a stream is one."""
    rows = connection.execute(
        f"select {_SUBSCRIPTION}, count(*) over () from consumer_group g"
        "  left join leadership l on l.leadership_id = g.group_id"
        " where g.deleted_at is null and (l.expires_at is null or l.expires_at <= clock_timestamp())"
        "   and exists (select from lending k where k.group_id = g.group_id and k.unfinished and k.status = 'held')"
        " order by 1 limit %s",
        (MAX_NAMED,),
    ).fetchall()
    return LeaderlessGroups(rows[0][1] if rows else 0, tuple(name for name, _ in rows))


def _check_leaderless_groups(connection: Connection) -> DoctorCheckResult:
    groups = find_leaderless_groups(connection)
    if groups.total:
        detail = f"{groups.total} have consumers and no leader: {format_names(groups.names, total=groups.total)}"
        hint = "A node that is not draining leads it within a lease, once a consumer requests its leader."
        return DoctorCheckResult("groups", Severity.WARNING, detail, hint)
    return DoctorCheckResult("groups", Severity.OK, "each that has consumers is led")


def _check_blocked_streams(connection: Connection) -> DoctorCheckResult:
    rows = connection.execute(
        f"select {_SUBSCRIPTION}, l.stream_id, coalesce((g.options ->> 'atomic')::boolean, false),"
        " (select h.reason from lending_history h where h.group_id = l.group_id and h.stream_id = l.stream_id"
        "   and h.event = 'block' order by h.history_id desc limit 1)"
        " from lending l join consumer_group g using (group_id)"
        " where l.status = 'blocked' and g.deleted_at is null order by 1, 2"
    ).fetchall()
    if rows:
        name, stream_id, is_atomic, reason = rows[0]
        detail = f"{len(rows)} are blocked: {format_names([f'{stream} of {group}' for group, stream, *_ in rows])}"
        detail += "" if reason is None else f"; the first because of this: {reason.rstrip(' .')}"
        reset = suggest_reset(name, stream_id, reason, is_atomic=is_atomic)
        hint = f"sublet groups why {quote(name)} says why, {reset} lets it go on."
        return DoctorCheckResult("streams", Severity.ERROR, detail, hint)
    return DoctorCheckResult("streams", Severity.OK, "none is blocked")


def _check_unreadable_streams(connection: Connection) -> DoctorCheckResult:
    rows = connection.execute(
        f"select {_SUBSCRIPTION}, u.stream_id from ({UNREADABLE_NOW.format(groups='true')}) u"
        " join consumer_group g using (group_id) where g.deleted_at is null order by u.since, 1, 2"
    ).fetchall()
    if rows:
        detail = f"{len(rows)} streams cannot be read on by who holds them: "
        detail += format_names([f"{stream} of {group}" for group, stream in rows])
        return DoctorCheckResult(
            "reading", Severity.ERROR, detail, f"sublet groups why {quote(rows[0][0])} says why, and what helps."
        )
    return DoctorCheckResult("reading", Severity.OK, "no holder of a stream says that it cannot read on")


def _check_paused_groups(connection: Connection) -> DoctorCheckResult:
    rows = connection.execute(
        f"select {_SUBSCRIPTION} from consumer_group g"
        " where g.deleted_at is null and g.desired_state ? 'paused' order by 1"
    ).fetchall()
    if rows:
        detail = f"{len(rows)} groups are paused: {format_names([name for (name,) in rows])}"
        return DoctorCheckResult(
            "pauses", Severity.WARNING, detail, f"Where it is not meant: sublet groups resume {quote(rows[0][0])}"
        )
    return DoctorCheckResult("pauses", Severity.OK, "no group is paused")


def _check_lag(connection: Connection) -> DoctorCheckResult:
    if waiting := list_unconsumed_groups(connection):
        detail = f"groups with messages and no stream held, {len(waiting)}: "
        detail += format_names([f"{name} ({lag})" for name, lag in waiting])
        hint = f"Start their consumers, or see what keeps them: sublet groups why {quote(waiting[0][0])}"
        return DoctorCheckResult("lag", Severity.WARNING, detail, hint)
    return DoctorCheckResult("lag", Severity.OK, "each group with messages has consumers")

"""Payloads outside of Postgres: places, and the objects that no block names.

It declares no older version as compatible: an older program cannot read what lies outside, and its retention would
forget the objects of what it drops.
"""

from pathlib import Path

from alembic import op

from sublet_protocol.domain.errors import Conflict

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

SQL = Path(__file__).parent.parent / "sql" / "0002_payload_places.sql"

REMOVE = """
drop index if exists lending_history_reading;
drop table payload_object;
drop function payload_places_of;
drop table payload_place;
alter table block drop column uri_bytes;
alter table stream drop column tiered_offset;
alter table space drop column payloads, drop column tier_after_s, drop column payload_places;
"""


# A detach that is pending counts as done: queries do not see such a partition any more.
DETACHED = """
generation g join space p using (space_id) join pg_class t on t.oid = to_regclass('block_' || g.generation_id)
 where g.state = 'gone' and p.payload_places <> '{}'
   and not exists (select from pg_inherits i where i.inhrelid = t.oid and not i.inhdetachpending)"""


def upgrade() -> None:
    _run(SQL.read_text(encoding="utf-8"))


def downgrade() -> None:
    """Refused while it would lose messages: the older schema cannot read what lies outside, nor delete it."""
    _run("lock table space, payload_object, block in access exclusive mode")  # in the order of whoever moves payloads
    outside, waiting = _count("block where uri is not null"), _count("payload_object")
    detached = _count(DETACHED)
    if outside or waiting or detached:
        begun = _count("payload_object where doomed_at is null")
        raise Conflict(
            f"{outside} blocks have their payload outside of Postgres, {waiting} objects there are to be deleted "
            f"({begun} of them were being written, and are nobody's after an hour), and {detached} generations that "
            "retention is dropping may name more: without this version nobody could read or delete what lies there. "
            "Bring the payloads back with `sublet spaces alter NAME --no-payload-location --restore-payloads` for "
            "each space, and let a "
            "leader node run until the generations are dropped and the objects gone, with "
            "SUBLET_PAYLOAD_DELETION_GRACE_S=1 if no backup is to have them any more. Then stop it, and try again."
        )
    _run(REMOVE)


def _count(what: str) -> int:
    row = op.get_bind().connection.driver_connection.execute(f"select count(*) from {what}").fetchone()
    return int(row[0])


def _run(text: str) -> None:
    """Straight to psycopg: many statements."""
    op.get_bind().connection.driver_connection.execute(text)

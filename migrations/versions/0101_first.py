"""The first schema, by topic in `sql/0101_*.sql`.

Earlier revisions were never released, and are rejected by name: no script upgrades them.
"""

from pathlib import Path

from alembic import op

from sublet_protocol.domain.errors import Conflict

revision = "0101"
down_revision = None
branch_labels = None
depends_on = None

SQL = Path(__file__).parent.parent / "sql"
TOPICS = ("messages", "epochs", "producers", "nodes", "groups", "outbox", "staging", "payloads", "access", "isolation")
"""In the order of their references."""

DROP_ALL = """
do $$
declare
  thing record;
begin
  for thing in
    select format('%I.%I', n.nspname, c.relname) as name
      from pg_class c join pg_namespace n on n.oid = c.relnamespace
     where n.nspname = current_schema() and c.relkind in ('r', 'p') and c.relname <> 'alembic_version'
  loop
    execute format('drop table if exists %s cascade', thing.name);
  end loop;
  for thing in
    select p.oid::regprocedure::text as name from pg_proc p join pg_namespace n on n.oid = p.pronamespace
     where n.nspname = current_schema()
  loop
    execute format('drop routine if exists %s cascade', thing.name);
  end loop;
end $$
"""

# A pending detach counts as done: queries do not see such a partition any more.
DETACHED = """
generation g join space p using (space_id) join pg_class t on t.oid = to_regclass('block_' || g.generation_id)
 where g.state = 'gone' and p.payload_locations <> '{}'
   and not exists (select from pg_inherits i where i.inhrelid = t.oid and not i.inhdetachpending)"""


AS_OWNER = "select set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true)"
"""Functions that run with their owner's rights have the search_path set here. pg_temp is last in it: a caller's
temporary tables must not shadow ours."""


def upgrade() -> None:
    _run(AS_OWNER)
    for topic in TOPICS:
        _run((SQL / f"0101_{topic}.sql").read_text(encoding="utf-8"))


def downgrade() -> None:
    """Drop everything in the schema but alembic's own table, partitions made since included. Refused while payloads are
    remote, which nothing could delete afterwards."""
    _run("lock table space, payload_object, block in access exclusive mode")  # in the order of moving payloads
    outside, waiting = _count("block where uri is not null"), _count("payload_object")
    detached = _count(DETACHED)
    if outside or waiting or detached:
        begun = _count("payload_object where orphaned_at is null")
        raise Conflict(
            f"{outside} blocks have their payload outside of Postgres, {waiting} objects there are to be deleted "
            f"({begun} of them were being written, and are nobody's after an hour), and {detached} generations that "
            "retention is dropping may name more: without these tables nobody could read or delete what lies there. "
            "Bring the payloads back with `sublet spaces alter NAME --no-payload-location --restore-payloads` for "
            "each space, and let a "
            "leader node run until the generations are dropped and the objects gone, with "
            "SUBLET_PAYLOAD_DELETION_GRACE_S=1 if no backup is to have them any more. Then stop it, and try again."
        )
    _run(DROP_ALL)


def _count(what: str) -> int:
    row = op.get_bind().connection.driver_connection.execute(f"select count(*) from {what}").fetchone()
    return int(row[0])


def _run(text: str) -> None:
    """Execute by psycopg itself: many statements, and percent signs that are no placeholders."""
    op.get_bind().connection.driver_connection.execute(text)

"""The first schema: messages, then groups, then whatever else bears its number in `sql/`."""

from pathlib import Path

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

FIRST = ("0001_messages.sql", "0001_groups.sql")

DROP_ALL = """
do $$
declare
  thing record;
begin
  for thing in
    select 'table' as kind, format('%I.%I', n.nspname, c.relname) as name
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


def upgrade() -> None:
    folder = Path(__file__).parent.parent / "sql"
    others = sorted(path.name for path in folder.glob("0001_*.sql") if path.name not in FIRST)
    for name in (*FIRST, *others):
        _run((folder / name).read_text(encoding="utf-8"))


def downgrade() -> None:
    """Everything in the schema but alembic's own table: partitions made since, too."""
    _run(DROP_ALL)


def _run(text: str) -> None:
    """Straight to psycopg: many statements, and percent signs that are no placeholders."""
    op.get_bind().connection.driver_connection.execute(text)

"""Adds the function that ends a server process which does not know a partition of the table of blocks."""

from alembic import op

revision = "0104"
down_revision = "0103"
branch_labels = None
depends_on = None

compatible_from = "0101"
"""No row has changed."""

CHECK = """
-- Return true. End the server process if it does not know the partition of a generation, and so sees no block of a
-- stream that has messages: until the table is changed again, where a partition was attached while it looked for them.
-- Whether it is attached is looked up as of now: an older snapshot may have a stream whose partition was dropped since.
create function check_partition(p_generation bigint, p_stream bigint) returns boolean
language plpgsql stable set plan_cache_mode = force_custom_plan as $$
begin
  if exists (select from stream s join generation g using (generation_id)
              where s.stream_id = p_stream and s.head > 0 and g.state <> 'gone')
     and not exists (select from block b where b.generation_id = p_generation and b.stream_id = p_stream)
     and 'block'::regclass in (select pg_partition_ancestors(to_regclass('block_' || p_generation))) then
    raise warning 'generation %: this server process does not know its partition, and ends.', p_generation;
    perform pg_terminate_backend(pg_backend_pid(), 5000);
    raise exception 'generation %: this server process does not know its partition.', p_generation
      using hint = 'Connect anew.';
  end if;
  return true;
end $$
"""


def upgrade() -> None:
    op.execute(CHECK)


def downgrade() -> None:
    op.execute("drop function check_partition")

-- Nothing of ours is right in a snapshot that is older than a lock: who waited for one would not see what was committed
-- meanwhile. Programs of ours set read committed when they connect; anybody else's transaction is rejected here, by name,
-- before it changes a row that others judge by. The condition is the table's, so that nobody who is right calls anything.
create function refuse_isolation() returns trigger language plpgsql as $$
begin
  raise exception 'this transaction is at isolation level %, and what sublet promises of table % rests on read committed',
    current_setting('transaction_isolation'), tg_table_name
    using errcode = 'SB003',
          hint = 'Nothing was written. Begin it with BEGIN ISOLATION LEVEL READ COMMITTED, and lock the rows that it relies on.';
end $$;

do $$
declare
  judged constant text[] := '{consumer_group, leadership, lending, space, generation, stream, producer, capability, sink_batch}';
  one text;
begin
  foreach one in array judged loop
    execute format(
      'create trigger read_committed before update on %I for each statement
         when (current_setting(''transaction_isolation'') in (''repeatable read'', ''serializable''))
         execute function refuse_isolation()', one);
  end loop;
end $$;

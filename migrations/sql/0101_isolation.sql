-- Functions here rely on snapshots taken after a lock: in an older snapshot, rows committed while waiting for the lock
-- are invisible. Sublet's programs set read committed when they connect; other transactions are rejected here, by name,
-- before they change a row that others rely on. The condition is the trigger's, so that correct transactions call no
-- function.
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

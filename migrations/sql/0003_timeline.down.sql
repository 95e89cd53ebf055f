-- Leaders of every timeline are believed again.
drop function check_timeline(bigint);
alter table leadership drop column timeline, drop column before_timeline;
select set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true);
create or replace function draw_session_epoch() returns bigint
language sql security definer set search_path from current as $$
  insert into session_epoch as e (last) values ((extract(epoch from clock_timestamp()) * 1000000)::bigint)
      on conflict (one) do update set last = greatest(e.last + 1, excluded.last)
  returning last
$$;
select set_config('search_path', quote_ident(current_schema()), true);
drop function timeline_ahead();
drop table timeline;
drop function timeline_now();

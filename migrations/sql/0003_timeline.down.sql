-- Leaders of every timeline are believed again.
alter table leadership drop column timeline, drop column before_timeline;
select set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true);
create or replace function advance(
  p_group bigint, p_stream bigint, p_grant bigint, p_position bigint, p_consumed jsonb default null,
  p_doubt jsonb default null
) returns void
language plpgsql security definer set search_path from current as $$
declare
  moved integer;
begin
  update lending l set position = p_position, consumed = coalesce(p_consumed, l.consumed), updated_at = clock_timestamp(),
         lost_position = case when p_consumed is null then lost_position end
    from stream s
   where l.group_id = p_group and l.stream_id = p_stream and l.grant_id = p_grant and l.status = 'held'
     and s.stream_id = l.stream_id and p_position <= s.head and (l.consumed is null) = (p_consumed is null)
     and (p_doubt is null or l.in_doubt - 'hold_s' = p_doubt - 'hold_s')
     and case when p_consumed is null then l.position < p_position
              else l.position <= p_position and l.consumed <> p_consumed and (p_consumed ->> 'upto')::bigint
                   between (l.consumed ->> 'upto')::bigint and s.head end;
  get diagnostics moved = row_count;
  if moved <> 1 then
    raise exception 'stream % of group % is not held under grant % before offset %: the transaction must not commit',
      p_stream, p_group, p_grant, p_position
      using errcode = 'SB001', hint = 'The stream was lent to somebody else. Roll back; its new holder does this work.';
  end if;
end $$;
create or replace function draw_session_epoch() returns bigint
language sql security definer set search_path from current as $$
  insert into session_epoch as e (last) values ((extract(epoch from clock_timestamp()) * 1000000)::bigint)
      on conflict (one) do update set last = greatest(e.last + 1, excluded.last)
  returning last
$$;
select set_config('search_path', quote_ident(current_schema()), true);
drop function timeline_ahead();
drop table timeline;
alter table consumer_group drop column created_timeline;
drop function timeline_now();

-- How far a stream came under a grant that is over, also where a reset has ended it.

-- From here on functions run with their owner's rights. pg_temp stands last in their search path: a caller's temporary
-- tables must not stand in for ours.
select set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true);

-- How far the stream came under that grant, also when it is over; null where history has forgotten it. It waits for
-- whoever is moving the row. A reset is written with the position that it sets, and says where the stream was.
create or replace function progress(p_group bigint, p_stream bigint, p_grant bigint) returns bigint
language plpgsql security definer set search_path from current as $$
declare
  found_at bigint;
begin
  select l.position into found_at from lending l
   where l.group_id = p_group and l.stream_id = p_stream and l.grant_id = p_grant and l.status = 'held' for share;
  if found_at is null then
    select case h.event when 'reset' then substring(h.reason from '; was at ([0-9]+)$')::bigint else h.position end
      into found_at
      from lending_history h
     where h.group_id = p_group and h.stream_id = p_stream and h.grant_id = p_grant
     order by h.history_id desc limit 1;
  end if;
  return found_at;
end $$;

select set_config('search_path', quote_ident(current_schema()), true);

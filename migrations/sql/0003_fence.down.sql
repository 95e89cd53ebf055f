-- As it was before.
select set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true);

create or replace function progress(p_group bigint, p_stream bigint, p_grant bigint) returns bigint
language plpgsql security definer set search_path from current as $$
declare
  found_at bigint;
begin
  select l.position into found_at from lending l
   where l.group_id = p_group and l.stream_id = p_stream and l.grant_id = p_grant and l.status = 'held' for share;
  if found_at is null then
    select h.position into found_at from lending_history h
     where h.group_id = p_group and h.stream_id = p_stream and h.grant_id = p_grant
     order by h.history_id desc limit 1;
  end if;
  return found_at;
end $$;

select set_config('search_path', quote_ident(current_schema()), true);

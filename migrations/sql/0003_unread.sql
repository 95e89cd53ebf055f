-- What lies before a group, for a session that is to end when it has had all that was there.

select set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true);

-- The streams that a group has not consumed to their heads, also those that no leader has made a row for yet: of generations
-- that were filled under these filters. `of_session` is whose a row is, that is held or kept.
create function ahead_of(p_group bigint, p_open text[], p_closed text[])
  returns table (of_stream bigint, reached bigint, ends bigint, status text, of_session text)
language plpgsql stable security definer set search_path from current as $$
declare
  noticed bigint;  -- a value: of a column the server does not know how few generations are newer
begin
  select g.after_generation into noticed from consumer_group g where g.group_id = p_group and g.deleted_at is null;
  if not found then
    return;
  end if;
  return query
    select s.stream_id, l.position, s.head, l.status, l.session
      from lending l join stream s using (stream_id) join generation n using (generation_id)
     where l.group_id = p_group and n.state <> 'gone' and l.unfinished and l.position < s.head
    union all
    select s.stream_id, 0::bigint, s.head, 'free', null
      from generation n join stream s using (generation_id)
     where n.generation_id > noticed and n.state <> 'gone' and s.head > 0
       and n.filter = any(case when s.state = 'open' then p_open else p_closed end)
       and not exists (select from lending l where l.group_id = p_group and l.stream_id = s.stream_id);
end $$;

select set_config('search_path', quote_ident(current_schema()), true);

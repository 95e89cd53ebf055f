-- What lies before a group, for a session that is to end when it has had all that was there.

select set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true);

-- The streams that a group has not consumed to their heads, also those that no leader has made a row for yet: of generations
-- that were filled under these filters. `of_session` is whose a row is, that is held or kept.
create function ahead_of(p_group bigint, p_open text[], p_closed text[])
  returns table (of_stream bigint, reached bigint, ends bigint, status text, of_session text)
language sql stable security definer set search_path from current as $$
  select s.stream_id, l.position, s.head, l.status, l.session
    from consumer_group g join lending l using (group_id) join stream s using (stream_id)
    join generation n using (generation_id)
   where g.group_id = p_group and g.deleted_at is null and n.state <> 'gone'
     and l.unfinished and l.position < s.head
  union all
  select s.stream_id, 0, s.head, 'free', null
    from consumer_group g join generation n on n.generation_id > g.after_generation join stream s using (generation_id)
   where g.group_id = p_group and g.deleted_at is null and n.state <> 'gone' and s.head > 0
     and n.filter = any(case when s.state = 'open' then p_open else p_closed end)
     and not exists (select from lending l where l.group_id = g.group_id and l.stream_id = s.stream_id)
$$;

select set_config('search_path', quote_ident(current_schema()), true);

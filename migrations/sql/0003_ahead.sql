-- What lies before a group, for a session that is to end when it has had all that was there.

select set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true);

-- The streams that a group has not consumed to their heads, also those that no leader has made a row for yet: of generations
-- that were filled under these filters. `of_session` is whose a row is, that is held or kept.
create function ahead_of(p_group bigint, p_open text[], p_closed text[])
  returns table (of_stream bigint, reached bigint, ends bigint, status text, of_session text)
language sql stable security definer set search_path from current as $$
  select s.stream_id, coalesce(l.position, 0), s.head, coalesce(l.status, 'free'), l.session
    from consumer_group g cross join stream s join generation n using (generation_id)
    left join lending l on l.group_id = g.group_id and l.stream_id = s.stream_id
   where g.group_id = p_group and g.deleted_at is null and n.state <> 'gone'
     and l.status is distinct from 'finished' and coalesce(l.position, 0) < s.head
     and (l.stream_id is not null or (n.generation_id > g.after_generation
            and n.filter = any(case when s.state = 'open' then p_open else p_closed end)))
$$;

select set_config('search_path', quote_ident(current_schema()), true);

-- Which life of the database this is: a standby that is promoted begins another timeline, and what was committed last on
-- the one before may be missing on it. The control file lags behind, the name of the WAL file does not. Null where the
-- server does not say.
create function timeline_now() returns text language plpgsql stable as $$
begin
  return (select system_identifier::text from pg_control_system()) || '/' || left(pg_walfile_name(pg_current_wal_lsn()), 8);
exception when insufficient_privilege or feature_not_supported or undefined_function then
  return null;
end $$;

-- A leader leads on the timeline on which it was elected.
alter table leadership add column timeline text, add column before_timeline text;
-- A group is on the one on which it was created until it has a leader.
alter table consumer_group add column created_timeline text default timeline_now();

-- Whoever moves a group's progress in a transaction of its own has read its messages before: on this timeline, if the
-- group has had a leader on it, who has ended all older grants. From then on it keeps the row from everybody, for no longer
-- than 30 minutes of idling before its COMMIT.
select set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true);

-- What is added to the clock in whatever only grows: terms (and with them grant ids), session epochs, incarnations. What
-- was given in the part of the former timeline that is lost is so below all that is given on this one, whatever the
-- clocks say: 2^52 microseconds are 142 years. The number of a timeline is above that of every one that this database has
-- been on, as far as the server or the table knows: a copy that was restored into another server begins at 1 there. After
-- 2047 timelines the clock alone counts.
create table timeline (
  one boolean primary key default true check (one),
  name text,
  number integer not null
);
insert into timeline (number) values (0);
create function timeline_ahead() returns bigint
language plpgsql security definer set search_path from current as $$
declare
  here text := timeline_now();
begin
  update timeline t set name = here, number = greatest(t.number + 1, ('x' || right(here, 8))::bit(32)::integer)
   where t.name <> here or (t.name is null and here is not null);
  return (select (least(greatest(number, 1), 2048) - 1)::bigint << 52 from timeline);
end $$;

create or replace function draw_session_epoch() returns bigint
language sql security definer set search_path from current as $$
  insert into session_epoch as e (last) values ((extract(epoch from clock_timestamp()) * 1000000)::bigint + timeline_ahead())
      on conflict (one) do update set last = greatest(e.last + 1, excluded.last)
  returning last
$$;

create or replace function advance(
  p_group bigint, p_stream bigint, p_grant bigint, p_position bigint, p_consumed jsonb default null,
  p_doubt jsonb default null
) returns void
language plpgsql security definer set search_path from current as $$
declare
  moved integer;
begin
  if exists (select from leadership where leadership_id = p_group and timeline <> timeline_now()) then
    raise exception 'the database has gone over to another timeline, and group % has no leader on it yet', p_group
      using errcode = 'SB001', hint = 'Roll back: what was read before may not be in the log. All is lent anew.';
  end if;
  if current_setting('idle_in_transaction_session_timeout')::interval not between '1ms' and '30min' then
    perform set_config('idle_in_transaction_session_timeout', '30min', true);
  end if;
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
select set_config('search_path', quote_ident(current_schema()), true);

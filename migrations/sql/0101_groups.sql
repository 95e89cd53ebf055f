-- Groups: the lending of each stream, its progress, and its history.

create table consumer_group (
  group_id bigint generated always as identity primary key,
  kind text not null check (kind in ('share', 'queue')),
  name text not null,
  filter text not null,
  starting_position text not null default 'latest',    -- latest, earliest, offset:N, or a UTC time in ISO 8601
  -- Generations up to this one were evaluated when the group was created: of their streams it has the rows that were
  -- made then, and no others ever. Later ones are added as they are found.
  after_generation bigint not null default 0,
  options jsonb not null default '{}',                 -- on_data_loss, strategy, session_expiry_s, atomic
  desired_state jsonb not null default '{}'            -- set by operators: paused (the reason), weights by session
    check (jsonb_array_length(jsonb_path_query_array(desired_state, '$.weights.keyvalue()')) <= 1000),
  desired_state_version integer not null default 0,    -- counts the changes of the desired state
  created_at timestamptz not null default clock_timestamp(),
  created_by text,                                     -- the principal for which a node made it
  created_timeline text default timeline_now(),        -- the timeline it is on until it has a leader
  deleted_at timestamptz,
  -- Operators write rows, and every node reads all groups: it cannot go on at one that is none.
  check (jsonb_typeof(options) = 'object' and jsonb_typeof(desired_state) = 'object'),
  -- No number has more digits than Python reads.
  check (octet_length(options::text) <= 4000 and desired_state - '{paused,weights}'::text[] = '{}'),
  check (not options @? 'strict $.on_data_loss ? (@.type() != "string" || @ != "fail" && @ != "skip")'
         and not options @? 'strict $.on_poison ? (@.type() != "string" || @ != "block" && @ != "skip")'),
  check (not options @? 'strict $.strategy ? (@.type() != "string")'
         and not options @? 'strict $.session_expiry_s ? (@.type() != "number" || @ < 0 || @ > 31622400)'
         and not options @? 'strict $.atomic ? (@.type() != "boolean")'
         and not options @? 'strict $.holds_retention ? (@.type() != "boolean")'),
  check (not desired_state @? 'strict $.paused ? (@.type() != "string")'
         and not desired_state @? 'strict $.weights ? (@.type() != "object")'
         and not desired_state @? 'strict $.weights.* ? (@.type() != "number" || @ < 0.001 || @ > 10000)'),
  -- As the product writes it: one that cannot be parsed ended every reading of groups.
  check (case when starting_position in ('latest', 'earliest') then true
              when starting_position ~ '^offset:(0|[1-9][0-9]{0,18})$'
              then substr(starting_position, 8)::numeric <= 9223372036854775807
              when starting_position ~ ('^(?!0000)[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])'
                || 'T([01][0-9]|2[0-3])(:[0-5][0-9]){2}([.][0-9]{6})?Z$')
              then extract(month from make_date(substr(starting_position, 1, 4)::int, substr(starting_position, 6, 2)::int, 1)
                                      + substr(starting_position, 9, 2)::int - 1) = substr(starting_position, 6, 2)::int
              else false end),
  check (length(name) between 1 and 255 and name !~ '[/+#]'),
  check (are_filters(array[filter]))
);
create unique index consumer_group_subscription on consumer_group (kind, name, filter) where deleted_at is null;
create index consumer_group_created on consumer_group (created_by, created_at) where created_by is not null;
create index consumer_group_behind on consumer_group (after_generation) where deleted_at is null;
create index consumer_group_deleted on consumer_group (deleted_at) where deleted_at is not null;

create table lending (
  group_id bigint not null,
  stream_id bigint not null,
  status text not null default 'free' check (status in ('free', 'held', 'reserved', 'finished', 'blocked')),
  -- The unfinished rows of a group are read at each grant, and by each renewal, without a scan of the finished ones. A
  -- column of its own, which only the end of a stream changes: an index over the status would make each grant write to
  -- the indexes.
  unfinished boolean not null generated always as (status <> 'finished') stored,
  grant_id bigint not null default 0,
  grant_key bytea,                                     -- of the grant in force, else null: sent to its holder only
  -- For the history of those who may not read the key.
  grant_key_sha256 bytea generated always as (sha256(grant_key)) stored,
  borrower_id text,
  agent text,
  session text,
  session_epoch bigint,
  losses integer not null default 0,                   -- forced ends at lost_position, in a row
  lost_position bigint,
  lost_message_count bigint not null default 0,        -- skipped because they were gone
  in_doubt jsonb,                                      -- what its holder planned last: {"grant_id", "start", "end", "hold_s", "consumed"}
  planned_by text,                                     -- the session of the holder that planned it
  planned_at timestamptz,                              -- when it was saved
  held_until timestamptz,                              -- a free or reserved row: until then it is reserved for its session
  consumed jsonb,                                      -- atomic: {"upto": offset, "least": epochs}, beside what lies before position
  granted_at timestamptz,
  -- What progress changes comes last: Postgres logs an update from the first byte that differs to the last.
  position bigint not null check (position >= 0),      -- the next offset to deliver
  term bigint,                                         -- of the leader that wrote last
  updated_at timestamptz not null default clock_timestamp(),
  -- Operators write rows, and leaders read them. One check, which is compiled by each statement; the functions are not
  -- called for null.
  check (is_range_in_doubt(in_doubt) and is_consumed_frontier(nullif(in_doubt -> 'consumed', 'null'))
         and is_consumed_frontier(consumed) and held_until between '0001-01-01 UTC' and '9999-12-31 UTC'),
  primary key (group_id, stream_id)
) with (fillfactor = 50);
create index lending_stream on lending (stream_id);
alter table lending alter consumed set storage external; -- its size bounds what is read of it
create index lending_unfinished on lending (group_id, stream_id) where unfinished;

-- The consumed frontier of an atomic group in a space. It only grows, and each advance is announced once.
create table consumed_frontier (
  group_id bigint not null,
  space_id bigint not null references space,
  least jsonb check (are_epochs(nullif(least, 'null'))), -- null: no epoch yet
  has_streams boolean not null default true,           -- false: the group has had none of the space so far
  updated_at timestamptz not null default clock_timestamp(),
  primary key (group_id, space_id)
) with (fillfactor = 50);

create table lending_history (
  history_id bigint generated always as identity primary key,
  at timestamptz not null,
  group_id bigint not null,
  stream_id bigint not null,                           -- 0: of the group itself
  event text not null,                                 -- as docs/groups.md lists them: grant, revoke, release, force_release, ...
  reason text not null,
  grant_id bigint not null,                            -- the grant that began or ended
  grant_key_sha256 bytea,                              -- of its key
  borrower_id text,
  agent text,
  session text,
  position bigint not null,
  term bigint not null,
  forced boolean not null default false,
  redelivery_end bigint,                               -- forced: messages in [position, redelivery_end) may be seen twice
  -- The transaction that wrote it: numbers are drawn before the commit, so a reader that continues after a number would
  -- miss a record with a lower number that commits later.
  xact xid8 default pg_current_xact_id(),
  check (forced = (redelivery_end is not null))
);
create index lending_history_group on lending_history (group_id, history_id);
create index lending_history_forced on lending_history (group_id, history_id) where forced;
create index lending_history_at on lending_history (at);
create index lending_history_behind on lending_history (group_id, xact);
-- Events that are looked up among all others of a group.
create index lending_history_event on lending_history (event, group_id, stream_id, history_id)
 where event in ('unreadable', 'readable', 'block', 'revoke', 'delete', 'reset');

-- Operators reset and delete groups without a leader, and may write no other row of a leadership.

-- Make a group's row, which has no leader, unless there is one. Its term is a time, and not in the future.
create function add_leadership(p_group bigint, p_term bigint) returns void
language plpgsql security definer set search_path from current as $$
begin
  insert into leadership (leadership_id, term, expires_at)
  select group_id, least(p_term, (extract(epoch from clock_timestamp()) * 1000000)::bigint), timestamptz 'epoch'
    from consumer_group where group_id = p_group
      on conflict do nothing;
end $$;

-- End leases of others, also for a clock that is set back later.
create function end_leaderships(p_groups bigint[]) returns void
language plpgsql security definer set search_path from current as $$
begin
  update leadership set deposed_until = greatest(deposed_until, expires_at), expires_at = timestamptz 'epoch'
   where leadership_id = any(p_groups);
end $$;

-- Orders the processes of one session name in a group. Draws of one name are serialized and increase; the clock keeps
-- them increasing after a backup was restored. No draw depends on another name's. The row with empty names has the
-- highest epoch of the deleted rows.
create table session_epoch (
  subscription text not null,                          -- $share/GROUP/FILTER: no group exists before its first member
  session text not null,
  last bigint not null,
  drawn_at timestamptz not null default clock_timestamp(),
  principal text,                                      -- the owner of the name; null: no known owner
  drawn_by text not null default session_user,         -- the database's user who drew the first
  primary key (subscription, session)
) with (fillfactor = 50);
create index session_epoch_drawn on session_epoch (drawn_at);
create index session_epoch_principal on session_epoch (principal) where principal is not null;
create index session_epoch_drawn_by on session_epoch (drawn_by) where principal is null;

create function next_session_epoch(p_subscription text, p_session text) returns bigint
language plpgsql security definer set search_path from current as $$
declare
  drawn bigint;
begin
  if not coalesce(octet_length(p_subscription) between 1 and 5124, false) then
    perform reject_message('subscription ' || quote_nullable(left(p_subscription, 80)), 'it has 1 to 5124 bytes of UTF-8',
      'Give one such as $share/billing/orders/#.');
  elsif not coalesce(octet_length(p_session) between 1 and 255 and is_printable(p_session), false) then
    perform reject_message('session ' || quote_nullable(left(p_session, 80)),
      'its name has 1 to 255 bytes of UTF-8, all of them printable characters', 'Choose a shorter or plainer one.');
  elsif not exists (select from session_epoch e where (e.subscription, e.session) = (p_subscription, p_session))
        and (select count(*) >= 100000 from (
               select from session_epoch e where e.drawn_by = session_user and e.principal is null limit 100000) as own) then
    perform reject_message('session ' || quote_nullable(left(p_session, 80)),
      'database user ' || session_user || ' has drawn epochs for 100000 names of sessions, and that is the limit',
      'Use the same names again. Those under which none was drawn for long are deleted by nodes.');
  end if;
  insert into session_epoch as e (subscription, session, last)
  select p_subscription, p_session,
         greatest(timeline_clock(), 1 + (select f.last from session_epoch f where f.subscription = '' and f.session = ''))
      on conflict (subscription, session)
      do update set last = greatest(e.last + 1, excluded.last), drawn_at = clock_timestamp()
  returning last into drawn;
  return drawn;
end $$;

-- Return the highest epoch that a process of that name may have: the last one drawn. One drawn on a former timeline, or
-- deleted, may be missing; it is below all that are drawn now.
create function last_session_epoch(p_subscription text, p_session text) returns bigint language sql stable as $$
  select greatest(
    (select max(e.last) from session_epoch e
      where (e.subscription, e.session) in ((p_subscription, p_session), ('', ''))),
    (select (least(greatest(t.number, 1), 2048) - 1)::bigint << 52 from timeline t))
$$;

-- Return whether a process of that name in the group may have that epoch.
create function is_session(p_group bigint, p_session text, p_epoch bigint) returns boolean language sql stable as $$
  select p_epoch > 0 and exists (
    select from consumer_group g where g.group_id = p_group
       and p_epoch <= last_session_epoch('$' || g.kind || '/' || g.name || '/' || g.filter, p_session))
$$;

-- The following functions run with their owner's rights, for consumers. A grant id is visible to others and
-- predictable, so each call about a grant needs its key as well, which only its holder receives.

-- Limit the idle time of the caller's transaction to 30 minutes: it is to hold the lock of a grant's row.
create function limit_idle_time() returns void language plpgsql as $$
begin
  if current_setting('idle_in_transaction_session_timeout')::interval not between '1ms' and '30min' then
    perform set_config('idle_in_transaction_session_timeout', '30min', true);
  end if;
end $$;

-- The only progress write outside of a leader: made in the consumer's own transaction, so that output and progress
-- commit together. Raises unless exactly one row moved, forward from its position and no further than the head. For an
-- atomic group the stream's consumed frontier is given too, and must advance. With p_doubt the row must have this as
-- the last planned range: a range that was planned meanwhile may have the same messages. The caller has read its
-- messages before: on this timeline, if the group has had a leader on it, which has ended all older grants. From then
-- on it holds the row lock, for at most 30 minutes of idle time before its COMMIT.
create function advance(
  p_group bigint, p_stream bigint, p_grant bigint, p_position bigint, p_key bytea, p_consumed jsonb default null,
  p_doubt jsonb default null
) returns void
language plpgsql security definer set search_path from current as $$
declare
  moved integer;
begin
  if exists (select from leadership where leadership_id = p_group and timeline <> timeline_now()) then
    raise exception 'the database has gone over to another timeline, and group % has no leader on it yet', p_group
      using errcode = 'SB001', hint = 'Roll back: what was read before may not be in the log. All streams are granted anew.';
  end if;
  perform limit_idle_time();
  update lending l set position = p_position, consumed = coalesce(p_consumed, l.consumed), updated_at = clock_timestamp(),
         lost_position = case when p_consumed is null then lost_position end
    from stream s
   where l.group_id = p_group and l.stream_id = p_stream and l.grant_id = p_grant and l.status = 'held'
     and l.grant_key = p_key
     and s.stream_id = l.stream_id and p_position <= s.head and (l.consumed is null) = (p_consumed is null)
     and (p_doubt is null or l.in_doubt - 'hold_s' = p_doubt - 'hold_s')
     and case when p_consumed is null then l.position < p_position
              else l.position <= p_position and l.consumed <> p_consumed
                   and is_consumed_frontier(p_consumed, (select p.lower_frontier from space p where p.space_id = s.space_id))
                   and (p_consumed ->> 'upto')::bigint between (l.consumed ->> 'upto')::bigint and s.head end;
  get diagnostics moved = row_count;
  if moved <> 1 then
    raise exception 'stream % of group % is not held under grant % and this key before offset %: the transaction must not commit',
      p_stream, p_group, p_grant, p_position
      using errcode = 'SB001',
            hint = 'The stream was granted to another borrower, the key is not that of the grant, or its progress is not '
                   'between the present position and the head. Roll back; its holder does this work.';
  end if;
end $$;

-- Return the stream's progress under that grant, also after its end; null if it is no longer in the history. Waits for
-- concurrent changes of the row, and holds its lock as `advance` does. A reset is recorded with the position that it
-- sets, and its reason has the one before.
create function read_progress(p_group bigint, p_stream bigint, p_grant bigint, p_key bytea) returns bigint
language plpgsql security definer set search_path from current as $$
declare
  found_at bigint;
begin
  perform limit_idle_time();
  select l.position into found_at from lending l
   where l.group_id = p_group and l.stream_id = p_stream and l.grant_id = p_grant and l.grant_key = p_key
     for share;
  if found_at is null then
    select case h.event when 'reset' then substring(h.reason from '; was at ([0-9]+)$')::bigint else h.position end
      into found_at
      from lending_history h
     where h.group_id = p_group and h.stream_id = p_stream and h.grant_id = p_grant and h.grant_key_sha256 = sha256(p_key)
     order by h.history_id desc limit 1;
  end if;
  return found_at;
end $$;

-- Return the stream's consumed frontier under that grant, while it is in force; else null.
create function read_consumed_frontier(p_group bigint, p_stream bigint, p_grant bigint, p_key bytea) returns jsonb
language plpgsql security definer set search_path from current as $$
declare
  found jsonb;
begin
  perform limit_idle_time();
  select l.consumed into found from lending l
   where l.group_id = p_group and l.stream_id = p_stream and l.grant_id = p_grant and l.grant_key = p_key
     for share;
  return found;
end $$;

-- Return the last ranges that the session planned of these streams (null: of all), and their progress: for its process
-- with this epoch, which has restarted without the former keys and queries the outcome of the ranges started before, and
-- for its sink. `is_ours`: the row is the session's, held or reserved; `of_grant` is null unless the session holds it. A
-- row of a later process is not returned.
create function read_planned_ranges(p_group bigint, p_session text, p_epoch bigint, p_streams bigint[])
  returns table (of_stream bigint, is_ours boolean, of_grant bigint, reached bigint, frontier jsonb, doubt jsonb,
                 saved_at float)
language sql stable security definer set search_path from current as $$
  select l.stream_id, l.session is not distinct from p_session,
         case when l.status = 'held' and l.session = p_session then l.grant_id end, l.position, l.consumed, l.in_doubt,
         coalesce(extract(epoch from l.planned_at), 0)::float
    from lending l
   where l.group_id = p_group and l.planned_by = p_session
     and l.stream_id = any(coalesce(p_streams, array(select stream_id from lending where group_id = p_group)))
     and l.in_doubt is not null
     and (l.session is distinct from p_session or coalesce(l.session_epoch, 0) <= p_epoch)
     and is_session(p_group, p_session, p_epoch)
$$;

-- Return the session's progress under ended grants, as far as history has them, and whether the stream was finished; not
-- of a stream that was reset since. For a process of the session whose plans are in no row any more.
create function read_ended_grants(
  p_group bigint, p_session text, p_epoch bigint, p_streams bigint[], p_grants bigint[]
) returns table (of_stream bigint, of_grant bigint, reached bigint, is_finished boolean)
language sql stable security definer set search_path from current as $$
  select h.stream_id, h.grant_id, max(h.position), bool_or(h.event = 'finish')
    from unnest(p_streams, p_grants) as u (stream_id, grant_id)
    join lending_history h on h.group_id = p_group and h.stream_id = u.stream_id and h.grant_id = u.grant_id
   where h.session = p_session and h.event <> 'reset' and is_session(p_group, p_session, p_epoch)
     and not exists (select from lending_history r where r.group_id = p_group and r.stream_id = u.stream_id
                        and r.event = 'reset' and r.history_id > h.history_id)
   group by h.stream_id, h.grant_id
$$;

-- Return the streams that the session's group has not consumed to their heads, also those without a row yet: of
-- generations that were filled under these filters. `is_anothers`: another session holds it, or it is reserved for one.
create function ahead_of(p_group bigint, p_session text, p_epoch bigint, p_open text[], p_closed text[])
  returns table (of_stream bigint, reached bigint, ends bigint, status text, is_anothers boolean)
language plpgsql stable security definer set search_path from current as $$
declare
  noticed bigint;  -- a variable: from a column the planner cannot estimate how few generations are newer
begin
  select g.after_generation into noticed from consumer_group g
   where g.group_id = p_group and g.deleted_at is null and is_session(p_group, p_session, p_epoch);
  if not found then
    return;
  end if;
  return query
    select s.stream_id, l.position, s.head, l.status,
           l.status in ('held', 'reserved') and l.session is distinct from p_session
      from lending l join stream s using (stream_id) join generation n using (generation_id)
     where l.group_id = p_group and n.state <> 'gone' and l.unfinished and l.position < s.head
    union all
    select s.stream_id, 0::bigint, s.head, 'free', false
      from generation n join stream s using (generation_id)
     where n.generation_id > noticed and n.state <> 'gone' and s.head > 0
       and n.filter = any(case when s.state = 'open' then p_open else p_closed end)
       and not exists (select from lending l where l.group_id = p_group and l.stream_id = s.stream_id);
end $$;

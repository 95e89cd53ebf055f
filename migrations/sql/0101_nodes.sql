-- Leader nodes, and the timeline of the database.

-- Registered leader nodes, each under a lease of its own.
create table node (
  name text primary key,
  incarnation text not null,
  address text not null,
  http_address text,
  protocol_version integer not null,
  started_at timestamptz not null default clock_timestamp(),
  expires_at timestamptz not null,
  notify_endpoint text,                                -- where publishers' notifications reach it; null: it polls
  -- The driver of its notifications. The endpoint may end in a key that admits its bearer, so few users may read it.
  notify_driver text not null generated always as (split_part(coalesce(notify_endpoint, 'poll:'), ':', 1)) stored,
  draining boolean not null default false              -- set by an operator: lead nothing any more
) with (fillfactor = 50);

-- Return the database's timeline: promoting a standby begins another one, and the last commits of the one before may be
-- missing on it. The control file lags behind, the name of the WAL file does not. Null if the server does not report
-- it.
create function timeline_now() returns text language plpgsql stable as $$
begin
  return (select system_identifier::text from pg_control_system()) || '/' || left(pg_walfile_name(pg_current_wal_lsn()), 8);
exception when insufficient_privilege or feature_not_supported or undefined_function then
  return null;
end $$;

-- leadership_id is a group_id, or 0 for the maintenance of the entire database. Rows are expired, never deleted,
-- so that a term cannot come back.
create table leadership (
  leadership_id bigint primary key,
  node text not null default 'nobody',
  incarnation text not null default '',
  address text not null default '',                    -- its holder is sent tokens: operators cannot write it
  term bigint not null,
  expires_at timestamptz not null,
  step_down_term bigint,                               -- set by an operator: the term whose leader is to step down
  previous_node text,                                  -- the leader before this term; null: none
  previous_incarnation text,
  timeline text,                                       -- on which it was elected, and leads
  previous_timeline text,
  deposed_until timestamptz                            -- until then one whose lease ended early may believe it leads
) with (fillfactor = 50);
create index leadership_step_down on leadership (incarnation) where step_down_term is not null;

-- Added to the clock in all increasing numbers: terms (and with them grant ids), session epochs, incarnations. So
-- numbers drawn on the lost part of a former timeline are below all that are drawn on this one, whatever the clocks
-- are: 2^52 microseconds are 142 years. A timeline's number is above that of every former timeline of this database, as
-- far as the server or the table knows: a copy that was restored into another server begins at 1 there, and is counted on
-- from what the table has. It is the same whether or not the row has been written on a former timeline of this server. After
-- 2047 timelines only the clock counts.
create table timeline (
  one boolean primary key default true check (one),
  name text,
  number integer not null
);
insert into timeline (number) values (0);
create function current_timeline() returns timeline
language sql stable security definer set search_path from current as $$
  select t.one, coalesce(here, t.name),
         case when here = t.name or here is null then t.number
              else t.number + greatest(1, ('x' || right(here, 8))::bit(32)::integer
                - case when split_part(here, '/', 1) = split_part(t.name, '/', 1)
                       then ('x' || right(t.name, 8))::bit(32)::integer else 0 end) end
    from timeline t, timeline_now() as here
$$;

-- Return the timeline's number in drawn numbers, from 0. Writes nothing.
create function timeline_number() returns integer
language sql stable security definer set search_path from current as $$
  select least(greatest(number, 1), 2048) - 1 from current_timeline()
$$;

-- Return what is drawn now: the time in microseconds since 1970, above all that was drawn on former timelines.
create function timeline_clock() returns bigint language sql as $$
  select (timeline_number()::bigint << 52) + (extract(epoch from clock_timestamp()) * 1000000)::bigint
$$;

-- Write the timeline's number, and return it as it is added. Only for claims, which are short: each waits for the lock of
-- the one row until the first on a timeline has committed.
create function timeline_ahead() returns bigint
language plpgsql security definer set search_path from current as $$
begin
  update timeline t set name = c.name, number = c.number from current_timeline() c where t.name is distinct from c.name;
  return timeline_number()::bigint << 52;
end $$;

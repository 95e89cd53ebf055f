-- Messages: spaces, their generations, the streams of each generation, the blocks of each stream.
-- Run with search_path set to the schema; names are not qualified so that the schema stays a setting.

-- Return whether it is a frontier as readers expect it: a list of up to 1000 epochs, all of the same dimensions. Numbers
-- have no point: as text, which they are cast from, 5.0 is no integer. Like every function of a check it calls no other
-- of ours, which a restore would not find.
create function are_epochs(p_epochs jsonb) returns boolean language plpgsql immutable strict as $$
begin
  return coalesce(
    jsonb_path_match(p_epochs, 'strict $.type() == "array" && $.size() <= 1000', '{}', true)
    and not jsonb_path_exists(p_epochs,
      'strict $[*] ? (@.type() != "array" || @.size() < 1 || @.size() > 8 || @.size() != $[0].size())', '{}', true)
    and not jsonb_path_exists(p_epochs,
      'strict $[*][*] ? (@.type() != "number" || @ > 9223372036854775807 || @ < -9223372036854775808)', '{}', true)
    and strpos(p_epochs::text, '.') = 0, false);
end $$;

-- Return whether all are filters, in a plain list.
create function are_filters(p_filters text[]) returns boolean language sql immutable as $$
  select coalesce(array_ndims(p_filters), 1) = 1 and coalesce(bool_and(coalesce(
           octet_length(filter) between 1 and 4096 and length(filter) - length(replace(filter, '/', '')) < 128
           and filter !~ '^[$]|#.|[^/]#|[+][^/]|[^/][+]', false)), true)
    from unnest(p_filters) as u (filter)
$$;

create table space (
  space_id bigint generated always as identity primary key,
  name text not null,
  filter text not null,
  shards integer not null check (shards between 1 and 4096),
  retention_s bigint,                                  -- null: keep for ever
  rollover_s bigint,                                   -- null: only on command
  compression text not null default 'none' check (compression in ('none', 'lz4', 'zstd')),
  epoch_dimensions smallint check (epoch_dimensions between 1 and 8), -- of each epoch in it; null: no epoch was ever used
  frontier_move_count bigint not null default 0,       -- how often the lower frontier has moved
  lower_frontier jsonb,                                -- the least epochs that may still be published (epochs.sql)
  payload_location text,                               -- where payloads are moved to; null: they stay here
  tier_after_s bigint,                                 -- also of open generations, if older; null: of closed ones
  payload_locations text[] not null default '{}',      -- every location that payloads of this space may be at
  lost_upper_frontier jsonb,                           -- the greatest epochs in streams whose rows are deleted
  filter_since bigint not null default 0,              -- the newest stream when it got its filter
  former_filters text[] not null default '{}',         -- every other one that it has had
  created_at timestamptz not null default clock_timestamp(),
  dropped_at timestamptz,
  -- Operators write rows, and nodes read them all: what cannot be read would hold up other spaces.
  check (are_epochs(lower_frontier) and are_epochs(lost_upper_frontier)),
  check (are_filters(array[filter]) and are_filters(former_filters)),
  check (least(retention_s, rollover_s, tier_after_s) > 0
         and greatest(retention_s, rollover_s, tier_after_s) <= 31536000000) -- 1000 years
);
create unique index space_name on space (name) where dropped_at is null;
create unique index space_filter on space (filter) where dropped_at is null;

-- One global sequence of ids: a generation belongs to exactly one space.
create table generation (
  generation_id bigint generated always as identity primary key,
  space_id bigint not null references space,
  ordinal integer not null,                            -- 0, 1, 2, ... within the space
  filter text not null,                                -- of the space when the generation was opened
  state text not null default 'open' check (state in ('open', 'closed', 'gone')),
  opened_at timestamptz not null default clock_timestamp(),
  closed_at timestamptz,
  -- Null: open, or not checked yet. False: it has messages, or its partition is still to be dropped. True: its messages
  -- are deleted, and its rows may be once every group is past them.
  is_past boolean,
  unique (space_id, ordinal),
  check (are_filters(array[filter]))
);
create index generation_filter on generation (filter, generation_id);
create index generation_open on generation (filter) where state = 'open';
create index generation_ended on generation (space_id, closed_at) where state = 'closed';
create index generation_unseen on generation (generation_id) where state = 'closed' and is_past is null;
create index generation_gone on generation (generation_id) where state = 'gone' and is_past is not true;
create index generation_past on generation (generation_id) where is_past;

-- For each filter of a generation, the newest generation that had messages and whose rows are deleted, and its newest
-- stream: later ones still have their rows if they had messages.
create table lost_generation (
  filter text primary key,
  generation_id bigint not null,
  stream_id bigint not null
);

-- Hash ranges are half-open on the unsigned 64-bit ring, hence numeric: the last end is 2^64.
create table stream (
  stream_id bigint generated always as identity primary key,
  space_id bigint not null references space,
  generation_id bigint not null references generation,
  hash_from numeric(20) not null,
  hash_to numeric(20) not null,
  state text not null default 'open' check (state in ('open', 'closed')),
  head bigint not null default 0,                      -- the next offset to be written
  upper_frontier jsonb,                                -- the greatest epochs in it
  parents bigint[] not null default '{}',              -- streams closed in the same rollover with overlapping ranges
  -- Payloads up to here are moved, or too small to move; some after it may be moved, too. Null: none is remote.
  tiered_offset bigint,
  -- A closed stream whose payloads have not all been checked for tiering. A column of its own, which no append changes:
  -- an index over the head would make each write to the indexes.
  is_to_tier boolean not null generated always as (state = 'closed' and coalesce(tiered_offset, 0) < head) stored,
  seen_offset bigint not null default 0,               -- blocks up to there were checked for compaction
  is_compact boolean not null default false,           -- it is closed, and checked to its end
  opened_at timestamptz not null default clock_timestamp(),
  closed_at timestamptz,
  -- One check, since each update compiles each anew. Not NaN, the greatest of all; and sums of heads have to be numbers.
  check (0 <= hash_from and hash_from < hash_to and hash_to <= 18446744073709551616
         and head between 0 and 9007199254740992)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
create index stream_generation on stream (generation_id);
create index stream_open on stream (stream_id) where state = 'open';
-- Finds the children of a stream when it is deleted.
create index stream_parents on stream using gin (parents);
create index stream_to_compact on stream (stream_id) where state = 'closed' and not is_compact;
create index stream_to_tier on stream (space_id) where is_to_tier;

-- The epochs that have begun in each space: the greatest of each stream, and, without a stream, of all deleted ones.
create view stream_upper_frontier as
  select space_id, stream_id, upper_frontier from stream
  union all
  select space_id, null, lost_upper_frontier from space;

-- Return whether it is a block's epochs as readers expect them: two antichains of up to 1000, all of the same
-- dimensions, and nothing else. Numbers have no point: as text, which they are cast from, 5.0 is no integer.
create function are_epoch_bounds(p_bounds jsonb) returns boolean language plpgsql immutable strict as $$
begin
  return coalesce(
    jsonb_path_match(p_bounds, 'strict $.has_unset.type() == "boolean" && $.least[0].size() >= 1 && $.least[0].size() <= 8
      && $.least.size() <= 1000 && $.greatest.size() >= 1 && $.greatest.size() <= 1000
      && ($.least[0].size() > 1 || ($.least.size() == 1 && $.greatest.size() == 1))', '{}', true)  -- of numbers one is least
    and p_bounds - '{has_unset,least,greatest}'::text[] = '{}'
    and not jsonb_path_exists(p_bounds,
      'strict $.keyvalue() ? (@.key == "least" || @.key == "greatest").value[*] ? (@.type() != "array" || @.size() != $.least[0].size())',
      '{}', true)
    and not jsonb_path_exists(p_bounds,
      'strict $.keyvalue() ? (@.key == "least" || @.key == "greatest").value[*][*]
         ? (@.type() != "number" || @ > 9223372036854775806 || @ < -9223372036854775808)', '{}', true)
    and strpos(p_bounds::text, '.') = 0, false);
end $$;

-- A block covers the offsets [end_offset - count, end_offset). The checks admit only rows as readers expect them. One
-- partition per generation, made by LIKE + ATTACH.
create table block (
  generation_id bigint not null,
  stream_id bigint not null,
  end_offset bigint not null,
  count integer not null,
  first_timestamp timestamptz not null,                -- smallest and largest message timestamp in it
  last_timestamp timestamptz not null,
  appended_at timestamptz not null default clock_timestamp(),
  topics text[],                                       -- a skip index; null if there are more than 8
  lower_frontier jsonb,                                -- the space's, before this block
  epoch_bounds jsonb,                                  -- {"least": antichain, "greatest": antichain} of those in it,
                                                       -- and whether it is "has_unset": with messages without an epoch
  codec smallint not null,
  payload bytea,
  uri text,
  uri_bytes bigint,                                    -- of the remote payload
  -- For a merged block, by which a time window has the same messages for ever: the offsets in it, from its first
  -- message, at which messages begin that were appended later than all before them, and their times. The first offset
  -- is 0, the last messages were appended at the time in the block's row. Null: all have one time.
  piece_starts integer[],
  piece_times timestamptz[],
  primary key (generation_id, stream_id, end_offset),
  -- One check, since each insert compiles each anew. Topics are checked where they are given.
  check (count between 1 and 100000 and (payload is null) <> (uri is null) and cardinality(topics) <= 8
         and coalesce(octet_length(payload), uri_bytes) <= 34603008 and are_epoch_bounds(epoch_bounds))
) partition by list (generation_id);
alter table block alter payload set storage external;

-- Create the partition for the blocks of a generation, for nodes and operators, who can create no other table: by LIKE
-- and ATTACH, which do not block readers or wait for them. It has the privileges of `block`, and not the database's
-- default privileges.
create function create_partition(p_generation bigint) returns void
language plpgsql security definer set search_path from current as $$
declare
  part constant text := 'block_' || p_generation;
  given record;
begin
  if not exists (select from generation where generation_id = p_generation and state = 'open') then
    raise exception 'generation %: there is none that is open.', p_generation using errcode = 'SB002', hint = 'Insert its row first.';
  end if;
  execute format('create table %I (like block including all)', part);
  execute format('revoke all on %I from public', part);
  execute format('alter table %I alter payload set storage external', part);
  execute format('alter table block attach partition %I for values in (%s)', part, p_generation);
  for given in
    select grantee::regrole as whom, string_agg(privilege_type, ', ') as rights
      from pg_class c cross join aclexplode(c.relacl) where c.oid = 'block'::regclass and grantee not in (0, relowner)
     group by grantee
    union all
    select grantee::regrole, privilege_type || ' (' || string_agg(quote_ident(attname), ', ') || ')'
      from pg_attribute cross join aclexplode(attacl) where attrelid = 'block'::regclass and grantee <> 0
     group by grantee, privilege_type
  loop
    execute format('grant %s on %I to %s', given.rights, part, given.whom);
  end loop;
end $$;

-- Planned for each call: a generic plan locks the partitions of all generations, and the lock table is limited.

-- Return the offset of the first message of a stream that was appended at that time or later; null if there is none.
create function offset_at_time(p_generation bigint, p_stream bigint, p_time timestamptz) returns bigint
language plpgsql stable set plan_cache_mode = force_custom_plan as $$
begin
  return (
    select b.end_offset - b.count
             + coalesce(b.piece_starts[1 + (select count(*) from unnest(b.piece_times) as t (at) where t.at < p_time)], 0)
      from block b
     where b.generation_id = p_generation and b.stream_id = p_stream and b.appended_at >= p_time
     order by b.end_offset limit 1);
end $$;

-- Return when the message at an offset of a stream was appended; null if it is gone, or not there yet.
create function appended_at(p_generation bigint, p_stream bigint, p_offset bigint) returns timestamptz
language plpgsql stable set plan_cache_mode = force_custom_plan as $$
begin
  return (
    select coalesce(b.piece_times[(select count(*) from unnest(b.piece_starts) as s (start)
                                    where s.start <= p_offset - (b.end_offset - b.count))], b.appended_at)
      from block b
     where b.generation_id = p_generation and b.stream_id = p_stream and b.end_offset > p_offset
     order by b.end_offset limit 1);
end $$;

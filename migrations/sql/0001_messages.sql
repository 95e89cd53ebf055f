-- Messages: spaces, their generations, the streams of each generation, the blocks of each stream.
-- Run with search_path set to the schema; names are not qualified so that the schema stays a setting.

create table space (
  space_id bigint generated always as identity primary key,
  name text not null,
  filter text not null,
  shards integer not null check (shards between 1 and 4096),
  retention_s bigint check (retention_s > 0),          -- null: keep for ever
  rollover_s bigint check (rollover_s > 0),            -- null: only when asked
  compression text not null default 'none' check (compression in ('none', 'lz4', 'zstd')),
  epoch_numbers smallint check (epoch_numbers between 1 and 8), -- of each epoch in it; null: no epoch was ever used
  frontier_moves bigint not null default 0,            -- how often the lower frontier has moved
  lower_frontier jsonb,                                -- the least epochs that may still be published (0001_epochs.sql)
  created_at timestamptz not null default clock_timestamp(),
  dropped_at timestamptz
);
create unique index space_name on space (name) where dropped_at is null;
create unique index space_filter on space (filter) where dropped_at is null;

-- One global sequence of ids: a generation belongs to exactly one space.
create table generation (
  generation_id bigint generated always as identity primary key,
  space_id bigint not null references space,
  ordinal integer not null,                            -- 0, 1, 2, ... within the space
  filter text not null,                                -- the space's when it was opened: what it was filled under
  state text not null default 'open' check (state in ('open', 'closed', 'gone')),
  opened_at timestamptz not null default clock_timestamp(),
  closed_at timestamptz,
  unique (space_id, ordinal)
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
  opened_at timestamptz not null default clock_timestamp(),
  closed_at timestamptz,
  check (hash_from < hash_to)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
create index stream_generation on stream (generation_id);

-- A block covers the offsets [end_offset - count, end_offset). One partition per generation, made by LIKE + ATTACH.
create table block (
  generation_id bigint not null,
  stream_id bigint not null,
  end_offset bigint not null,
  count integer not null check (count > 0),
  first_timestamp timestamptz not null,                -- smallest and largest message timestamp in it
  last_timestamp timestamptz not null,
  appended_at timestamptz not null default clock_timestamp(),
  topics text[],                                       -- a skip index; null when there are more than a few
  lower_frontier jsonb,                                -- the space's, before this block
  epochs jsonb,                                        -- {"least": antichain, "greatest": antichain} of those in it, and whether it is
                                                       -- "mixed": with messages without an epoch
  codec smallint not null,
  payload bytea,
  uri text,
  primary key (generation_id, stream_id, end_offset),
  check ((payload is null) <> (uri is null))
) partition by list (generation_id);
alter table block alter payload set storage external;

-- The last block of each (producer, stream): what makes a retried append be stored once.
create table producer (
  producer_id text not null,
  stream_id bigint not null,
  incarnation bigint not null,
  sequence bigint not null,
  end_offset bigint not null,
  refused jsonb not null default '{}',                 -- {"incarnation:sequence": outcome} of late: a retry is told the same
  updated_at timestamptz not null default clock_timestamp(),
  primary key (producer_id, stream_id)
) with (fillfactor = 50);

-- Messages published by SQL (0001_outbox.sql) that wait for the relay. What rolled back was never here. With the
-- transaction in front, the relay finds what has come since it looked last without walking over all that it removed.
create table outbox (
  xact xid8 not null default pg_current_xact_id(),
  outbox_id bigint generated always as identity,
  topic text not null,
  key bytea,
  value bytea,
  headers jsonb,                                       -- [["name", value], ...]; a value: text, null, {"base64": text}
  "timestamp" timestamptz,                             -- the message's; null: at
  at timestamptz not null default clock_timestamp(),
  primary key (xact, outbox_id)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);
alter table outbox alter value set storage external;

-- Rows that were not written by `publish`, and that nobody could publish: kept for whoever wants to know.
create table outbox_refused (
  outbox_id bigint primary key,
  topic text not null,
  key bytea,
  value bytea,
  headers jsonb,
  "timestamp" timestamptz,
  at timestamptz not null,
  reason text not null,
  refused_at timestamptz not null default clock_timestamp()
);

-- Leader nodes that can be reached, under a lease of their own.
create table node (
  name text primary key,
  incarnation text not null,
  address text not null,
  http_address text,
  protocol_version integer not null,
  started_at timestamptz not null default clock_timestamp(),
  expires_at timestamptz not null,
  notify text,                                         -- where publishers' notifications reach it; null: it looks by itself
  draining boolean not null default false              -- an operator's: lead nothing any more
) with (fillfactor = 50);

-- The advisory lock of a producer; negative, which is not so of our others. Who registers it holds the lock alone, and who
-- appends under its name shares it until the end of the transaction, before any other lock: so registering waits for what
-- is being written, and what is written later sees that it is fenced.
create function producer_lock(p_producer text) returns bigint language sql immutable as $$
  select hashtextextended(p_producer, 0) | (1::bigint << 63)
$$;

-- Remember, for a retry, that a producer's block was not stored; so many blocks are not committed together.
create function note_refusal(p_producer text, p_incarnation bigint, p_sequence bigint, p_stream bigint, p_outcome text)
returns void language sql as $$
  update producer p
     set refused = jsonb_build_object(format('%s:%s', p_incarnation, p_sequence), p_outcome) || (
       select coalesce(jsonb_object_agg(key, value), '{}') from jsonb_each(p.refused)
        where split_part(key, ':', 1)::bigint = p_incarnation and split_part(key, ':', 2)::bigint > p_sequence - 1000)
   where p.producer_id = p_producer and p.stream_id = p_stream
$$;

-- One block in one round trip, in the caller's transaction. `outcome` is exactly one of
--   appended   it lies at [end_offset - p_count, end_offset)
--   duplicate  this (producer, incarnation, sequence) is stored already, ending at end_offset (null: it is older than the last)
--   closed     the stream takes no more; nothing was written, and the messages belong to its children
--   fenced     a newer incarnation of the producer has begun; nothing was written
--   completed  it has an epoch that is not at or after those that the producer may still publish; nothing was written
--   expired    it has epochs, and the producer holds no capability (any more); nothing was written
-- The (producer, stream) row is locked first, so that a retry waits for the attempt whose outcome it doubts.
-- stream_id 0 in `producer` is the registration of a named producer: the incarnation that may write anywhere.
create function append_block(
  p_producer text, p_incarnation bigint, p_sequence bigint, p_stream bigint, p_count integer,
  p_first timestamptz, p_last timestamptz, p_topics text[], p_codec smallint, p_payload bytea, p_epochs jsonb,
  out outcome text, out end_offset bigint
) language plpgsql as $$
declare
  known record;
  place record;
  least jsonb;
  greatest bigint;                                     -- of epochs of one number, which need no sets
  is_behind boolean;
begin
  if p_producer is not null then
    perform pg_advisory_xact_lock_shared(producer_lock(p_producer));
    select p.incarnation, p.sequence, p.end_offset, p.refused into known from producer p
     where p.producer_id = p_producer and p.stream_id = p_stream for no key update;
    if not found then
      insert into producer (producer_id, stream_id, incarnation, sequence, end_offset)
      values (p_producer, p_stream, p_incarnation, 0, 0) on conflict do nothing;
      select p.incarnation, p.sequence, p.end_offset, p.refused into known from producer p
       where p.producer_id = p_producer and p.stream_id = p_stream for no key update;
    end if;
    if known.incarnation > p_incarnation or exists (
      select from producer p where p.producer_id = p_producer and p.stream_id = 0 and p.incarnation > p_incarnation
    ) then
      outcome := 'fenced';
      return;
    end if;
    if known.incarnation = p_incarnation and known.sequence >= p_sequence then
      -- A block that was refused may lie before one that was stored with it.
      outcome := coalesce(known.refused ->> format('%s:%s', p_incarnation, p_sequence), 'duplicate');
      end_offset := case when known.sequence = p_sequence then known.end_offset end;
      return;
    end if;
  end if;
  if p_epochs is not null then
    -- Nobody takes it away meanwhile: for that one would need the producer's lock.
    select c.least into least from capability c join stream s using (space_id)
     where s.stream_id = p_stream and c.producer_id = p_producer and c.incarnation = p_incarnation and c.expired_at is null;
    if not found then
      outcome := 'expired';
      perform note_refusal(p_producer, p_incarnation, p_sequence, p_stream, outcome);
      return;
    end if;
    if p_epochs #> '{least,0,1}' is null then
      greatest := (p_epochs #>> '{greatest,0,0}')::bigint;
      is_behind := (p_epochs #>> '{least,0,0}')::bigint < (least #>> '{0,0}')::bigint;
    else
      is_behind := exists (select from jsonb_array_elements(p_epochs -> 'least') as e(epoch) where not may_come(least, e.epoch));
    end if;
    if is_behind then
      outcome := 'completed';
      perform note_refusal(p_producer, p_incarnation, p_sequence, p_stream, outcome);
      return;
    end if;
  end if;
  update stream s
     set head = s.head + p_count,
         upper_frontier = case when p_epochs is null or (s.upper_frontier #>> '{0,0}')::bigint >= greatest
                               then s.upper_frontier
                               when greatest is not null then p_epochs -> 'greatest'
                               when is_covered(p_epochs -> 'greatest', coalesce(s.upper_frontier, '[]'))
                               then s.upper_frontier
                               else upper_frontier_with(s.upper_frontier, p_epochs -> 'greatest') end
    from space
   where s.stream_id = p_stream and s.state = 'open' and space.space_id = s.space_id
    returning s.head, s.generation_id, space.lower_frontier into place;
  if not found then
    outcome := 'closed';
    return;
  end if;
  insert into block (generation_id, stream_id, end_offset, count, first_timestamp, last_timestamp, topics,
                     lower_frontier, epochs, codec, payload)
  values (place.generation_id, p_stream, place.head, p_count, p_first, p_last, p_topics,
          place.lower_frontier, p_epochs, p_codec, p_payload);
  if p_producer is not null then
    update producer p
       set incarnation = p_incarnation, sequence = p_sequence, end_offset = place.head, updated_at = clock_timestamp()
     where p.producer_id = p_producer and p.stream_id = p_stream;
  end if;
  outcome := 'appended';
  end_offset := place.head;
end $$;

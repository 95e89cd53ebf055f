-- Producers, and the append of a block in one call.

-- The last block of each (producer, stream), by which a retried append is stored once.
create table producer (
  producer_id text not null,
  stream_id bigint not null,
  incarnation bigint not null,
  sequence bigint not null,
  end_offset bigint not null,
  rejected jsonb not null default '{}',                -- recent {"incarnation:sequence": outcome}, for retries
  updated_at timestamptz not null default clock_timestamp(),
  primary key (producer_id, stream_id)
) with (fillfactor = 50);

-- Return the key of a producer's advisory lock; negative, unlike other keys. Registering takes the lock exclusively,
-- and appends under its name share it until the end of the transaction, before any other lock: so registering waits for
-- pending appends, and later ones see that they are fenced.
create function producer_lock(p_producer text) returns bigint language sql immutable as $$
  select hashtextextended(p_producer, 0) | (1::bigint << 63)
$$;

-- Return whether a later incarnation of a named producer has begun. Under the producer's lock the answer holds until
-- the lock is released.
create function is_fenced(p_producer text, p_incarnation bigint) returns boolean language sql stable as $$
  select exists (select from producer p
                  where p.producer_id = p_producer and p.stream_id = 0 and p.incarnation > p_incarnation)
$$;

-- Record, for a retry, that a producer's block was not stored; at most 1000 are stored, more than commit at once: this one
-- and the last of the others.
create function record_rejection(p_producer text, p_incarnation bigint, p_sequence bigint, p_stream bigint, p_outcome text)
returns void language sql as $$
  update producer p
     set rejected = jsonb_build_object(format('%s:%s', p_incarnation, p_sequence), p_outcome) || (
       select coalesce(jsonb_object_agg(key, value), '{}') from (
         select key, value from jsonb_each(p.rejected)
          where split_part(key, ':', 1)::bigint = p_incarnation and split_part(key, ':', 2)::bigint > p_sequence - 1000
          order by split_part(key, ':', 2)::bigint desc limit 999) as others)
   where p.producer_id = p_producer and p.stream_id = p_stream
$$;

-- Return the number of levels of a topic.
create function topic_levels(p_topic text) returns integer language sql immutable as $$
  select length(p_topic) - length(replace(p_topic, '/', '')) + 1
$$;
-- Raise if a block's row cannot be valid. Of its payload only the size and the header are checked: readers decode
-- Arrow.
create function check_block(
  p_count integer, p_first timestamptz, p_last timestamptz, p_topics text[], p_payload bytea
) returns void language plpgsql immutable as $$
declare
  most constant integer := 34603008;                   -- bytes
  header bigint;
begin
  if p_count is null or p_count < 1 or p_count > 100000 then
    perform reject_message('count ' || coalesce(p_count::text, 'null'), 'a block has 1 to 100000 messages',
      'Append several blocks.');
  end if;
  if p_payload is null or octet_length(p_payload) not between 16 and most then
    perform reject_message('payload of ' || coalesce(octet_length(p_payload)::text, 'no') || ' bytes',
      'an Arrow record batch has 16 to ' || most, 'Append the message that the block is encoded as, in several blocks if need be.');
  end if;
  -- An Arrow message begins with four bytes 0xff and the length of its metadata.
  header := 8 + get_byte(p_payload, 4) + (get_byte(p_payload, 5) << 8) + (get_byte(p_payload, 6) << 16)
          + (get_byte(p_payload, 7)::bigint << 24);
  if substr(p_payload, 1, 4) <> '\xffffffff' or header > octet_length(p_payload) then
    perform reject_message('payload of ' || octet_length(p_payload) || ' bytes',
      'it begins with ffffffff and the length of its metadata, which ends in it', 'Append an Arrow IPC message.');
  end if;
  if p_first is null or p_last is null or p_first > p_last
     or p_first < '0001-01-01 00:00:00+00' or p_last >= '10000-01-01 00:00:00+00' then
    perform reject_message('timestamps ' || coalesce(p_first::text, 'null') || ' to ' || coalesce(p_last::text, 'null'),
      'the first is not after the last, and both are in the years 1 to 9999', 'Give the least and the greatest of the block.');
  end if;
  if cardinality(p_topics) not between 1 and least(p_count, 8) or array_ndims(p_topics) > 1 then
    perform reject_message(cardinality(p_topics) || ' topics', 'a block of ' || p_count || ' names 1 to '
      || least(p_count, 8) || ' distinct ones in a plain list, or null', 'Give null where it has more.');
  end if;
  perform check_topic(t.topic) from unnest(p_topics) as t (topic);
end $$;

-- The following functions run with their owner's rights, for publishers, who have none on the tables that they change.

-- Raise unless it is a valid producer name. Those on nodes are feed/PRINCIPAL/NAME.
create function check_producer(p_producer text) returns void language plpgsql immutable as $$
declare
  most constant integer := case when starts_with(p_producer, 'feed/') then 1281 else 255 end;
begin
  if not coalesce(octet_length(p_producer) between 1 and most and is_printable(p_producer), false) then
    perform reject_message('producer ' || quote_nullable(left(p_producer, 80)),
      'its name has 1 to ' || most || ' bytes of UTF-8, all of them printable characters', 'Choose a shorter or plainer one.');
  end if;
end $$;

-- Begin a new incarnation of a named producer and return it; appends of older ones are fenced from now on. With
-- p_incarnation: register that one, after a failover to another timeline, where its registration may be missing.
create function register_producer(p_producer text, p_incarnation bigint default null) returns bigint
language plpgsql security definer set search_path from current as $$
declare
  drawn bigint;
  -- What is drawn on the last timeline, by a clock that is an hour ahead.
  most constant bigint := (2047::bigint << 52) + (extract(epoch from clock_timestamp()) * 1000000)::bigint + 4294967296;
begin
  perform check_producer(p_producer);
  if starts_with(p_producer, 'feed/') then
    perform reject_message('producer ' || quote_literal(left(p_producer, 80)),
      'names that begin with feed/ are those of producers at nodes, which register none', 'Choose another name.');
  end if;
  if p_incarnation not between 1 and most then
    perform reject_message('incarnation ' || p_incarnation, 'it is one that was drawn, from 1 to ' || most,
      'Leave it out, and one is drawn.');
  end if;
  perform pg_advisory_xact_lock(producer_lock(p_producer));
  if p_incarnation is null then
    insert into producer as p (producer_id, stream_id, incarnation, sequence, end_offset)
    values (p_producer, 0, timeline_clock(), 0, 0)
        on conflict (producer_id, stream_id)
        do update set incarnation = greatest(p.incarnation + 1, excluded.incarnation), updated_at = clock_timestamp()
    returning incarnation into drawn;
  else
    insert into producer as p (producer_id, stream_id, incarnation, sequence, end_offset)
    values (p_producer, 0, p_incarnation, 0, 0)
        on conflict (producer_id, stream_id)
        do update set incarnation = excluded.incarnation, updated_at = clock_timestamp()
     where p.incarnation < excluded.incarnation;
    drawn := p_incarnation;
  end if;
  return drawn;
end $$;

-- Reject an incarnation that does not come from `register_producer`: it would fence those that do. Names that are not
-- registered have what could be drawn by now, by a clock that is an hour ahead.
create function check_incarnation(p_producer text, p_incarnation bigint) returns void language plpgsql as $$
declare
  most constant bigint := coalesce(
    (select p.incarnation from producer p where p.producer_id = p_producer and p.stream_id = 0),
    timeline_clock() + 4294967296);
begin
  if p_incarnation not between 1 and most then
    perform reject_message('incarnation ' || p_incarnation || ' of producer ' || quote_literal(p_producer),
      'it is one that was drawn, from 1 to ' || most, 'Call register_producer, which draws one.');
  end if;
end $$;

-- Return whether a block is valid, in one expression; otherwise it is checked value by value. Stable, as array_to_string
-- is: else Postgres would not inline it.
create function is_plain_block(
  p_count integer, p_first timestamptz, p_last timestamptz, p_topics text[], p_payload bytea
) returns boolean language sql stable as $$
  select p_count between 1 and 100000 and octet_length(p_payload) between 16 and 34603008
     and substr(p_payload, 1, 4) = '\xffffffff' and get_byte(p_payload, 7) = 0
     and 8 + get_byte(p_payload, 4) + get_byte(p_payload, 5) * 256 + get_byte(p_payload, 6) * 65536 <= octet_length(p_payload)
     and p_first <= p_last and p_first >= '0001-01-01 00:00:00+00' and p_last < '10000-01-01 00:00:00+00'
     and (p_topics is null or (
       cardinality(p_topics) between 1 and least(p_count, 8) and array_ndims(p_topics) = 1
       and array_position(p_topics, null) is null
       and array_position(p_topics, '') is null and octet_length(array_to_string(p_topics, e'\n')) <= 4096
       and topic_levels(array_to_string(p_topics, '/')) <= 128
       and e'\n' || array_to_string(p_topics, e'\n') !~ '\n[$]|[+#]'))
$$;

-- Append one block in one round trip, in the caller's transaction. `outcome` is exactly one of
--   appended   it lies at [end_offset - p_count, end_offset)
--   duplicate  this (producer, incarnation, sequence) is stored already, ending at end_offset (null: it is older than the last)
--   closed     the stream takes no more; nothing was written, and the messages belong to its children
--   fenced     a newer incarnation of the producer has begun; nothing was written
--   completed  it has an epoch that is not at or after those that the producer may still publish; nothing was written
--   expired    it has epochs, and the producer holds no capability (any more); nothing was written
-- The (producer, stream) row is locked first, so that a retry waits for the attempt whose outcome is unknown.
-- stream_id 0 in `producer` is the registration of a named producer: the incarnation that may write anywhere.
-- Each append leaves a version of its rows behind, which vacuum may not remove while an older transaction is open, and a
-- lookup by key examines all of them. Backwards the newest comes first; `between` keeps the planner from dropping that
-- order, as it does where the key equals a constant. What is locked so is changed by its ctid. Other scans read all.
create function append_block(
  p_producer text, p_incarnation bigint, p_sequence bigint, p_stream bigint, p_count integer,
  p_first timestamptz, p_last timestamptz, p_topics text[], p_codec smallint, p_payload bytea, p_epochs jsonb,
  out outcome text, out end_offset bigint
) language plpgsql security definer set search_path from current
set enable_seqscan = off set enable_bitmapscan = off as $$
declare
  known record;
  stream_row tid;
  written record;
  least jsonb;
  greatest bigint;                                     -- of epochs of one number, which need no sets
  is_behind boolean;
begin
  if is_plain_block(p_count, p_first, p_last, p_topics, p_payload) is not true then
    perform check_block(p_count, p_first, p_last, p_topics, p_payload);
  end if;
  -- Before any lock, as many take long to compare; few are left to the table's check.
  if octet_length(p_epochs::text) > 100 and not are_epoch_bounds(p_epochs) then
    perform reject_message('epochs ' || left(p_epochs::text, 80),
      'a block has the least and the greatest of its epochs, each a list of 1 to 1000, each a list of as many numbers',
      'Give such lists, as {"has_unset": false, "least": [[17]], "greatest": [[17]]}.');
  end if;
  if p_stream < 1 then
    outcome := 'closed';
    return;
  end if;
  if p_producer is not null then
    perform pg_advisory_xact_lock_shared(producer_lock(p_producer));
    select p.ctid as row_id, p.incarnation, p.sequence, p.end_offset, p.rejected into known from producer p
     where p.producer_id = p_producer and p.stream_id between p_stream and p_stream
     order by p.stream_id desc limit 1 for no key update;
    if not found then
      perform check_producer(p_producer);
      perform check_incarnation(p_producer, p_incarnation);
      -- A concurrent attempt may have inserted it: that one's row is locked by this.
      insert into producer as p (producer_id, stream_id, incarnation, sequence, end_offset)
      values (p_producer, p_stream, p_incarnation, 0, 0)
          on conflict (producer_id, stream_id) do update set sequence = p.sequence
      returning p.ctid as row_id, p.incarnation, p.sequence, p.end_offset, p.rejected into known;
    end if;
    if known.incarnation > p_incarnation or exists (
      select from producer p where p.producer_id = p_producer and p.stream_id = 0 and p.incarnation > p_incarnation
    ) then
      outcome := 'fenced';
      return;
    end if;
    if known.incarnation < p_incarnation then
      perform check_incarnation(p_producer, p_incarnation);
    end if;
    if known.incarnation = p_incarnation and known.sequence >= p_sequence then
      -- A rejected block may come before one that was stored with it.
      outcome := coalesce(known.rejected ->> format('%s:%s', p_incarnation, p_sequence), 'duplicate');
      end_offset := case when known.sequence = p_sequence then known.end_offset end;
      return;
    end if;
  end if;
  if p_epochs is not null then
    -- It cannot be taken away meanwhile: that needs the producer's lock.
    select c.least into least from capability c
     where c.space_id = (select s.space_id from stream s where s.stream_id between p_stream and p_stream
                          order by s.stream_id desc limit 1)
       and c.producer_id = p_producer and c.incarnation = p_incarnation and c.expired_at is null;
    if not found then
      if not exists (select from stream s where s.stream_id = p_stream) then
        outcome := 'closed';                           -- and past: its row is deleted
        return;
      end if;
      outcome := 'expired';
      perform record_rejection(p_producer, p_incarnation, p_sequence, p_stream, outcome);
      return;
    end if;
    if jsonb_array_length(p_epochs #> '{least,0}') <> jsonb_array_length(least -> 0) then
      perform reject_message('epochs ' || left(p_epochs::text, 80),
        'all of a space have as many numbers as ' || (least -> 0)::text, 'Give that many.');
    end if;
    if p_epochs #> '{least,0,1}' is null then
      greatest := (p_epochs #>> '{greatest,0,0}')::bigint;
      is_behind := (p_epochs #>> '{least,0,0}')::bigint < (least #>> '{0,0}')::bigint;
    else
      is_behind := not admits_all(least, p_epochs -> 'least');
    end if;
    if is_behind then
      outcome := 'completed';
      perform record_rejection(p_producer, p_incarnation, p_sequence, p_stream, outcome);
      return;
    end if;
  end if;
  select s.ctid into stream_row from stream s
   where s.stream_id between p_stream and p_stream and s.state = 'open'
   order by s.stream_id desc limit 1 for no key update;
  if not found then
    outcome := 'closed';
    return;
  end if;
  update stream s
     set head = s.head + p_count,
         upper_frontier = case when p_epochs is null or (s.upper_frontier #>> '{0,0}')::bigint >= greatest
                               then s.upper_frontier
                               when greatest is not null then p_epochs -> 'greatest'
                               when is_covered(p_epochs -> 'greatest', coalesce(s.upper_frontier, '[]'))
                               then s.upper_frontier
                               else merge_upper_frontier(s.upper_frontier, p_epochs -> 'greatest') end
    from space
   where s.ctid = stream_row and space.space_id = s.space_id
    returning s.head, s.generation_id, space.lower_frontier into written;
  insert into block (generation_id, stream_id, end_offset, count, first_timestamp, last_timestamp, topics,
                     lower_frontier, epoch_bounds, codec, payload)
  values (written.generation_id, p_stream, written.head, p_count, p_first, p_last, p_topics,
          written.lower_frontier, p_epochs, p_codec, p_payload);
  if p_producer is not null then
    update producer p
       set incarnation = p_incarnation, sequence = p_sequence, end_offset = written.head, updated_at = clock_timestamp()
     where p.ctid = known.row_id;
  end if;
  outcome := 'appended';
  end_offset := written.head;
end $$;

-- Append the blocks of several streams, sorted by stream and sequence, as `append_block` does one by one, and return
-- the same. p_topics has the topics of each block with # between them, which is in no topic.
-- Blocks as they nearly always are (valid, with epochs of one number that their producer may publish or none, new ones
-- of a producer that has appended there, and all of the streams open) take one statement for all; those that are not are
-- appended one by one.
create function append_blocks(
  p_producer text, p_incarnation bigint, p_sequences bigint[], p_streams bigint[], p_counts integer[],
  p_firsts timestamptz[], p_lasts timestamptz[], p_topics text[], p_codecs smallint[], p_payloads bytea[],
  p_epochs jsonb[]
) returns table (outcome text, end_offset bigint)
language plpgsql security definer set search_path from current
set enable_seqscan = off set enable_bitmapscan = off set plan_cache_mode = force_generic_plan as $$
declare
  is_usual boolean := (
    select bool_and((
        is_plain_block(p_counts[n], p_firsts[n], p_lasts[n], string_to_array(p_topics[n], '#'), p_payloads[n])
        and (p_epochs[n] is null or are_epoch_bounds(p_epochs[n]) and p_epochs[n] #> '{least,0,1}' is null)
        and (n = 1 or (p_streams[n], coalesce(p_sequences[n], n)) > (p_streams[n - 1], coalesce(p_sequences[n - 1], n - 1)))
      ) is true)
      from generate_series(1, cardinality(p_streams)) as n);
  stream_ids constant bigint[] := array(select distinct stream_id from unnest(p_streams) as stream_id order by 1);
  producer_rows tid[];
  stream_rows tid[];
  least_epoch bigint;
begin
  if is_usual and p_producer is not null then
    perform pg_advisory_xact_lock_shared(producer_lock(p_producer));
    producer_rows := array(
      select newest.row_id
        from (select s.stream_id, min(s.sequence) as first from unnest(p_streams, p_sequences) as s (stream_id, sequence)
               group by 1 order by 1) as sent
        cross join lateral (
          select p.ctid as row_id, p.incarnation, p.sequence from producer p
           where p.producer_id = p_producer and p.stream_id between sent.stream_id and sent.stream_id
           order by p.stream_id desc limit 1 for no key update) as newest
       where newest.incarnation = p_incarnation and newest.sequence < sent.first);
    is_usual := cardinality(producer_rows) = cardinality(stream_ids) and not is_fenced(p_producer, p_incarnation);
  end if;
  if is_usual then
    stream_rows := array(
      select newest.row_id from unnest(stream_ids) as sent (stream_id)
        cross join lateral (
          select s.ctid as row_id from stream s
           where s.stream_id between sent.stream_id and sent.stream_id and s.state = 'open'
           order by s.stream_id desc limit 1 for no key update) as newest);
    is_usual := cardinality(stream_rows) = cardinality(stream_ids);
  end if;
  if is_usual and p_epochs is not null then
    least_epoch := (select min((epochs #>> '{least,0,0}')::bigint) from unnest(p_epochs) as epochs);
    is_usual := cardinality(stream_ids) = (
      select count(*) from stream s join capability c using (space_id)
       where s.ctid = any(stream_rows) and c.producer_id = p_producer and c.incarnation = p_incarnation
         and c.expired_at is null and c.least #> '{0,1}' is null and (c.least #>> '{0,0}')::bigint <= least_epoch);
  end if;
  if not coalesce(is_usual, false) then
    for n in 1 .. cardinality(p_streams) loop
      return query select * from append_block(
        p_producer, p_incarnation, p_sequences[n], p_streams[n], p_counts[n], p_firsts[n], p_lasts[n],
        string_to_array(p_topics[n], '#'), p_codecs[n], p_payloads[n], p_epochs[n]);
    end loop;
    return;
  end if;
  return query
    with lot as materialized (
      select n, p_streams[n] as stream_id, p_sequences[n] as sequence,
             (p_epochs[n] #>> '{greatest,0,0}')::bigint as greatest,
             sum(p_counts[n]) over (partition by p_streams[n] order by n) as upto
        from generate_series(1, cardinality(p_streams)) as n),
    grown as (
      update stream s
         set head = s.head + sent.total,
             upper_frontier = case when sent.greatest is null or (s.upper_frontier #>> '{0,0}')::bigint >= sent.greatest
                                   then s.upper_frontier
                                   else jsonb_build_array(jsonb_build_array(sent.greatest)) end
        from (select stream_id, max(upto) as total, max(greatest) as greatest from lot group by 1) as sent
          join unnest(stream_ids, stream_rows) as locked (stream_id, row_id) using (stream_id), space
       where s.ctid = locked.row_id and space.space_id = s.space_id
      returning s.stream_id, s.generation_id, s.head, s.head - sent.total as before, space.lower_frontier),
    stored as (
      -- Payloads are not sorted, but only taken in order.
      insert into block (generation_id, stream_id, end_offset, count, first_timestamp, last_timestamp, topics,
                         lower_frontier, epoch_bounds, codec, payload)
      select generation_id, stream_id, before + upto, p_counts[n], p_firsts[n], p_lasts[n],
             string_to_array(p_topics[n], '#'), lower_frontier, p_epochs[n], p_codecs[n], p_payloads[n]
        from (select * from lot join grown using (stream_id) order by n offset 0) as ordered),
    counted as (
      update producer p set sequence = sent.last, end_offset = grown.head, updated_at = clock_timestamp()
        from (select stream_id, max(sequence) as last from lot group by 1) as sent join grown using (stream_id)
          join unnest(stream_ids, producer_rows) as locked (stream_id, row_id) using (stream_id)
       where p.ctid = locked.row_id)
    select 'appended', (grown.before + lot.upto)::bigint from lot join grown using (stream_id) order by n;
end $$;

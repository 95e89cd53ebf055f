-- Writes that many processes stage and one publishes, atomically and once: a Spark write, whose tasks stage blocks and
-- whose driver's commit appends them.

-- Staged blocks. Unlogged: a crash of the server loses them, the commit detects that, and the batch is written again.
create unlogged table staged_block (
  sink text not null,
  batch bigint not null,
  attempt uuid not null,                               -- of a task: published only if a commit names it
  ordinal integer not null,
  stream_id bigint not null,                           -- open when it was routed there
  count integer not null check (count between 1 and 100000),
  first_timestamp timestamptz not null,
  last_timestamp timestamptz not null,
  topics text[],
  codec smallint not null,
  payload bytea not null check (octet_length(payload) <= 34603008),
  staged_at timestamptz not null default clock_timestamp(),
  primary key (sink, batch, attempt, ordinal)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
alter table staged_block alter payload set storage external;
create index staged_block_age on staged_block (staged_at);

-- The newest batch that each sink has published, by which a repeated batch is stored once.
create table sink_batch (
  sink text primary key,
  batch bigint not null,
  messages bigint not null,                            -- in that batch
  single boolean not null,                             -- the name is used once: it is deleted after a day
  at timestamptz not null default clock_timestamp()
) with (fillfactor = 50);
create index sink_batch_single on sink_batch (at) where single;

-- The following functions run with their owner's rights, for sinks. Staging needs the right to insert only: the name of
-- an attempt is random, so that only processes that know it can read what was staged under it.

-- Record the batch and lock its sink's row; return null, or the newest batch and its number of messages if this or a
-- later one is recorded already.
create function enter_sink_batch(
  p_sink text, p_batch bigint, p_messages bigint, p_single boolean, out newest bigint, out message_count bigint
) language plpgsql security definer set search_path from current as $$
begin
  if not coalesce(octet_length(p_sink) between 1 and 260, false) then
    perform reject_message('sink ' || quote_nullable(left(p_sink, 80)), 'its name has 1 to 260 bytes of UTF-8', 'Choose a shorter one.');
  end if;
  if p_batch is null or p_batch not between 0 and 9007199254740992 then
    perform reject_message('batch ' || coalesce(p_batch::text, 'null'), 'its number is from 0 to 2^53',
      'Count the batches of a sink, from 0 on.');
  end if;
  insert into sink_batch as s (sink, batch, messages, single) values (p_sink, p_batch, p_messages, p_single)
      on conflict (sink) do update set batch = excluded.batch, messages = excluded.messages, at = clock_timestamp()
   where s.batch < excluded.batch;
  if not found then
    select s.batch, s.messages into newest, message_count from sink_batch s where s.sink = p_sink;
  end if;
end $$;

-- Lock the streams that these attempts have staged for, in the order in which appends lock them, and return the closed
-- ones; also those that are past, whose rows are deleted.
create function lock_staged_streams(p_sink text, p_batch bigint, p_attempts uuid[]) returns setof bigint
language plpgsql security definer set search_path from current as $$
begin
  return query
    with staged as materialized (
      select distinct b.stream_id from staged_block b
       where b.sink = p_sink and b.batch = p_batch and b.attempt = any(p_attempts)),
    locked as materialized (
      select s.stream_id, s.state from stream s where s.stream_id in (select staged.stream_id from staged)
       order by s.stream_id for no key update)
    select stream_id from staged left join locked using (stream_id) where locked.state is distinct from 'open';
end $$;

-- Return up to 64 blocks that an attempt has staged for these streams, after an ordinal.
create function read_staged_blocks(p_sink text, p_batch bigint, p_attempt uuid, p_streams bigint[], p_after integer)
  returns table (codec smallint, payload bytea, stream_id bigint, count integer, ordinal integer)
language sql stable security definer set search_path from current as $$
  select b.codec, b.payload, b.stream_id, b.count, b.ordinal from staged_block b
   where b.sink = p_sink and b.batch = p_batch and b.attempt = p_attempt and b.stream_id = any(p_streams)
     and b.ordinal > p_after
   order by b.ordinal limit 64
$$;

create function delete_staged_blocks(p_sink text, p_batch bigint, p_attempt uuid, p_streams bigint[]) returns void
language sql security definer set search_path from current as $$
  delete from staged_block b
   where b.sink = p_sink and b.batch = p_batch and b.attempt = p_attempt and b.stream_id = any(p_streams)
$$;

-- Delete what is staged for this batch, and for earlier ones of its sink.
create function discard_staged_blocks(p_sink text, p_batch bigint) returns void
language sql security definer set search_path from current as $$
  delete from staged_block b where b.sink = p_sink and b.batch <= p_batch
$$;

-- Append what these attempts have staged, in their order, to open streams; return the head and the growth of each.
create function append_staged_blocks(p_sink text, p_batch bigint, p_attempts uuid[])
  returns table (of_stream bigint, ends bigint, total bigint)
language plpgsql security definer set search_path from current as $$
declare
  twice uuid;
begin
  select named.attempt into twice from unnest(p_attempts) as named (attempt) group by 1 having count(*) > 1 limit 1;
  if found then
    perform reject_message('attempt ' || coalesce(twice::text, 'null') || ' is given more than once',
      'what it has staged is appended once', 'Give each attempt once.');
  end if;
  return query
    -- Checked in the statement that appends them, as only that sees the same rows.
    with lot as materialized (
      select b.*, sum(b.count) over (partition by b.stream_id order by named.nth, b.ordinal) as upto,
             check_block(b.count, b.first_timestamp, b.last_timestamp, b.topics, b.payload) as checked
        from staged_block b join unnest(p_attempts) with ordinality as named (attempt, nth) using (attempt)
       where b.sink = p_sink and b.batch = p_batch),
    grown as (
      update stream s set head = s.head + size.total
        from (select l.stream_id, max(l.upto) as total from lot l group by l.stream_id) as size, space p
       where s.stream_id = size.stream_id and s.state = 'open' and p.space_id = s.space_id
      returning s.stream_id, s.generation_id, s.head, size.total, p.lower_frontier),
    stored as (
      insert into block (generation_id, stream_id, end_offset, count, first_timestamp, last_timestamp, topics,
                         lower_frontier, codec, payload)
      select g.generation_id, g.stream_id, g.head - g.total + l.upto, l.count, l.first_timestamp, l.last_timestamp,
             l.topics, g.lower_frontier, l.codec, l.payload
        from lot l join grown g on g.stream_id = l.stream_id)
    select g.stream_id, g.head, g.total from grown g;
end $$;

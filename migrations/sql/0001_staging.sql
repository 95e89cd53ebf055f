-- Writes that many processes prepare and one publishes, whole and once: a Spark write, whose tasks stage blocks and whose
-- driver's commit appends them.

-- Blocks on their way. Not logged: a crash of the server loses them, the commit notices, and the batch is written again.
create unlogged table staged_block (
  sink text not null,
  batch bigint not null,
  attempt uuid not null,                               -- at a task: what a commit does not name is not published
  ordinal integer not null,
  stream_id bigint not null,                           -- open when it was routed there
  count integer not null check (count > 0),
  first_timestamp timestamptz not null,
  last_timestamp timestamptz not null,
  topics text[],
  codec smallint not null,
  payload bytea not null,
  staged_at timestamptz not null default clock_timestamp(),
  primary key (sink, batch, attempt, ordinal)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
alter table staged_block alter payload set storage external;
create index staged_block_age on staged_block (staged_at);

-- The newest batch that each sink has published: what makes one that is done again be stored once.
create table sink_batch (
  sink text primary key,
  batch bigint not null,
  once boolean not null,                               -- nobody comes back under this name: it is forgotten after a day
  at timestamptz not null default clock_timestamp()
) with (fillfactor = 50);

-- Append the staged blocks of these attempts to those of their streams that are open, in the order of the attempts given and
-- of their ordinals, and answer the new heads. What is still staged afterwards belongs to the children of closed streams.
create function publish_staged(p_sink text, p_batch bigint, p_attempts uuid[])
returns table (stream_id bigint, head bigint) language plpgsql as $$
#variable_conflict use_column
begin
  perform from stream s
    where s.stream_id in (select b.stream_id from staged_block b
                           where b.sink = p_sink and b.batch = p_batch and b.attempt = any(p_attempts))
    order by s.stream_id for no key update;
  return query
    with lot as (
      select b.*, sum(b.count) over (partition by b.stream_id order by named.place, b.ordinal) as upto
        from staged_block b join unnest(p_attempts) with ordinality as named (attempt, place) using (attempt)
       where b.sink = p_sink and b.batch = p_batch),
    grown as (
      update stream s set head = s.head + size.total
        from (select l.stream_id, max(l.upto) as total from lot l group by l.stream_id) as size, space p
       where s.stream_id = size.stream_id and s.state = 'open' and p.space_id = s.space_id
      returning s.stream_id, s.generation_id, s.head, s.head - size.total as base, p.lower_frontier),
    stored as (
      insert into block (generation_id, stream_id, end_offset, count, first_timestamp, last_timestamp, topics,
                         lower_frontier, codec, payload)
      select g.generation_id, l.stream_id, g.base + l.upto, l.count, l.first_timestamp, l.last_timestamp, l.topics,
             g.lower_frontier, l.codec, l.payload
        from lot l join grown g on g.stream_id = l.stream_id)
    select g.stream_id, g.head from grown g;
  delete from staged_block b using stream s
   where b.sink = p_sink and b.batch = p_batch and b.attempt = any(p_attempts)
     and s.stream_id = b.stream_id and s.state = 'open';
end $$;

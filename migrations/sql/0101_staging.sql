-- Writes that many processes prepare and one publishes, all of it and only once: a Spark write, whose tasks stage blocks
-- and whose driver's commit appends them.

-- Blocks on their way. Not logged: a crash of the server loses them, the commit notices, and the batch is written again.
create unlogged table staged_block (
  sink text not null,
  batch bigint not null,
  attempt uuid not null,                               -- at a task: what a commit does not name is not published
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

-- The newest batch that each sink has published: what makes one that is done again be stored once.
create table sink_batch (
  sink text primary key,
  batch bigint not null,
  messages bigint not null,                            -- in that batch
  single boolean not null,                             -- nobody comes back under this name: it is forgotten after a day
  at timestamptz not null default clock_timestamp()
) with (fillfactor = 50);
create index sink_batch_single on sink_batch (at) where single;

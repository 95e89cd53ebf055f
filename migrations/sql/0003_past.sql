-- What renewals and housekeeping cost depends on what is there to be read, not on what has been.

-- Null: open, or not looked at yet. False: it has messages, or its partition is still to be dropped. True: nothing of it is left, and its rows may be deleted
-- once every group is past them.
alter table generation add is_past boolean;
create index generation_filter on generation (filter, generation_id);
create index generation_open on generation (filter) where state = 'open';
create index generation_ended on generation (space_id, closed_at) where state = 'closed';
create index generation_unseen on generation (generation_id) where state = 'closed' and is_past is null;
create index generation_gone on generation (generation_id) where state = 'gone' and is_past is not true;
create index generation_past on generation (generation_id) where is_past;

-- The newest generation of the space, and stream, that had messages and whose rows are deleted: messages of no later one
-- are gone without a row.
alter table space add lost_generation bigint not null default 0, add lost_stream bigint not null default 0;

create index stream_open on stream (stream_id) where state = 'open';
-- By its parents it is found when one of them is deleted.
create index stream_parents on stream using gin (parents);
-- Up to there blocks are looked at for compaction; is_compact: the stream is closed, and that was its end.
alter table stream add seen_offset bigint not null default 0, add is_compact boolean not null default false;
create index stream_to_compact on stream (stream_id) where state = 'closed' and not is_compact;
-- A closed stream whose payloads have not all been looked at to be moved out. A column of its own, which no append changes: an
-- index over the head would make each write to the indexes.
alter table stream add is_to_tier boolean not null
  generated always as (state = 'closed' and coalesce(tiered_offset, 0) < head) stored;
create index stream_to_tier on stream (space_id) where is_to_tier;

-- Of a sink that nobody comes back to, when it was used; and of a producer whose lease has run out, when.
create index sink_batch_once on sink_batch (at) where once;
create index capability_expired on capability (expired_at) where expired_at is not null;

create index consumer_group_behind on consumer_group (after_generation) where deleted_at is null;

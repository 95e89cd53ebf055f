-- Payloads outside of Postgres: where each space's go, what has gone there, and which objects belong to nobody.
-- Run with search_path set to the schema; names are not qualified so that the schema stays a setting.

alter table space
  add payloads text,                                   -- the place that payloads are moved to; null: they stay here
  add tier_after_s bigint check (tier_after_s > 0),    -- also those so old of an open generation; null: only of closed ones
  add payload_places text[] not null default '{}';     -- every place where payloads of this space may lie

-- Up to here the payloads of a stream have been moved, or are too small for it.
alter table stream add tiered_offset bigint not null default 0;

alter table block
  add uri_bytes bigint,                                -- of the payload that lies at uri
  add check ((uri is null) = (uri_bytes is null));

-- Objects that no block names: not yet (somebody is writing them at this moment, or died at it), or not any more. A row
-- is there before its object is, and until it is gone. Who lets a block name the object takes the row away, in the same
-- transaction, unless it is doomed: then the object may be deleted at any moment.
create table payload_object (
  uri text primary key,
  space_id bigint not null,
  generation_id bigint not null,
  stream_id bigint not null,
  end_offset bigint not null,
  doomed boolean not null default false,
  at timestamptz not null default clock_timestamp()
);
create index payload_object_due on payload_object (space_id, doomed, at);

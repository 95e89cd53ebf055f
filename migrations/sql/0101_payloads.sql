-- Remote payloads: the locations, and the objects that no block names.

-- The id in each location's marker. It is stored here first, so that all writers of the marker write the same one; once
-- it was seen there it is never written again.
create table payload_location (
  prefix text primary key,                             -- the location without its options
  marker text not null,
  is_marked boolean not null default false
);

-- Return every location that payloads of a space may be at, with the id in its marker after a #.
create function payload_locations_of(p_space bigint) returns text[] language sql stable as $$
  select array(select location || '#' || coalesce(m.marker, '')
                 from space s cross join unnest(s.payload_locations) with ordinality as p (location, nth)
                 left join payload_location m on m.prefix = split_part(location, '?', 1)
                where s.space_id = p_space order by nth)
$$;

-- Objects that no block names: not yet (being written, or abandoned by a writer that died), or no longer. A row exists
-- before its object does, and until it is deleted. The transaction that lets a block name the object deletes the row,
-- unless it is orphaned: then the object is deleted after a grace period, for the sake of backups, whose blocks may
-- name it.
create table payload_object (
  uri text primary key,
  space_id bigint not null,
  generation_id bigint not null,
  stream_id bigint not null,
  end_offset bigint not null,
  registered_at timestamptz not null default clock_timestamp(),
  orphaned_at timestamptz,                             -- null: being written; -infinity: no block ever named it
  delete_failed_at timestamptz                         -- when it could not be deleted
);
create index payload_object_registered on payload_object (registered_at) where orphaned_at is null;
create index payload_object_due on payload_object (space_id, orphaned_at) where delete_failed_at is null;
create index payload_object_delete_failed on payload_object (space_id, delete_failed_at) where delete_failed_at is not null;

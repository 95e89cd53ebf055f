-- Which rows of a group are unfinished is asked at each grant, and by each renewal, and must not take a look at all that are
-- finished. A column of its own, which only the end of a stream changes: an index over the status would make each grant write
-- to the indexes.
alter table lending add unfinished boolean not null generated always as (status <> 'finished') stored;
create index lending_unfinished on lending (group_id, stream_id) where unfinished;

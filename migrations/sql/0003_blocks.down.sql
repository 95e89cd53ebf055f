drop function appended_at(bigint, bigint, bigint);
drop function position_at(bigint, bigint, timestamptz);
alter table block drop piece_starts, drop piece_times;

-- Leaders of every timeline are believed again.
drop function check_timeline(bigint);
alter table leadership drop column timeline, drop column before_timeline;
drop function timeline_now();

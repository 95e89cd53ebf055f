-- Which transaction wrote a line of history: numbers are drawn before the commit, and who reads on behind a number would
-- miss a line with a lower one that commits later. Null: before this migration, and so before whatever is read on from.
alter table lending_history add column xact xid8;
alter table lending_history alter column xact set default pg_current_xact_id();
create index lending_history_behind on lending_history (group_id, xact);

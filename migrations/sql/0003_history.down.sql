-- History is read on by its numbers again.
drop index lending_history_behind;
alter table lending_history drop column xact;

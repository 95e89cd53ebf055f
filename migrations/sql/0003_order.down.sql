drop index lending_unfinished;
alter table lending drop column unfinished;

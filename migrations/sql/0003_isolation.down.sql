-- Any isolation level again, and nobody is told.
drop function refuse_isolation() cascade;

-- Which life of the database this is: a standby that is promoted begins another timeline, and what was committed last on
-- the one before may be missing on it. The control file lags behind, the name of the WAL file does not. Null where the
-- server does not tell.
create function timeline_now() returns text language plpgsql stable as $$
begin
  return (select system_identifier::text from pg_control_system()) || '/' || left(pg_walfile_name(pg_current_wal_lsn()), 8);
exception when insufficient_privilege or feature_not_supported or undefined_function then
  return null;
end $$;

-- A leader leads on the timeline on which it was elected.
alter table leadership add column timeline text, add column before_timeline text;

-- Whoever moves a group's progress in a transaction of its own has read its messages before: on this timeline, if the
-- group has had a leader on it, who has ended all older grants.
select set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true);
create function check_timeline(p_group bigint) returns void
language plpgsql security definer set search_path from current as $$
begin
  if exists (select from leadership where leadership_id = p_group and timeline <> timeline_now()) then
    raise exception 'the database has gone over to another timeline, and group % has no leader on it yet', p_group
      using errcode = 'SB001', hint = 'Roll back: what was read before may not be in the log. All is lent anew.';
  end if;
end $$;
select set_config('search_path', quote_ident(current_schema()), true);

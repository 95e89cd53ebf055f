-- Access control at nodes: rules, tokens, and the history of their changes.

create table access (
  principal text not null,                             -- user:NAME, a name of a certificate, or * for all known ones
  may text not null check (may in ('publish', 'read', 'join', 'watch', 'operate')),
  filter text not null,
  group_name text not null default '*',                -- a name, or team-*
  granted_by text not null,
  granted_at timestamptz not null default clock_timestamp(),
  primary key (principal, may, filter, group_name)
);

create table token (
  token_id text primary key,
  digest bytea not null unique check (octet_length(digest) = 32), -- sha256 of the token, which is not stored itself
  principal text not null,
  made_by text not null,
  made_at timestamptz not null default clock_timestamp(),
  expires_at timestamptz not null,
  revoked_at timestamptz,
  last_used date,
  note text not null default ''
) with (fillfactor = 80);

-- Every change of a rule or token, however it was made. Nodes look for what has committed since they read the two tables,
-- and read them again.
create table access_history (
  number bigint generated always as identity primary key,
  at timestamptz not null default clock_timestamp(),
  by text not null default 'database user ' || session_user,
  event text not null,                                 -- allow, revoke, token, revoke-token
  principal text not null,
  object text not null,                                -- the rule, or the token's id
  -- The transaction that wrote it: numbers are drawn before the commit, so a lower one may commit later.
  xact xid8 not null default pg_current_xact_id()
);
create index access_history_at on access_history (at);
create index access_history_xact on access_history (xact);

-- Raise if there is no room for one more change. Revoking is not limited.
create function check_access_history() returns void language plpgsql as $$
begin
  if (select max(number) - min(number) >= 299999 from access_history)
     and (select count(*) >= 300000 from access_history) then
    perform reject_message('table access_history has 300000 rows', 'that is the limit, and no more rights are given',
      'Taking one away goes on. Those older than SUBLET_HISTORY_RETENTION_S are deleted by nodes.');
  end if;
end $$;

-- Raise if a table has as many rows as nodes read.
create function check_access_room(p_table text, p_count bigint) returns void language plpgsql as $$
begin
  if p_count >= 100000 then
    perform reject_message('table ' || p_table || ' has 100000 rows', 'that is the limit, as every node has them all in memory',
      'Delete some first: a rule for a wider filter does the work of many, and tokens that are over are of no use.');
  end if;
end $$;

-- For maintenance: delete changes older than p_older_than, and than a day.
create function forget_access_history(p_older_than interval) returns bigint
language sql security definer set search_path from current as $$
  with forgotten as (
    delete from access_history where at < clock_timestamp() - greatest(p_older_than, interval '1 day')
    returning 1)
  select count(*) from forgotten
$$;

-- For maintenance, which has no other right to delete a token: delete tokens that expired or were revoked that long
-- ago.
create function forget_tokens(p_older_than interval) returns bigint
language sql security definer set search_path from current as $$
  with forgotten as (
    delete from token where least(revoked_at, expires_at) < clock_timestamp() - greatest(p_older_than, interval '0')
    returning 1)
  select count(*) from forgotten
$$;

create function note_access() returns trigger language plpgsql security definer set search_path from current as $$
declare
  a record;
  what text;
begin
  if tg_table_name = 'token' and tg_op = 'DELETE' then
    if least(old.revoked_at, old.expires_at) <= clock_timestamp() then
      return null;  -- it was over: no right is lost
    end if;
  end if;
  if tg_op = 'INSERT' then perform check_access_history(); end if;
  if tg_op = 'DELETE' then a := old; else a := new; end if;
  if tg_op = 'TRUNCATE' then
    select '*' as principal into a;
    what := 'all';
  elsif tg_table_name = 'access' then
    what := a.may || ' ' || a.filter || ' ' || a.group_name;
  else
    what := a.token_id;
  end if;
  insert into access_history (event, principal, object)
  values (case when tg_table_name = 'access' then case when tg_op in ('INSERT', 'UPDATE') then 'allow' else 'revoke' end
               when tg_op = 'INSERT' then 'token' else 'revoke-token' end, a.principal, what);
  -- A full queue, which any client can fill that listens and does not read, would refuse the change; nodes look anyway.
  if pg_notification_queue_usage() < 0.5 then perform pg_notify('sublet_access', tg_table_schema); end if;
  return null;
end $$;

create trigger noted after insert or update or delete on access for each row execute function note_access();
-- last_used is not recorded: it changes daily, and no right with it.
create trigger noted after insert or delete or update of digest, principal, expires_at, revoked_at on token
  for each row execute function note_access();
-- That deletes all rows without the triggers above.
create trigger noted_as_one after truncate on access for each statement execute function note_access();
create trigger noted_as_one after truncate on token for each statement execute function note_access();

-- The following functions run with their owner's rights, for operators, who have none on the two tables; session_user
-- is recorded as the author of a change.

-- The rules of protocol/sublet_protocol/domain/access/rights.py.
create function check_principal(p_principal text) returns void language plpgsql immutable as $$
begin
  if not coalesce(length(p_principal) between 1 and 255 and is_printable(p_principal) and p_principal !~ '[ *]'
                  and p_principal ~ '[:.]' and p_principal <> 'user:', false) then
    perform reject_message('principal ' || quote_nullable(left(p_principal, 80)),
      'it is user:NAME, or the URI or DNS name of a certificate: 1 to 255 printable characters without blanks and *',
      'Write user:NAME.');
  end if;
end $$;

create function check_rule(p_principal text, p_may text, p_filter text, p_group text) returns void
language plpgsql immutable as $$
declare
  shown constant text := 'rule ' || concat_ws(' ', left(p_principal, 80), p_may, left(p_filter, 80), left(p_group, 80));
begin
  if p_principal is distinct from '*' then
    perform check_principal(p_principal);
  end if;
  if not coalesce(p_may in ('publish', 'read', 'join', 'watch', 'operate'), false) then
    perform reject_message(shown, 'a right is one of publish, read, join, watch, operate', 'Write one of them.');
  elsif not are_filters(array[p_filter]) then
    perform reject_message(shown, 'a filter has 1 to 4096 bytes and 128 levels, does not begin with $, + is alone in its '
      'level, and # in the last', 'Write one such as orders/+/eu or orders/#.');
  elsif not coalesce(case when p_may in ('publish', 'read') then p_group = '*'
                          else length(p_group) between 1 and 256 and rtrim(p_group, '*') !~ '[*/+#]' and p_group !~ '[*][*]$'
                               and length(rtrim(p_group, '*')) <= 255 end, false) then
    perform reject_message(shown, 'its group is * for publish and read, else a name of at most 255 characters, the '
      'beginning of names like team-*, or *', 'Write one of these.');
  end if;
end $$;

-- Add a rule; false if it exists. Who adds others waits, as they are counted; who takes rights away does not.
create function allow_access(p_principal text, p_may text, p_filter text, p_group text) returns boolean
language plpgsql security definer set search_path from current as $$
begin
  perform check_rule(p_principal, p_may, p_filter, p_group);
  lock table access in share update exclusive mode;
  perform check_access_room('access', (select count(*) from (select from access limit 100000) as found));
  insert into access (principal, may, filter, group_name, granted_by)
  values (p_principal, p_may, p_filter, p_group, 'database user ' || session_user) on conflict do nothing;
  return found;
end $$;

-- Delete a rule; false if it does not exist.
create function revoke_access(p_principal text, p_may text, p_filter text, p_group text) returns boolean
language plpgsql security definer set search_path from current as $$
begin
  delete from access where (principal, may, filter, group_name) = (p_principal, p_may, p_filter, p_group);
  return found;
end $$;

-- Store a token and return when it expires; null if the principal has two valid ones, enough to replace one without a
-- gap.
create function store_token(p_token text, p_digest bytea, p_principal text, p_lifetime_s double precision, p_note text)
returns timestamptz language plpgsql security definer set search_path from current as $$
declare
  ends timestamptz;
begin
  perform check_principal(p_principal);
  if not coalesce(p_token ~ '^[a-z2-7]{8}$' and p_lifetime_s > 0 and p_lifetime_s <= 315360000 and length(p_note) <= 200
                  and is_printable(p_note), false) then
    perform reject_message('token ' || quote_nullable(left(p_token, 80)),
      'its id has 8 characters of a-z and 2-7, it is valid for at most 3650 days, and its note has at most 200 printable characters',
      'Make it with `sublet access token`.');
  end if;
  lock table token in share update exclusive mode;     -- serializes callers, and nobody who revokes
  perform check_access_room('token', (select count(*) from (select from token limit 100000) as found));
  insert into token (token_id, digest, principal, made_by, expires_at, note)
  select p_token, p_digest, p_principal, 'database user ' || session_user,
         clock_timestamp() + make_interval(secs => p_lifetime_s), p_note
   where (select count(*) from token
           where principal = p_principal and revoked_at is null and expires_at > clock_timestamp()) < 2
  returning expires_at into ends;
  return ends;
end $$;

-- Revoke a token; false if it was revoked before, null if there is none.
create function revoke_token(p_token text) returns boolean
language plpgsql security definer set search_path from current as $$
begin
  update token set revoked_at = clock_timestamp() where token_id = p_token and revoked_at is null;
  return case when found then true when exists (select from token where token_id = p_token) then false end;
end $$;

-- Release a session's name from its principal, and return that; null if it had none.
create function release_session(p_subscription text, p_session text) returns text
language plpgsql security definer set search_path from current as $$
declare
  owned text;
begin
  select principal into owned from session_epoch where subscription = p_subscription and session = p_session for update;
  if owned is not null then
    update session_epoch set principal = null where subscription = p_subscription and session = p_session;
    insert into access_history (event, principal, object)
    values ('release-session', owned, p_session || ' of ' || p_subscription);
  end if;
  return owned;
end $$;

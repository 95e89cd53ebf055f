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

-- Every change of a rule or token, however it was made. Nodes compare its highest number to decide whether to read the
-- two tables again.
create table access_history (
  number bigint generated always as identity primary key,
  at timestamptz not null default clock_timestamp(),
  by text not null default 'database user ' || session_user,
  event text not null,                                 -- allow, revoke, token, revoke-token
  principal text not null,
  object text not null                                 -- the rule, or the token's id
);
create index access_history_at on access_history (at);

-- Raise if there is no room for one more change. Revoking is not limited.
create function check_access_history() returns void language plpgsql as $$
begin
  if (select max(number) - min(number) >= 299999 from access_history)
     and (select count(*) >= 300000 from access_history) then
    perform reject_message('table access_history has 300000 rows', 'that is the limit, and no more rights are given',
      'Taking one away goes on. Those older than SUBLET_HISTORY_RETENTION_S are deleted by nodes.');
  end if;
end $$;

-- For maintenance: delete changes older than p_older_than, and than a day; never the last, whose number nodes compare.
create function forget_access_history(p_older_than interval) returns bigint
language sql security definer set search_path from current as $$
  with forgotten as (
    delete from access_history where at < clock_timestamp() - greatest(p_older_than, interval '1 day')
       and number < (select max(number) from access_history)
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
  -- Serialized, so that the numbers become visible in their order.
  lock table access_history in share row exclusive mode;
  if tg_op = 'INSERT' then perform check_access_history(); end if;
  if tg_op = 'DELETE' then a := old; else a := new; end if;
  if tg_table_name = 'access' then
    what := a.may || ' ' || a.filter || ' ' || a.group_name;
  else
    what := a.token_id;
  end if;
  insert into access_history (event, principal, object)
  values (case when tg_table_name = 'access' then case tg_op when 'DELETE' then 'revoke' else 'allow' end
               when tg_op = 'INSERT' then 'token' else 'revoke-token' end, a.principal, what);
  perform pg_notify('sublet_access', tg_table_schema);
  return null;
end $$;

create trigger noted after insert or update or delete on access for each row execute function note_access();
-- last_used is not recorded: it changes daily, and no right with it.
create trigger noted after insert or delete or update of digest, principal, expires_at, revoked_at on token
  for each row execute function note_access();

-- The following functions run with their owner's rights, for operators, who have none on the two tables; session_user
-- is recorded as the author of a change.

-- Add a rule; false if it exists.
create function allow_access(p_principal text, p_may text, p_filter text, p_group text) returns boolean
language plpgsql security definer set search_path from current as $$
begin
  if not coalesce(length(p_principal) between 1 and 512 and length(p_group) between 1 and 512
                  and octet_length(p_filter) between 1 and 4096, false) then
    perform reject_message('rule ' || concat_ws(' ', left(p_principal, 80), p_may, left(p_filter, 80), left(p_group, 80)),
      'principal and group have 1 to 512 characters, a filter 1 to 4096 bytes', 'Shorten what is longer.');
  end if;
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
  lock table token in share row exclusive mode;        -- serializes callers
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
  lock table access_history in share row exclusive mode; -- as each change of rights does
  select principal into owned from session_epoch where subscription = p_subscription and session = p_session for update;
  if owned is not null then
    update session_epoch set principal = null where subscription = p_subscription and session = p_session;
    insert into access_history (event, principal, object)
    values ('release-session', owned, p_session || ' of ' || p_subscription);
  end if;
  return owned;
end $$;

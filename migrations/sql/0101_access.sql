-- Who may do what at nodes: rules, tokens, and what became of them.

create table access (
  principal text not null,                             -- user:NAME, a name of a certificate, or * for whoever is known
  may text not null check (may in ('publish', 'read', 'join', 'watch', 'operate')),
  filter text not null,
  group_name text not null default '*',                -- a name, or team-*
  granted_by text not null,
  granted_at timestamptz not null default clock_timestamp(),
  primary key (principal, may, filter, group_name)
);

create table token (
  token_id text primary key,
  digest bytea not null unique check (octet_length(digest) = 32), -- sha256 of the token, which is stored nowhere
  principal text not null,
  made_by text not null,
  made_at timestamptz not null default clock_timestamp(),
  expires_at timestamptz not null,
  revoked_at timestamptz,
  last_used date,
  note text not null default ''
) with (fillfactor = 80);

-- What was changed, by whichever way. Nodes look at its last number to find out whether to read the two tables again.
create table access_history (
  number bigint generated always as identity primary key,
  at timestamptz not null default clock_timestamp(),
  by text not null default 'database user ' || session_user,
  event text not null,                                 -- allow, revoke, token, revoke-token
  principal text not null,
  object text not null                                 -- the rule, or the token's id
);

create function note_access() returns trigger language plpgsql as $$
declare
  a record;
  what text;
begin
  -- One after the other, so that the numbers become visible in their order.
  lock table access_history in share row exclusive mode;
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
-- last_used is noted nowhere: it changes daily, and no right with it.
create trigger noted after insert or delete or update of digest, principal, expires_at, revoked_at on token
  for each row execute function note_access();

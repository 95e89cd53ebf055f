-- Publishing by SQL: a message is a row of `outbox`, written in the caller's own transaction. The relay moves what has
-- committed into the log, in the order of outbox_id.

-- Messages published by SQL that wait for the relay; rolled-back rows are never visible. With the transaction first in
-- the key, the relay finds new rows without scanning the index entries of those it removed.
create table outbox (
  xact xid8 not null default pg_current_xact_id(),
  outbox_id bigint generated always as identity,
  topic text not null,
  key bytea,
  value bytea,
  headers jsonb,                                       -- [["name", value], ...]; a value: text, null, {"base64": text}
  "timestamp" timestamptz,                             -- of the message; null: at
  at timestamptz not null default clock_timestamp(),
  primary key (xact, outbox_id)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);
alter table outbox alter value set storage external;

-- Rows that were not written by `publish` and could not be published, for operators.
create table outbox_rejected (
  outbox_id bigint primary key,
  topic text not null,
  key bytea,
  value bytea,
  headers jsonb,
  "timestamp" timestamptz,
  at timestamptz not null,
  reason text not null,
  rejected_at timestamptz not null default clock_timestamp()
);

create function reject_message(p_what text, p_rule text, p_hint text) returns void
language plpgsql as $$
begin
  raise exception '%: %.', p_what, p_rule using errcode = 'SB002', hint = p_hint;
end $$;

-- Return whether all characters are printable, by the rule of Python's str.isprintable; code points that Unicode has not
-- assigned count as printable.
create function is_printable(p_text text) returns boolean language sql immutable as $$
  select p_text !~ ('[\u0001-\u001f\u007f-\u00a0\u00ad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u1680\u180e\u2000-\u200f'
    || '\u2028-\u202f\u205f-\u2064\u2066-\u206f\u3000\ue000-\uf8ff\ufeff\ufff9-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f'
    || '\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0001\U000e0020-\U000e007f\U000f0000-\U000ffffd\U00100000-\U0010fffd]')
$$;

-- The rules of protocol/sublet_protocol/domain/topics.py. Text in Postgres has no NUL and no lone surrogate.
create function check_topic(p_topic text) returns void
language plpgsql immutable as $$
declare
  shown text := 'topic ' || quote_nullable(left(p_topic, 80))
    || case when length(p_topic) > 80 then '... (' || length(p_topic) || ' characters)' else '' end;
  bytes integer := octet_length(convert_to(p_topic, 'UTF8'));
begin
  if p_topic is null then
    perform reject_message(shown, 'each message needs a topic', 'Give a topic such as orders/eu.');
  elsif p_topic = '' then
    perform reject_message(shown, 'it is empty, and needs a character', 'Give a topic such as orders/eu.');
  elsif bytes > 4096 then
    perform reject_message(shown, 'it is ' || bytes || ' bytes of UTF-8 and the limit is 4096',
      'Shorten it, and put the rest into the message''s key or headers.');
  elsif topic_levels(p_topic) > 128 then
    perform reject_message(shown, 'it has ' || topic_levels(p_topic) || ' levels and the limit is 128',
      'Put the rest into the message''s key or headers.');
  elsif starts_with(p_topic, '$') then
    perform reject_message(shown, 'what begins with $ is reserved, and cannot be a topic', 'Leave out the leading $.');
  elsif p_topic ~ '[+#]' then
    perform reject_message(shown, 'a topic has no wildcards, and this one contains ' || substring(p_topic from '[+#]'),
      'Publish to one exact topic.');
  end if;
end $$;

-- Headers as [["name", value], ...], null for none. A value is text, null, or {"base64": text} for bytes. Line breaks in
-- base64, which encode() puts there, are taken out.
create function message_headers(p_headers jsonb) returns jsonb
language plpgsql immutable as $$
declare
  shape constant text := 'headers are an object, or a list of [name, value] pairs';
  hint constant text := 'Write {"name": "text"}, or [["name", "text"]]; null for no value, {"base64": "..."} for bytes.';
  pairs jsonb := p_headers;
  checked jsonb := '[]';
  pair jsonb;
  held jsonb;
  base64 text;
begin
  if jsonb_typeof(p_headers) = 'object' then
    select jsonb_agg(jsonb_build_array(h.key, h.value)) into pairs from jsonb_each(p_headers) h;
  elsif jsonb_typeof(p_headers) = 'null' then
    return null;
  elsif jsonb_typeof(p_headers) <> 'array' then
    perform reject_message('headers ' || left(p_headers::text, 60), shape, hint);
  end if;
  for pair in select e.value from jsonb_array_elements(pairs) e loop
    if jsonb_typeof(pair) <> 'array' or jsonb_array_length(pair) <> 2 or jsonb_typeof(pair -> 0) <> 'string' then
      perform reject_message('header ' || left(pair::text, 60), shape, hint);
    end if;
    held := pair -> 1;
    if jsonb_typeof(held) = 'object' and held - 'base64' = '{}' and jsonb_typeof(held -> 'base64') = 'string' then
      base64 := translate(held ->> 'base64', E'\r\n', '');
      if length(base64) % 4 <> 0 or base64 !~ '^[A-Za-z0-9+/]*={0,2}$' then
        perform reject_message('header ' || left((pair -> 0)::text, 60), 'its value is not base64',
          'Encode it with encode(..., ''base64'').');
      end if;
      held := jsonb_build_object('base64', base64);
    elsif jsonb_typeof(held) in ('number', 'boolean') then
      held := to_jsonb(held::text);
    elsif jsonb_typeof(held) not in ('string', 'null') then
      perform reject_message('header ' || left((pair -> 0)::text, 60) || ' of type ' || jsonb_typeof(held),
        'a value is text, a number, true, false, null, or {"base64": "..."}', 'Turn it into text.');
    end if;
    checked := checked || jsonb_build_array(jsonb_build_array(pair -> 0, held));
  end loop;
  return nullif(checked, '[]');
end $$;

-- Return the headers' part of a message's size, as in storage/sublet_storage/producer/batches/input_conversion.py.
create function headers_size(p_headers jsonb) returns bigint
language sql immutable as $$
  select sum(length(pair ->> 0) + coalesce(octet_length(
           case when jsonb_typeof(pair -> 1) = 'object' then decode(pair -> 1 ->> 'base64', 'base64')
                else convert_to(pair ->> 1, 'UTF8') end), 0))
    from jsonb_array_elements(p_headers) pair
$$;

-- Return the headers' bytes that count for the limit of 16 KiB for all headers of a message.
create function headers_bytes(p_headers jsonb) returns bigint
language sql immutable as $$
  select headers_size(p_headers) + sum(octet_length(convert_to(pair ->> 0, 'UTF8')) - length(pair ->> 0))
    from jsonb_array_elements(p_headers) pair
$$;

create function insert_outbox_row(p_topic text, p_value bytea, p_key bytea, p_headers jsonb, p_timestamp timestamptz)
returns bigint language plpgsql as $$
declare
  most constant integer := 1048576;
  headers jsonb;
  size bigint;
  id bigint;
begin
  perform check_topic(p_topic);
  size := 32 + length(p_topic) + coalesce(octet_length(p_key), 0) + coalesce(octet_length(p_value), 0);
  if p_headers is not null then
    headers := message_headers(p_headers);
    if jsonb_array_length(headers) > 100 then
      perform reject_message('a message to topic ' || quote_literal(left(p_topic, 80)),
        'it has ' || jsonb_array_length(headers) || ' headers and the limit is 100', 'Put the rest into its value.');
    elsif headers_bytes(headers) > 16384 then
      perform reject_message('a message to topic ' || quote_literal(left(p_topic, 80)),
        'it has headers of ' || headers_bytes(headers) || ' bytes and the limit is 16384', 'Put the rest into its value.');
    end if;
    size := size + coalesce(headers_size(headers), 0);
  end if;
  if size > most then
    perform reject_message('a message to topic ' || quote_literal(left(p_topic, 80)),
      'it takes ' || size || ' bytes and the limit is ' || most, 'Publish a reference to where it is stored.');
  end if;
  if p_timestamp < '0001-01-01 00:00:00+00' or p_timestamp >= '10000-01-01 00:00:00+00' then
    perform reject_message('timestamp ' || p_timestamp, 'it is outside of the years 1 to 9999', 'Correct it.');
  end if;
  insert into outbox (topic, value, key, headers, "timestamp") values (p_topic, p_value, p_key, headers, p_timestamp)
    returning outbox_id into id;
  return id;
end $$;

-- Publish a message. Values and keys are each bytes or text; an untyped literal is text.
create function publish(
  topic text, value bytea, key bytea default null, headers jsonb default null, "timestamp" timestamptz default null
) returns bigint language plpgsql security definer set search_path from current as $$
begin
  return insert_outbox_row(topic, value, key, headers, "timestamp");
end $$;

create function publish(
  topic text, value text, key text default null, headers jsonb default null, "timestamp" timestamptz default null
) returns bigint language plpgsql security definer set search_path from current as $$
begin
  return insert_outbox_row(topic, convert_to(value, 'UTF8'), convert_to(key, 'UTF8'), headers, "timestamp");
end $$;

create function publish(
  topic text, value bytea, key text, headers jsonb default null, "timestamp" timestamptz default null
) returns bigint language plpgsql security definer set search_path from current as $$
begin
  return insert_outbox_row(topic, value, convert_to(key, 'UTF8'), headers, "timestamp");
end $$;

create function publish(
  topic text, value text, key bytea, headers jsonb default null, "timestamp" timestamptz default null
) returns bigint language plpgsql security definer set search_path from current as $$
begin
  return insert_outbox_row(topic, convert_to(value, 'UTF8'), key, headers, "timestamp");
end $$;

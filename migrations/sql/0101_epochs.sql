-- Epochs: what publishers may still publish, and what follows from that for a space. An epoch is a JSON array of as many
-- integers as all epochs of its space have; an antichain is a JSON array of epochs, none at or before another, sorted.

-- Who may publish which epochs of a space: those at or after one of `least`. Leased, so that a publisher that has died does
-- not hold the frontier back; the row of one that has expired stays for a while, with what it left unfinished.
create table capability (
  space_id bigint not null references space,
  producer_id text not null,
  incarnation bigint not null,
  least jsonb not null,
  expires_at timestamptz not null,
  expired_at timestamptz,                              -- null: in force
  upper_frontier jsonb,                                -- expired: the greatest epochs that had begun in the space by then
  primary key (space_id, producer_id, incarnation)     -- a later incarnation may come while the end of the one before is retained
) with (fillfactor = 50);

create unique index capability_in_force on capability (space_id, producer_id) where expired_at is null;
create index capability_expired on capability (expired_at) where expired_at is not null;

-- Product order.
create function epoch_at_or_before(p_one jsonb, p_other jsonb) returns boolean language sql immutable as $$
  select coalesce(bool_and(one.number::bigint <= (p_other ->> (one.nth - 1)::integer)::bigint), true)
    from jsonb_array_elements_text(p_one) with ordinality as one(number, nth)
$$;

-- Whether any epoch of the one is at or before the epoch.
create function frontier_admits(p_least jsonb, p_epoch jsonb) returns boolean language sql immutable as $$
  select exists (select from jsonb_array_elements(p_least) as least(epoch) where epoch_at_or_before(least.epoch, p_epoch))
$$;

-- Whether every epoch of the one is at or before some epoch of the other.
create function is_covered(p_greatest jsonb, p_by jsonb) returns boolean language sql immutable as $$
  select not exists (
    select from jsonb_array_elements(p_greatest) as mine(epoch)
     where not exists (
       select from jsonb_array_elements(p_by) as other(epoch) where epoch_at_or_before(mine.epoch, other.epoch)))
$$;

-- The greatest epochs of both.
create function merge_upper_frontier(p_greatest jsonb, p_more jsonb) returns jsonb language sql immutable as $$
  with every as (select distinct epoch from jsonb_array_elements(coalesce(p_greatest, '[]') || p_more) as e(epoch))
  select jsonb_agg(epoch order by epoch) from every
   where not exists (select from every other where other.epoch <> every.epoch and epoch_at_or_before(every.epoch, other.epoch))
$$;

-- The least epochs of all.
create function least_epochs(p_epochs jsonb) returns jsonb language sql immutable as $$
  with every as (select distinct epoch from jsonb_array_elements(p_epochs) as e(epoch))
  select jsonb_agg(epoch order by epoch) from every
   where not exists (select from every other where other.epoch <> every.epoch and epoch_at_or_before(other.epoch, every.epoch))
$$;

-- Whether it is what a stream's consumed frontier is stored as: {"upto": offset, "least": null, or an antichain}.
create function is_consumed_frontier(p_consumed jsonb) returns boolean language sql immutable as $$
  select p_consumed - 'upto' - 'least' = '{}' and (p_consumed ->> 'upto')::bigint >= 0
     and case jsonb_typeof(p_consumed -> 'least') when 'null' then true when 'array' then (
       select count(*) <= 1000 and count(distinct jsonb_array_length(e.epoch)) <= 1
              and coalesce(bool_and(jsonb_array_length(e.epoch) between 1 and 8 and not exists (
                select from jsonb_array_elements_text(e.epoch) as d(number)
                 where d.number::bigint > 9223372036854775806)), true)
         from jsonb_array_elements(p_consumed -> 'least') as e(epoch)) else false end
$$;

-- The producer publishes only at or after one of p_least, from this call on. `outcome` is exactly one of
--   held       it does, for the lease; `lower` is the space's frontier that is left, and `moves` counts its moves
--   unknown    there is no such space (any more)
--   fenced     a later incarnation of the producer has begun
--   expired    what it held in this incarnation is closed
--   numbers    all epochs of the space have other dimensions: `lower` is an example
--   backward   it has advanced beyond one of p_least: to `lower`
--   completed  one of p_least is completed: what may still come is at or after `lower`
create function hold_epochs(
  p_space bigint, p_producer text, p_incarnation bigint, p_least jsonb, p_lease_s double precision,
  out outcome text, out lower jsonb, out space_name text, out moves bigint
) language plpgsql as $$
declare
  target record;
  own jsonb;
begin
  lock table space in row exclusive mode;              -- as who changes spaces, before any row: else each waits for the other
  perform pg_advisory_xact_lock(producer_lock(p_producer));
  select name, epoch_dimensions, lower_frontier, frontier_move_count into target from space
   where space_id = p_space and dropped_at is null for no key update;
  if not found then
    outcome := 'unknown';
    return;
  end if;
  if is_fenced(p_producer, p_incarnation)
     or exists (select from capability c where c.space_id = p_space and c.producer_id = p_producer
                   and c.expired_at is null and c.incarnation > p_incarnation) then
    outcome := 'fenced';
    return;
  end if;
  if exists (select from capability c where c.space_id = p_space and c.producer_id = p_producer
                and c.expired_at is not null and c.incarnation = p_incarnation) then
    outcome := 'expired';
    return;
  end if;
  if target.epoch_dimensions <> jsonb_array_length(p_least -> 0) then
    outcome := 'numbers';
    lower := target.lower_frontier;
    return;
  end if;
  select c.least into own from capability c
   where c.space_id = p_space and c.producer_id = p_producer and c.expired_at is null;
  lower := coalesce(own, target.lower_frontier);
  if lower is not null
     and exists (select from jsonb_array_elements(p_least) as e(epoch) where not frontier_admits(lower, e.epoch)) then
    outcome := case when own is null then 'completed' else 'backward' end;
    return;
  end if;
  insert into capability (space_id, producer_id, incarnation, least, expires_at)
  values (p_space, p_producer, p_incarnation, p_least, clock_timestamp() + make_interval(secs => p_lease_s))
      on conflict (space_id, producer_id) where expired_at is null
      do update set incarnation = excluded.incarnation, least = excluded.least, expires_at = excluded.expires_at;
  select least_epochs(jsonb_agg(e.epoch)) into lower
    from capability c, jsonb_array_elements(c.least) as e(epoch) where c.space_id = p_space and c.expired_at is null;
  outcome := 'held';
  space_name := target.name;
  moves := target.frontier_move_count;
  if lower is distinct from target.lower_frontier then
    moves := moves + 1;
    update space set lower_frontier = lower, epoch_dimensions = jsonb_array_length(lower -> 0), frontier_move_count = moves
     where space_id = p_space;
  end if;
end $$;

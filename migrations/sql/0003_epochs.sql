-- A publisher that was fenced moves no frontier: not only once its next life holds epochs, but from the moment it began.

-- Whether a later life of a named producer has begun. Who asks under the producer's lock is told for the time until he lets
-- go of it.
create function is_fenced(p_producer text, p_incarnation bigint) returns boolean language sql stable as $$
  select exists (select from producer p
                  where p.producer_id = p_producer and p.stream_id = 0 and p.incarnation > p_incarnation)
$$;

-- As in 0001_epochs.sql, which says what the outcomes are; `fenced` is also who has a later life that holds nothing yet.
create or replace function hold_epochs(
  p_space bigint, p_producer text, p_incarnation bigint, p_least jsonb, p_lease_s double precision,
  out outcome text, out lower jsonb, out space_name text, out moves bigint
) language plpgsql as $$
declare
  place record;
  own jsonb;
begin
  lock table space in row exclusive mode;              -- as who changes spaces, before any row: else each waits for the other
  perform pg_advisory_xact_lock(producer_lock(p_producer));
  select name, epoch_numbers, lower_frontier, frontier_moves into place from space
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
  if place.epoch_numbers <> jsonb_array_length(p_least -> 0) then
    outcome := 'numbers';
    lower := place.lower_frontier;
    return;
  end if;
  select c.least into own from capability c
   where c.space_id = p_space and c.producer_id = p_producer and c.expired_at is null;
  lower := coalesce(own, place.lower_frontier);
  if lower is not null and exists (select from jsonb_array_elements(p_least) as e(epoch) where not may_come(lower, e.epoch)) then
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
  space_name := place.name;
  moves := place.frontier_moves;
  if lower is distinct from place.lower_frontier then
    moves := moves + 1;
    update space set lower_frontier = lower, epoch_numbers = jsonb_array_length(lower -> 0), frontier_moves = moves
     where space_id = p_space;
  end if;
end $$;

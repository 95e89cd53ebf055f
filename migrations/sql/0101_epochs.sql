-- Epochs: the capabilities of publishers, and the frontiers of spaces. An epoch is a JSON array of integers, as many as
-- in all epochs of its space; an antichain is a JSON array of epochs, none at or before another, sorted.

-- The epochs that a publisher may still publish in a space: those at or after one of `least`. Leased, so that a dead
-- publisher does not hold the frontier back; an expired row stays for a while, with what it left unfinished.
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

-- Product order, of epochs of at most 8 numbers. One expression without a table, so that it is inlined: antichains are
-- compared pair by pair, and a call for each pair would take some ten times as long.
create function epoch_at_or_before(p_one jsonb, p_other jsonb) returns boolean language sql immutable as $$
  select coalesce((p_one ->> 0)::bigint <= (p_other ->> 0)::bigint, true)
     and coalesce((p_one ->> 1)::bigint <= (p_other ->> 1)::bigint, true)
     and coalesce((p_one ->> 2)::bigint <= (p_other ->> 2)::bigint, true)
     and coalesce((p_one ->> 3)::bigint <= (p_other ->> 3)::bigint, true)
     and coalesce((p_one ->> 4)::bigint <= (p_other ->> 4)::bigint, true)
     and coalesce((p_one ->> 5)::bigint <= (p_other ->> 5)::bigint, true)
     and coalesce((p_one ->> 6)::bigint <= (p_other ->> 6)::bigint, true)
     and coalesce((p_one ->> 7)::bigint <= (p_other ->> 7)::bigint, true)
$$;

-- Return whether any epoch of the antichain is at or before the epoch.
create function frontier_admits(p_least jsonb, p_epoch jsonb) returns boolean language sql immutable as $$
  select exists (select from jsonb_array_elements(p_least) as least(epoch) where epoch_at_or_before(least.epoch, p_epoch))
$$;

-- Return the distinct epochs, and their numbers: many epochs are compared by these, in a tenth of the time.
create function epoch_numbers(p_epochs jsonb) returns table (epoch jsonb, numbers bigint[]) language sql immutable as $$
  select distinct e.epoch, translate(e.epoch::text, '[] ', '{}')::bigint[] from jsonb_array_elements(p_epochs) as e(epoch)
$$;

-- Product order, as epoch_at_or_before.
create function numbers_at_or_before(p_one bigint[], p_other bigint[]) returns boolean language sql immutable as $$
  select coalesce(p_one[1] <= p_other[1], true) and coalesce(p_one[2] <= p_other[2], true)
     and coalesce(p_one[3] <= p_other[3], true) and coalesce(p_one[4] <= p_other[4], true)
     and coalesce(p_one[5] <= p_other[5], true) and coalesce(p_one[6] <= p_other[6], true)
     and coalesce(p_one[7] <= p_other[7], true) and coalesce(p_one[8] <= p_other[8], true)
$$;

-- Return whether every epoch of the first antichain is at or before some epoch of the second.
create function is_covered(p_greatest jsonb, p_by jsonb) returns boolean language sql immutable as $$
  with other as materialized (select numbers from epoch_numbers(p_by))
  select not exists (
    select from epoch_numbers(p_greatest) mine
     where not exists (select from other where numbers_at_or_before(mine.numbers, other.numbers)))
$$;

-- Return whether some epoch of the antichain is at or before each of the epochs.
create function admits_all(p_least jsonb, p_epochs jsonb) returns boolean language sql immutable as $$
  with least as materialized (select numbers from epoch_numbers(p_least))
  select not exists (
    select from epoch_numbers(p_epochs) mine
     where not exists (select from least where numbers_at_or_before(least.numbers, mine.numbers)))
$$;

-- Return the greatest of the epochs of both lists. Where these are more than 1000 (or have to be found among more than
-- 4000), return the one epoch that all of them are at or before: what lies between counts as begun.
create function merge_upper_frontier(p_greatest jsonb, p_more jsonb) returns jsonb language sql immutable as $$
  with every as materialized (
    select epoch, numbers, row_number() over (order by numbers desc) as n
      from epoch_numbers(coalesce(p_greatest, '[]') || coalesce(p_more, '[]'))
  ), greatest as materialized (
    select epoch from every
     where (select count(*) from every) <= 4000
       and not exists (select from every other where other.n < every.n and numbers_at_or_before(every.numbers, other.numbers))
  ), corner as (
    select jsonb_agg(number order by nth) as epoch
      from (select nth, max(number) as number from every, unnest(numbers) with ordinality as u(number, nth) group by nth) d)
  select case when count(*) between 1 and 1000 then jsonb_agg(epoch order by epoch)
              else (select jsonb_build_array(corner.epoch) from corner where corner.epoch is not null) end
    from greatest
$$;

-- Return the least of the epochs. In this order none comes before one that is at or before it, and the first is found
-- at once where epochs have one number.
create function least_epochs(p_epochs jsonb) returns jsonb language sql immutable as $$
  with every as materialized (
    select epoch, numbers, row_number() over (order by numbers) as n from epoch_numbers(p_epochs))
  select jsonb_agg(epoch order by n) from every
   where not exists (select from every other where other.n < every.n and numbers_at_or_before(other.numbers, every.numbers))
$$;

-- Return whether it is a valid stored consumed frontier: {"upto": offset, "least": null, or an antichain}.
create function is_consumed_frontier(p_consumed jsonb) returns boolean language plpgsql immutable strict as $$
begin
  return jsonb_typeof(p_consumed) = 'object' and coalesce(
    jsonb_path_match(p_consumed, 'strict $.upto.type() == "number" && $.upto >= 0 && $.upto <= 9223372036854775807
      && ($.least.type() == "null" || $.least.type() == "array" && $.least.size() <= 1000)', '{}', true)
    and p_consumed - '{upto,least}'::text[] = '{}'
    and not jsonb_path_exists(p_consumed, 'strict $.least ? (@.type() == "array")[*]
      ? (@.type() != "array" || @.size() < 1 || @.size() > 8 || @.size() != $.least[0].size())', '{}', true)
    and not jsonb_path_exists(p_consumed, 'strict $.least ? (@.type() == "array")[*][*]
      ? (@.type() != "number" || @ > 9223372036854775807 || @ < -9223372036854775808)', '{}', true)
    and strpos(p_consumed::text, '.') = 0, false);
end $$;

-- Return whether it is a valid consumed frontier in a space with that lower frontier. Of epochs of several numbers whoever
-- reads it takes the least.
create function is_consumed_frontier(p_consumed jsonb, p_lower jsonb) returns boolean language sql immutable as $$
  select case when is_consumed_frontier(p_consumed) then p_consumed -> 'least' = 'null' or (
    select count(*) between 1 and case when jsonb_array_length(p_lower -> 0) = 1 then 1 else 1000 end
           and bool_and(jsonb_array_length(e.epoch) = jsonb_array_length(p_lower -> 0))
      from jsonb_array_elements(nullif(p_consumed -> 'least', 'null')) as e(epoch)) end
$$;

-- Return whether it is a valid stored range in doubt; of its consumed frontier, only that it is there.
create function is_range_in_doubt(p_range jsonb) returns boolean language plpgsql immutable strict as $$
begin
  return jsonb_typeof(p_range) = 'object' and coalesce(
    jsonb_path_match(p_range, 'strict $.grant_id.type() == "number" && $.start.type() == "number"
      && $.end.type() == "number" && $.hold_s.type() == "number" && exists($.consumed)
      && $.grant_id >= 0 && $.grant_id <= 9223372036854775807 && $.start >= 0 && $.start <= $.end
      && $.end <= 9223372036854775807 && $.hold_s >= 0 && $.hold_s <= 86400', '{}', true)
    and p_range - '{grant_id,start,end,hold_s,consumed}'::text[] = '{}'
    and strpos((p_range - '{hold_s,consumed}'::text[])::text, '.') = 0, false);
end $$;

-- Return the frontier after all epochs up to p_greatest are completed: the least epochs that lie above it. Where these
-- are more than 1000, or take too long to find, return those of them that lie above the greatest of all numbers and
-- after the first epoch of the frontier: more is completed then.
create function complete_epochs(p_least jsonb, p_greatest jsonb) returns jsonb language plpgsql immutable as $$
declare
  reached jsonb;
  beside jsonb;
  above jsonb;
  first jsonb := jsonb_build_array(p_least -> 0);
  comparisons bigint := 0;
begin
  for reached in select g.epoch from jsonb_array_elements(p_greatest) as g(epoch) where frontier_admits(p_least, g.epoch) loop
    with least as materialized (
      select l.epoch, epoch_at_or_before(l.epoch, reached) as is_reached from jsonb_array_elements(p_least) as l(epoch))
    select (select coalesce(jsonb_agg(epoch), '[]') from least where not is_reached),
           (select coalesce(jsonb_agg(jsonb_set(l.epoch, array[(b.nth - 1)::text], to_jsonb(b.number::bigint + 1))), '[]')
              from least l, jsonb_array_elements_text(reached) with ordinality as b(number, nth)
             where l.is_reached and b.number::bigint <= 9223372036854775806)
      into beside, above;
    comparisons := comparisons + jsonb_array_length(above) * (jsonb_array_length(above) + jsonb_array_length(beside));
    if comparisons > 2000000 then
      exit;
    end if;
    -- None of the others is after one of `above`, which are after one of the epochs that these were beside.
    select beside || coalesce(jsonb_agg(a.epoch), '[]') into p_least
      from jsonb_array_elements(least_epochs(above)) as a(epoch) where not frontier_admits(beside, a.epoch);
    exit when jsonb_array_length(p_least) > 1000;
  end loop;
  if comparisons > 2000000 or jsonb_array_length(p_least) > 1000 then
    select jsonb_build_array(jsonb_agg(number order by nth)) into above
      from (select u.nth, max(u.number) as number
              from epoch_numbers(p_greatest), unnest(numbers) with ordinality as u(number, nth) group by u.nth) d;
    return complete_epochs(first, above);
  end if;
  return (select coalesce(jsonb_agg(l.epoch order by l.epoch), '[]') from jsonb_array_elements(p_least) as l(epoch));
end $$;

-- Return the greatest epochs that have begun in the space.
create function space_upper_frontier(p_space bigint) returns jsonb language sql stable as $$
  select merge_upper_frontier('[]', jsonb_agg(distinct g.epoch))
    from stream_upper_frontier u, jsonb_array_elements(u.upper_frontier) as g(epoch) where u.space_id = p_space
$$;

-- Write the lower frontier of a space, whose row is locked, from the capabilities in force. Without any, all epochs
-- that have begun are completed. It never goes back; that of a dropped space is final.
create function settle_epochs(p_space bigint) returns void language plpgsql as $$
declare
  lower jsonb;
begin
  if (select epoch_dimensions = 1 from space where space_id = p_space) then
    select jsonb_build_array(jsonb_build_array(min((c.least #>> '{0,0}')::bigint))) into lower
      from capability c where c.space_id = p_space and c.expired_at is null having count(*) > 0;
  else
    select least_epochs(jsonb_agg(e.epoch)) into lower
      from capability c, jsonb_array_elements(c.least) as e(epoch) where c.space_id = p_space and c.expired_at is null;
  end if;
  if lower is null then
    select complete_epochs(p.lower_frontier, coalesce(space_upper_frontier(p_space), '[]')) into lower
      from space p where p.space_id = p_space;
  end if;
  update space
     set lower_frontier = lower, epoch_dimensions = coalesce(epoch_dimensions, jsonb_array_length(lower -> 0)),
         frontier_move_count = frontier_move_count + 1
   where space_id = p_space and dropped_at is null and lower_frontier is distinct from lower
     and admits_all(coalesce(lower_frontier, lower), lower);
end $$;

-- Raise unless it is a valid lease in seconds.
create function check_lease(p_lease_s double precision) returns void language plpgsql immutable as $$
begin
  if not coalesce(p_lease_s between 0 and 604800, false) then
    perform reject_message('a lease of ' || coalesce(p_lease_s::text, 'no') || ' s', 'it is of at most 604800', 'Shorten it.');
  end if;
end $$;

-- Set the epochs that the producer may publish from now on: at or after one of p_least. `outcome` is exactly one of
--   held       it may, for the lease; `lower` is the resulting frontier of the space, and `moves` counts its moves
--   unknown    the space does not exist (any more)
--   fenced     a later incarnation of the producer has begun
--   expired    its capability of this incarnation has expired
--   numbers    all epochs of the space have other dimensions: `lower` is an example
--   backward   it has advanced beyond one of p_least: to `lower`
--   completed  one of p_least is completed: what may still come is at or after `lower`
--   many       all producers of the space together would hold more than 1000 epochs, of several numbers each, or 10000
--              where each counts for each of its producers. The first bounds the frontier, also when some of them
--              release or lose theirs; the second, what an advance looks at.
create function hold_epochs(
  p_space bigint, p_producer text, p_incarnation bigint, p_least jsonb, p_lease_s double precision,
  out outcome text, out lower jsonb, out moves bigint
) language plpgsql security definer set search_path from current as $$
declare
  target record;
  own jsonb;
begin
  perform check_producer(p_producer);
  perform check_lease(p_lease_s);
  if not coalesce(are_epoch_bounds(jsonb_build_object('has_unset', false, 'least', p_least, 'greatest', p_least)), false) then
    perform reject_message('epochs ' || coalesce(left(p_least::text, 80), 'null'),
      'they are a list of 1 to 1000, each a list of as many numbers', 'Give such a list, as [[17]].');
  end if;
  perform lock_producer(p_producer);
  perform check_incarnation(p_producer, p_incarnation);
  select epoch_dimensions, lower_frontier into target from space
   where space_id = p_space and dropped_at is null for no key update;
  if not found then
    outcome := 'unknown';
    return;
  end if;
  if is_fenced(p_producer, p_incarnation)
     or exists (select from capability c where c.space_id = p_space and c.producer_id = p_producer
                   and c.incarnation > p_incarnation) then
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
  if lower is not null and not admits_all(lower, p_least) then
    outcome := case when own is null then 'completed' else 'backward' end;
    return;
  end if;
  p_least := least_epochs(p_least);
  if p_least #> '{0,1}' is not null and (
    select count(*) > 10000 or count(distinct epoch) > 1000 from (
      select jsonb_array_elements(p_least) union all
      select jsonb_array_elements(c.least) from capability c
       where c.space_id = p_space and c.expired_at is null and c.producer_id <> p_producer) held(epoch)) then
    outcome := 'many';
    return;
  end if;
  insert into capability (space_id, producer_id, incarnation, least, expires_at)
  values (p_space, p_producer, p_incarnation, p_least, clock_timestamp() + make_interval(secs => p_lease_s))
      on conflict (space_id, producer_id) where expired_at is null
      do update set incarnation = excluded.incarnation, least = excluded.least, expires_at = excluded.expires_at;
  outcome := 'held';
  perform settle_epochs(p_space);
  select lower_frontier, frontier_move_count into lower, moves from space where space_id = p_space;
end $$;

-- Wait for the producer's pending writes, and block later ones, until the end of the transaction.
create function lock_producer(p_producer text) returns void language plpgsql security definer set search_path from current as $$
begin
  lock table space in row exclusive mode;              -- as changes of spaces do, before any row: else deadlock
  perform pg_advisory_xact_lock(producer_lock(p_producer));
end $$;

-- Renew the producer's capabilities for another lease; return their spaces. `is_over`: a later incarnation has taken
-- them over.
create function renew_epochs(
  p_producer text, p_incarnation bigint, p_lease_s double precision, out spaces bigint[], out is_over boolean
) language plpgsql security definer set search_path from current as $$
begin
  perform check_lease(p_lease_s);
  with renewed as (
    update capability c set expires_at = clock_timestamp() + make_interval(secs => p_lease_s)
     where c.producer_id = p_producer and c.incarnation = p_incarnation and c.expired_at is null
       and not is_fenced(p_producer, p_incarnation)
    returning c.space_id)
  select coalesce(array_agg(space_id), '{}') into spaces from renewed;
  is_over := is_fenced(p_producer, p_incarnation);
end $$;

-- End the producer's capability in the space: its unfinished epochs are completed as far as it is concerned. False,
-- without any change, if a later incarnation has taken it over.
create function release_epochs(p_space bigint, p_producer text, p_incarnation bigint) returns boolean
language plpgsql security definer set search_path from current as $$
declare
  holder bigint;
begin
  perform lock_producer(p_producer);
  perform from space where space_id = p_space for no key update;
  select c.incarnation into holder from capability c
   where c.space_id = p_space and c.producer_id = p_producer and c.expired_at is null;
  if holder > p_incarnation or is_fenced(p_producer, p_incarnation) then
    return false;
  end if;
  if holder = p_incarnation then
    delete from capability where space_id = p_space and producer_id = p_producer and expired_at is null;
    perform settle_epochs(p_space);
  end if;
  return true;
end $$;

-- Epochs: what publishers may still publish, and what follows from that for a space. An epoch is a JSON array of as many
-- integers as all epochs of its space have; an antichain is a JSON array of epochs, none at or before another, sorted.

-- Who may publish which epochs of a space: those at or after one of `least`. Leased, so that a publisher that has died does
-- not hold the frontier back; the row of one that has expired stays for a while, and says what it left unfinished.
create table capability (
  space_id bigint not null references space,
  producer_id text not null,
  incarnation bigint not null,
  least jsonb not null,
  expires_at timestamptz not null,
  expired_at timestamptz,                              -- null: in force
  begun jsonb,                                         -- expired: the greatest epochs that had begun in the space by then
  primary key (space_id, producer_id, incarnation)     -- a later life may come while it is remembered how one before ended
) with (fillfactor = 50);

create unique index capability_in_force on capability (space_id, producer_id) where expired_at is null;

-- Product order.
create function epoch_at_or_before(p_one jsonb, p_other jsonb) returns boolean language sql immutable as $$
  select coalesce(bool_and(one.number::bigint <= (p_other ->> (one.place - 1)::integer)::bigint), true)
    from jsonb_array_elements_text(p_one) with ordinality as one(number, place)
$$;

-- Whether any epoch of the one is at or before the epoch.
create function may_come(p_least jsonb, p_epoch jsonb) returns boolean language sql immutable as $$
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
create function upper_frontier_with(p_greatest jsonb, p_more jsonb) returns jsonb language sql immutable as $$
  with every as (select distinct epoch from jsonb_array_elements(coalesce(p_greatest, '[]') || p_more) as e(epoch))
  select jsonb_agg(epoch order by epoch) from every
   where not exists (select from every other where other.epoch <> every.epoch and epoch_at_or_before(every.epoch, other.epoch))
$$;

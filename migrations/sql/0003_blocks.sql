-- A window by time holds the same messages for ever: a block that was merged from others keeps when they were appended.

-- Of a block that was merged: where in it, counted from its first message, those begin that were appended later than all
-- before them, and when. The first begins at 0, the last was appended when the block says. Null: it is of one time.
alter table block add piece_starts integer[], add piece_times timestamptz[];

-- Planned anew at each call: a plan for any generation locks all of them, and a server has not so many locks.

-- The offset of the first message of a stream that was appended then or later; null if there is none.
create function position_at(p_generation bigint, p_stream bigint, p_time timestamptz) returns bigint
language plpgsql stable set plan_cache_mode = force_custom_plan as $$
begin
  return (
    select b.end_offset - b.count
             + coalesce(b.piece_starts[1 + (select count(*) from unnest(b.piece_times) as t (at) where t.at < p_time)], 0)
      from block b
     where b.generation_id = p_generation and b.stream_id = p_stream and b.appended_at >= p_time
     order by b.end_offset limit 1);
end $$;

-- When the message at an offset of a stream was appended; null if it is gone, or not there yet.
create function appended_at(p_generation bigint, p_stream bigint, p_offset bigint) returns timestamptz
language plpgsql stable set plan_cache_mode = force_custom_plan as $$
begin
  return (
    select coalesce(b.piece_times[(select count(*) from unnest(b.piece_starts) as s (start)
                                    where s.start <= p_offset - (b.end_offset - b.count))], b.appended_at)
      from block b
     where b.generation_id = p_generation and b.stream_id = p_stream and b.end_offset > p_offset
     order by b.end_offset limit 1);
end $$;

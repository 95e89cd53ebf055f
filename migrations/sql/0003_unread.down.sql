drop function ahead_of(bigint, text[], text[]);

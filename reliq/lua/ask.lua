-- ask: during a resize, check in the old shard of chosen ids whether their new shard may publish them
--
-- KEYS  epoch unack? retries_left? lease? garbage? | dedup
-- ARGV  clock known closing replace | id
-- Runs  epoch:GET,SET unack:ZSCORE retries_left:HEXISTS lease:HGET garbage:SISMEMBER dedup:GET
-- Returns  `free`, `duplicate` or `tombstoned` for each id; `stale` for all ids if this shard has a newer shard map.
-- Nothing to do: a call without ids only stores the version of the shard map.
--
-- The asked shard stores `known`, the version of the caller's shard map. From then on it refuses chosen ids from
-- publishers with an older map, so that they cannot publish an id that was reported as free. With `closing`, it refuses
-- all messages until a call has a newer map.

local answers, text = {}, read('GET', epoch) or ''
local least, mine = epoch_of(text), epoch_of(known)
for i = 1, ITEMS do
  local reason = mine >= least and standing(i, arg(i, ID)) or 'free'
  answers[i] = mine < least and 'stale' or reason == 'revive' and 'free' or reason
end
if mine > least or (mine == least and closing ~= '' and not text:find('closed')) then
  redis.call('SET', epoch, known .. (closing ~= '' and ' closed' or ''))
end
return answers

-- ask: during a resize, check in the old shard of chosen ids whether their new shard may publish messages with them
--
-- KEYS  epoch unack? retries_left? lease? garbage? | dedup
-- ARGV  clock known closing replace | id
-- Runs  epoch:GET,SET unack:ZSCORE retries_left:HEXISTS lease:HGET garbage:SISMEMBER dedup:GET
-- Returns  `free`, `duplicate` or `tombstoned` for each id; `stale` for all ids if this shard has a newer shard map.
-- Nothing to do: a script call without ids only stores the version of the shard map.
--
-- The old shard stores `known`, the version of the caller's shard map. After that, it refuses chosen ids from
-- publishers with an older shard map. So they cannot publish an id after this script has returned `free` for it. With
-- `closing`, the old shard refuses all messages until a call of this script has a newer shard map.

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

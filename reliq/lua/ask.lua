-- ask: no move; whether the new home shard of chosen ids may publish them, asked at their old home shard
--
-- KEYS  epoch unack? retries_left? lease? garbage? | dedup
-- ARGV  clock known closing replace | id
-- Runs  epoch:GET,SET unack:ZSCORE retries_left:HEXISTS lease:HGET garbage:SISMEMBER dedup:GET
-- Returns  `free`, `duplicate` or `tombstoned` for each id; `stale` for each if the shard has a later epoch
-- Nothing to do: a call without ids only raises the fence.
--
-- The answer raises the fence: publishers with an earlier map cannot publish chosen ids here any more, so free ids stay
-- free. With `closing` the shard accepts no messages until a later epoch.

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

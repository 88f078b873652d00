-- ask: at the shard that chosen ids had for a home -> nowhere: whether the home that they have now may publish them
--
-- KEYS  epoch unack? retries_left? lease? garbage? | dedup
-- ARGV  clock known closing replace | id
-- Runs  epoch:GET,SET unack:ZSCORE retries_left:HEXISTS lease:HGET garbage:SISMEMBER dedup:GET
-- Returns  `free`, `duplicate` or `tombstoned` for each id; `stale` for each when the shard knows a later epoch
-- Nothing to do: without ids the fence is raised alone.
--
-- The fence is raised with the answer: whoever knows an earlier map publishes no chosen id here any more, so that what
-- is free stays free. With `closing` the shard takes no message at all until a later epoch.

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

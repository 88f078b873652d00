-- release: return leased messages to the head of ready or of their key queues, without spending a retry
--
-- KEYS  unack ready retries_left lease errors totals ends wake
-- ARGV  clock sleep_ms keyed | id nonce key
-- Runs  unack:ZMSCORE,ZREM ready:RPUSH retries_left:HDEL lease:HDEL,HMGET,HSET errors:HDEL,HMGET totals:HINCRBY
--       ends:XADD wake:LLEN,LPUSH
-- Keyed  ready:EXISTS retry:EXISTS watch:DEL limits:HGET,HMGET ring:EXISTS,ZADD,ZRANGE,ZREM held:ZCARD,ZLEXCOUNT,ZREM
--       asleep:ZADD,ZMSCORE,ZRANGE,ZSCORE rates:ZADD,ZREM,ZSCORE line:EXISTS,RPUSH retries_left:HGET
-- Returns  the ids of messages with an invalid receipt.
-- Nothing to do: an invalid receipt changes nothing.
--
-- The first message of the script call will be claimed first. A suspect, which may have killed an earlier worker
-- process, is still a suspect at its next delivery.
--
-- With `sleep_ms`, the keys of the messages are throttled for this time, except keys that are already throttled for
-- longer. A message without a key throttles the whole queue.

local ids, held, stopped, lost, words, receipt_of = receipts()
local freed, suspects, calm = {}, {}, {}
-- keyed: note_keys(receipt_of)
for j, i in ipairs(held) do
  local id, died = ids[i], deaths(words[i])
  freed[j] = id
  if died > 0 then pair(suspects, id, suspect(died)) else calm[#calm + 1] = id end
end

begin(unack)
-- keyed: correct_costs(receipt_of)
-- keyed: if sleep_ms ~= '' then put_to_sleep(freed, now_up + sleep_ms) end
if run('RPUSH', ready, reversed(come_back(freed))) then offer() end
run('HSET', lease, suspects)
run('ZREM', unack, freed)
run('HDEL', lease, calm)
stop(stopped)
add('released', #freed)
-- keyed: free_places(freed)
-- keyed: free_places(stopped)
return lost

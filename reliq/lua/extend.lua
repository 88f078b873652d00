-- extend: renew leases
--
-- KEYS  unack lease
-- ARGV  clock lease_ms | id nonce
-- Runs  unack:ZADD,ZMSCORE,ZREM lease:HMGET,HSET
-- Returns  the ids of messages with an invalid receipt, then the ids of cancelled messages.
-- Nothing to do: an invalid receipt changes nothing.
--
-- The state word of a message (its value in the hash `lease`) stores the longest time for which a worker has leased the
-- message. If the lease has more time left, because Redis' clock was set back, `tidy` shortens it. With `lease_ms` 0,
-- the state word shows that the worker process is dead: any `reclaim` then redelivers the message.

local ids, held, _, lost, words = receipts('any')
local stopped, deadlines, longer = {}, {}, {}
for _, i in ipairs(held) do
  local id, word = ids[i], words[i]
  pair(deadlines, score(now_up + lease_ms), id)
  if cancelled(word) then stopped[#stopped + 1] = id end
  if lease_ms == '0' or tonumber(lease_ms) > (tonumber(word:match(':(%d+)')) or 0) then
    pair(longer, id, (word:gsub(':%d+', ':' .. lease_ms)))
  end
end

begin(unack)
run('HSET', lease, longer)
run('ZADD', unack, deadlines)
return { lost, stopped }

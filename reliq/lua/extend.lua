-- extend: unack -> unack with a new deadline
--
-- KEYS  unack lease
-- ARGV  clock lease_ms | id nonce
-- Runs  unack:ZADD,ZMSCORE,ZREM lease:HMGET,HSET
-- Returns  the ids whose receipt no longer holds, then those whose message was cancelled
-- Nothing to do: a receipt that does not hold changes nothing.
--
-- A lease that is longer than any before is noted in the state word: `tidy` pulls back what lies behind it.

local ids, held, _, lost, words = receipts(true)
local stopped, deadlines, longer = {}, {}, {}
for _, i in ipairs(held) do
  local id, word = ids[i], words[i]
  pair(deadlines, score(now_up + lease_ms), id)
  if cancelled(word) then stopped[#stopped + 1] = id end
  if tonumber(lease_ms) > (tonumber(word:match(':(%d+)')) or 0) then
    pair(longer, id, (word:gsub(':%d+', ':' .. lease_ms)))
  end
end

begin(unack)
run('HSET', lease, longer)
run('ZADD', unack, deadlines)
return { lost, stopped }

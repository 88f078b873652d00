-- succeed: end running messages that have successors, and publish the successors under the same ids
--
-- KEYS  unack pending ready retries_left lease errors totals ends history wake watch | msg
-- ARGV  clock kind history_max keyed | id nonce took_ms key
-- Runs  unack:ZMSCORE,ZREM pending:ZADD,ZRANGE ready:LPUSH retries_left:HSET lease:HDEL,HMGET,HSET errors:HDEL
--       totals:HINCRBY ends:XADD history:XADD wake:LLEN,LPUSH watch:DEL msg:GETRANGE
-- Keyed  limits:HGET,HMGET ring:EXISTS,ZADD,ZRANGE held:ZCARD,ZLEXCOUNT,ZREM asleep:ZMSCORE,ZSCORE
--       rates:ZADD,ZREM,ZSCORE ready:EXISTS retry:EXISTS line:EXISTS,LPUSH retries_left:HGET
-- Returns  the ids of messages with an invalid receipt, and the ids of messages without a successor, each of these in
--          its own list.
-- Nothing to do: changes nothing if the receipt is invalid or the message has no successor.
--
-- If `kind` is `acked`, the running message ends as acked. Any other word means that the message has failed: its
-- successor replaces it, and the totals do not count its end, because they have already counted it as replaced. But if
-- the message was cancelled while it ran, and is not acked, it ends as cancelled.

local ids, held, _, lost, words, receipt_of = receipts('heir')
local done, took, stopped = {}, {}, {}
-- keyed: local over = {}
-- keyed: note_keys(receipt_of)

begin(unack)
-- keyed: correct_costs(receipt_of)
for _, i in ipairs(held) do
  local id = ids[i]
  local due, retries, first = heir(words[i])
  local left = retries
  -- keyed: local old = key_of[id]
  -- keyed: left = counted(retries, line_of_value(redis.call('GETRANGE', body(i), 0, 16383)))
  -- keyed: key_of[id] = key_in(left)
  if first ~= '' then redis.call('HSET', lease, id, first) else redis.call('HDEL', lease, id) end
  enter({ id }, tonumber(due))
  redis.call('HSET', retries_left, id, left)
  redis.call('ZREM', unack, id)
  redis.call('HDEL', errors, id)
  -- keyed: key_of[id], over[#over + 1] = old, id
  if kind == 'acked' then
    done[#done + 1], took[#took + 1] = id, arg(i, TOOK_MS)
  elseif cancelled(words[i]) then
    stopped[#stopped + 1] = id
  end
end
-- keyed: free_places(over)
add('published', #done + #stopped)
add('acked', #done)
note_ends(history, tonumber(history_max), 'acked', done, took, {})
count_ends('cancelled', stopped)
return lost

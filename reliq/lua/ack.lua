-- ack: ack running messages, or end messages without a body as expired
--
-- KEYS  unack retries_left lease errors totals ends history windows result | msg dedup
-- ARGV  clock kind history_max results keyed | id nonce window took_ms key
-- Runs  unack:ZMSCORE,ZREM retries_left:HDEL lease:HDEL,HMGET errors:HDEL,HMGET totals:HINCRBY ends:XADD,XREVRANGE
--       history:XADD windows:HDEL,HMGET msg:UNLINK dedup:SET result:SET
-- Keyed  limits:HGET,HMGET ring:EXISTS,ZADD,ZRANGE held:ZCARD,ZLEXCOUNT,ZREM asleep:ZMSCORE,ZREM,ZSCORE
--       rates:ZADD,ZREM,ZSCORE wake:LLEN,LPUSH ready:EXISTS retry:EXISTS line:EXISTS retries_left:HGET
-- Returns  the ids of messages with an invalid receipt.
-- Nothing to do: an invalid receipt changes nothing.
--
-- `kind` is `acked`, or `expired` for messages whose body did not exist when they were claimed. With `expired`,
-- cancelled messages end as `cancelled`. The stream `history` keeps the last `history_max` acked messages, with their
-- run times `took_ms`.
--
-- If an id may be a chosen id, the script call has deduplication keys. A chosen id stays blocked after the end of its
-- message for the time that its publish has stored, or else for `window` ms.
--
-- A message that ends as expired was claimed but never ran. So the script returns its tokens to the token buckets of
-- the queue's rate limits. For such a message, `took_ms` is not a run time but the time of the claim (the fencing
-- token).
--
-- `results` is empty, or a MessagePack list: for how many ms Redis keeps the results, and the encoded result of each
-- message. With each result, the script stores the id of the newest entry in the stream `ends`. If the stream later has
-- a newer entry with the same message id, another message with this id has ended, and `status` ignores the result.

local ids, held, stopped, lost, _, receipt_of = receipts(kind == 'acked')
local done, bodies, spans, took = {}, {}, {}, {}
-- keyed: note_keys(receipt_of)
for j, i in ipairs(held) do done[j], bodies[j], spans[j], took[j] = ids[i], body(i), arg(i, WINDOW), arg(i, TOOK_MS) end

-- Write the results first. When Redis is full (`maxmemory`), it then refuses the results, but the script still ends the
-- messages: Redis checks its memory only until the first successful write of a script.
local refused = 0
if results ~= '' then
  local records, last = cmsgpack.unpack(results), redis.pcall('XREVRANGE', ends, '+', '-', 'COUNT', 1)[1]
  for j, i in ipairs(held) do
    local record = (last and last[1] or '0-0') .. ' ' .. records[i + 1]
    if redis.pcall('SET', result .. done[j], record, 'PX', records[1]).err then refused = refused + 1 end
  end
end

begin(unack)
-- keyed: correct_costs(receipt_of)
take(done, held, spans)
run('ZREM', unack, done)
if kind == 'expired' then
  finish(kind, done)
  stop(stopped)
else
  forget(done)
  add(kind, #done)
  note_ends(history, tonumber(history_max), kind, done, took, {})
end
if #bodies > 0 then redis.call('UNLINK', unpack(bodies)) end
-- keyed: free_places(done) free_places(stopped)
-- keyed: if kind == 'expired' then give_back(done, stopped) end
add('results_dropped', refused)
return lost

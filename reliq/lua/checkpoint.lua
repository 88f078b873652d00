-- checkpoint: store checkpoints of running messages in their headers
--
-- KEYS  unack lease | msg
-- ARGV  clock | id nonce number saved
-- Runs  unack:ZMSCORE,ZREM lease:HMGET,HSET msg:GET,GETRANGE,SET,SETRANGE
-- Returns  the ids of messages with an invalid receipt, then the ids of cancelled messages.
-- Nothing to do: changes nothing if the receipt is invalid, the body is missing, or Redis has a later checkpoint.
--
-- `saved` is a JSON string with the checkpoint, which begins with `number`, the number of the checkpoint. If a handler
-- reports its progress without a new checkpoint, the number is the number of the last checkpoint.
--
-- The script writes `saved` as the last field of the header, with the name `~`. The text `,"~":` occurs nowhere else in
-- a header, because publishers cannot set a header with this name and JSON escapes quotes. The script adds spaces to
-- the field, up to a multiple of 64 bytes, so that it can usually overwrite the field with the next checkpoint.

local ids, held, _, lost, words = receipts('any')
local stopped, alive = {}, {}
begin(unack)
for _, i in ipairs(held) do
  if cancelled(words[i]) then stopped[#stopped + 1] = ids[i] end
  local start = redis.call('GETRANGE', body(i), 0, 16383)
  -- If the running message has a successor, Redis already stores the successor's body under the same id. Do not write
  -- the checkpoint into it, because the successor must not resume from this checkpoint.
  local last = not heir(words[i]) and start:match('^RELIQ/1 [^\n]*()}\n')
  if last then
    local at = start:sub(1, last):find(',"~":', 1, true) or last
    local before = tonumber(start:match('^,"~":"(%d+)', at) or 0)
    local piece = ',"~":' .. arg(i, SAVED) .. string.rep(' ', -#arg(i, SAVED) % 64) .. '}'
    if before > tonumber(arg(i, NUMBER)) then
      piece = ''
    elseif #piece == last - at + 1 then
      redis.call('SETRANGE', body(i), at - 1, piece)
    else
      local value = redis.call('GET', body(i))
      redis.call('SET', body(i), value:sub(1, at - 1) .. piece .. value:sub(last + 1), 'KEEPTTL')
    end
    -- The handler has come further than in the earlier deliveries whose leases expired. So the message is no longer
    -- suspected to kill its worker process: remove the number of these deliveries from its state word.
    if tonumber(arg(i, NUMBER)) > before and deaths(words[i]) > 0 then pair(alive, ids[i], (words[i]:gsub('^%d+~', ''))) end
  end
end
run('HSET', lease, alive)
return { lost, stopped }

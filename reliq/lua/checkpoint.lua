-- checkpoint: store a handler's checkpoint in the header of its message
--
-- KEYS  unack lease | msg
-- ARGV  clock | id nonce number saved
-- Runs  unack:ZMSCORE,ZREM lease:HMGET,HSET msg:GET,GETRANGE,SET,SETRANGE
-- Returns  the ids with an invalid receipt, then the ids of cancelled messages.
-- Nothing to do: an invalid receipt, a missing body or an older checkpoint than in Redis changes nothing.
--
-- `saved` is a JSON string that begins with `number`, the number of the checkpoint. A progress report without a new
-- checkpoint has the number of the last checkpoint.
--
-- The script writes `saved` as the last field of the header, with the name `~`. The text `,"~":` occurs nowhere else,
-- because headers cannot have this name and JSON escapes quotes. Spaces extend the field to a multiple of 64 bytes, so
-- that the next checkpoint usually fits in the same place.

local ids, held, _, lost, words = receipts('any')
local stopped, alive = {}, {}
begin(unack)
for _, i in ipairs(held) do
  if cancelled(words[i]) then stopped[#stopped + 1] = ids[i] end
  local start = redis.call('GETRANGE', body(i), 0, 16383)
  -- If the message has a successor, which takes over the id later, the body in Redis is the successor's body. Do not
  -- write the checkpoint there: the successor must not resume from it.
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
    -- The handler has passed the last checkpoint of the deliveries whose leases expired, so the message is no longer
    -- suspected of killing its process.
    if tonumber(arg(i, NUMBER)) > before and deaths(words[i]) > 0 then pair(alive, ids[i], (words[i]:gsub('^%d+~', ''))) end
  end
end
run('HSET', lease, alive)
return { lost, stopped }

-- Each message to the head of ready, or of the line of its key.
--
-- With `sleep_ms` the messages' keys sleep for so long from now on, those that sleep for longer as long as before; of a
-- message without a key the queue sleeps.

local ids, holding, stopped, lost, _, receipt_of = receipts()
local freed, suspects, calm, sleepers, untils = {}, {}, {}, {}, {}
know(receipt_of)
for j = #holding, 1, -1 do
  local id, died = ids[holding[j]], deaths(arg(holding[j], NONCE))
  freed[#freed + 1] = id
  if died > 0 then pair(suspects, id, suspect(died)) else calm[#calm + 1] = id end
  local key = priorities[key_of[id]] and '' or key_of[id]
  local before, wanted = ms_of(redis.call('ZSCORE', asleep, key) or 0), now_up + (tonumber(sleep_ms) or 0)
  if sleep_ms ~= '' and before < wanted then sleepers[#sleepers + 1], untils[#untils + 1] = key, wanted end
end

begin(unack)
put(asleep, untils, sleepers)
run('ZREM', ring, sleepers)
if run('RPUSH', ready, come_back(freed)) then offer() end
run('HSET', lease, suspects)
run('ZREM', unack, freed)
run('HDEL', lease, calm)
stop(stopped)
add('released', #freed)
free_places(freed)
free_places(stopped)
return lost

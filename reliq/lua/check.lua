-- check: anywhere -> where it belongs
--
-- KEYS  pending ready unack retry garbage counts lease errors dead ends totals wake watch | msg
-- ARGV  clock part from to | id seen place due left word kind note
-- Returns  the time in ms; then for each id its state, or where a state was `seen` `mended` or `changed`
-- Nothing to do: an id whose state is no longer the one that was `seen` is left alone.
--
-- A state: scores in pending and unack, 1 in garbage, retries left, state word, 1 with an error, type and start of
-- the body, how often it is in ready and in retry (in the piece `from`..`to` of the list `part`, or in all of both:
-- as slow as they are long), and a digest of all that.
-- `place`, `left` and `word` are `=` where they are right; `kind` is how a message ends, `stray` if none does.

local ids, piece, reply = {}, {}, { now_down }
if ITEMS == 0 then return reply end
for i = 1, ITEMS do ids[i] = arg(i, ID) end
local scores, deadlines = redis.call('ZMSCORE', pending, unpack(ids)), redis.call('ZMSCORE', unack, unpack(ids))
local ended = redis.call('SMISMEMBER', garbage, unpack(ids))
for _, id in ipairs(redis.call('LRANGE', part == 'retry' and retry or ready, from, to)) do piece[id] = (piece[id] or 0) + 1 end

local function met(list, name, id)
  if part == 'both' then return #redis.call('LPOS', list, id, 'COUNT', 100) end
  return part == name and (piece[id] or 0) or ''
end

local function mend(i, id, times)
  local place, left, kind, key = arg(i, PLACE), arg(i, LEFT), arg(i, KIND), body(i)
  local value = kind == 'dead' and redis.call('GET', key)
  if left ~= '=' then redis.call('HDEL', counts, id) end
  if arg(i, WORD) == '' then redis.call('HDEL', lease, id) end
  if place ~= '=' then redis.call('ZREM', pending, id) redis.call('ZREM', unack, id) end
  if place ~= '=' and place ~= 'garbage' then redis.call('SREM', garbage, id) end
  for name, list in pairs(place ~= '=' and { ready = ready, retry = retry } or {}) do
    local surplus = (tonumber(times[name]) or 0) - (place == name and 1 or 0)
    if surplus > 0 then redis.call('LREM', list, surplus, id) end
    if surplus < 0 then redis.call('LPUSH', list, id) push_token() end
  end
  if place == 'pending' or place == 'unack' then put(place == 'unack' and unack or pending, tonumber(arg(i, DUE)), { id }) end
  if left ~= '=' and left ~= '' then redis.call('HSET', counts, id, left) end
  if kind == 'expired' or kind == 'cancelled' then finish(kind, { id }) end
  if kind ~= '' then forget({ id }) redis.call('DEL', key) end
  if value then
    local letter = redis.call('XADD', dead, '*', 'id', id, 'value', value, 'note', arg(i, NOTE))
    add(kind, 1)
    note_ends(ends, 1000, kind, { id }, { arg(i, NOTE) }, { letter })
  end
  return 'mended'
end

for i, id in ipairs(ids) do
  local kind, times = redis.call('TYPE', body(i)).ok, { ready = met(ready, 'ready', id), retry = met(retry, 'retry', id) }
  local state = { scores[i] or '', deadlines[i] or '', ended[i], redis.call('HGET', counts, id) or '' }
  state[5], state[6] = redis.call('HGET', lease, id) or '', redis.call('HEXISTS', errors, id)
  state[7], state[8] = kind, kind == 'string' and redis.call('GETRANGE', body(i), 0, 31) or ''
  state[9], state[10] = times.ready, times.retry
  state[11] = redis.sha1hex(table.concat(state, '\n'))
  reply[i + 1] = arg(i, SEEN) == '' and state or (arg(i, SEEN) == state[11] and mend(i, id, times)) or 'changed'
end
return reply

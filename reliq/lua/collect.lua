-- collect: garbage -> dead letter
--
-- KEYS  garbage errors dead totals ends | msg dd
-- ARGV  clock letters_max letters_ms | id
-- Returns  the ids that became letters, and those whose body was gone (they end as expired)
-- Nothing to do: an id that is no longer in garbage is left alone.

local buried, gone, why, last = {}, {}, {}, {}
for i = 1, ITEMS do
  local id = arg(i, ID)
  if redis.call('SREM', garbage, id) == 1 then
    local value = redis.pcall('GET', body(i))
    local note = redis.call('HGET', errors, id) or 'lease - '
    if type(value) ~= 'string' then
      gone[#gone + 1], last[#gone + 1] = id, note
    else
      if tonumber(letters_max) > 0 then
        redis.call('XADD', dead, '*', 'id', id, 'value', value, 'note', note)
      end
      buried[#buried + 1], why[#buried + 1] = id, note
      local window = value:match('^RELIQ/1 {"d":%d+,"r":%d+,"e":%d+,"w":(%d+)')
      if window and tonumber(window) > 0 then redis.pcall('SET', mark(i), 'ended', 'PX', window) end
    end
    redis.call('HDEL', errors, id)
    redis.call('DEL', body(i))
  end
end
local dropped = redis.call('XTRIM', dead, 'MAXLEN', letters_max)
local oldest = redis.call('XRANGE', dead, '-', string.format('%.0f', math.max(0, now_down - letters_ms)), 'COUNT', 100)
for _, letter in ipairs(oldest) do dropped = dropped + redis.call('XDEL', dead, letter[1]) end
add('dead', #buried)
add('expired', #gone)
add('letters_dropped', dropped)
note_ends(ends, 1000, 'dead', buried, why)
note_ends(ends, 1000, 'expired', gone, last)
return { buried, gone }

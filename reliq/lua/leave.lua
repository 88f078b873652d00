-- leave: leaving -> gone, or back where it was
--
-- KEYS  pending ready retry unack retries_left lease errors totals ends wake watch windows leaving | msg
-- ARGV  clock number | id stays
-- Runs  pending:ZADD,ZRANGE ready:LPUSH retry:LPUSH unack:ZADD,ZRANGE,ZREM,ZSCORE retries_left:HDEL lease:HDEL,HGET,HSET
--       errors:HDEL,HMGET totals:HINCRBY ends:XADD wake:LLEN,LPUSH watch:DEL windows:HDEL leaving:HDEL,HGET msg:DEL
-- Returns  the ids that were cancelled meanwhile, and that the other shard has
-- Nothing to do: no ids, of a departure that is over, or was never begun.
--
-- Only what this departure holds goes or comes back: when it was cut off, some may be where they were, and stay there.

if (redis.call('HGET', leaving, '') or ''):match('^%d+') ~= number then return {} end
local gone, bodies, over, cancels, ended, words, calm = {}, {}, {}, {}, {}, {}, {}
local lists, dues, back = { ready = {}, retry = {} }, { pending = {}, unack = {} }, { pending = {}, unack = {} }
for i = 1, ITEMS do
  local id = arg(i, ID)
  local record, word = redis.call('HGET', leaving, id), redis.call('HGET', lease, id) or ''
  local one = record and cmsgpack.unpack(record) or { 'dead' }
  local holds = one[1] ~= 'dead' and word:match('^shards%.(%d+):') == number and redis.call('ZSCORE', unack, id)
  over[#over + 1] = id
  if holds and arg(i, STAYS) == '' then
    gone[#gone + 1], bodies[#bodies + 1] = id, body(i)
    if cancelled(word) then cancels[#cancels + 1] = id end
  elseif holds and cancelled(word) then
    ended[#ended + 1], bodies[#bodies + 1] = id, body(i)
  elseif holds then
    if one[3] ~= '' then pair(words, id, one[3]) else calm[#calm + 1] = id end
    local at, ids = dues[one[1]], lists[one[1]] or back[one[1]]
    ids[#ids + 1] = id
    if at then at[#at + 1] = ms_of(one[2]) end
  end
end

begin(unack)
put(pending, dues.pending, back.pending)
for name, ids in pairs(lists) do
  if run('LPUSH', name == 'ready' and ready or retry, ids) then push_token() end
  run('ZREM', unack, ids)
end
run('ZREM', unack, back.pending)
put(unack, dues.unack, back.unack)
run('HSET', lease, words)
run('HDEL', lease, calm)
run('ZREM', unack, gone)
forget(gone)
if #gone > 0 then redis.pcall('HDEL', windows, unpack(gone)) end
stop(ended)
if #bodies > 0 then redis.call('DEL', unpack(bodies)) end
run('HDEL', leaving, over)
add('left', #gone)
return cancels

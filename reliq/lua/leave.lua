-- leave: finish the move of a batch in its old shard, and delete the messages that have moved
--
-- KEYS  pending ready retry unack retries_left lease errors totals ends wake watch windows leaving | msg
-- ARGV  clock number | id stays
-- Runs  pending:ZADD,ZRANGE ready:LPUSH retry:LPUSH unack:ZADD,ZRANGE,ZREM,ZSCORE retries_left:HDEL lease:HDEL,HGET,HSET
--       errors:HDEL,HMGET totals:HINCRBY ends:XADD wake:LLEN,LPUSH watch:DEL windows:HDEL leaving:HDEL,HGET msg:DEL
-- Returns  the ids of moved messages that were cancelled during the move.
-- Nothing to do: if the move of this batch has ended or never began, returns no ids.
--
-- Messages with `stays` have not moved, so they return to their earlier states. The script skips messages that are no
-- longer reserved for this batch: Redis may have stopped in the middle of an earlier call, which has already returned
-- these messages to their states.

if (redis.call('HGET', leaving, '') or ''):match('^%d+') ~= number then return {} end
local gone, bodies, over, cancels, ended, words, calm = {}, {}, {}, {}, {}, {}, {}
local back, dues = { pending = {}, ready = {}, retry = {}, unack = {} }, { pending = {}, unack = {} }
for i = 1, ITEMS do
  local id = arg(i, ID)
  local record, word = redis.call('HGET', leaving, id), redis.call('HGET', lease, id) or ''
  local state, at, before = unpack(record and cmsgpack.unpack(record) or { 'dead' })
  local holds = state ~= 'dead' and word:match('^shards%.(%d+):') == number and redis.call('ZSCORE', unack, id)
  over[i] = id
  if holds and (cancelled(word) or arg(i, STAYS) == '') then bodies[#bodies + 1] = body(i) end
  if holds and arg(i, STAYS) == '' then
    gone[#gone + 1] = id
    if cancelled(word) then cancels[#cancels + 1] = id end
  elseif holds and cancelled(word) then
    ended[#ended + 1] = id
  elseif holds then
    if before ~= '' then pair(words, id, before) else calm[#calm + 1] = id end
    table.insert(back[state], id)
    if dues[state] then table.insert(dues[state], ms_of(at)) end
  end
end

begin(unack)
put(pending, dues.pending, back.pending)
line_up(back.ready)
redeliver(back.retry)
for _, state in ipairs({ 'pending', 'ready', 'retry' }) do run('ZREM', unack, back[state]) end
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

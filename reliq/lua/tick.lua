-- tick: publish the message of a periodic job's tick (due time), and mark the tick as settled
--
-- KEYS  cron pending ready retries_left lease garbage totals wake watch | msg
-- ARGV  clock entry schedule since tick asked overlap missed at ttl_ms retries prefix | id value
-- Runs  cron:HDEL,HLEN,HMGET,HSET pending:ZADD,ZCARD,ZRANGE ready:LLEN,LPUSH retries_left:HEXISTS,HLEN,HSET
--       lease:HDEL,HLEN garbage:SCARD,SISMEMBER totals:HINCRBY wake:LLEN,LPUSH watch:DEL msg:SET
-- Returns  `published`; `paused` if the tick is skipped because the job is paused (the missed ticks then also count as
--          skipped); `overlap` if the tick is skipped because the job's last message has not ended; or `missed` if the
--          script call has no message.
-- Nothing to do: returns `done` if another process has settled the tick or the requested run; `superseded` if Redis has
--          another schedule for the job; `unknown` if Redis has no schedule for it.
--
-- The script publishes the message before it marks the tick as settled. So if Redis stops in the middle of the script,
-- the tick is handled again and is not lost. If Redis is full (`maxmemory`), it refuses the first write, and the script
-- changes nothing: the first write is a SET, or an HSET if no message is published.

local function of(what) return entry .. ' ' .. what end
local names = { of('schedule'), of('last'), of('asked'), of('pause'), of('id'), of('missed'), of('paused'), of('overlap') }
local known, last, wish, pause, before, misses, pauses, overlaps = unpack(redis.call('HMGET', cron, unpack(names)))
if not known then return 'unknown' end
if known ~= schedule then return 'superseded' end
if asked == '' and last ~= since or asked ~= '' and wish ~= asked then return 'done' end

local function alive(one) return redis.call('HEXISTS', retries_left, one) == 1 end
local id, due = ITEMS > 0 and arg(1, ID), math.max(tonumber(at), now_down)
local blocked = overlap == 'skip' and before and alive(before)
local answer = asked == '' and pause and 'paused' or not id and 'missed' or asked == '' and blocked and 'overlap' or 'published'

-- If a message with this id is alive or in `garbage`, an earlier call has published it, but Redis stopped before it
-- marked the tick as settled.
if answer == 'published' and not alive(id) and redis.call('SISMEMBER', garbage, id) == 0 then
  local start = prefix == '' and '' or prefix .. string.format('%.0f', due)
  redis.call('SET', body(1), start .. arg(1, VALUE), 'PX', string.format('%.0f', due - now_down + ttl_ms))
  redis.call('HDEL', lease, id)
  enter({ id }, due)
  redis.call('HSET', retries_left, id, retries)
  add('published', 1)
end

local news = asked == '' and { of('last'), tick } or {}
local function plus(what, text, n) pair(news, of(what), string.format('%.0f', (tonumber(text or '') or 0) + n)) end
if answer == 'published' then pair(news, of('id'), id) end
if answer == 'published' and asked == '' then pair(news, of('ticked'), tick) end
if answer == 'paused' then plus('paused', pauses, missed + (id and 1 or 0)) end
if answer == 'overlap' then plus('overlap', overlaps, 1) end
if answer ~= 'paused' and tonumber(missed) > 0 then plus('missed', misses, missed) end
redis.call('HSET', cron, unpack(news))
if asked ~= '' then redis.call('HDEL', cron, of('asked')) end
return answer

-- plan_tick: publish the messages of due stored schedules, and write their next ticks
--
-- KEYS  plans plans_due ready retries_left lease garbage totals wake | msg
-- ARGV  clock prefix keyed | id name revision since next ttl_ms retries value key
-- Runs  plans:HGET,HLEN plans_due:ZADD,ZCARD,ZREM,ZSCORE ready:LPUSH retries_left:HEXISTS,HSET
--       lease:HDEL garbage:SISMEMBER totals:HINCRBY wake:LLEN,LPUSH msg:SET
-- Keyed  limits:HGET,HMGET,HSETNX ring:ZADD,ZRANGE held:ZCARD,ZLEXCOUNT asleep:ZMSCORE,ZSCORE rates:ZSCORE
--       line:EXISTS,LPUSH
-- Returns  for each tick (due time) `published`; `missed` if `value` is empty; or `superseded` if the schedule was
--          deleted, paused or changed, or if `since` is not its next tick.
-- Nothing to do: if the tick is no longer the next tick of its schedule, returns `superseded`.
--
-- The script publishes the messages before it writes the next ticks. So if Redis stops in the middle of the script, a
-- tick is handled again, and no tick is lost. `next` is the tick after this tick, or empty if no tick follows. If a
-- script call has several ticks of a schedule, they are in the order of their times.

local answers, fresh, left, nexts = {}, {}, {}, {}
local function alive(id) return redis.call('HEXISTS', retries_left, id) == 1 or redis.call('SISMEMBER', garbage, id) == 1 end
-- keyed: if keyed == '1' then redis.call('HSETNX', limits, 'on', '1') end
for i = 1, ITEMS do
  local id, name = arg(i, ID), arg(i, NAME)
  local row = redis.call('HGET', plans, name)
  local known, pause = (row or ''):match('^(%x+) ([^\n]*)\n')
  local expected = nexts[name] or redis.call('ZSCORE', plans_due, name)
  answers[i] = 'superseded'
  if not row or (pause or '') ~= '' then
    nexts[name] = ''
  elseif known == arg(i, REVISION) and tonumber(expected or '') == tonumber(arg(i, SINCE)) then
    answers[i], nexts[name] = arg(i, VALUE) == '' and 'missed' or 'published', arg(i, NEXT)
    -- If a message with this id is alive, an earlier call has published it, but Redis stopped before it wrote the next
    -- tick.
    if answers[i] == 'published' and not alive(id) then
      redis.call('SET', body(i), prefix .. string.format('%.0f', now_down) .. arg(i, VALUE), 'PX', arg(i, TTL_MS))
      fresh[#fresh + 1] = id
      pair(left, id, arg(i, RETRIES))
      -- keyed: left[#left] = counted(arg(i, RETRIES), line_arg(i))
      -- keyed: key_of[id] = key_in(left[#left])
    end
  end
end
run('HDEL', lease, fresh)
line_up(fresh)
run('HSET', retries_left, left)
add('published', #fresh)
for name, next in pairs(nexts) do
  if next ~= '' then redis.call('ZADD', plans_due, next, name) else redis.call('ZREM', plans_due, name) end
end
return answers

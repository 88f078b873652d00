-- plan: create, change, delete, pause or resume a stored schedule
--
-- KEYS  plans plans_due limits map
-- ARGV  clock verb name revision next key value
-- Runs  plans:HDEL,HGET,HLEN,HSET plans_due:ZADD,ZCARD,ZREM,ZSCORE limits:HSETNX map:GET
-- Returns  `written`, `deleted`, `paused` or `resumed`; `unchanged` if the schedule already is in this state; `unknown`
--          if there is no such schedule; `sharded` if the schedule has a message key and the queue has several shards;
--          `superseded` if `next` has passed, or if the caller of a resume has read another revision.
-- Nothing to do: returns `unchanged`, `unknown`, `sharded` or `superseded`.
--
-- The hash `plans` stores a schedule as `REVISION PAUSE`, a line feed, and the definition (options and message).
-- REVISION is the hash of the definition. PAUSE is the user who paused the schedule and the reason, as JSON, or empty.
-- With the verb `write`, the argument `value` is the definition; with `pause`, it is PAUSE. `next` is the next tick
-- (due time), or empty if no tick follows. A `write` keeps the PAUSE of the schedule. If the definition is the same, it
-- also keeps the next tick.

local row = redis.call('HGET', plans, name)
local known, pause, rest = (row or ''):match('^(%x+) ([^\n]*)\n(.*)$')
if verb == 'delete' then
  redis.call('ZREM', plans_due, name)
  return redis.call('HDEL', plans, name) == 1 and 'deleted' or 'unknown'
end
if verb ~= 'write' and not known then return 'unknown' end
if verb == 'pause' then
  if pause ~= '' then redis.call('ZREM', plans_due, name) return 'unchanged' end
  redis.call('HSET', plans, name, known .. ' ' .. value .. '\n' .. rest)
  redis.call('ZREM', plans_due, name)
  return 'paused'
end
if verb == 'resume' and pause == '' then return 'unchanged' end
if verb == 'resume' and known ~= revision then return 'superseded' end
if key ~= '' and is_sharded() then return 'sharded' end
local is_new = known ~= revision
local sets_next = verb == 'resume' or (pause or '') == '' and (is_new or not redis.call('ZSCORE', plans_due, name))
-- `next` may have passed since the client read the clock, and a worker may already have published the message of this
-- tick. Then the client must compute `next` again.
if sets_next and next ~= '' and next * 1000 <= now_down then return 'superseded' end
if key ~= '' then redis.call('HSETNX', limits, 'on', '1') end

-- Write the next tick before the schedule, because Redis may stop between the two writes. A tick without a schedule is
-- removed later, but a schedule without a tick would never run.
if sets_next then
  if next ~= '' then redis.call('ZADD', plans_due, next, name) else redis.call('ZREM', plans_due, name) end
end
if verb == 'write' and not is_new then return 'unchanged' end
redis.call('HSET', plans, name, revision .. ' ' .. (verb == 'resume' and '' or pause or '') .. '\n' .. (value ~= '' and value or rest))
return verb == 'resume' and 'resumed' or 'written'

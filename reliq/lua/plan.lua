-- plan: write, delete, pause or resume a stored schedule
--
-- KEYS  plans plans_due limits map
-- ARGV  clock verb name revision next key value
-- Runs  plans:HDEL,HGET,HLEN,HSET plans_due:ZADD,ZCARD,ZREM,ZSCORE limits:HSETNX map:GET
-- Returns  `written`, `deleted`, `paused` or `resumed`; `unchanged` if the schedule already is in this state; `unknown`
--          if there is no such schedule; `sharded` if the schedule has a message key and the queue has several shards;
--          `superseded` if `next` has passed, or if the caller of a resume has read another revision.
-- Nothing to do: returns `unchanged`, `unknown`, `sharded` or `superseded`.
--
-- Redis stores a schedule as `REVISION PAUSE`, a line feed, and the definition (options and message). The revision is
-- the hash of the definition. For a write, `value` is the definition; for a pause, `value` is the pause. `next` is the
-- next tick, or empty if there is none. A write keeps the pause. If the revision is the same, it also keeps the next
-- tick.

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
-- If `next` has passed since the client read the clock, a worker may have published this tick.
if sets_next and next ~= '' and next * 1000 <= now_down then return 'superseded' end
if key ~= '' then redis.call('HSETNX', limits, 'on', '1') end

-- Write the next tick before the schedule's row, because the script may be interrupted. A tick without a row is removed
-- later, but a row without a tick would never run.
if sets_next then
  if next ~= '' then redis.call('ZADD', plans_due, next, name) else redis.call('ZREM', plans_due, name) end
end
if verb == 'write' and not is_new then return 'unchanged' end
redis.call('HSET', plans, name, revision .. ' ' .. (verb == 'resume' and '' or pause or '') .. '\n' .. (value ~= '' and value or rest))
return verb == 'resume' and 'resumed' or 'written'

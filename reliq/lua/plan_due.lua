-- plan_due: read the stored schedules that are due
--
-- KEYS  plans plans_due
-- ARGV  clock skip limit
-- Runs  plans:HLEN,HMGET plans_due:ZCARD,ZCOUNT,ZRANGE
-- Returns  the current time in unix ms; the ms until the next tick (due time) of any schedule (-1: there is none); how
--          many schedules are due; then for each due schedule its name, its tick in unix seconds, and its value in the
--          hash `plans` (empty if the hash does not have it). The first `skip` due schedules are left out, and at most
--          `limit` are returned.
-- Nothing to do: if no schedule is due, returns no names.

local due = redis.call('ZCOUNT', plans_due, '-inf', score(now_down))
local answer = { now_down, wait_for(plans_due), due }
local last = math.min(due, skip + limit) - 1
local found = last >= tonumber(skip) and redis.call('ZRANGE', plans_due, skip, last, 'WITHSCORES') or {}
local names = {}
for i = 1, #found, 2 do names[#names + 1] = found[i] end
local rows = run('HMGET', plans, names)
for i, name in ipairs(names) do
  pair(answer, name, found[2 * i])
  answer[#answer + 1] = rows[i] or ''
end
return answer

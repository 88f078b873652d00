-- plan_due: read the stored schedules that are due
--
-- KEYS  plans plans_due
-- ARGV  clock skip limit
-- Runs  plans:HLEN,HMGET plans_due:ZCARD,ZCOUNT,ZRANGE
-- Returns  the time in ms; the ms until the next tick (-1: none); how many schedules are due; then name, tick in unix
--          seconds and row (empty if it is missing) of at most `limit` due schedules after the first `skip`.
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

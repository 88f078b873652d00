-- register: periodic entries -> in force, each with its schedule
--
-- KEYS  cron
-- ARGV  clock newest | entry schedule
-- Runs  cron:HLEN,HMGET,HSET
-- Returns  the time in ms, then of each entry the tick up to which all is done and when a run was asked for; `` for
--   none, and twice where another schedule is in force
-- Nothing to do: the same.
--
-- A process calls it when it starts, as the `newest`, and then every few seconds. A schedule that no process has
-- called for in half a minute gives way to the next that does: its processes are gone.

local now, answer = math.floor(now_down / 1000), { now_down }
for i = 1, ITEMS do
  local entry, wanted = arg(i, ENTRY), arg(i, SCHEDULE)
  local names = { entry .. ' schedule', entry .. ' last', entry .. ' seen', entry .. ' asked' }
  local known, last, seen, asked = unpack(redis.call('HMGET', cron, unpack(names)))
  local silent = now - (tonumber(seen or '') or 0)
  local is_ours = known == wanted and (last or ''):find('^%d+$') and #last < 13
  if is_ours and silent > 10 then
    redis.call('HSET', cron, names[3], now)
  elseif not is_ours and (newest == '1' or not known or known == wanted or silent > 30) then
    -- What was due before it was in force is not made up for, and no tick comes twice by a clock that was set back.
    local before = (last or ''):match('^%d+$')
    last = string.format('%.0f', math.max(now, math.min(tonumber(before or 0), 1e11)))
    redis.call('HSET', cron, names[1], wanted, names[2], last, names[3], now)
    is_ours = true
  end
  pair(answer, is_ours and last or '', is_ours and asked or '')
end
return answer

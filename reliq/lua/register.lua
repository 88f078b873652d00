-- register: store periodic jobs with their schedules
--
-- KEYS  cron
-- ARGV  clock newest | entry schedule
-- Runs  cron:HLEN,HMGET,HSET
-- Returns  the time in ms, then for each entry the last settled tick and the time of a requested run (empty: none);
--          both are empty if Redis keeps another schedule.
-- Nothing to do: if the schedules are stored already, returns the same answer.
--
-- A process calls this script with `newest` when it starts, and without `newest` every few seconds. If no process has
-- registered the stored schedule for half a minute, the caller's schedule replaces it.

local now, answer = math.floor(now_down / 1000), { now_down }
for i = 1, ITEMS do
  local entry, wanted, names = arg(i, ENTRY), arg(i, SCHEDULE), {}
  for n, name in ipairs({ 'schedule', 'last', 'seen', 'asked', 'former', 'former_seen' }) do names[n] = entry .. ' ' .. name end
  local known, last, seen, asked, former, former_seen = unpack(redis.call('HMGET', cron, unpack(names)))
  local function silent(since) return now - (tonumber(since or '') or 0) end
  local before = (last or ''):match('^%d+$')
  local is_sound = before and #before < 13
  local is_ours = known == wanted and is_sound
  if is_ours and silent(seen) > 10 then
    redis.call('HSET', cron, names[3], now)
  elseif not is_ours and (newest == '1' or not known or known == wanted or silent(seen) > 30) then
    local is_change = known and known ~= wanted
    local ran_meanwhile = newest ~= '1' or former == wanted and silent(former_seen) <= 30
    if not (is_change and is_sound and ran_meanwhile) then
      -- The new schedule skips all ticks before now. If it replaces another schedule, a tick in this second is not
      -- skipped: it may also be a tick of the former schedule that is not published yet. If the clock was set back, no
      -- tick is repeated.
      last = string.format('%.0f', math.max(is_change and now - 1 or now, math.min(tonumber(before or 0), 1e11)))
    end
    redis.call('HSET', cron, names[1], wanted, names[2], last, names[3], now)
    if is_change then redis.call('HSET', cron, names[5], known, names[6], seen or 0) end
    is_ours = true
  elseif not is_ours and former == wanted and silent(former_seen) > 10 then
    redis.call('HSET', cron, names[6], now)
  end
  pair(answer, is_ours and last or '', is_ours and asked or '')
end
return answer

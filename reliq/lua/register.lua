-- register: store periodic jobs with their schedules, and read their states
--
-- KEYS  cron
-- ARGV  clock newest | entry schedule
-- Runs  cron:HLEN,HMGET,HSET
-- Returns  the current time in unix ms; then for each periodic job its last settled tick (due time), and when a user
--          requested an immediate run (empty: no request). Both are empty if Redis keeps another schedule for the job.
-- Nothing to do: if the schedules are already stored, only returns these values.
--
-- A process calls this script with `newest` when it starts: its schedules then replace different stored schedules.
-- Every few seconds, it calls the script without `newest`. Its schedule then replaces a different stored schedule only
-- if no process has registered the stored schedule for half a minute.

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
      -- The new schedule begins now, so its earlier ticks (due times) are skipped. If it replaces another schedule, a
      -- tick in this second is not skipped, because the other schedule may have the same tick and may not have
      -- published it. If Redis' clock was set back, keep the later of both times, so that no tick is repeated.
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

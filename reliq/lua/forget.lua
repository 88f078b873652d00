-- forget: remove an empty queue
--
-- KEYS  pending ready unack retry garbage retries_left dead lease errors totals ends history minutes cron? plans? plans_due? wake watch paused windows map? epoch? token? leaving arrived limits? ring? held? asleep? rates?
-- ARGV  clock letters look
-- Runs  pending:ZCARD ready:LLEN unack:ZCARD retry:LLEN garbage:SCARD retries_left:HLEN dead:UNLINK,XLEN
--       lease:HLEN,UNLINK errors:HLEN,UNLINK totals:UNLINK ends:UNLINK history:UNLINK minutes:UNLINK cron:UNLINK wake:LLEN,UNLINK
--       plans:UNLINK plans_due:UNLINK watch:UNLINK paused:UNLINK windows:UNLINK map:UNLINK epoch:UNLINK token:UNLINK
--       leaving:UNLINK arrived:UNLINK limits:UNLINK ring:UNLINK held:UNLINK asleep:UNLINK rates:UNLINK
-- Returns  how many messages and how many dead letters the queue has.
-- Nothing to do: for a queue that does not exist, returns 0 and 0.
--
-- The script does not remove a queue that has messages. It removes a queue with dead letters only if `letters` is 1. If
-- `look` is 1, it removes nothing, and only counts the messages and dead letters.

local waiting = redis.call('ZCARD', pending) + redis.call('LLEN', ready) + redis.call('LLEN', retry)
local placed = waiting + redis.call('ZCARD', unack) + redis.call('SCARD', garbage)
-- A message that has a retry count, but is in no list and no set, is lost. `reliq check` can repair it, so count it as
-- a message of the queue.
local alive, kept = math.max(placed, redis.call('HLEN', retries_left)), redis.call('XLEN', dead)
if look == '0' and alive == 0 and (kept == 0 or letters == '1') then
  redis.call('UNLINK', dead, lease, errors, totals, ends, history, minutes, cron, wake, watch, paused, windows, map, epoch, token, leaving, arrived)
  redis.call('UNLINK', plans, plans_due, limits, ring, held, asleep, rates)
end
return { alive, kept }

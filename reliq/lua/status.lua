-- status: read the state of a living message, or how a message ended
--
-- KEYS  retries_left lease unack pending garbage errors ends result | msg
-- ARGV  clock | id
-- Runs  retries_left:HGET lease:HGET unack:ZSCORE pending:ZSCORE garbage:SISMEMBER errors:HGET ends:XREVRANGE
--       msg:GETRANGE result:GET
-- Returns  the state of the message or the kind of its end, its retries left, and its last failure; then the header of
--          a living message, or the stored result of a message that has ended.
-- Nothing to do: for an unknown id, returns `not_found`.

local id = arg(1, ID)
local left, word = redis.call('HGET', retries_left, id), redis.call('HGET', lease, id)
local why, state = redis.call('HGET', errors, id) or '', 'ready'
if redis.call('SISMEMBER', garbage, id) == 1 then return { 'dead', '', why, '' } end
if left then
  if redis.call('ZSCORE', pending, id) then state = 'pending' end
  if redis.call('ZSCORE', unack, id) then
    state = waits(word) and 'backoff' or 'running'
  elseif cancelled(word) then
    return { word == 'purged!' and 'purged' or 'cancelled', '', why, '' }
  end
  return { state, left, why, redis.call('GETRANGE', body(1), 0, 16383):match('^[^\n]*\n') or '' }
end
-- After a message has ended, a new message with the same id can be published. The stored result may belong to the
-- earlier of these messages. If a later message with this id has ended without an ack, return how the later message
-- ended.
local record = read('GET', result .. id)
local seen = record and record:match('^%d+-%d+')
for _, entry in ipairs(read('XREVRANGE', ends, '+', seen and '(' .. seen or '-', 'COUNT', 1000)) do
  local end_of = fields_of(entry)
  if end_of.id == id then return { end_of.kind or '', '', end_of.note or '', '' } end
end
return { record and 'acked' or 'not_found', '', '', record or '' }

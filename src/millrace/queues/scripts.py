"""What Redis runs in one step: scripts in Lua. They use the server's clock only, in milliseconds. ``KEYS[1]`` is ``r:RUN``.

Keys of a run: ``r`` links by last sign of life, ``d`` records, ``f`` its folder, ``e`` that it has ended, ``t`` tickets
that wait by time, ``l`` leases by end, ``h`` their holders, ``w`` and ``i`` workers, ``q`` wakes workers, ``n:`` what
became ready in each line, ``a:`` arrays, ``b:`` payloads.
"""

from __future__ import annotations

_NOW = """
local run, time = KEYS[1]:sub(3), redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function fresh(key, member, alive)
  local at = redis.call('ZSCORE', key, member)
  return at and now - at < tonumber(alive)
end
local function give_back(id)
  local held = redis.call('HGET', 'h:' .. run, id)
  redis.call('ZREM', 'l:' .. run, id)
  redis.call('HDEL', 'h:' .. run, id)
  local offered = tonumber(held and held:match('^(%S+) ')) or now
  redis.call('ZADD', 't:' .. run, offered == offered and offered or now, id)
end
local function worker_seen(worker, info, ttl)
  redis.call('ZADD', 'w:' .. run, now, worker)
  redis.call('HSET', 'i:' .. run, worker, info)
  redis.call('PEXPIRE', 'w:' .. run, ttl)
  redis.call('PEXPIRE', 'i:' .. run, ttl)
end
"""

# link, folder, alive, ttl, attempt, record, number unwanted, unwanted..., wanted...
# What frees memory comes first: it works also where the server has none left.
OFFER = (
    _NOW
    + """
local link, folder, alive, ttl, attempt, record = unpack(ARGV, 1, 6)
local first = 8 + ARGV[7]
for k = 8, first - 1 do
  redis.call('UNLINK', 'b:' .. run .. ':' .. ARGV[k])
  redis.call('ZREM', 't:' .. run, ARGV[k])
  redis.call('ZREM', 'l:' .. run, ARGV[k])
  redis.call('HDEL', 'h:' .. run, ARGV[k])
end
local owner = redis.call('GET', 'f:' .. run)
if owner and owner ~= folder then return {'taken', owner} end
redis.call('SET', 'f:' .. run, folder, 'PX', alive)
redis.call('DEL', 'e:' .. run)
redis.call('ZADD', 'r:' .. run, now, link)
local answer, added = {'ok', 0}, 0
if attempt ~= '' then redis.call('HSETNX', 'd:' .. run, attempt, record) end
for k = first, #ARGV do
  local id = ARGV[k]
  if redis.call('PEXPIRE', 'b:' .. run .. ':' .. id, ttl) == 1 then
    answer[#answer + 1] = id
  elseif not redis.call('ZSCORE', 'l:' .. run, id) then
    added = added + redis.call('ZADD', 't:' .. run, 'NX', now + (k - first) / 1024, id)
  end
end
for k = 1, added do redis.call('LPUSH', 'q:' .. run, 1) end
redis.call('LTRIM', 'q:' .. run, 0, 63)
for _, kind in ipairs({'r', 'd', 't', 'l', 'h', 'q'}) do redis.call('PEXPIRE', kind .. ':' .. run, ttl) end
for _, worker in ipairs(redis.call('ZRANGEBYSCORE', 'w:' .. run, '(' .. (now - alive), '+inf')) do
  local ok, info = pcall(cjson.decode, redis.call('HGET', 'i:' .. run, worker) or '')
  if ok and type(info) == 'table' and type(info.threads) == 'number' then answer[2] = answer[2] + info.threads end
end
return answer
"""
)

# number of attempts, ttl, attempts..., tickets...
CLOSE_LINES = (
    _NOW
    + """
for k = 3 + ARGV[1], #ARGV do
  redis.call('UNLINK', 'b:' .. run .. ':' .. ARGV[k])
  redis.call('ZREM', 't:' .. run, ARGV[k])
  redis.call('ZREM', 'l:' .. run, ARGV[k])
  redis.call('HDEL', 'h:' .. run, ARGV[k])
end
for k = 3, 2 + ARGV[1] do
  redis.call('HDEL', 'd:' .. run, ARGV[k])
  redis.call('RPUSH', 'n:' .. run .. ':' .. ARGV[k], '')
  redis.call('PEXPIRE', 'n:' .. run .. ':' .. ARGV[k], ARGV[2])
end
"""
)

# link, alive, ttl. Another link takes the mark away at its next beat, unless it is dead.
END = (
    _NOW
    + """
redis.call('ZREM', 'r:' .. run, ARGV[1])
redis.call('SET', 'e:' .. run, 1, 'PX', ARGV[3])
if #redis.call('ZRANGEBYSCORE', 'r:' .. run, '(' .. (now - ARGV[2]), '+inf') == 0 then
  redis.call('DEL', 'f:' .. run)
  for _ = 1, 64 do redis.call('LPUSH', 'q:' .. run, 1) end
  redis.call('PEXPIRE', 'q:' .. run, 2000)
end
"""
)

# worker, info, lease, alive, ttl
LEASE = (
    _NOW
    + """
local worker, info, lease, alive, ttl = unpack(ARGV)
worker_seen(worker, info, ttl)
for _, id in ipairs(redis.call('ZRANGEBYSCORE', 'l:' .. run, '-inf', now)) do give_back(id) end
if #redis.call('ZRANGEBYSCORE', 'r:' .. run, '(' .. (now - alive), '+inf') == 0 then
  return {redis.call('EXISTS', 'e:' .. run) == 1 and 'ended' or 'absent', ''}
end
while true do
  local found = redis.call('ZPOPMIN', 't:' .. run)
  if #found == 0 then return {'idle', ''} end
  local id = found[1]
  local link = id:match('^[^-]*')
  if fresh('r:' .. run, link, alive) and redis.call('HEXISTS', 'd:' .. run, id:match('^[^:]*')) == 1 then
    redis.call('ZADD', 'l:' .. run, now + lease, id)
    redis.call('HSET', 'h:' .. run, id, found[2] .. ' ' .. worker)
    redis.call('PEXPIRE', 'l:' .. run, ttl)
    redis.call('PEXPIRE', 'h:' .. run, ttl)
    return {'ticket', id}
  end
end
"""
)

# worker, info, lease, ttl, tickets...
RENEW = (
    _NOW
    + """
local worker, lost = ARGV[1], {}
worker_seen(worker, ARGV[2], ARGV[4])
for k = 5, #ARGV do
  local held = redis.call('HGET', 'h:' .. run, ARGV[k])
  if held and held:match('^%S+ (.*)$') == worker then
    redis.call('ZADD', 'l:' .. run, 'XX', now + ARGV[3], ARGV[k])
  else
    lost[#lost + 1] = ARGV[k]
  end
end
return lost
"""
)

# ticket, ttl
DONE = (
    _NOW
    + """
local id = ARGV[1]
redis.call('ZREM', 't:' .. run, id)
redis.call('ZREM', 'l:' .. run, id)
redis.call('HDEL', 'h:' .. run, id)
local attempt = id:match('^[^:]*')
if redis.call('HEXISTS', 'd:' .. run, attempt) == 0 then redis.call('UNLINK', 'b:' .. run .. ':' .. id) end
local list = 'n:' .. run .. ':' .. attempt
redis.call('RPUSH', list, id)
redis.call('LTRIM', list, -4096, -1)
redis.call('PEXPIRE', list, ARGV[2])
"""
)

# worker
LEAVE = (
    _NOW
    + """
redis.call('ZREM', 'w:' .. run, ARGV[1])
redis.call('HDEL', 'i:' .. run, ARGV[1])
for _, id in ipairs(redis.call('ZRANGE', 'l:' .. run, 0, -1)) do
  local held = redis.call('HGET', 'h:' .. run, id)
  if held and held:match('^%S+ (.*)$') == ARGV[1] then give_back(id) end
end
"""
)

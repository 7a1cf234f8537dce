-- Remember where a response is. ARGV: prefix, its name, where it is (JSON), when (microseconds since 1970), how long to
-- remember it (milliseconds), most responses.
local list = p .. 'y'
claim(list, 'zset')
redis.call('SET', p .. 'k:' .. ARGV[2], ARGV[3], 'PX', ARGV[5])
redis.call('ZADD', list, ARGV[4], ARGV[2])
redis.call('PEXPIRE', list, ARGV[5])
redis.call('ZREMRANGEBYSCORE', list, '-inf', string.format('%.0f', ARGV[4] - 1000 * ARGV[5]))
for _, name in ipairs(redis.call('ZRANGE', list, 0, -ARGV[6] - 1)) do
  redis.call('DEL', p .. 'k:' .. name)
  redis.call('ZREM', list, name)
end
return odd

-- Forget a conversation; what it held. ARGV: prefix, conversation, tenant's name, idle time (milliseconds).
local name, key = ARGV[2], p .. 'c:' .. ARGV[2]
local turns, records = {}, {}
for place, turn in ipairs(turns_of(key)) do
  turns[2 * place - 1], turns[2 * place] = turn[1], turn[2]
  records[place] = turn[2]
end
local holders = holders_of(records, {})
forget(name)
redis.call('SET', p .. 'x:' .. name, '', 'PX', ARGV[4])
for _, list in ipairs({p .. 'z', p .. 'z:' .. ARGV[3]}) do
  claim(list, 'zset')
  redis.call('ZREM', list, name)
end
return {odd, turns, holders}

-- All of one conversation. ARGV: prefix, conversation.
local key, records, told = p .. 'c:' .. ARGV[2], {}, {}
local turns = {}
for place, turn in ipairs(turns_of(key)) do
  turns[2 * place - 1], turns[2 * place] = turn[1], turn[2]
  records[place] = turn[2]
end
local stamp = read('ZSCORE', p .. 'z', ARGV[2]) or ''
local gone = redis.call('EXISTS', p .. 'x:' .. ARGV[2])
local recent = read('LRANGE', p .. 'r:' .. ARGV[2], 0, -1) or {}
local holders = holders_of(records, {})
return {odd, gone, stamp, recent, turns, holders}

-- All of one conversation. ARGV: prefix, conversation, and the tenant's name whose it must be, or '' for anybody's. A foreign
-- one is looked at no longer than one that is not known.
local key, records, turns = p .. 'c:' .. ARGV[2], {}, {}
local gone = redis.call('EXISTS', p .. 'x:' .. ARGV[2])
if ARGV[3] ~= '' and not read('ZSCORE', p .. 'z:' .. ARGV[3], ARGV[2]) then return {odd, gone, '', {}, {}, {}} end
for place, turn in ipairs(turns_of(key)) do
  turns[2 * place - 1], turns[2 * place] = turn[1], turn[2]
  records[place] = turn[2]
end
local stamp = read('ZSCORE', p .. 'z', ARGV[2]) or ''
local recent = read('LRANGE', p .. 'r:' .. ARGV[2], 0, -1) or {}
local holders = holders_of(records, {})
return {odd, gone, stamp, recent, turns, holders}

-- Conversations, the one used last first. ARGV: prefix, tenant's name or '' for all, highest stamp ('+inf' or '(stamp'),
-- most to give.
local list = ARGV[2] == '' and p .. 'z' or p .. 'z:' .. ARGV[2]
local found = read('ZREVRANGEBYSCORE', list, ARGV[3], '-inf', 'WITHSCORES', 'LIMIT', 0, ARGV[4]) or {}
local answer = {0}
for at = 1, #found, 2 do
  local name = found[at]
  local turns = 0
  for _, field in ipairs(read('HKEYS', p .. 'c:' .. name) or {}) do
    if #field == 16 then turns = turns + 1 end
  end
  answer[#answer + 1] = {name, found[at + 1], read('LINDEX', p .. 'r:' .. name, -1) or '', turns}
end
answer[1] = odd
return answer

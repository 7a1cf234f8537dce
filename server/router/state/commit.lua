-- Remember a turn that ended well. ARGV: prefix, conversation, tenant's name, what became of the turn (JSON), how many of
-- those to keep, when it ended (microseconds since 1970), idle time (milliseconds), most conversations, and, if it may be
-- read back: holder's name, holder (JSON), the turn's digest ('' for none), digest of the turn to hang under ('' for none),
-- depth (4 bytes), most turns of a conversation.
local name, tenant, told, max_records = ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local ended, idle, max_conversations = ARGV[6], ARGV[7], tonumber(ARGV[8])
local key, records = p .. 'c:' .. name, p .. 'r:' .. name

claim(records, 'list')
if redis.call('LINDEX', records, -1) ~= told then -- Else this is the same call once more.
  redis.call('RPUSH', records, told)
  redis.call('LTRIM', records, -max_records, -1)
end
redis.call('PEXPIRE', records, idle)
redis.call('DEL', p .. 'x:' .. name)

-- A turn that is written back after an outage is the latest only if no other router has seen a later one.
local before_s = read('ZSCORE', p .. 'z', name)
local is_latest = not before_s or tonumber(before_s) <= tonumber(ended)

local function insert(holder, digest, above, depth, max_turns)
  local parent, zeros = nil, string.rep('\0', 16)
  local before = read_record(key, digest)
  if before then
    parent = before:sub(21, 36)
  elseif #above == 16 and read_record(key, above) then
    parent = above
  end
  local number = redis.call('HINCRBY', key, 's', 1)
  redis.call('HSET', key, digest, holder .. depth .. (parent or zeros) .. struct.pack('>I4', number))
  if is_latest or not read('HGET', key, 'l') then redis.call('HSET', key, 'l', digest) end
  local pointer = p .. 't:' .. digest
  redis.call('SET', pointer, (name .. without(twins(digest), name)):sub(1, 16 * TWINS), 'PX', idle)
  local turns = turns_of(key)
  for oldest = 1, #turns - max_turns do
    local gone, up = turns[oldest][1], turns[oldest][2]:sub(21, 36)
    redis.call('HDEL', key, gone)
    unlist(name, gone)
    for later = oldest + 1, #turns do
      local other = turns[later]
      if other[2]:sub(21, 36) == gone then
        other[2] = other[2]:sub(1, 20) .. up .. other[2]:sub(37)
        redis.call('HSET', key, other[1], other[2])
      end
    end
  end
  for place = math.max(1, #turns - max_turns + 1), #turns do
    redis.call('PEXPIRE', p .. 't:' .. turns[place][1], idle)
  end
end

local holder = ARGV[9]
if holder then
  claim(key, 'hash')
  local number = redis.call('HGET', key, 's')
  if number and not number:find('^[1-9]%d?%d?%d?%d?%d?%d?%d?%d?$') then
    bad()
    redis.call('DEL', key)
  end
  redis.call('SET', p .. 'h:' .. holder, ARGV[10], 'PX', 2 * idle)
  if ARGV[11] == '' then
    if is_latest or not read('HGET', key, 'l') then redis.call('HSET', key, 'l', 'n' .. holder) end
  else
    insert(holder, ARGV[11], ARGV[12], ARGV[13], tonumber(ARGV[14]))
  end
end
redis.call('PEXPIRE', key, idle)

for _, list in ipairs({p .. 'z', p .. 'z:' .. tenant}) do
  claim(list, 'zset')
  redis.call('ZADD', list, 'GT', ended, name)
  redis.call('ZREMRANGEBYSCORE', list, '-inf', string.format('%.0f', ended - 1000 * idle))
  redis.call('PEXPIRE', list, idle)
end
for _, other in ipairs(redis.call('ZRANGE', p .. 'z', 0, -max_conversations - 1)) do
  forget(other)
  redis.call('ZREM', p .. 'z', other)
end
return odd

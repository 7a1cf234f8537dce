-- Shared by all scripts. Every script gets the prefix of all keys first.
--
--   c:<conversation>  hash: digest of a turn -> its record; l -> digest of the latest turn, or n and its holder's name
--                     if it has no digest; s -> the number given last
--   t:<digest>        conversations that have this turn, 16 bytes each, the one that committed it last first
--   h:<holder's name> holder as JSON
--   r:<conversation>  list of what became of the last turns, as JSON, oldest first
--   x:<conversation>  it was released, and has had no turn since
--   k:<response>      where a response is, as JSON; y lists them by time
--   z, z:<tenant>     sorted sets: conversation by the time of its last turn
--
-- A record is 40 bytes: holder's name (16), depth (4), parent's digest or zeros (16), number in order of commits (4).
-- What has another shape was not written by a router: it is passed over, removed where it is in the way, and counted.

local p = ARGV[1]
local odd = 0
local TWINS = 4

local function bad()
  odd = odd + 1
  return false
end

local function read(...)
  local found = redis.pcall(...)
  if type(found) == 'table' and found.err then return bad() end
  return found
end

local function read_record(key, digest)
  local record = read('HGET', key, digest)
  if record and #record ~= 40 then return bad() end
  return record
end

local function twins(digest)
  local found = read('GET', p .. 't:' .. digest)
  if not found then return '' end
  if #found == 0 or #found % 16 ~= 0 or #found > 16 * TWINS then
    bad()
    return ''
  end
  return found
end

-- Remove what is in the way of a key of this type.
local function claim(key, kind)
  local found = redis.call('TYPE', key).ok
  if found ~= kind and found ~= 'none' then
    bad()
    redis.call('DEL', key)
  end
end

local function without(list, name)
  local rest = {}
  for at = 1, #list, 16 do
    local other = list:sub(at, at + 15)
    if other ~= name then rest[#rest + 1] = other end
  end
  return table.concat(rest)
end

-- A conversation's turns as {digest, record, number}, oldest first.
local function turns_of(key)
  local found, turns = read('HGETALL', key), {}
  if not found then return turns end
  for at = 1, #found, 2 do
    local digest, record = found[at], found[at + 1]
    if #digest == 16 and #record == 40 then
      turns[#turns + 1] = {digest, record, (struct.unpack('>I4', record, 37))}
    elseif digest ~= 'l' and digest ~= 's' then
      bad()
    end
  end
  table.sort(turns, function(a, b) return a[3] < b[3] end)
  return turns
end

local function unlist(name, digest)
  local key = p .. 't:' .. digest
  local found = twins(digest)
  local rest = without(found, name)
  if rest == '' then
    redis.call('DEL', key)
  elseif rest ~= found then
    redis.call('SET', key, rest, 'KEEPTTL')
  end
end

local function forget(name)
  local key = p .. 'c:' .. name
  for _, turn in ipairs(turns_of(key)) do unlist(name, turn[1]) end
  redis.call('DEL', key, p .. 'r:' .. name)
end

-- The latest turn of a conversation: digest and record, or '' and the holder's name if it has no digest.
local function latest_of(key)
  local latest = read('HGET', key, 'l')
  if not latest then return '', '' end
  if #latest == 17 and latest:sub(1, 1) == 'n' then return '', latest:sub(2) end
  if #latest ~= 16 then
    bad()
    return '', ''
  end
  return latest, read_record(key, latest) or ''
end

-- Append the holders that these records name, each once: name, JSON.
local function holders_of(records, into)
  local seen = {}
  for _, record in ipairs(records) do
    local name = record:sub(1, 16)
    if #name == 16 and not seen[name] then
      seen[name] = true
      into[#into + 1] = name
      into[#into + 1] = read('GET', p .. 'h:' .. name) or ''
    end
  end
  return into
end

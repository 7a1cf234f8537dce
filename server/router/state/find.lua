-- Place a request. ARGV: prefix, conversation, whether the client named it (else it is the name for a new one),
-- digests of the prompt's prefixes in one piece, shortest first.
local name, named, digests = ARGV[2], ARGV[3] == '1', ARGV[4]
local own = p .. 'c:' .. name

local function digest_at(at) return digests:sub(16 * at - 15, 16 * at) end

local at, from, record = 0, '', ''
for place = #digests / 16, 1, -1 do
  local digest = digest_at(place)
  local found = named and read_record(own, digest)
  if found then
    at, from, record = place, name, found
    break
  end
  local keys = twins(digest)
  for start = 1, #keys, 16 do
    local other = keys:sub(start, start + 15)
    found = read_record(p .. 'c:' .. other, digest)
    if found then
      at, from, record = place, other, found
      break
    end
  end
  if found then break end
end
if not named and from ~= '' then
  name = from
  own = p .. 'c:' .. name
end

local own_at, own_record = 0, ''
if from == name then
  own_at, own_record = at, record
else
  local fields, known = read('HKEYS', own), {}
  if fields and #fields > 0 then
    for _, field in ipairs(fields) do known[field] = true end
    for place = at > 0 and at - 1 or #digests / 16, 1, -1 do
      local found = known[digest_at(place)] and read_record(own, digest_at(place))
      if found then
        own_at, own_record = place, found
        break
      end
    end
  end
end

local latest, latest_record = latest_of(own)
local gone = redis.call('EXISTS', p .. 'x:' .. name)
local holders = holders_of({record, own_record, latest_record}, {})
return {odd, gone, name, at, record, own_at, own_record, latest, latest_record, holders}

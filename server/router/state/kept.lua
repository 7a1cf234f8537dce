-- Where a response is; nothing if it is not known. ARGV: prefix, its name.
return read('GET', p .. 'k:' .. ARGV[2]) or ''

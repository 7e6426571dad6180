"""The steps on a stream group that must not be split, as scripts that Redis runs whole."""

from __future__ import annotations

from typing import Final

RENEW: Final = """
local lost = {}
for i = 4, #ARGV do
    local pending = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1)
    if #pending > 0 then
        if pending[1][2] == ARGV[2] then
            redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[i],
                'IDLE', ARGV[3], 'JUSTID')
        else
            lost[#lost + 1] = ARGV[i]
        end
    end
end
return lost
"""
"""KEYS: stream. ARGV: group, consumer, idle time in ms to set, entry ids.

Only what this consumer owns is touched: a claim by its id alone would steal an entry back from
whoever has it by now. Returns the ids that somebody else owns. An id that is pending with
nobody was acked, or the group was made anew. The delivery count stays as it is.
"""

DROP_CONSUMERS: Final = """
local dropped = 0
for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
    local told = {}
    for i = 1, #consumer, 2 do
        told[consumer[i]] = consumer[i + 1]
    end
    local dead = told.name == ARGV[2] and ARGV[4] == 'self' or told.idle > tonumber(ARGV[3])
    if dead and told.pending == 0 then
        redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], told.name)
        dropped = dropped + 1
    end
end
return dropped
"""
"""KEYS: stream. ARGV: group, own name, idle limit in ms, `self` to drop the own consumer too.

A consumer that is dropped takes its pending entries with it, so only one with none is, and
nothing can come in between. Returns how many were dropped.
"""

TRIM: Final = """
local function before(a, b)
    local a_ms, a_seq = string.match(a, '(%d+)-(%d+)')
    local b_ms, b_seq = string.match(b, '(%d+)-(%d+)')
    if a_ms == b_ms then
        a_ms, b_ms = a_seq, b_seq
    end
    return #a_ms < #b_ms or #a_ms == #b_ms and a_ms < b_ms
end
local oldest = false
for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
    local told = {}
    for i = 1, #group, 2 do
        told[group[i]] = group[i + 1]
    end
    local needed = told['last-delivered-id']
    if told.pending > 0 then
        local first = redis.call('XPENDING', KEYS[1], told.name)[2]
        if first and before(first, needed) then
            needed = first
        end
    end
    if not oldest or before(needed, oldest) then
        oldest = needed
    end
end
if not oldest then
    return 0
end
return redis.call('XTRIM', KEYS[1], 'MINID', '~', oldest)
"""
"""KEYS: stream. Returns how many entries were trimmed.

Kept is whatever any group has not delivered or still has pending, and everything after it.
Ids are compared as decimal strings: a Lua number would round a long one. In one script, or a
group could come into being between the question and the trimming.
"""

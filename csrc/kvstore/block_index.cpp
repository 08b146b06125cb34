#include "kvstore/block_index.h"

#include <algorithm>
#include <cstring>
#include <ranges>
#include <utility>

namespace deepnvme::kvstore {

namespace {

std::uint64_t mixed(std::uint64_t word) noexcept {
    word = (word ^ word >> 32) * 0x9E3779B97F4A7C15u;
    word = (word ^ word >> 29) * 0xBF58476D1CE4E5B9u;
    return word ^ word >> 32;
}

}  // namespace

KeyHash hash_of(std::string_view key, std::uint64_t seed) noexcept {
    KeyHash hash{mixed(seed ^ key.size()), mixed(~seed - key.size())};
    for (std::size_t at = 0; at < key.size(); at += sizeof(std::uint64_t)) {
        std::uint64_t word = 0;
        std::memcpy(&word, key.data() + at, std::min(sizeof word, key.size() - at));
        hash = {mixed(hash.high ^ word), mixed(hash.low + word)};
    }
    return hash;
}

BlockIndex::BlockIndex(Slot slots)
    : entries_(slots), table_(std::size_t{slots} + slots / 2 + 2, kNoSlot), evicted_((slots + kBucket - 1) / kBucket * kBucket) {}

std::uint64_t BlockIndex::nbytes() const noexcept {
    return entries_.size() * sizeof(Entry) + table_.size() * sizeof(Slot) + evicted_.size() * sizeof(Evicted);
}

void BlockIndex::place(Slot slot, const KeyHash& key, std::uint32_t length, std::uint32_t crc) noexcept {
    Entry& entry = entries_[slot];
    entry.key = key;
    entry.length = length;
    entry.crc = crc;
    entry.state = State::stored;
}

std::vector<Slot> BlockIndex::finish_placing(std::vector<Placed> placed) {
    std::vector<Slot> superseded;
    // Of one put the last blocks are in the last slots, and evicted first: see BlockStore::end_put().
    std::ranges::sort(placed, {}, [](const Placed& each) { return std::pair(~each.sequence, each.slot); });
    for (const Placed& each : placed) {
        if (find(entries_[each.slot].key) == kNoSlot) insert(each.slot);
        else entries_[each.slot].state = State::free, superseded.push_back(each.slot);
    }
    for (const Placed& each : placed | std::views::reverse)
        if (stored(each.slot)) append(each.slot, kOnce);
    used_ = slots();
    for (Slot slot = slots(); slot-- > 0;)  // downwards, so that the first free ones are taken first
        if (!stored(slot)) vacate(slot, false);
    return superseded;
}

// The hash table: linear probing. -----------------------------------------------------------------------------------------------

Slot BlockIndex::find(const KeyHash& key) const noexcept {
    std::size_t i = home_of(key);
    while (table_[i] != kNoSlot && entries_[table_[i]].key != key) i = after(i);
    return table_[i];
}

void BlockIndex::insert(Slot slot) noexcept {
    std::size_t i = home_of(entries_[slot].key);
    while (table_[i] != kNoSlot) i = after(i);
    table_[i] = slot;
}

// Keys behind the gap move up into it unless it is before their home: a search from there must not end at the gap.
void BlockIndex::erase(Slot slot) noexcept {
    const auto distance = [this](std::size_t from, std::size_t to) { return to >= from ? to - from : to + table_.size() - from; };
    std::size_t gap = home_of(entries_[slot].key);
    while (table_[gap] != slot) gap = after(gap);
    for (std::size_t i = after(gap); table_[i] != kNoSlot; i = after(i)) {
        if (distance(home_of(entries_[table_[i]].key), i) < distance(gap, i)) continue;
        table_[gap] = table_[i];
        gap = i;
    }
    table_[gap] = kNoSlot;
}

// The queues. -------------------------------------------------------------------------------------------------------------------

void BlockIndex::append(Slot slot, Queue queue) noexcept {
    Entry& entry = entries_[slot];
    Ends& ends = queues_[queue];
    entry.queue = queue;
    entry.previous = ends.last;
    entry.next = kNoSlot;
    (ends.last == kNoSlot ? ends.first : entries_[ends.last].next) = slot;
    ends.last = slot;
    ++ends.size;
}

void BlockIndex::unlink(Slot slot) noexcept {
    const Entry& entry = entries_[slot];
    Ends& ends = queues_[entry.queue];
    (entry.previous == kNoSlot ? ends.first : entries_[entry.previous].next) = entry.next;
    (entry.next == kNoSlot ? ends.last : entries_[entry.next].previous) = entry.previous;
    --ends.size;
}

// Blocks at the front of the second queue that were used again go to its end, up to the first block that was not. If the first kMostTurns
// all were, none moves: to give some of them a turn would have a younger block evicted, in the middle of a prompt.
void BlockIndex::give_turns() noexcept {
    Slot end = queues_[kOften].first;
    for (int turns = kMostTurns; entries_[end].used_again; end = entries_[end].next)
        if (--turns == 0 || entries_[end].next == kNoSlot) return;
    for (Slot slot; (slot = queues_[kOften].first) != end; append(slot, kOften)) {
        unlink(slot);
        entries_[slot].used_again = false;
    }
}

// Evict a block and return its slot, which stays used; kNoSlot if every block is held.
Slot BlockIndex::evict() noexcept {
    if (queues_[kOnce].size + queues_[kOften].size == 0) return kNoSlot;
    const Queue queue = queues_[kOnce].size > target_ || queues_[kOften].size == 0 ? kOnce : kOften;
    if (queue == kOften) give_turns();
    const Slot slot = queues_[queue].first;
    unlink(slot);
    erase(slot);
    remember(entries_[slot].key, queue);
    ++evictions_;
    return slot;
}

// Evicted keys. ------------------------------------------------------------------------------------------------------------------

std::span<BlockIndex::Evicted> BlockIndex::bucket_of(const KeyHash& key) noexcept {
    return std::span(evicted_).subspan(scaled(key.low, evicted_.size() / kBucket) * kBucket, kBucket);
}

// How many evictions from the same queue came after it.
std::uint32_t BlockIndex::age(const Evicted& evicted) const noexcept {
    return (queues_[evicted.queue()].evictions - evicted.stamp) & kClock;
}

// How many keys evicted from a queue count: as many as its blocks leave of the slots.
std::uint64_t BlockIndex::remembered(Queue queue) const noexcept {
    return std::min<std::uint64_t>(queues_[queue].evictions, slots() - queues_[queue].size);
}

// Remember an evicted key in place of the oldest one in its bucket.
void BlockIndex::remember(const KeyHash& key, Queue queue) noexcept {
    std::uint32_t& evictions = queues_[queue].evictions;
    evictions = (evictions + 1) & kClock;
    Evicted& oldest = *std::ranges::max_element(bucket_of(key), {}, [this](const Evicted& each) { return each.stamp == kNever ? kClock : age(each); });
    oldest = {static_cast<std::uint32_t>(key.high), evictions | (queue == kOften ? kClock + 1 : 0)};
}

// The queue for a new block: the second one if its key is remembered. The queue that it was evicted from should have been longer, and may
// be from now on.
BlockIndex::Queue BlockIndex::queue_for(const KeyHash& key) noexcept {
    for (Evicted& each : bucket_of(key)) {
        if (each.stamp == kNever || each.fingerprint != static_cast<std::uint32_t>(key.high)) continue;
        if (age(each) >= remembered(each.queue())) return kOnce;
        const std::uint64_t once = std::max<std::uint64_t>(remembered(kOnce), 1), often = std::max<std::uint64_t>(remembered(kOften), 1);
        if (each.queue() == kOnce) target_ = std::min<std::uint64_t>(target_ + std::max<std::uint64_t>(often / once, 1), slots());
        else target_ -= std::min(target_, std::max<std::uint64_t>(once / often, 1));
        each = {};
        return kOften;
    }
    return kOnce;
}

// The life of a block. -----------------------------------------------------------------------------------------------------------

std::vector<Slot> BlockIndex::reserve(std::size_t most) {
    std::vector<Slot> reserved;
    reserved.reserve(std::min<std::size_t>(most, slots()));
    while (reserved.size() < most) {
        Slot slot = free_;
        if (slot != kNoSlot) free_ = entries_[slot].next, ++used_;
        else if ((slot = evict()) == kNoSlot) break;
        reserved.push_back(slot);
    }
    std::ranges::sort(reserved);
    return reserved;
}

void BlockIndex::claim(Slot slot, const KeyHash& key) noexcept {
    entries_[slot] = {.key = key, .state = State::writing, .queue = queue_for(key)};
    insert(slot);
}

void BlockIndex::publish(Slot slot, std::uint32_t length, std::uint32_t crc) noexcept {
    Entry& entry = entries_[slot];
    entry.state = State::stored;
    entry.length = length;
    entry.crc = crc;
    append(slot, entry.queue);
}

void BlockIndex::vacate(Slot slot, bool set_aside) noexcept {
    --used_;
    entries_[slot].state = set_aside ? State::set_aside : State::free;
    if (set_aside) ++set_aside_;
    else entries_[slot].next = std::exchange(free_, slot);
}

bool BlockIndex::hold(Slot slot) noexcept {
    Entry& entry = entries_[slot];
    if (entry.holds == kMostHolds) return false;
    if (entry.holds++ == 0) unlink(slot);
    return true;
}

void BlockIndex::release(Slot slot) noexcept {
    Entry& entry = entries_[slot];
    entry.used_again = true;
    if (--entry.holds > 0) return;
    if (entry.state == State::stored) append(slot, kOften);
    else vacate(slot, entry.state == State::removed_after_error);
}

bool BlockIndex::pin(Slot slot) noexcept {
    if (!hold(slot)) return false;
    if (entries_[slot].pins++ == 0) ++pinned_;
    return true;
}

bool BlockIndex::unpin(Slot slot) noexcept {
    if (entries_[slot].pins == 0) return false;
    if (--entries_[slot].pins == 0) --pinned_;
    release(slot);
    return true;
}

void BlockIndex::remove(Slot slot, bool set_aside) noexcept {
    Entry& entry = entries_[slot];
    erase(slot);
    if (entry.pins > 0) --pinned_;
    entry.holds = static_cast<std::uint16_t>(entry.holds - std::exchange(entry.pins, 0));
    entry.state = set_aside ? State::removed_after_error : State::removed;
}

}  // namespace deepnvme::kvstore

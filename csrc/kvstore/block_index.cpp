#include "kvstore/block_index.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace deepnvme::kvstore {

namespace {

constexpr std::uint32_t kClock = UINT32_MAX >> 1;  // mask of the clock in a stamp

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
    : entries_(slots), table_(slots + slots / 2 + 2, kNoSlot), evicted_((slots + kBucket - 1) / kBucket * kBucket) {}

std::uint64_t BlockIndex::nbytes() const noexcept {
    return entries_.size() * sizeof(Entry) + table_.size() * sizeof(Slot) + evicted_.size() * sizeof(Evicted);
}

// The hash table: linear probing. -----------------------------------------------------------------------------------------------

Slot BlockIndex::find(const KeyHash& key) const noexcept {
    for (std::size_t i = home_of(key);; i = i + 1 == table_.size() ? 0 : i + 1) {
        if (table_[i] == kNoSlot) return kNoSlot;
        if (entries_[table_[i]].key == key) return table_[i];
    }
}

void BlockIndex::insert(Slot slot, const KeyHash& key) noexcept {
    entries_[slot].key = key;
    std::size_t i = home_of(key);
    while (table_[i] != kNoSlot) i = i + 1 == table_.size() ? 0 : i + 1;
    table_[i] = slot;
}

// Those behind it that are not where they belong move up, so that no gap cuts them off.
void BlockIndex::erase(Slot slot) noexcept {
    const auto next = [this](std::size_t i) { return i + 1 == table_.size() ? 0 : i + 1; };
    const auto distance = [this](std::size_t from, std::size_t to) { return to >= from ? to - from : to + table_.size() - from; };
    std::size_t gap = home_of(entries_[slot].key);
    while (table_[gap] != slot) gap = next(gap);
    for (std::size_t i = next(gap); table_[i] != kNoSlot; i = next(i)) {
        if (distance(home_of(entries_[table_[i]].key), i) < distance(gap, i)) continue;
        table_[gap] = table_[i];
        gap = i;
    }
    table_[gap] = kNoSlot;
}

// The queues. -------------------------------------------------------------------------------------------------------------------

void BlockIndex::append(Slot slot, std::uint8_t queue) noexcept {
    Entry& entry = entries_[slot];
    Queue& to = queues_[queue];
    entry.queue = queue;
    entry.previous = to.last;
    entry.next = kNoSlot;
    (to.last == kNoSlot ? to.first : entries_[to.last].next) = slot;
    to.last = slot;
    ++to.size;
}

void BlockIndex::unlink(Slot slot) noexcept {
    const Entry& entry = entries_[slot];
    Queue& from = queues_[entry.queue];
    (entry.previous == kNoSlot ? from.first : entries_[entry.previous].next) = entry.next;
    (entry.next == kNoSlot ? from.last : entries_[entry.next].previous) = entry.previous;
    --from.size;
}

void BlockIndex::free(Slot slot) noexcept {
    Entry& entry = entries_[slot];
    entry.state = State::free;
    entry.next = free_;
    free_ = slot;
    --used_;
}

void BlockIndex::put_aside(Slot slot) noexcept {
    entries_[slot].state = State::set_aside;
    --used_;
    ++set_aside_;
}

// Evict a block and return its slot, which stays used; kNoSlot if every block is held.
Slot BlockIndex::evict() noexcept {
    while (queues_[kOnce].size + queues_[kOften].size > 0) {
        const bool once = queues_[kOnce].size > target_ || queues_[kOften].size == 0;
        const Slot slot = queues_[once ? kOnce : kOften].first;
        Entry& entry = entries_[slot];
        unlink(slot);
        if (!once && entry.uses > 0) {
            --entry.uses;
            append(slot, kOften);
            continue;
        }
        erase(slot);
        remember(entry.key, entry.queue);
        ++evictions_;
        return slot;
    }
    return kNoSlot;
}

// Evicted keys. ------------------------------------------------------------------------------------------------------------------

std::span<BlockIndex::Evicted> BlockIndex::bucket_of(const KeyHash& key) noexcept {
    return std::span(evicted_).subspan(scaled(key.low, evicted_.size() / kBucket) * kBucket, kBucket);
}

// Instead of the key that was evicted longest ago, of those that could be in the same places: of the first queue, if more of it are
// remembered than the second queue has slots.
void BlockIndex::remember(const KeyHash& key, std::uint8_t queue) noexcept {
    clock_ = (clock_ + 1) & kClock;
    const bool often = queues_[kOnce].remembered + queues_[kOnce].size <= slots();
    const auto age = [&](const Evicted& each) -> std::uint64_t {
        if (each.stamp == UINT32_MAX) return UINT64_MAX;
        return ((clock_ - each.stamp) & kClock) + ((each.stamp > kClock) == often ? std::uint64_t{1} << 32 : 0);
    };
    const auto places = bucket_of(key);
    Evicted& oldest = *std::max_element(places.begin(), places.end(), [&](const auto& left, const auto& right) { return age(left) < age(right); });
    forget(oldest);
    oldest = {static_cast<std::uint32_t>(key.high), clock_ | (queue == kOften ? kClock + 1 : 0)};
    ++queues_[queue].remembered;
}

void BlockIndex::forget(Evicted& evicted) noexcept {
    if (evicted.stamp != UINT32_MAX) --queues_[evicted.stamp > kClock ? kOften : kOnce].remembered;
    evicted = {};
}

// Where a new block goes: to those used often, if it is remembered. The queue that it was evicted from should have been longer.
std::uint8_t BlockIndex::queue_for(const KeyHash& key) noexcept {
    for (Evicted& each : bucket_of(key)) {
        if (each.stamp == UINT32_MAX || each.fingerprint != static_cast<std::uint32_t>(key.high)) continue;
        const std::uint64_t once = queues_[kOnce].remembered, often = queues_[kOften].remembered;
        if (each.stamp <= kClock) target_ = std::min<std::uint64_t>(target_ + std::max<std::uint64_t>(often / once, 1), slots());
        else target_ -= std::min(target_, std::max<std::uint64_t>(once / often, 1));
        forget(each);
        return kOften;
    }
    return kOnce;
}

// New blocks. --------------------------------------------------------------------------------------------------------------------

std::vector<Slot> BlockIndex::reserve(std::size_t most) {
    std::vector<Slot> reserved;
    reserved.reserve(std::min<std::size_t>(most, slots()));
    while (reserved.size() < most) {
        Slot slot = free_;
        if (slot != kNoSlot) free_ = entries_[slot].next, ++used_;
        else if (fresh_ < slots()) slot = fresh_++, ++used_;
        else slot = evict();
        if (slot == kNoSlot) break;
        entries_[slot].state = State::reserved;
        reserved.push_back(slot);
    }
    std::sort(reserved.begin(), reserved.end());
    return reserved;
}

void BlockIndex::claim(Slot slot, const KeyHash& key) noexcept {
    Entry& entry = entries_[slot];
    entry = {};
    entry.state = State::writing;
    entry.queue = queue_for(key);
    insert(slot, key);
}

void BlockIndex::publish(Slot slot, std::uint32_t length, std::uint32_t crc) noexcept {
    Entry& entry = entries_[slot];
    entry.state = State::stored;
    entry.length = length;
    entry.crc = crc;
    append(slot, entry.queue);
}

void BlockIndex::abandon(Slot slot, bool set_aside) noexcept {
    erase(slot);
    if (set_aside) put_aside(slot);
    else free(slot);
}

void BlockIndex::place(Slot slot, const KeyHash& key, std::uint32_t length, std::uint32_t crc) noexcept {
    Entry& entry = entries_[slot];
    entry.state = State::stored;
    entry.length = length;
    entry.crc = crc;
    ++used_;
    insert(slot, key);
}

void BlockIndex::displace(Slot slot) noexcept {
    erase(slot);
    entries_[slot].state = State::fresh;
    --used_;
}

void BlockIndex::finish_placing() noexcept {
    fresh_ = slots();
    used_ = slots();
    for (Slot slot = slots(); slot-- > 0;)  // downwards, so that the first free ones are taken first
        if (entries_[slot].state != State::stored) free(slot);
}

// Stored blocks. -----------------------------------------------------------------------------------------------------------------

bool BlockIndex::hold(Slot slot) noexcept {
    Entry& entry = entries_[slot];
    if (entry.holds == kMostHolds) return false;
    if (entry.holds++ == 0) unlink(slot);
    return true;
}

void BlockIndex::release(Slot slot) noexcept {
    Entry& entry = entries_[slot];
    if (entry.state == State::stored) entry.uses = std::min<std::uint8_t>(entry.uses + 1, kMostUses);
    if (--entry.holds > 0) return;
    if (entry.state == State::stored) append(slot, kOften);
    else if (entry.spoilt) put_aside(slot);
    else free(slot);
}

bool BlockIndex::pin(Slot slot) noexcept {
    Entry& entry = entries_[slot];
    if (!hold(slot)) return false;
    if (entry.pins++ == 0) ++pinned_;
    return true;
}

bool BlockIndex::unpin(Slot slot) noexcept {
    Entry& entry = entries_[slot];
    if (entry.pins == 0) return false;
    if (--entry.pins == 0) --pinned_;
    release(slot);
    return true;
}

void BlockIndex::touch(Slot slot) noexcept {
    if (hold(slot)) release(slot);
}

void BlockIndex::remove(Slot slot, bool set_aside) noexcept {
    Entry& entry = entries_[slot];
    erase(slot);
    if (entry.holds == 0) unlink(slot);
    if (entry.pins > 0) --pinned_;
    entry.holds = static_cast<std::uint16_t>(entry.holds - std::exchange(entry.pins, 0));
    entry.state = State::removed;
    entry.spoilt = set_aside;
    if (entry.holds > 0) return;
    if (set_aside) put_aside(slot);
    else free(slot);
}

}  // namespace deepnvme::kvstore

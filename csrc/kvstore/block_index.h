// Which block lies in which slot, and which blocks stay. In memory only: no method reads or writes a file.
//
//     free --reserve, claim--> writing --publish--> stored --remove--> removed --release--> free
//                                 `----abandon------------------------------------------------^
//
// In place of free, a slot is set aside if the drive has failed there.
//
// 1. The hash table finds blocks that are being written or stored, and no others. A key has at most one slot.
// 2. A stored block is in one of two queues unless it is held (by reads or pins). Only blocks in a queue are evicted.
// 3. used() + free slots = slots() - set_aside() at every moment.
//
// The policy is that of ARC: blocks used once are in the first queue, blocks used more often in the second, each in the order of use.
// How many slots the first may have follows what comes back after its eviction. In the second queue a block that was used again has one
// more turn, unless the oldest kMostTurns all were: so an eviction is short. benchmarks/block_eviction.py compares.
//
// A key takes 40 bytes for its slot, 6 in the hash table and 8 for an evicted key that is remembered: 54. Not thread-safe.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace deepnvme::kvstore {

struct KeyHash {
    std::uint64_t high = 0, low = 0;
    auto operator<=>(const KeyHash&) const = default;
};

// 128 bits of a key. Keys that are near one another in the hash table are not with another seed.
KeyHash hash_of(std::string_view key, std::uint64_t seed) noexcept;

using Slot = std::uint32_t;
inline constexpr Slot kNoSlot = UINT32_MAX;

struct Placed {
    std::uint64_t sequence;  // larger for blocks that were stored later
    Slot slot;
};

class BlockIndex {
public:
    static constexpr std::uint32_t kMostHolds = UINT16_MAX;

    // Throws std::bad_alloc. `slots`: below kNoSlot. To be used after finish_placing().
    explicit BlockIndex(Slot slots);

    // When a store is opened: the slot has a stored block.
    void place(Slot slot, const KeyHash& key, std::uint32_t length, std::uint32_t crc) noexcept;
    // Once: all slots that were placed. Of two blocks of a key the later one counts; earlier ones are evicted first. Other slots are free.
    // Returns the slots of blocks that do not count.
    std::vector<Slot> finish_placing(std::vector<Placed> placed);

    Slot find(const KeyHash& key) const noexcept;
    // Have the memory for a key that is looked up soon on its way to the processor.
    void prefetch(const KeyHash& key) const noexcept { __builtin_prefetch(&table_[home_of(key)]); }
    bool stored(Slot slot) const noexcept { return entries_[slot].state == State::stored; }
    std::uint32_t length(Slot slot) const noexcept { return entries_[slot].length; }
    std::uint32_t crc(Slot slot) const noexcept { return entries_[slot].crc; }
    std::uint32_t pins(Slot slot) const noexcept { return entries_[slot].pins; }

    // Take up to `most` slots, evicting blocks where none are free; fewer where too many blocks are held. In ascending order. Each is to
    // be claimed or vacated.
    std::vector<Slot> reserve(std::size_t most);
    // A reserved slot gets a block that is being written. The key must not be there.
    void claim(Slot slot, const KeyHash& key) noexcept;
    // The block is whole on the drive.
    void publish(Slot slot, std::uint32_t length, std::uint32_t crc) noexcept;
    // The block that is being written does not come.
    void abandon(Slot slot, bool set_aside) noexcept { erase(slot), vacate(slot, set_aside); }
    // Nobody uses the slot any more.
    void vacate(Slot slot, bool set_aside) noexcept;

    // Keep a stored block from being evicted until release(). False where it has kMostHolds already.
    bool hold(Slot slot) noexcept;
    // A block that was not removed counts as used now.
    void release(Slot slot) noexcept;
    void touch(Slot slot) noexcept {
        if (hold(slot)) release(slot);
    }
    bool pin(Slot slot) noexcept;
    // False where the block has no pin.
    bool unpin(Slot slot) noexcept;
    // Have a block that the caller holds found no more, without pins. The slot is vacated with the last release().
    void remove(Slot slot, bool set_aside) noexcept;

    Slot slots() const noexcept { return static_cast<Slot>(entries_.size()); }
    std::uint64_t used() const noexcept { return used_; }  // blocks being written, stored or removed and held
    std::uint64_t pinned() const noexcept { return pinned_; }
    std::uint64_t set_aside() const noexcept { return set_aside_; }
    std::uint64_t evictions() const noexcept { return evictions_; }
    // Bytes of memory in all.
    std::uint64_t nbytes() const noexcept;

private:
    enum class State : std::uint8_t { free, writing, stored, removed, removed_after_error, set_aside };
    enum Queue : std::uint8_t { kOnce, kOften };

    struct Entry {
        KeyHash key;
        std::uint32_t length = 0, crc = 0;
        Slot previous = kNoSlot, next = kNoSlot;  // in a queue; of free slots only `next`
        std::uint16_t holds = 0, pins = 0;        // pins are among the holds
        State state = State::free;
        Queue queue = kOnce;  // the one that it is in, or goes to once it is written
        bool used_again = false;
    };
    static_assert(sizeof(Entry) == 40);

    // An evicted key: 32 bits of its hash; the evictions of its queue until then; and in bit 31 the queue.
    struct Evicted {
        std::uint32_t fingerprint = 0, stamp = kNever;
        Queue queue() const noexcept { return stamp > kClock ? kOften : kOnce; }
    };
    static constexpr std::uint32_t kNever = UINT32_MAX, kClock = UINT32_MAX >> 1;
    static constexpr std::size_t kBucket = 4;
    static constexpr int kMostTurns = 32;

    struct Ends {
        Slot first = kNoSlot, last = kNoSlot;
        std::uint64_t size = 0;
        std::uint32_t evictions = 0;  // but for the last bit
    };

    std::size_t home_of(const KeyHash& key) const noexcept { return scaled(key.high, table_.size()); }
    std::size_t after(std::size_t place) const noexcept { return place + 1 == table_.size() ? 0 : place + 1; }
    static std::size_t scaled(std::uint64_t hash, std::size_t size) noexcept {
        return static_cast<std::size_t>(static_cast<unsigned __int128>(hash) * size >> 64);
    }
    void insert(Slot slot) noexcept;
    void erase(Slot slot) noexcept;
    void append(Slot slot, Queue queue) noexcept;
    void unlink(Slot slot) noexcept;
    void give_turns() noexcept;
    Slot evict() noexcept;
    void remember(const KeyHash& key, Queue queue) noexcept;
    Queue queue_for(const KeyHash& key) noexcept;
    std::span<Evicted> bucket_of(const KeyHash& key) noexcept;
    std::uint32_t age(const Evicted& evicted) const noexcept;
    std::uint64_t remembered(Queue queue) const noexcept;

    std::vector<Entry> entries_;
    std::vector<Slot> table_;
    std::vector<Evicted> evicted_;
    Ends queues_[2];
    std::uint64_t target_ = 0;  // slots that the first queue may have
    Slot free_ = kNoSlot;       // the first of the free slots
    std::uint64_t used_ = 0, pinned_ = 0, set_aside_ = 0, evictions_ = 0;
};

}  // namespace deepnvme::kvstore

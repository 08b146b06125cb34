// Which block lies in which slot, and which blocks stay. In memory only: no method reads or writes a file.
//
// A slot is free, or has a block that is being written, or one that is stored, or one that was removed while somebody still uses the slot,
// or it is set aside because the drive failed there:
//
//     free --claim--> writing --publish--> stored --remove--> removed --release--> free, or set aside
//                        `----abandon---------------------------------------------^
//
// 1. The hash table finds blocks that are being written or stored, and no others. A key has at most one slot.
// 2. A stored block is in one of two queues unless it is held (by reads or pins). Only blocks in a queue are evicted.
// 3. used() + slots that can be reserved = slots() - set_aside() at every moment.
//
// The policy is that of ARC: blocks used once are in the first queue, blocks used more often in the second, each in the order of use.
// How many slots the first may have follows what comes back after its eviction. In the second queue a block that was used several times
// has that many more turns, up to kMostUses. benchmarks/block_eviction.py compares.
//
// A key takes 40 bytes for its slot, 6 in the hash table and 8 for an evicted key that is remembered: 54. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace deepnvme::kvstore {

struct KeyHash {
    std::uint64_t high = 0, low = 0;
    bool operator==(const KeyHash&) const = default;
};

// 128 bits of a key. With another seed, all keys have other hashes: nobody can choose keys that meet in the hash table.
KeyHash hash_of(std::string_view key, std::uint64_t seed) noexcept;

using Slot = std::uint32_t;
inline constexpr Slot kNoSlot = UINT32_MAX;

class BlockIndex {
public:
    static constexpr std::uint32_t kMostHolds = UINT16_MAX;

    // Throws std::bad_alloc. `slots`: below kNoSlot.
    explicit BlockIndex(Slot slots);

    Slot find(const KeyHash& key) const noexcept;
    // Have the memory for a key that is looked up soon on its way to the processor.
    void prefetch(const KeyHash& key) const noexcept { __builtin_prefetch(&table_[home_of(key)]); }
    bool stored(Slot slot) const noexcept { return entries_[slot].state == State::stored; }
    std::uint32_t length(Slot slot) const noexcept { return entries_[slot].length; }
    std::uint32_t crc(Slot slot) const noexcept { return entries_[slot].crc; }
    std::uint32_t pins(Slot slot) const noexcept { return entries_[slot].pins; }

    // -- new blocks

    // Take up to `most` slots, evicting blocks where none are free; fewer where too many blocks are held. In ascending order. Each is to
    // be claimed or given back.
    std::vector<Slot> reserve(std::size_t most);
    // A reserved slot gets a block that is being written. The key must not be there.
    void claim(Slot slot, const KeyHash& key) noexcept;
    void give_back(Slot slot) noexcept { free(slot); }
    // The block is whole on the drive.
    void publish(Slot slot, std::uint32_t length, std::uint32_t crc) noexcept;
    // The block that is being written does not come. `set_aside`: the drive has failed, and the slot is not used again.
    void abandon(Slot slot, bool set_aside) noexcept;
    // When a store is opened, before anything else: the slot has a stored block of a key that is not there. Blocks are then enqueued,
    // those to be evicted first at the front, and finish_placing() makes the other slots free.
    void place(Slot slot, const KeyHash& key, std::uint32_t length, std::uint32_t crc) noexcept;
    void displace(Slot slot) noexcept;
    void enqueue_placed(Slot slot) noexcept { append(slot, kOnce); }
    void finish_placing() noexcept;

    // -- stored blocks

    // Keep a stored block from being evicted until release(). False where it has kMostHolds already.
    bool hold(Slot slot) noexcept;
    // A block that was not removed counts as used now.
    void release(Slot slot) noexcept;
    bool pin(Slot slot) noexcept;
    // False where the block has no pin.
    bool unpin(Slot slot) noexcept;
    void touch(Slot slot) noexcept;
    // Have it found no more, without pins. Once nobody holds the slot, it is free, or set aside.
    void remove(Slot slot, bool set_aside) noexcept;

    Slot slots() const noexcept { return static_cast<Slot>(entries_.size()); }
    std::uint64_t used() const noexcept { return used_; }  // blocks being written, stored or removed and held
    std::uint64_t pinned() const noexcept { return pinned_; }
    std::uint64_t set_aside() const noexcept { return set_aside_; }
    std::uint64_t evictions() const noexcept { return evictions_; }
    // Bytes of memory in all.
    std::uint64_t nbytes() const noexcept;

private:
    enum class State : std::uint8_t { fresh, free, reserved, writing, stored, removed, set_aside };
    static constexpr std::uint8_t kOnce = 0, kOften = 1, kNoQueue = 2;
    static constexpr std::uint8_t kMostUses = 1;

    struct Entry {
        KeyHash key;
        std::uint32_t length = 0, crc = 0;
        Slot previous = kNoSlot, next = kNoSlot;  // in a queue; of free slots only `next`
        std::uint16_t holds = 0, pins = 0;        // pins are among the holds
        State state = State::fresh;
        std::uint8_t queue = kNoQueue;  // the one that it is in, or goes to once it is not held
        std::uint8_t uses = 0;
        bool spoilt = false;  // removed, and to be set aside
    };
    static_assert(sizeof(Entry) == 40);

    struct Queue {
        Slot first = kNoSlot, last = kNoSlot;
        std::uint64_t size = 0;
        std::uint64_t remembered = 0;  // keys evicted from it
    };

    // An evicted key: 32 bits of its hash; whether it was used often (bit 31), and the time, in evictions.
    struct Evicted {
        std::uint32_t fingerprint = 0, stamp = UINT32_MAX;
    };
    static constexpr std::size_t kBucket = 4;

    std::size_t home_of(const KeyHash& key) const noexcept { return scaled(key.high, table_.size()); }
    static std::size_t scaled(std::uint64_t hash, std::size_t size) noexcept {
        return static_cast<std::size_t>(static_cast<unsigned __int128>(hash) * size >> 64);
    }
    void insert(Slot slot, const KeyHash& key) noexcept;
    void erase(Slot slot) noexcept;
    void append(Slot slot, std::uint8_t queue) noexcept;
    void unlink(Slot slot) noexcept;
    void free(Slot slot) noexcept;
    void put_aside(Slot slot) noexcept;
    Slot evict() noexcept;
    void remember(const KeyHash& key, std::uint8_t queue) noexcept;
    std::uint8_t queue_for(const KeyHash& key) noexcept;
    std::span<Evicted> bucket_of(const KeyHash& key) noexcept;
    void forget(Evicted& evicted) noexcept;

    std::vector<Entry> entries_;
    std::vector<Slot> table_;
    std::vector<Evicted> evicted_;
    Queue queues_[2];
    std::uint32_t clock_ = 0;   // evictions, but for the last bit
    std::uint64_t target_ = 0;  // slots that the first queue may have
    Slot fresh_ = 0;            // slots from here on were never used
    Slot free_ = kNoSlot;       // the first of the free slots before
    std::uint64_t used_ = 0, pinned_ = 0, set_aside_ = 0, evictions_ = 0;
};

}  // namespace deepnvme::kvstore

// Blocks by key, in the slots of one file on each of several drives: the jobs that write and read them.
//
// 1. A block is found once it and its record are written. Before a slot is used for another block, its record is cleared.
// 2. What is read is checked against the checksum of key and block before a flag says that it is there. So whatever a crash, a drive or
//    another program has left in a slot, a wrong byte is never returned.
// 3. A slot in which a block is being written or read is held: nothing else is written there meanwhile. A read-only store cannot hold slots
//    of the process that writes. It looks at the record again when the block is read: by 1, the block was whole if the record is still there.
//
// Threads of the store run the jobs, each from its beginning to its end, in the order of the calls. They never wait for one another, except
// for keys that an earlier job is writing: that job is being run, and waits for the drive alone.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "kvstore/block_index.h"
#include "kvstore/job.h"
#include "kvstore/records.h"

namespace deepnvme::kvstore {

// The layout of each file of a store; see docs/formats.md.
struct Layout {
    std::uint64_t block_bytes;    // most bytes of a block
    std::uint64_t slot_bytes;     // from one slot to the next: block_bytes, rounded up to whole pages
    std::uint64_t records_begin;  // bytes from the start of the file
    std::uint64_t blocks_begin;
    Slot slots;  // in each file
};

// What a store counts: of puts, then of gets, where `corrupt` and `read_errors` are misses, too; then its state.
enum Figure : std::size_t {
    kStored, kDuplicates, kRefused, kWriteErrors, kBytesWritten, kHits, kMisses, kCorrupt, kReadErrors, kBytesRead,
    kSlots, kUsed, kPinned, kSetAside, kEvictions, kIndexBytes, kFigures
};
inline constexpr std::array<const char*, kFigures> kFigureNames = {
    "stored", "duplicates", "refused", "write_errors", "bytes_written", "hits", "misses", "corrupt", "read_errors", "bytes_read",
    "slots", "used", "pinned", "set_aside", "evictions", "index_bytes"};
using Figures = std::array<std::uint64_t, kFigures>;

// What to do with keys that are stored.
enum class Use : std::uint8_t { none, touch, pin, unpin, remove };

// The state of a block's transfer. `moved`: read but not checked, or written but not recorded. `replaced`: the process that writes has
// removed the block.
enum class Outcome : std::uint8_t { unfinished, moved, done, drive_failed, mismatched, replaced };

class BlockStore {
public:
    // Reads all records. Throws IoError if a file cannot be opened.
    BlockStore(std::shared_ptr<Engine> engine, const std::vector<std::string>& paths, const Layout& layout, bool read_only);
    // As close(). Not to be called in a forked child, which has none of the threads.
    ~BlockStore();
    BlockStore(const BlockStore&) = delete;
    BlockStore& operator=(const BlockStore&) = delete;

    // Start a job. Does not block. Throws std::invalid_argument if the store is closed.
    void submit(std::shared_ptr<Job> job);
    // A flag for each key: whether it is stored, and was used so. A pinned block is not removed.
    Flags use(const Keys& keys, Use how);
    // Remove all blocks that are not pinned, and return how many.
    std::size_t clear();
    // Read all records again: what another process has stored meanwhile. Jobs under way go on with what was there before.
    void refresh();
    Figures figures() const;
    // Empty, or what failed last, with file and offset.
    std::string last_error() const;
    // Finish all jobs, then flush the records. Idempotent. Throws IoError of the flush.
    void close();

private:
    static constexpr std::size_t kThreads = 4;  // jobs that are run at a time: their transfers fill the drives' queues

    // A block of a job, where it is, and what became of its transfer.
    struct Transfer {
        std::size_t key;
        Slot slot;
        std::uint32_t crc;
        Outcome outcome = Outcome::unfinished;
    };
    // Some transfers of a job in one file: one request of the engine. A part outlives its request, whatever is thrown meanwhile.
    struct Part {
        Part(Job& job, std::span<Transfer> transfers) : job(job), transfers(transfers) {}
        Part(Part&&) noexcept = default;
        ~Part() {
            if (!request) return;
            request->wait();
            if (request->memory_lost()) job.memory_lost.store(true);
        }

        Job& job;
        std::span<Transfer> transfers;
        std::shared_ptr<Request> request;  // null if it could not be started
    };

    // Neighbouring slots of the index are in different files.
    std::pair<std::size_t, Slot> place_of(Slot slot) const noexcept { return {slot % files_.size(), slot / static_cast<Slot>(files_.size())}; }
    File& file_of(Slot slot) const noexcept { return *files_[slot % files_.size()]; }
    std::uint64_t offset_of(Slot slot) const noexcept { return layout_.blocks_begin + place_of(slot).second * layout_.slot_bytes; }
    std::uint64_t record_of(Slot slot) const noexcept { return layout_.records_begin + place_of(slot).second * sizeof(Record); }
    std::shared_ptr<BlockIndex> load();
    void run() noexcept;
    void put(Job& job);
    void end_put(Job& job, std::vector<Transfer>& transfers) noexcept;
    void get(Job& job);
    void end_get(Job& job, BlockIndex& index, std::vector<Transfer>& transfers) noexcept;
    std::vector<Transfer> claim(Job& job, std::vector<std::size_t>& awaited);
    void await(Job& job, const std::vector<std::size_t>& awaited);
    void sort_by_place(std::vector<Transfer>& transfers) const;
    std::vector<Part> start(Job& job, std::span<Transfer> transfers);
    void finish(Part& part);
    Outcome checked(const Job& job, const Transfer& transfer);
    std::uint32_t checksum(const Job& job, std::size_t key) const noexcept;
    void record(const Job& job, std::span<Transfer> transfers, std::span<const Slot> slots);
    std::vector<bool> write(std::span<const Slot> slots, std::span<const Record> records);
    void remove_held(std::vector<Slot> slots);
    bool hold_removed(Slot slot);
    void note(const char* error) noexcept;
    std::vector<KeyHash> hashes_of(const Keys& keys) const;

    const std::shared_ptr<Engine> engine_;
    const Layout layout_;
    const bool read_only_;
    const std::uint64_t seed_;
    std::vector<std::shared_ptr<File>> files_;

    mutable std::mutex mutex_;  // guards what follows; held while nothing waits
    std::shared_ptr<BlockIndex> index_;  // replaced by refresh()
    std::condition_variable published_;
    std::uint64_t sequence_ = 0;
    Figures figures_{};
    std::string last_error_;

    std::mutex queue_mutex_;  // guards what follows
    std::condition_variable submitted_;
    std::deque<std::shared_ptr<Job>> jobs_;
    bool closed_ = false;
    std::array<std::thread, kThreads> threads_;
};

}  // namespace deepnvme::kvstore

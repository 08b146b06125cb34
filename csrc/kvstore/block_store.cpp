#include "kvstore/block_store.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <exception>
#include <functional>
#include <random>
#include <stdexcept>

#include "core/crc32.h"
#include "core/threads.h"

namespace deepnvme::kvstore {

namespace {

constexpr std::size_t kRecordsAtOnce = 32768;  // read when a store is opened, or cleared: 4 MiB

// Of a get, so many bytes are checked while the next are read. Smaller parts cost the engine more than they gain.
constexpr std::uint64_t kLeastPart = 1 << 20, kMostPart = 8 << 20, kParts = 8;

// Whether the drive is to blame for a failed transfer, the file was cut off, or neither: the program or its memory.
Outcome outcome_of(const std::exception& error) {
    if (dynamic_cast<const PastEndError*>(&error)) return Outcome::mismatched;
    const auto* failed = dynamic_cast<const IoError*>(&error);
    const int number = failed ? failed->error() : ECANCELED;
    if (number == ECANCELED || number == EFAULT || number == ENOMEM || number == EINTR || number == EAGAIN) return Outcome::unfinished;
    return number == ENODATA ? Outcome::mismatched : Outcome::drive_failed;
}

std::uint64_t seconds_now() {
    return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count());
}

// Calls a function at the end of a block, however it is left.
template <typename Function>
struct AtEnd {
    Function function;
    ~AtEnd() { function(); }
};

}  // namespace

void Job::finish() noexcept {
    {
        std::lock_guard lock(mutex_);
        done_.store(true, std::memory_order_release);
        ended_.notify_all();
    }
    const std::uint64_t one = 1;
    if (event_ && ::write(event_.get(), &one, sizeof one) < 0) return;  // full: whoever reads it is told all the same
}

BlockStore::BlockStore(std::shared_ptr<Engine> engine, const std::vector<std::string>& paths, const Layout& layout, bool read_only)
    : engine_(std::move(engine)), layout_(layout), read_only_(read_only), seed_(std::random_device()() * 0x100000001u) {
    for (const std::string& path : paths)
        files_.push_back(std::make_shared<File>(path, read_only ? Access::read : Access::read_write, Creation::must_exist, true, Ownership::pages));
    index_ = load();
    try {
        for (std::thread& thread : threads_) thread = start_thread([this] { run(); });
    } catch (...) {
        close();
        throw;
    }
}

BlockStore::~BlockStore() {
    try {
        close();
    } catch (const IoError&) {  // a crash now would lose blocks, and nothing else
    }
}

void BlockStore::close() {
    {
        std::lock_guard lock(queue_mutex_);
        closed_ = true;
        submitted_.notify_all();
    }
    bool ended = false;
    for (std::thread& thread : threads_)
        if (thread.joinable()) thread.join(), ended = true;
    if (!ended || read_only_) return;
    std::exception_ptr failed;  // the other drives' records are flushed all the same
    for (const auto& file : files_)
        if (::fdatasync(file->buffered()) != 0) failed = std::make_exception_ptr(IoError(errno, "fdatasync", file->path()));
    if (failed) std::rethrow_exception(failed);
}

// The index of the blocks that the records name. Where records cannot be read, their slots are free.
std::shared_ptr<BlockIndex> BlockStore::load() {
    auto index = std::make_shared<BlockIndex>(static_cast<Slot>(layout_.slots * files_.size()));
    std::vector<Placed> placed;
    std::vector<Record> records(std::min<std::size_t>(kRecordsAtOnce, layout_.slots));
    std::uint64_t last = 0;
    for (std::size_t number = 0; number < files_.size(); ++number) {
        for (std::uint64_t first = 0; first < layout_.slots; first += records.size()) {
            const auto some = std::span(records).first(std::min<std::size_t>(records.size(), layout_.slots - first));
            try {
                read_records(*files_[number], layout_.records_begin + first * sizeof(Record), some);
            } catch (const IoError& error) {  // these blocks are lost
                note(error.what());
                continue;
            }
            for (std::size_t i = 0; i < some.size(); ++i) {
                if (!some[i].valid(layout_.block_bytes)) continue;
                const auto slot = static_cast<Slot>((first + i) * files_.size() + number);
                index->place(slot, hash_of(some[i].key_text(), seed_), some[i].length, some[i].block_crc);
                placed.push_back({some[i].sequence, slot});
                last = std::max(last, some[i].sequence);
            }
        }
    }
    const std::vector<Slot> superseded = index->finish_placing(std::move(placed));
    // As a kill leaves them. A record that stayed would bring a block back whose key is deleted later.
    if (!read_only_) write(superseded, std::vector<Record>(superseded.size()));
    std::lock_guard lock(mutex_);
    sequence_ = std::max(sequence_, last);
    return index;
}

void BlockStore::refresh() {
    auto index = load();
    std::lock_guard lock(mutex_);
    index_ = std::move(index);
}

// Jobs. --------------------------------------------------------------------------------------------------------------------------

void BlockStore::submit(std::shared_ptr<Job> job) {
    std::lock_guard lock(queue_mutex_);
    if (closed_) throw std::invalid_argument("the store is closed");
    jobs_.push_back(std::move(job));
    submitted_.notify_one();
}

void BlockStore::run() noexcept {
    std::unique_lock lock(queue_mutex_);
    while (true) {
        submitted_.wait(lock, [this] { return closed_ || !jobs_.empty(); });
        if (jobs_.empty()) return;
        const std::shared_ptr<Job> job = std::move(jobs_.front());
        jobs_.pop_front();
        lock.unlock();
        try {
            job->kind == Job::Kind::put ? put(*job) : get(*job);
        } catch (const std::exception& error) {  // as out of memory
            note(error.what());
        }
        job->finish();
        lock.lock();
    }
}

void BlockStore::put(Job& job) {
    std::vector<std::size_t> awaited;
    std::vector<Transfer> transfers = claim(job, awaited);
    {
        const AtEnd settle{[&] { end_put(job, transfers); }};  // when all requests have ended
        sort_by_place(transfers);
        std::vector<Slot> slots;
        for (const Transfer& each : transfers) slots.push_back(each.slot);
        write(slots, std::vector<Record>(slots.size()));  // cleared
        std::vector<Part> parts = start(job, transfers);
        for (Transfer& each : transfers) each.crc = checksum(job, each.key);  // while the drive writes
        for (Part& part : parts) finish(part);
        record(job, transfers, slots);
    }
    await(job, awaited);
}

void BlockStore::end_put(Job& job, std::vector<Transfer>& transfers) noexcept {
    // The last keys first: those at the beginning of a prompt, without which the others are no use, are evicted last.
    std::ranges::sort(transfers, std::greater(), &Transfer::key);
    std::lock_guard lock(mutex_);
    for (const Transfer& each : transfers) {
        const std::size_t bytes = job.memory[each.key].size();
        if (each.outcome != Outcome::done) {
            index_->abandon(each.slot, each.outcome == Outcome::drive_failed);
            ++figures_[kWriteErrors];
            continue;
        }
        index_->publish(each.slot, static_cast<std::uint32_t>(bytes), each.crc);
        job.flags[each.key] = true;
        ++figures_[kStored];
        figures_[kBytesWritten] += bytes;
    }
    published_.notify_all();
}

// Take slots for the blocks that are neither stored nor being written. The last keys are refused where slots are missing.
std::vector<BlockStore::Transfer> BlockStore::claim(Job& job, std::vector<std::size_t>& awaited) {
    std::vector<Transfer> transfers;
    std::vector<std::size_t> absent;
    transfers.reserve(job.keys.size());
    absent.reserve(job.keys.size());
    awaited.reserve(job.keys.size());
    const std::vector<KeyHash> hashes = hashes_of(job.keys);
    std::vector<KeyHash> distinct;
    distinct.reserve(hashes.size());
    std::vector<Slot> held;  // so that they are not evicted for the others
    held.reserve(hashes.size());
    std::lock_guard lock(mutex_);
    const AtEnd let_go{[&] {
        for (const Slot each : held) index_->release(each);
    }};
    for (std::size_t i = hashes.size(); i-- > 0;) {
        const Slot present = index_->find(hashes[i]);
        if (present == kNoSlot) absent.push_back(i), distinct.push_back(hashes[i]);
        else if (!index_->stored(present)) awaited.push_back(i);
        else {
            if (index_->hold(present)) held.push_back(present);
            job.flags[i] = true;
        }
    }
    std::ranges::sort(distinct);
    const auto repeated = std::ranges::unique(distinct);
    const std::vector<Slot> slots = index_->reserve(distinct.size() - repeated.size());
    auto free = slots.begin();
    for (; !absent.empty(); absent.pop_back()) {
        const std::size_t i = absent.back();
        if (index_->find(hashes[i]) != kNoSlot) awaited.push_back(i);  // of a key that is given twice
        else if (free == slots.end()) ++figures_[kRefused];
        else transfers.push_back({i, *free, 0}), index_->claim(*free++, hashes[i]);
    }
    figures_[kDuplicates] += awaited.size() + static_cast<std::uint64_t>(std::ranges::count(job.flags, true));
    return transfers;
}

// Wait for the keys that other jobs, or this one, are writing.
void BlockStore::await(Job& job, const std::vector<std::size_t>& awaited) {
    std::unique_lock lock(mutex_);
    for (const std::size_t i : awaited) {
        Slot slot = kNoSlot;
        published_.wait(lock, [&] {
            slot = index_->find(hash_of(job.keys[i], seed_));
            return slot == kNoSlot || index_->stored(slot);
        });
        job.flags[i] = slot != kNoSlot;
    }
}

void BlockStore::get(Job& job) {
    std::vector<Transfer> transfers;
    transfers.reserve(job.keys.size());
    const std::vector<KeyHash> hashes = hashes_of(job.keys);
    std::shared_ptr<BlockIndex> index;
    {
        std::lock_guard lock(mutex_);
        index = index_;
        for (const KeyHash& each : hashes) index->prefetch(each);
        for (std::size_t i = 0; i < hashes.size(); ++i) {
            const Slot slot = index->find(hashes[i]);
            if (slot == kNoSlot || !index->stored(slot) || index->length(slot) != job.memory[i].size() || !index->hold(slot)) continue;
            transfers.push_back({i, slot, index->crc(slot)});
        }
    }
    const AtEnd settle{[&] { end_get(job, *index, transfers); }};  // when all requests have ended
    sort_by_place(transfers);
    std::vector<Part> parts = start(job, transfers);
    for (Part& part : parts) {
        finish(part);
        for (Transfer& each : part.transfers)
            if (each.outcome == Outcome::moved) each.outcome = checked(job, each);
    }
}

// Whether a block that was read is that of its key.
Outcome BlockStore::checked(const Job& job, const Transfer& transfer) {
    if (read_only_) {
        Record now;
        try {
            read_records(file_of(transfer.slot), record_of(transfer.slot), {&now, 1});
        } catch (const IoError& error) {
            note(error.what());
            return outcome_of(error);
        }
        if (!now.valid(layout_.block_bytes) || now.key_text() != job.keys[transfer.key] || now.block_crc != transfer.crc) return Outcome::replaced;
    }
    if (checksum(job, transfer.key) == transfer.crc) return Outcome::done;
    note(("the checksum of the block at offset " + std::to_string(offset_of(transfer.slot)) + " of '" + file_of(transfer.slot).path() +
          "' does not match").c_str());
    return Outcome::mismatched;
}

void BlockStore::end_get(Job& job, BlockIndex& index, std::vector<Transfer>& transfers) noexcept {
    std::ranges::sort(transfers, std::greater(), &Transfer::key);  // as in end_put()
    std::lock_guard lock(mutex_);
    for (const Transfer& each : transfers) {
        const bool failed = each.outcome == Outcome::drive_failed, mismatched = each.outcome == Outcome::mismatched;
        const bool replaced = each.outcome == Outcome::replaced, done = each.outcome == Outcome::done;
        if ((failed || mismatched || replaced) && index.stored(each.slot)) index.remove(each.slot, failed);
        index.release(each.slot);
        job.flags[each.key] = done;
        figures_[kHits] += done;
        figures_[kBytesRead] += done ? job.memory[each.key].size() : 0;
        figures_[kCorrupt] += mismatched;
        figures_[kReadErrors] += !done && !mismatched && !replaced;
    }
    figures_[kMisses] += static_cast<std::uint64_t>(std::ranges::count(job.flags, false));
}

// Transfers. ---------------------------------------------------------------------------------------------------------------------

void BlockStore::sort_by_place(std::vector<Transfer>& transfers) const {
    std::ranges::sort(transfers, {}, [this](const Transfer& each) { return place_of(each.slot); });
}

// Start all transfers, which are sorted by place: those of each file together, of a get in several parts.
std::vector<BlockStore::Part> BlockStore::start(Job& job, std::span<Transfer> transfers) {
    std::uint64_t bytes = 0;
    for (const Transfer& each : transfers) bytes += job.memory[each.key].size();
    const bool read = job.kind == Job::Kind::get;
    std::uint64_t most = read ? std::clamp(bytes / kParts, kLeastPart, kMostPart) : UINT64_MAX;
    std::vector<Part> parts;
    parts.reserve(transfers.size());
    for (std::size_t begin = 0, end; begin < transfers.size(); begin = end) {
        const std::size_t number = place_of(transfers[begin].slot).first;
        std::vector<Piece> pieces;
        std::uint64_t size = 0;
        for (end = begin; end < transfers.size() && size < most && place_of(transfers[end].slot).first == number; ++end) {
            const auto memory = job.memory[transfers[end].key];
            pieces.push_back({memory.data(), offset_of(transfers[end].slot), memory.size()});
            size += memory.size();
        }
        Part& part = parts.emplace_back(job, transfers.subspan(begin, end - begin));
        SharedFile file(files_[number]);
        try {
            part.request = engine_->transfer(read ? Request::Kind::read : Request::Kind::write, std::make_unique<Pieces>(std::move(pieces)),
                                             file, /*last=*/true);
        } catch (const std::exception& error) {
            if (part.transfers.size() > 1 && outcome_of(error) == Outcome::mismatched) {  // the file was cut off somewhere
                most = 1;  // from here on one by one, so that only what is missing is a miss
                parts.pop_back();
                end = begin;
                continue;
            }
            for (Transfer& each : part.transfers) each.outcome = outcome_of(error);
            note(error.what());
        }
    }
    return parts;
}

// Wait for a part. An error concerns some of its transfers.
void BlockStore::finish(Part& part) {
    if (!part.request) return;
    part.request->wait();
    const auto error = part.request->error();
    const Pieces& pieces = *part.request->pieces();
    for (std::size_t i = 0; i < part.transfers.size(); ++i)
        part.transfers[i].outcome = error && pieces.failed(i) ? outcome_of(*error) : Outcome::moved;
    if (error) note(error->what());
}

std::uint32_t BlockStore::checksum(const Job& job, std::size_t key) const noexcept {
    const std::string& text = job.keys[key];
    const auto memory = job.memory[key];
    return crc32(crc32(0, reinterpret_cast<const std::byte*>(text.data()), text.size()), memory.data(), memory.size());
}

// Records. -----------------------------------------------------------------------------------------------------------------------

// Write the records of the blocks that are whole on the drive. Where that fails, the block counts as not written.
void BlockStore::record(const Job& job, std::span<Transfer> transfers, std::span<const Slot> slots) {
    std::uint64_t sequence;
    {
        std::lock_guard lock(mutex_);
        sequence = sequence_ = std::max(sequence_ + 1, seconds_now() << 32);
    }
    std::vector<Record> records;
    for (const Transfer& each : transfers) {
        const auto bytes = static_cast<std::uint32_t>(job.memory[each.key].size());
        records.push_back(each.outcome == Outcome::moved ? Record::of(job.keys[each.key], bytes, each.crc, sequence) : Record());
    }
    const std::vector<bool> taken = write(slots, records);
    for (std::size_t i = 0; i < transfers.size(); ++i)
        if (transfers[i].outcome == Outcome::moved) transfers[i].outcome = taken[i] ? Outcome::done : Outcome::drive_failed;
}

// Neighbours are written by one call. Returns for each record whether the system has taken it.
std::vector<bool> BlockStore::write(std::span<const Slot> slots, std::span<const Record> records) {
    std::vector<bool> taken;
    for (std::size_t begin = 0, end; begin < slots.size(); begin = end) {
        for (end = begin + 1; end < slots.size() && slots[end] == slots[end - 1] + files_.size();) ++end;
        bool done = true;
        try {
            write_records(file_of(slots[begin]), record_of(slots[begin]), records.subspan(begin, end - begin));
        } catch (const IoError& error) {
            done = false;
            note(error.what());
        }
        taken.insert(taken.end(), end - begin, done);
    }
    return taken;
}

// Keys. --------------------------------------------------------------------------------------------------------------------------

std::vector<KeyHash> BlockStore::hashes_of(const Keys& keys) const {
    std::vector<KeyHash> hashes;
    hashes.reserve(keys.size());
    for (const std::string& key : keys) hashes.push_back(hash_of(key, seed_));
    return hashes;
}

Flags BlockStore::use(const Keys& keys, Use how) {
    Flags flags(keys.size());
    std::vector<Slot> removed;
    removed.reserve(keys.size());
    const std::vector<KeyHash> hashes = hashes_of(keys);
    {
        std::lock_guard lock(mutex_);
        for (const KeyHash& each : hashes) index_->prefetch(each);
        for (std::size_t i = keys.size(); i-- > 0;) {  // the last first, as in end_put()
            const Slot slot = index_->find(hashes[i]);
            if (slot == kNoSlot || !index_->stored(slot)) continue;
            flags[i] = how == Use::pin ? index_->pin(slot) : how == Use::unpin ? index_->unpin(slot) : how != Use::remove || hold_removed(slot);
            if (how == Use::touch) index_->touch(slot);
            if (how == Use::remove && flags[i]) removed.push_back(slot);
        }
    }
    remove_held(std::move(removed));
    return flags;
}

std::size_t BlockStore::clear() {
    std::vector<Slot> removed;
    {
        std::lock_guard lock(mutex_);
        removed.reserve(index_->used());
        for (Slot slot = 0; slot < index_->slots(); ++slot)
            if (index_->stored(slot) && hold_removed(slot)) removed.push_back(slot);
    }
    const std::size_t count = removed.size();
    remove_held(std::move(removed));
    return count;
}

// Remove a stored block unless it is pinned, and hold its slot, so that nothing new is written there.
bool BlockStore::hold_removed(Slot slot) {
    if (index_->pins(slot) > 0 || !index_->hold(slot)) return false;
    index_->remove(slot, false);
    return true;
}

// Clear the records of removed blocks, then let go of their slots, also where memory for that is short.
void BlockStore::remove_held(std::vector<Slot> slots) {
    std::ptrdiff_t failed = 0;
    const AtEnd let_go{[&] {
        std::lock_guard lock(mutex_);
        figures_[kWriteErrors] += static_cast<std::uint64_t>(failed);
        for (const Slot slot : slots) index_->release(slot);
    }};
    std::ranges::sort(slots, {}, [this](Slot slot) { return place_of(slot); });
    const std::vector<Record> cleared(std::min(slots.size(), kRecordsAtOnce));
    for (std::size_t begin = 0; begin < slots.size(); begin += cleared.size()) {
        const auto some = std::span(slots).subspan(begin, std::min(cleared.size(), slots.size() - begin));
        failed += std::ranges::count(write(some, std::span(cleared).first(some.size())), false);
    }
}

void BlockStore::note(const char* error) noexcept {
    std::lock_guard lock(mutex_);
    try {
        last_error_ = error;
    } catch (const std::bad_alloc&) {  // the earlier error stays
    }
}

std::string BlockStore::last_error() const {
    std::lock_guard lock(mutex_);
    return last_error_;
}

Figures BlockStore::figures() const {
    std::lock_guard lock(mutex_);
    Figures now = figures_;
    const std::uint64_t state[] = {index_->slots(), index_->used(), index_->pinned(), index_->set_aside(), index_->evictions(), index_->nbytes()};
    std::ranges::copy(state, now.begin() + kSlots);
    return now;
}

}  // namespace deepnvme::kvstore

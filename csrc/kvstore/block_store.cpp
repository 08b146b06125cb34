#include "kvstore/block_store.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <exception>
#include <random>
#include <stdexcept>
#include <utility>

#include "core/crc32.h"
#include "core/threads.h"

namespace deepnvme::kvstore {

namespace {

constexpr std::size_t kRecordsAtOnce = 32768;  // read when a store is opened: 4 MiB

// Of a get, so many bytes are checked while the next are read. Smaller parts cost the engine more than they gain.
constexpr std::uint64_t kLeastPart = 1 << 20, kMostPart = 8 << 20, kParts = 8;

// Whether the drive is to blame, rather than the program or its memory.
bool blames_drive(const IoError& error) {
    const int number = error.error();
    return number != ECANCELED && number != ENOMEM && number != EINTR && number != EAGAIN;
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

std::uint64_t random_seed() {
    std::random_device random;
    return std::uint64_t{random()} << 32 | random();
}

}  // namespace

void Job::finish() noexcept {
    {
        std::lock_guard lock(mutex_);
        done_.store(true, std::memory_order_release);
        ended_.notify_all();
    }
    const std::uint64_t one = 1;
    if (event_ >= 0 && ::write(event_, &one, sizeof one) < 0) return;  // the descriptor is the caller's to keep open
}

BlockStore::BlockStore(std::shared_ptr<Engine> engine, const std::vector<std::string>& paths, const Layout& layout, bool read_only)
    : engine_(std::move(engine)), layout_(layout), read_only_(read_only), seed_(random_seed()) {
    for (const std::string& path : paths) {
        auto file = std::make_shared<File>(path, read_only ? Access::read : Access::read_write, Creation::must_exist, true, Ownership::pages);
        volumes_.push_back({std::move(file), RecordArea(path, layout.records_begin, !read_only)});
    }
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
    if (ended && !read_only_)
        for (const Volume& volume : volumes_) volume.records.flush();
}

// Where slots are. Neighbouring slots of the index go to the drives in turn, `stripe` at a time.

BlockStore::Place BlockStore::place_of(Slot slot) const noexcept {
    const Slot group = slot / layout_.stripe, files = static_cast<Slot>(volumes_.size());
    if (files == 1) return {0, slot};
    return {group % files, group / files * layout_.stripe + slot % layout_.stripe};
}

Slot BlockStore::slot_at(const Place& place) const noexcept {
    if (volumes_.size() == 1) return place.slot;
    const Slot files = static_cast<Slot>(volumes_.size()), group = place.slot / layout_.stripe * files + static_cast<Slot>(place.volume);
    return group * layout_.stripe + place.slot % layout_.stripe;
}

// The index of the blocks that the records name. Of two records of a key the later one counts. Where records cannot be read, their slots
// are free.
std::shared_ptr<BlockIndex> BlockStore::load() {
    auto index = std::make_shared<BlockIndex>(static_cast<Slot>(layout_.slots * volumes_.size()));
    std::vector<std::uint64_t> order;  // seconds and slot
    std::vector<Record> records(std::min<std::size_t>(kRecordsAtOnce, layout_.slots));
    std::uint64_t last = 0;
    for (std::size_t volume = 0; volume < volumes_.size(); ++volume) {
        for (Slot first = 0; first < layout_.slots; first += static_cast<Slot>(records.size())) {
            const auto some = std::span(records).first(std::min<std::size_t>(records.size(), layout_.slots - first));
            try {
                volumes_[volume].records.read(first, some);
            } catch (const IoError& error) {  // these blocks are lost
                note(error.what());
                continue;
            }
            for (std::size_t i = 0; i < some.size(); ++i) {
                const Record& record = some[i];
                if (!record.valid(layout_.block_bytes)) continue;
                const Slot slot = slot_at({volume, static_cast<Slot>(first + i)});
                last = std::max(last, record.sequence);
                const KeyHash key = hash_of(record.key_text(), seed_);
                const Slot other = index->find(key);
                if (other != kNoSlot) {
                    Record earlier;
                    const Place place = place_of(other);
                    volumes_[place.volume].records.read(place.slot, {&earlier, 1});
                    if (earlier.sequence > record.sequence) continue;
                    index->displace(other);
                }
                index->place(slot, key, record.length, record.block_crc);
                order.push_back((record.sequence & ~std::uint64_t{UINT32_MAX}) | slot);
            }
        }
    }
    std::sort(order.begin(), order.end());
    for (const std::uint64_t each : order)
        if (const auto slot = static_cast<Slot>(each); index->stored(slot)) index->enqueue_placed(slot);
    index->finish_placing();
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
    if (read_only_ && job->kind == Job::Kind::put) throw std::invalid_argument("the store is open for reading only");
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
        } catch (const std::exception& error) {  // out of memory
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
        std::vector<Slot> old;
        for (const Transfer& each : transfers) old.push_back(each.slot);
        clear_records(std::move(old));
        std::vector<Part> parts = start(job, transfers);
        for (Transfer& each : transfers) each.crc = checksum(job, each.key);  // while the drive writes
        for (Part& part : parts) finish(job, part);
        write_records(job, transfers);
    }
    await(job, awaited);
}

void BlockStore::end_put(Job& job, std::span<const Transfer> transfers) noexcept {
    std::lock_guard lock(mutex_);
    for (const Transfer& each : transfers) {
        const std::size_t bytes = job.memory[each.key].size();
        if (each.outcome != Transfer::Outcome::done) {
            index_->abandon(each.slot, each.outcome == Transfer::Outcome::drive_failed);
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
    transfers.reserve(job.keys.size());
    awaited.reserve(job.keys.size());
    const std::vector<KeyHash> hashes = hashes_of(job.keys);
    std::lock_guard lock(mutex_);
    std::size_t absent = 0;
    for (const KeyHash& key : hashes) absent += index_->find(key) == kNoSlot;
    const std::vector<Slot> slots = index_->reserve(absent);
    std::size_t taken = 0;
    for (std::size_t i = 0; i < hashes.size(); ++i) {
        const Slot present = index_->find(hashes[i]);
        if (present != kNoSlot) {
            ++figures_[kDuplicates];
            if (index_->stored(present)) index_->touch(present), job.flags[i] = true;
            else awaited.push_back(i);
        } else if (taken < slots.size()) {
            transfers.push_back({i, slots[taken], 0});
            index_->claim(slots[taken++], hashes[i]);
        } else {
            ++figures_[kRefused];
        }
    }
    for (; taken < slots.size(); ++taken) index_->give_back(slots[taken]);
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
    std::vector<KeyHash> hashes = hashes_of(job.keys);
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
    std::vector<Part> parts = start(job, transfers);
    for (Part& part : parts) {
        finish(job, part);
        for (Transfer& each : part.transfers)
            if (each.outcome == Transfer::Outcome::done && checksum(job, each.key) != each.crc) {
                each.outcome = Transfer::Outcome::mismatched;
                note("checksum of the block at offset " + std::to_string(offset_of(each.slot)) + " of '" +
                     volumes_[place_of(each.slot).volume].file->path() + "' does not match");
            }
    }
}

void BlockStore::end_get(Job& job, BlockIndex& index, std::vector<Transfer>& transfers) noexcept {
    // The last keys first: those at the beginning of a prompt, without which the others are no use, are evicted last.
    std::sort(transfers.begin(), transfers.end(), [](const Transfer& left, const Transfer& right) { return left.key > right.key; });
    std::lock_guard lock(mutex_);
    for (const Transfer& each : transfers) {
        const bool mismatched = each.outcome == Transfer::Outcome::mismatched, failed = each.outcome == Transfer::Outcome::drive_failed;
        if ((mismatched || failed) && index.stored(each.slot)) index.remove(each.slot, failed);
        index.release(each.slot);
        figures_[kCorrupt] += mismatched;
        figures_[kReadErrors] += failed || each.outcome == Transfer::Outcome::unfinished;
        if (each.outcome != Transfer::Outcome::done) continue;
        job.flags[each.key] = true;
        ++figures_[kHits];
        figures_[kBytesRead] += job.memory[each.key].size();
    }
    figures_[kMisses] += static_cast<std::uint64_t>(std::count(job.flags.begin(), job.flags.end(), false));
}

// Transfers. ---------------------------------------------------------------------------------------------------------------------

// Start all transfers, sorted by their places; those of a get in several parts.
std::vector<BlockStore::Part> BlockStore::start(Job& job, std::vector<Transfer>& transfers) {
    const auto volume_of = [this](const Transfer& each) { return place_of(each.slot).volume; };
    std::sort(transfers.begin(), transfers.end(), [&](const Transfer& left, const Transfer& right) {
        return std::pair(volume_of(left), left.slot) < std::pair(volume_of(right), right.slot);
    });
    std::uint64_t bytes = 0;
    for (const Transfer& each : transfers) bytes += job.memory[each.key].size();
    const bool read = job.kind == Job::Kind::get;
    const std::uint64_t most = read ? std::clamp(bytes / kParts, kLeastPart, kMostPart) : UINT64_MAX;
    std::vector<Part> parts;
    parts.reserve(transfers.size());
    for (std::size_t begin = 0, end; begin < transfers.size(); begin = end) {
        const std::size_t volume = volume_of(transfers[begin]);
        std::vector<Piece> pieces;
        std::uint64_t size = 0;
        for (end = begin; end < transfers.size() && size < most && volume_of(transfers[end]) == volume; ++end) {
            const auto memory = job.memory[transfers[end].key];
            pieces.push_back({memory.data(), offset_of(transfers[end].slot), memory.size()});
            size += memory.size();
        }
        Part& part = parts.emplace_back(std::span(transfers).subspan(begin, end - begin));
        SharedFile file(volumes_[volume].file);
        try {
            part.request = engine_->transfer(read ? Request::Kind::read : Request::Kind::write, std::make_unique<Pieces>(std::move(pieces)),
                                             file, /*last=*/true);
        } catch (const IoError& error) {
            note(error.what());
            if (blames_drive(error))
                for (Transfer& each : part.transfers) each.outcome = Transfer::Outcome::drive_failed;
        } catch (const PastEndError& error) {  // the file was cut off
            note(error.what());
            for (Transfer& each : part.transfers) each.outcome = Transfer::Outcome::mismatched;
        } catch (const std::exception& error) {
            note(error.what());
        }
    }
    return parts;
}

// Wait for a part. After an error the transfers that it does not concern are done.
void BlockStore::finish(Job& job, Part& part) {
    if (!part.request) return;
    part.request->wait();
    if (part.request->memory_lost()) job.memory_lost.store(true);
    const auto error = part.request->error();
    const Pieces& pieces = *part.request->pieces();
    for (std::size_t i = 0; i < part.transfers.size(); ++i) {
        if (!error || !pieces.failed(i)) part.transfers[i].outcome = Transfer::Outcome::done;
        else if (error->error() == ENODATA) part.transfers[i].outcome = Transfer::Outcome::mismatched;  // the file was cut off
        else if (blames_drive(*error)) part.transfers[i].outcome = Transfer::Outcome::drive_failed;
    }
    if (error) note(error->what());
}

std::uint32_t BlockStore::checksum(const Job& job, std::size_t key) const noexcept {
    const std::string& text = job.keys[key];
    const auto memory = job.memory[key];
    return crc32(crc32(0, reinterpret_cast<const std::byte*>(text.data()), text.size()), memory.data(), memory.size());
}

// Records. -----------------------------------------------------------------------------------------------------------------------

// Write the records of the blocks that are whole on the drive. Where that fails, the block counts as not written.
void BlockStore::write_records(const Job& job, std::span<Transfer> transfers) {
    std::uint64_t sequence;
    {
        std::lock_guard lock(mutex_);
        sequence = sequence_ = std::max(sequence_ + 1, seconds_now() << 32);
    }
    std::vector<Slot> slots;
    std::vector<Record> records;
    std::vector<Transfer*> written;
    for (Transfer& each : transfers) {
        if (each.outcome != Transfer::Outcome::done) continue;
        slots.push_back(each.slot);
        records.push_back(Record::of(job.keys[each.key], static_cast<std::uint32_t>(job.memory[each.key].size()), each.crc, sequence));
        written.push_back(&each);
    }
    const std::vector<bool> taken = write_records(slots, records);
    for (std::size_t i = 0; i < written.size(); ++i)
        if (!taken[i]) written[i]->outcome = Transfer::Outcome::drive_failed;
}

void BlockStore::clear_records(std::vector<Slot> slots) {
    std::sort(slots.begin(), slots.end());
    write_records(slots, std::vector<Record>(slots.size()));
}

// Neighbours are written by one call. Returns for each record whether the system has taken it.
std::vector<bool> BlockStore::write_records(std::span<const Slot> slots, std::span<const Record> records) {
    std::vector<bool> taken(slots.size());
    for (std::size_t begin = 0, end; begin < slots.size(); begin = end) {
        const auto [volume, first] = place_of(slots[begin]);
        for (end = begin + 1; end < slots.size() && place_of(slots[end]) == Place{volume, first + static_cast<Slot>(end - begin)};) ++end;
        try {
            volumes_[volume].records.write(first, records.subspan(begin, end - begin));
            for (std::size_t i = begin; i < end; ++i) taken[i] = true;
        } catch (const IoError& error) {
            note(error.what());
        }
    }
    return taken;
}

// Queries and changes without a transfer. ----------------------------------------------------------------------------------------

std::vector<KeyHash> BlockStore::hashes_of(const Keys& keys) const {
    std::vector<KeyHash> hashes;
    hashes.reserve(keys.size());
    for (const std::string& key : keys) hashes.push_back(hash_of(key, seed_));
    return hashes;
}

template <typename Change>
std::vector<std::uint8_t> BlockStore::for_stored(const Keys& keys, Change change) {
    std::vector<std::uint8_t> flags(keys.size());
    const std::vector<KeyHash> hashes = hashes_of(keys);
    std::lock_guard lock(mutex_);
    for (const KeyHash& each : hashes) index_->prefetch(each);
    for (std::size_t i = keys.size(); i-- > 0;) {  // the last first, as in get()
        const Slot slot = index_->find(hashes[i]);
        flags[i] = slot != kNoSlot && index_->stored(slot) && change(slot);
    }
    return flags;
}

std::vector<std::uint8_t> BlockStore::contains(const Keys& keys) {
    return for_stored(keys, [](Slot) { return true; });
}

std::vector<std::uint8_t> BlockStore::touch(const Keys& keys) {
    return for_stored(keys, [this](Slot slot) { return index_->touch(slot), true; });
}

std::vector<std::uint8_t> BlockStore::pin(const Keys& keys) {
    return for_stored(keys, [this](Slot slot) { return index_->pin(slot); });
}

std::vector<std::uint8_t> BlockStore::unpin(const Keys& keys) {
    return for_stored(keys, [this](Slot slot) { return index_->unpin(slot); });
}

std::vector<std::uint8_t> BlockStore::remove(const Keys& keys) {
    std::vector<Slot> slots;
    auto flags = for_stored(keys, [&](Slot slot) {
        if (index_->pins(slot) > 0 || !index_->hold(slot)) return false;
        index_->remove(slot, false);
        slots.push_back(slot);
        return true;
    });
    remove_held(slots);
    return flags;
}

std::size_t BlockStore::clear() {
    std::vector<Slot> slots;
    {
        std::lock_guard lock(mutex_);
        for (Slot slot = 0; slot < index_->slots(); ++slot) {
            if (!index_->stored(slot) || index_->pins(slot) > 0 || !index_->hold(slot)) continue;
            index_->remove(slot, false);
            slots.push_back(slot);
        }
    }
    remove_held(slots);
    return slots.size();
}

// Clear the records of removed blocks, while their slots are held so that nothing new is written there.
void BlockStore::remove_held(std::span<const Slot> slots) {
    clear_records({slots.begin(), slots.end()});
    std::lock_guard lock(mutex_);
    for (const Slot slot : slots) index_->release(slot);
}

void BlockStore::note(const std::string& error) {
    std::lock_guard lock(mutex_);
    last_error_ = error;
}

std::string BlockStore::last_error() const {
    std::lock_guard lock(mutex_);
    return last_error_;
}

Figures BlockStore::figures() const {
    std::lock_guard lock(mutex_);
    Figures now = figures_;
    const std::uint64_t state[] = {index_->slots(), index_->used(), index_->pinned(), index_->set_aside(), index_->evictions(), index_->nbytes()};
    std::copy(std::begin(state), std::end(state), now.begin() + kSlots);
    return now;
}

}  // namespace deepnvme::kvstore

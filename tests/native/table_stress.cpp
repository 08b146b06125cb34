// RowCache, RowBatch and WriteBatch in random turns, without Python or files, for AddressSanitizer and ThreadSanitizer: the drive is an
// array, and reads and writes of it end late and in any order. Rows are checked against a copy in memory after each read; a commit
// or a rollback ends an epoch. Batches are let go of in another thread. Exit status 0 when all was well.
//
// usage: table_stress [ROUNDS]
#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "tables/row_batch.h"
#include "tables/row_cache.h"
#include "tables/row_index.h"
#include "tables/write_batch.h"

using namespace deepnvme::tables;

namespace {

[[noreturn]] void complain(const std::string& what) {
    std::fprintf(stderr, "table_stress: %s\n", what.c_str());
    std::exit(1);
}

using Random = std::mt19937_64;

std::uint64_t below(Random& random, std::uint64_t most) { return random() % most; }

using Bytes = std::vector<std::byte>;

Bytes random_bytes(Random& random, std::size_t size) {
    Bytes bytes(size);
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
    return bytes;
}

void index_agrees_with_a_map(Random& random) {
    const std::uint64_t most = 1 + below(random, 300);
    RowIndex index(most);
    std::unordered_map<std::uint64_t, std::uint32_t> expected;
    for (int turn = 0; turn < 5000; ++turn) {
        // Multiples of large powers of two as well, whose homes are near one another.
        const std::uint64_t row = below(random, 2 * most) << (below(random, 2) ? 0 : 40);
        const auto found = expected.find(row);
        if (index.find(row) != (found == expected.end() ? RowIndex::kNone : found->second)) complain("an index has lost a row");
        if (found != expected.end()) {
            index.erase(row);
            expected.erase(found);
        } else if (expected.size() < most) {
            const auto slot = static_cast<std::uint32_t>(random() >> 33);
            index.insert(row, slot);
            expected[row] = slot;
        }
    }
}

// Lets go of batches whenever it comes to it.
class Remover {
public:
    Remover() : thread_([this] { run(); }) {}
    ~Remover() {
        remove(nullptr);
        thread_.join();
    }
    void remove(std::unique_ptr<RowBatch> batch) {
        const std::lock_guard guard(mutex_);
        batches_.push_back(std::move(batch));
        changed_.notify_one();
    }

private:
    void run() {
        for (;;) {
            std::unique_lock lock(mutex_);
            changed_.wait(lock, [this] { return !batches_.empty(); });
            const auto batch = std::move(batches_.front());
            batches_.pop_front();
            lock.unlock();
            if (!batch) return;
        }
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::unique_ptr<RowBatch>> batches_;
    std::thread thread_;
};

class World {
public:
    explicit World(Random& random)
        : random_(random),
          geometry_(random_geometry(random)),
          slots_(below(random, 3) == 0 ? below(random, 5) : below(random, 2 * geometry_.rows)),
          memory_(std::max<std::uint64_t>(slots_, 1) * RowCache::slot_bytes(geometry_.record_bytes)),
          cache_(geometry_.rows, geometry_.record_bytes, slots_, memory_.data()) {
        std::uint64_t bytes = 0;
        for (std::uint64_t row = 0; row < geometry_.rows; ++row)
            bytes = std::max(bytes, geometry_.start_of(row).offset + geometry_.stride);
        volumes_.assign(geometry_.volumes, Bytes((bytes + geometry_.unit - 1) / geometry_.unit * geometry_.unit));
        for (std::uint64_t row = 0; row < geometry_.rows; ++row) {
            rows_.push_back(geometry_.versioned() ? Bytes(geometry_.record_bytes) : random_bytes(random, geometry_.record_bytes));
            if (!geometry_.versioned()) std::memcpy(place(row), rows_.back().data(), geometry_.record_bytes);
        }
        committed_ = rows_;
        visible_.last = 1;
    }

    void run(int turns) {
        for (int turn = 0; turn < turns; ++turn) {
            switch (below(random_, geometry_.versioned() ? 11 : 4)) {
            case 0: case 1: case 2: start_read(); break;
            case 3: finish_read(); break;
            case 4: case 5: case 6: change(); break;
            case 7: start_write(); break;
            case 8: case 9: finish_write(); break;
            default: end_epoch(); break;
            }
        }
        while (!reads_.empty()) finish_read();
        while (!writes_.empty()) finish_write();
    }

private:
    struct Read {
        std::unique_ptr<RowBatch> batch;
        Bytes out;
        std::vector<std::int64_t> rows;
        std::vector<std::vector<Bytes>> possible;  // of each number, what it may be
        std::vector<Bytes> staging;
        std::vector<std::vector<std::uint64_t>> failed;
    };
    struct Write {
        std::unique_ptr<WriteBatch> batch;
        Bytes staging;
    };

    static Geometry random_geometry(Random& random) {
        Geometry geometry{};
        geometry.rows = 1 + below(random, 200);
        geometry.record_bytes = 1 + below(random, 1500);
        geometry.volumes = 1 + below(random, 3);
        geometry.chunk = 1 + below(random, 7);
        geometry.unit = 512;
        if (below(random, 2)) {
            geometry.version_bytes = (geometry.record_bytes + sizeof(VersionHeader) + 511) / 512 * 512;
            geometry.stride = 2 * geometry.version_bytes;
            if (below(random, 2)) geometry.unit = geometry.stride;
        } else {
            geometry.base = below(random, 1000);
            geometry.stride = geometry.record_bytes;
            if (below(random, 2)) {  // shards of any size, some without rows, in files of their own or together, in any order there
                const std::uint64_t apart = below(random, 2) ? geometry.rows * geometry.stride + below(random, 1000) : 0;
                for (std::uint64_t shard = 0, first = 0; shard < geometry.volumes; ++shard) {
                    const std::uint64_t before = apart * (geometry.volumes - shard);
                    geometry.shards.push_back({first, before + below(random, 1000), apart ? 0 : shard});
                    first += below(random, geometry.rows - first);
                }
            }
        }
        return geometry;
    }

    std::byte* place(std::uint64_t row) {
        const auto [volume, offset] = geometry_.start_of(row);
        return volumes_[volume].data() + offset;
    }

    void start_read() {
        Read& read = reads_.emplace_back();
        const std::uint64_t count = below(random_, 60);
        for (std::uint64_t i = 0; i < count; ++i) read.rows.push_back(static_cast<std::int64_t>(below(random_, geometry_.rows)));
        read.out.resize(count * geometry_.record_bytes);
        const bool copied = count > 0 && below(random_, 4);
        for (const auto row : read.rows) read.possible.push_back({rows_[static_cast<std::size_t>(row)]});
        const Destination destination{copied ? read.out.data() : nullptr, 0, geometry_.record_bytes};
        if (!copied) read.possible.clear();
        read.batch = std::make_unique<RowBatch>(cache_, geometry_, read.rows, destination,
                                                below(random_, 2) ? Admission::always : Admission::by_use);
        read.batch->look_up();
        if (below(random_, 3) == 0) read.batch->look_up();
        read.batch->plan(geometry_.unit * 4 + 4096, below(random_, 3) * 1024);
        for (const auto& part : read.batch->parts()) {
            const auto units = read.batch->units(part);
            Bytes& staging = read.staging.emplace_back(units.size() * geometry_.unit);
            auto& failed = read.failed.emplace_back();
            for (std::size_t i = 0; i < units.size(); ++i) {
                if (below(random_, 100) == 0) failed.push_back(i);
                else std::memcpy(staging.data() + i * geometry_.unit, volumes_[part.volume].data() + static_cast<std::uint64_t>(units[i]) * geometry_.unit, geometry_.unit);
            }
        }
    }

    void finish_read() {
        if (reads_.empty()) return;
        std::swap(reads_[below(random_, reads_.size())], reads_.back());
        Read read = std::move(reads_.back());
        reads_.pop_back();
        if (below(random_, 10)) {  // or else it is abandoned
            for (std::size_t part = 0; part < read.staging.size(); ++part)
                read.batch->deliver(part, read.staging[part].data(), visible_, read.failed[part]);
            const auto failed = read.batch->failed_positions();
            for (std::size_t i = 0; i < read.possible.size() && !read.batch->stale(); ++i) {
                if (std::binary_search(failed.begin(), failed.end(), i)) continue;
                const auto same = [&](const Bytes& row) {
                    return std::memcmp(row.data(), read.out.data() + i * geometry_.record_bytes, geometry_.record_bytes) == 0;
                };
                if (std::none_of(read.possible[i].begin(), read.possible[i].end(), same)) complain("a row has other bytes");
            }
        }
        remover_.remove(std::move(read.batch));
    }

    void change() {
        const std::uint64_t row = below(random_, geometry_.rows);
        const auto slot = cache_.find(row);
        if (slot == RowCache::kNone) return;
        rows_[row] = random_bytes(random_, geometry_.record_bytes);
        cache_.change(slot, rows_[row].data(), visible_.last);
        for (Read& read : reads_)
            for (std::size_t i = 0; i < read.possible.size(); ++i)
                if (static_cast<std::uint64_t>(read.rows[i]) == row) read.possible[i].push_back(rows_[row]);
    }

    void start_write() {
        const std::size_t most = 1 + below(random_, 20);
        Write& write = writes_.emplace_back();
        write.staging.resize(most * geometry_.version_bytes);
        write.batch = std::make_unique<WriteBatch>(cache_, geometry_, most, write.staging.data());
        copy_versions(write, 512);  // some of it is on the drive at once
    }

    void copy_versions(const Write& write, std::uint64_t length) {
        const std::byte* version = write.staging.data();
        for (const auto& part : write.batch->parts()) {
            for (const auto record : write.batch->records(part)) {
                std::memcpy(volumes_[part.volume].data() + static_cast<std::uint64_t>(record) * geometry_.version_bytes, version, length);
                version += geometry_.version_bytes;
            }
        }
    }

    void finish_write() {
        if (writes_.empty()) return;
        std::swap(writes_[below(random_, writes_.size())], writes_.back());
        Write& write = writes_.back();
        const bool fails = below(random_, 5) == 0;
        // A write that fails is torn.
        copy_versions(write, fails ? below(random_, geometry_.version_bytes / 512 + 1) * 512 : geometry_.version_bytes);
        write.batch->written(!fails);
        writes_.pop_back();
    }

    void end_epoch() {
        while (!reads_.empty()) finish_read();
        while (!writes_.empty()) finish_write();
        if (below(random_, 3) == 0) {
            cache_.drop_changed(visible_.last);
            visible_.abandoned.emplace_back(visible_.last, visible_.last + 5);
            visible_.last += 6;
            rows_ = committed_;
            return;
        }
        while (cache_.changed() > 0) {
            start_write();
            finish_write();
        }
        committed_ = rows_;
        ++visible_.last;
    }

    Random& random_;
    const Geometry geometry_;
    const std::uint64_t slots_;
    Bytes memory_;
    RowCache cache_;
    VisibleEpochs visible_;
    std::vector<Bytes> volumes_;
    std::vector<Bytes> rows_, committed_;
    Remover remover_;
    std::vector<Read> reads_;
    std::vector<Write> writes_;
};

}  // namespace

int main(int count, char** arguments) {
    const int rounds = count > 1 ? std::atoi(arguments[1]) : 300;
    for (int round = 0; round < rounds; ++round) {
        Random random(static_cast<std::uint64_t>(round));
        index_agrees_with_a_map(random);
        World(random).run(400);
    }
}

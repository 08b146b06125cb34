#include "engine/open_files.h"

#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "core/process.h"

namespace deepnvme {

namespace {

// Asked of the system before every so many permits: the bound follows a lowered limit that closely, and most requests do not ask.
constexpr std::uint64_t kPermitsBetweenLooks = 16;
// How often in a row a file may be removed while it is opened, as it is when others fail with their first write to it.
constexpr int kMostRemovals = 100;

std::uint64_t most_permits() noexcept {
    rlimit limit{};
    if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return 4096;
    return std::max<rlim_t>(limit.rlim_cur / 4, 1);  // a file may need two descriptors
}

}  // namespace

// The atomics are changed with or without the mutex, which is for those who wait. They are sequentially consistent: who waits
// counts itself before it looks at `taken_`, and who gives back lowers `taken_` before it looks for waiters, so that one sees the
// other.
class OpenFilePermit::Counter {
public:
    // A forked child starts with none taken, and never touches its parent's lock, which may have been held at the fork.
    static Counter& get() {
        static std::atomic<Counter*> counter{new Counter};
        Counter* current = counter.load(std::memory_order_acquire);
        if (current->generation_ != process_generation()) {
            auto* fresh = new Counter;
            if (counter.compare_exchange_strong(current, fresh)) current = fresh;
            else delete fresh;
        }
        return *current;
    }

    void take(const std::function<void()>& before_waiting) {
        if (try_take()) return;
        if (before_waiting) before_waiting();
        std::unique_lock lock(mutex_);
        const WaiterCount counted(waiters_);
        changed_.wait(lock, [this] {
            most_ = most_permits();
            return try_take();
        });
    }

    void give_back() noexcept {
        given_back_.fetch_add(1);  // first: who counts those without one must not find one less to wait for and nothing new
        taken_.fetch_sub(1);
        if (waiters_.load() == 0 || generation_ != process_generation()) return;
        std::lock_guard lock(mutex_);
        changed_.notify_all();
    }

    std::uint64_t given_back() const noexcept { return given_back_.load(); }

    // For somebody who has a permit and found no descriptor for it: wait until a permit is given back after `before` was. False
    // if there is no use in waiting, because all who have a permit wait here.
    bool wait_for_descriptors(std::uint64_t before) {
        std::unique_lock lock(mutex_);
        const WaiterCount counted(waiters_);
        ++without_descriptor_;
        changed_.notify_all();
        changed_.wait(lock, [&] { return given_back() != before || without_descriptor_ >= taken_.load(); });
        --without_descriptor_;
        return given_back() != before;
    }

private:
    struct WaiterCount {
        explicit WaiterCount(std::atomic<std::uint32_t>& counter) : waiters(counter) { waiters.fetch_add(1); }
        ~WaiterCount() { waiters.fetch_sub(1); }
        std::atomic<std::uint32_t>& waiters;
    };

    bool try_take() noexcept {
        std::uint64_t taken = taken_.load();
        while (true) {
            if (taken % kPermitsBetweenLooks == kPermitsBetweenLooks - 1) most_ = most_permits();
            if (taken >= most_.load(std::memory_order_relaxed)) return false;
            if (taken_.compare_exchange_weak(taken, taken + 1)) return true;
        }
    }

    const std::uint64_t generation_ = process_generation();
    std::atomic<std::uint64_t> most_{most_permits()};
    std::atomic<std::uint64_t> taken_{0};
    std::atomic<std::uint64_t> given_back_{0};  // so far
    std::atomic<std::uint32_t> waiters_{0};     // for a permit or for descriptors

    std::mutex mutex_;  // guards what follows
    std::condition_variable changed_;
    std::uint64_t without_descriptor_ = 0;  // of the permits taken
};

OpenFilePermit OpenFilePermit::take(const std::function<void()>& before_waiting) {
    OpenFilePermit permit;
    Counter& counter = Counter::get();
    counter.take(before_waiting);
    permit.counter_ = &counter;
    return permit;
}

OpenFilePermit::~OpenFilePermit() {
    if (counter_) counter_->give_back();
}

std::shared_ptr<File> OpenFilePermit::open(const std::string& path, Access access, Creation creation, bool expect_direct,
                                          ByteRange first_write, const std::function<void()>& before_waiting) {
    for (int removed = 0; true;) {
        const std::uint64_t before = counter_->given_back();
        try {
            auto file = std::make_shared<File>(path, access, creation, expect_direct, Ownership::bytes, first_write);
            // What is written to a file without a name would be lost. Some file systems may count no names.
            if (creation != Creation::provisional || removed == kMostRemovals || !file->removed_meanwhile()) return file;
            ++removed;
        } catch (const IoError& error) {
            if (error.error() != EMFILE && error.error() != ENFILE) throw;
            if (before_waiting) before_waiting();
            if (!counter_->wait_for_descriptors(before)) throw;
        }
    }
}

}  // namespace deepnvme

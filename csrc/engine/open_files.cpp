#include "engine/open_files.h"

#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <mutex>

#include "core/process.h"

namespace deepnvme {

namespace {

struct Places {
    std::mutex mutex;
    std::condition_variable given_back;
    rlim_t taken = 0;
    rlim_t waiting = 0;  // of the taken, those without a file, for want of descriptors
    std::uint64_t given_back_so_far = 0;
    std::uint64_t generation = process_generation();

    // A forked child starts with none taken, and never touches its parent's lock, which may have been held at the fork.
    static Places& get() {
        static std::atomic<Places*> places{new Places};
        Places* current = places.load(std::memory_order_acquire);
        if (current->generation != process_generation()) {
            auto* fresh = new Places;
            if (places.compare_exchange_strong(current, fresh)) current = fresh;
            else delete fresh;
        }
        return *current;
    }
};

rlim_t most_places() {
    rlimit limit{};
    if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return 4096;
    return std::max<rlim_t>(limit.rlim_cur / 4, 1);  // a file may need two descriptors
}

}  // namespace

OpenFilePlace OpenFilePlace::take() {
    Places& places = Places::get();
    std::unique_lock lock(places.mutex);
    places.given_back.wait(lock, [&] { return places.taken < most_places(); });
    ++places.taken;
    OpenFilePlace place;
    place.held_ = true;
    return place;
}

OpenFilePlace::~OpenFilePlace() {
    if (!held_) return;
    Places& places = Places::get();
    {
        std::lock_guard lock(places.mutex);
        if (places.taken > 0) --places.taken;
        ++places.given_back_so_far;
    }
    places.given_back.notify_all();
}

std::shared_ptr<File> OpenFilePlace::open(const std::string& path, Access access, Creation creation, bool expect_direct,
                                          ByteRange first_write) {
    while (true) {
        try {
            return std::make_shared<File>(path, access, creation, expect_direct, false, first_write);
        } catch (const IoError& error) {
            if (error.error() != EMFILE && error.error() != ENFILE) throw;
            Places& places = Places::get();
            std::unique_lock lock(places.mutex);
            // Those who wait here hold a place and no file: they must not wait for each other.
            ++places.waiting;
            places.given_back.notify_all();
            const auto before = places.given_back_so_far;
            places.given_back.wait(lock, [&] { return places.given_back_so_far != before || places.waiting >= places.taken; });
            --places.waiting;
            if (places.given_back_so_far == before) throw;
        }
    }
}

}  // namespace deepnvme

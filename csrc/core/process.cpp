#include "core/process.h"

#include <pthread.h>

#include <atomic>

namespace deepnvme {

namespace {

std::atomic<std::uint64_t> generation{0};

}  // namespace

std::uint64_t process_generation() noexcept {
    [[maybe_unused]] static const int registered =
        ::pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1, std::memory_order_relaxed); });
    return generation.load(std::memory_order_relaxed);
}

}  // namespace deepnvme

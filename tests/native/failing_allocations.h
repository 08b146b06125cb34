// Has allocations of a program, or of a shared object, fail on command. To be included by one of its sources.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace deepnvme::testing {

class FailingAllocations {
public:
    // The allocation after so many others fails, of whatever thread; and those after it, if `all_after`.
    static void arm(long others, bool all_after) noexcept {
        all_after_.store(all_after);
        failed_.store(0);
        left_.store(others + 1);
    }
    // From here on none fails any more. Returns how many did.
    static long disarm() noexcept {
        left_.store(0);
        return failed_.load();
    }

    static void* allocate(std::size_t size, std::size_t alignment) {
        const bool fails = left_.load(std::memory_order_relaxed) > 0 && counts_down();
        void* memory = fails ? nullptr : std::aligned_alloc(alignment, (size + alignment) / alignment * alignment);
        if (!memory) throw std::bad_alloc();
        return memory;
    }

private:
    static bool counts_down() noexcept {
        long left = left_.load();
        while (left > 0 && !left_.compare_exchange_weak(left, left > 1 || !all_after_.load() ? left - 1 : left)) {}
        if (left != 1) return false;
        failed_.fetch_add(1);
        return true;
    }

    static inline std::atomic<long> left_{0};  // until one fails; 0: none will
    static inline std::atomic<bool> all_after_{false};
    static inline std::atomic<long> failed_{0};
};

}  // namespace deepnvme::testing

// Not inline, or GCC takes std::free for a mistake.
[[gnu::noinline]] void* operator new(std::size_t size) {
    return deepnvme::testing::FailingAllocations::allocate(size, alignof(std::max_align_t));
}
[[gnu::noinline]] void* operator new(std::size_t size, std::align_val_t alignment) {
    return deepnvme::testing::FailingAllocations::allocate(size, static_cast<std::size_t>(alignment));
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

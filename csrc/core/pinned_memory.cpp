#include "core/pinned_memory.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <map>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>

#include "core/numa.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14; older kernels say EINVAL
#endif

namespace deepnvme {

namespace {

std::size_t page_size() {
    static const auto size = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    return size;
}

constexpr std::uintptr_t round_up(std::uintptr_t value, std::size_t unit) { return (value + unit - 1) / unit * unit; }

// Where mlock did not: every page present before the first transfer needs it.
void populate(std::byte* data, std::size_t size) {
    if (::madvise(data, size, MADV_POPULATE_WRITE) == 0) return;
    for (std::size_t at = 0; at < size; at += page_size()) *static_cast<volatile std::byte*>(data + at) = std::byte{0};
}

}  // namespace

PinnedMemory::PinnedMemory(std::size_t size, std::optional<int> node) {
    if (node && !has_memory_node(*node))
        throw std::invalid_argument("the machine has no memory on a NUMA node " + std::to_string(*node));
    if (size == 0) return;
    if (size > SIZE_MAX - 2 * kHugePage) throw std::bad_alloc();
    const std::size_t length = round_up(size, page_size());
    // Only a whole aligned extent can be one huge page; less than one is aligned to its size, for drives with large sectors.
    const std::size_t alignment = std::min(kHugePage, std::bit_ceil(length));
    const std::size_t slack = alignment > page_size() ? alignment : 0;

    void* mapped = ::mmap(nullptr, length + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    auto* begin = static_cast<std::byte*>(mapped);
    if (slack) {
        const auto address = reinterpret_cast<std::uintptr_t>(begin);
        const std::size_t head = round_up(address, alignment) - address;
        if (head) ::munmap(begin, head);
        if (slack - head) ::munmap(begin + head + length, slack - head);
        begin += head;
    }
    if (length >= kHugePage) ::madvise(begin, length, MADV_HUGEPAGE);  // advice: ordinary pages serve where it is not taken
    if (node) placement_error_ = prefer_node(begin, length, *node);
    data_ = begin;
    size_ = size;
    locked_ = ::mlock(begin, length) == 0;
    if (!locked_) populate(begin, length);
}

PinnedMemory::~PinnedMemory() {
    if (data_) ::munmap(data_, round_up(size_, page_size()));
}

namespace pinned_ranges {

namespace {

struct Ranges {
    std::mutex mutex;
    std::map<const std::byte*, std::size_t> sizes;  // by first byte

    static inline Ranges* adopted = nullptr;  // another module's, which has seen to forks

    // Never destroyed: tensors may outlive every static object.
    static Ranges& get() {
        if (adopted) return *adopted;
        static Ranges* ranges = [] {
            auto* made = new Ranges;
            // A fork while another thread holds the lock would leave the child's copy locked for good.
            ::pthread_atfork([] { get().mutex.lock(); }, [] { get().mutex.unlock(); }, [] { get().mutex.unlock(); });
            return made;
        }();
        return *ranges;
    }
};

}  // namespace

void* shared() { return &Ranges::get(); }

void adopt(void* shared) { Ranges::adopted = static_cast<Ranges*>(shared); }

void add(const std::byte* begin, std::size_t size) {
    auto& ranges = Ranges::get();
    std::lock_guard lock(ranges.mutex);
    ranges.sizes[begin] = size;
}

bool remove(const std::byte* begin) {
    auto& ranges = Ranges::get();
    std::lock_guard lock(ranges.mutex);
    return ranges.sizes.erase(begin) > 0;
}

bool contains(const std::byte* begin, std::size_t size) {
    auto& ranges = Ranges::get();
    std::lock_guard lock(ranges.mutex);
    auto after = ranges.sizes.upper_bound(begin);
    if (after == ranges.sizes.begin()) return false;
    const auto& [start, length] = *std::prev(after);
    return begin + size <= start + length;
}

}  // namespace pinned_ranges

}  // namespace deepnvme

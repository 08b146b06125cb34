// Page-locked memory on huge pages, and the process-wide record of it.
//
// Physically contiguous pages are worth more than the backend: reading 1 GiB cost 0.037 CPU s/GB on ordinary pages and 0.006 on
// huge ones, at 1.3 to 1.4 times the rate (docs/design.md).
#pragma once

#include <cstddef>
#include <optional>
#include <utility>

namespace deepnvme {

inline constexpr std::size_t kHugePage = std::size_t{2} << 20;  // bytes; so much memory, or more, is put on huge pages

// Move-only; locked, zeroed, and resident from the start. Unmapped by the destructor.
class PinnedMemory {
public:
    // Throws std::bad_alloc when the system has not that much. A refused mlock is not an error: see locked(). With `node`, the memory
    // is that NUMA node's as far as it has room; std::invalid_argument if the machine has no such node. A refusal to ask for a node
    // (in containers) is not an error either: see placement_error().
    explicit PinnedMemory(std::size_t size, std::optional<int> node = {});
    PinnedMemory() noexcept = default;
    PinnedMemory(PinnedMemory&& other) noexcept { *this = std::move(other); }
    PinnedMemory& operator=(PinnedMemory&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        std::swap(locked_, other.locked_);
        std::swap(placement_error_, other.placement_error_);
        return *this;
    }
    ~PinnedMemory();

    std::byte* data() const noexcept { return data_; }
    std::size_t size() const noexcept { return size_; }
    bool locked() const noexcept { return locked_; }
    // errno of the refusal; 0 if there was none.
    int placement_error() const noexcept { return placement_error_; }

private:
    std::byte* data_ = nullptr;
    std::size_t size_ = 0;
    bool locked_ = false;
    int placement_error_ = 0;
};

// Which address ranges were handed out as pinned; one for the process, so that every handle answers alike. Usable in a forked
// child, whose copy of the memory keeps its addresses.
namespace pinned_ranges {
void add(const std::byte* begin, std::size_t size);
// True if a range began exactly here.
bool remove(const std::byte* begin);
bool contains(const std::byte* begin, std::size_t size);

// The record, for another op's module of this process, which has these functions a second time; it calls adopt() before all others.
void* shared();
void adopt(void* shared);
}  // namespace pinned_ranges

}  // namespace deepnvme

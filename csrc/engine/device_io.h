// A way between files and device memory that does not lead through the host's, where there is one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/cuda.h"
#include "core/error.h"

namespace deepnvme {

// Thread-safe.
class DeviceIo {
public:
    virtual ~DeviceIo() = default;

    // A direct descriptor made ready, for as long as what is returned lives, which ends before the descriptor is closed. Throws
    // IoError with the reason if transfers of this file cannot go this way.
    virtual std::shared_ptr<void> open(int fd) = 0;

    // Bytes moved, -errno, or less than that: a reason of its own, which explain() tells. Block.
    virtual std::int64_t read(void* file, CudaDevice device, std::byte* memory, std::size_t length, std::uint64_t offset) = 0;
    virtual std::int64_t write(void* file, CudaDevice device, const std::byte* memory, std::size_t length, std::uint64_t offset) = 0;

    // What a negative result means: errno, and the reason unless errno says it all.
    virtual IoError explain(std::int64_t result) const = 0;
};

}  // namespace deepnvme

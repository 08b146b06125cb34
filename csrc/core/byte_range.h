// A range of a file.
#pragma once

#include <cstdint>

namespace deepnvme {

struct ByteRange {
    std::uint64_t offset = 0;  // bytes into the file
    std::uint64_t length = 0;  // bytes
};

}  // namespace deepnvme

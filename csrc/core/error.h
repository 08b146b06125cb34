// Errors of the core and the engine: what was tried, on what, and what the system said.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace deepnvme {

// A system call or a transfer that failed. The bindings turn it into the OSError subclass that its errno selects.
class IoError : public std::runtime_error {
public:
    // `what` names the operation with its figures ("write of 4096 bytes at offset 0"); `path` may be empty.
    IoError(int error, std::string what, std::string path);

    int error() const noexcept { return error_; }
    const std::string& operation() const noexcept { return operation_; }
    const std::string& path() const noexcept { return path_; }

private:
    int error_;
    std::string operation_;
    std::string path_;
};

// A read of a range that ends past the end of the file. The bindings turn it into a ValueError with an attribute `file_size`.
class PastEndError : public std::invalid_argument {
public:
    PastEndError(const std::string& what, std::uint64_t file_size) : std::invalid_argument(what), file_size_(file_size) {}

    // Bytes that the file had when the read was refused.
    std::uint64_t file_size() const noexcept { return file_size_; }

private:
    std::uint64_t file_size_;
};

// "No space left on device", without strerror's shared buffer.
std::string describe_errno(int error);

}  // namespace deepnvme

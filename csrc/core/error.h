// Errors of the core and the engine: what was tried, on what, and what the system said.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

namespace deepnvme {

// A system call or a transfer that failed. The bindings turn it into the OSError subclass that its errno selects. To copy one
// allocates nothing and never fails: errors are passed on where memory has just run out.
class IoError : public std::runtime_error {
public:
    // `what` names the operation with its figures ("write of 4096 bytes at offset 0"); `path` may be empty.
    IoError(int error, std::string what, std::string path);

    // ENOMEM, made beforehand: for where there is no memory to say more. The first call may throw std::bad_alloc.
    static const IoError& out_of_memory();

    int error() const noexcept { return error_; }
    const std::string& operation() const noexcept { return texts_->operation; }
    const std::string& path() const noexcept { return texts_->path; }

private:
    struct Texts {
        std::string operation;
        std::string path;
    };

    int error_;
    std::shared_ptr<const Texts> texts_;
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

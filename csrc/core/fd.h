// An open file descriptor with one owner.
#pragma once

#include <sys/types.h>
#include <utility>

namespace deepnvme {

// Move-only; closed exactly once.
class Fd {
public:
    Fd() noexcept = default;
    explicit Fd(int fd) noexcept : fd_(fd) {}
    Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    Fd& operator=(Fd&& other) noexcept {
        std::swap(fd_, other.fd_);
        return *this;
    }
    ~Fd();

    // Close it now. 0, or errno: some file systems say only here what they could not write (NFS, FUSE). It is closed all the same.
    int close() noexcept;

    int get() const noexcept { return fd_; }
    explicit operator bool() const noexcept { return fd_ >= 0; }

private:
    int fd_ = -1;
};

}  // namespace deepnvme

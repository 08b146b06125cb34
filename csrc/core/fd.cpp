#include "core/fd.h"

#include <unistd.h>

#include <cerrno>

namespace deepnvme {

Fd::~Fd() { close(); }

int Fd::close() noexcept {
    const int fd = std::exchange(fd_, -1);
    // EINTR from close leaves the descriptor closed on Linux; a retry could close somebody else's.
    return fd >= 0 && ::close(fd) != 0 ? errno : 0;
}

}  // namespace deepnvme

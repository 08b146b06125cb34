#include "core/fd.h"

#include <unistd.h>

namespace deepnvme {

Fd::~Fd() {
    // EINTR from close leaves the descriptor closed on Linux; a retry could close somebody else's.
    if (fd_ >= 0) ::close(fd_);
}

}  // namespace deepnvme

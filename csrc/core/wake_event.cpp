#include "core/wake_event.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

#include "core/error.h"

namespace deepnvme {

WakeEvent::WakeEvent() : fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!fd_) throw IoError(errno, "eventfd", "");
}

void WakeEvent::signal() noexcept {
    const std::uint64_t one = 1;
    // Fails only when 2^64 - 2 signals are pending, which wakes as well as one more would.
    [[maybe_unused]] const auto written = ::write(fd_.get(), &one, sizeof one);
}

void WakeEvent::clear() noexcept {
    std::uint64_t count;
    [[maybe_unused]] const auto read = ::read(fd_.get(), &count, sizeof count);
}

}  // namespace deepnvme

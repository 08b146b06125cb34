// How many files requests may hold open at a time.
//
// Every pending request on a path has its file open, and thousands may be pending: without a bound they would take every
// descriptor the process has, and an innocent open elsewhere in the program would fail.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "core/file.h"

namespace deepnvme {

// Permission for one open file of the process; given back by the destructor. Costs an atomic operation each way, and a lock only
// while somebody waits for a permit.
class OpenFilePermit {
public:
    OpenFilePermit() noexcept = default;
    // Blocks while the process's requests hold a quarter of the descriptors that RLIMIT_NOFILE allows. A limit that is lowered
    // later is noticed within 16 permits. `before_waiting`: called first; has requests of the caller's end that it keeps back.
    static OpenFilePermit take(const std::function<void()>& before_waiting = {});
    OpenFilePermit(OpenFilePermit&& other) noexcept : counter_(std::exchange(other.counter_, nullptr)) {}
    OpenFilePermit& operator=(OpenFilePermit&& other) noexcept {
        std::swap(counter_, other.counter_);
        return *this;
    }
    ~OpenFilePermit();

    // Open a file with this permit, like File's constructor. When descriptors run out all the same, waits until a pending request
    // has given some back, and throws EMFILE only if none holds any.
    std::shared_ptr<File> open(const std::string& path, Access access, Creation creation, bool expect_direct,
                               ByteRange first_write = {}, const std::function<void()>& before_waiting = {});

    explicit operator bool() const noexcept { return counter_ != nullptr; }

private:
    class Counter;
    Counter* counter_ = nullptr;  // of the process that took the permit, never destroyed
};

}  // namespace deepnvme

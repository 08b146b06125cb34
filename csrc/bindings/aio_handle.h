// DeepSpeed's handle on our engine: same names, same order, same results (DeepSpeed 0.19, py_ds_aio.cpp).
#pragma once

#include "bindings/python.h"

namespace deepnvme::bindings {

class AioHandle {
public:
    AioHandle(EngineOptions options, bool overlap_events);

    // Start a transfer; its end is collected by wait().
    int start(Direction direction, py::handle buffer, py::handle filename, std::int64_t offset, bool validate);
    int start_descriptor(py::handle buffer, int fd, std::int64_t offset);
    // Transfer and wait for this transfer alone, leaving what is pending to wait(). Returns 1, the operations completed.
    int finish(Direction direction, py::handle buffer, py::handle filename, std::int64_t offset, bool validate);

    // Operations completed since the last wait. Raises the first error, once all have ended.
    int wait();

    Session& session() noexcept { return session_; }
    bool overlap_events() const noexcept { return overlap_events_; }

private:
    Session session_;
    bool overlap_events_;
    std::deque<std::shared_ptr<Pending>> started_;
};

}  // namespace deepnvme::bindings

// DeepSpeed's handle on our engine: same names, same order, same results (DeepSpeed 0.19, py_ds_aio.cpp).
#pragma once

#include <deque>

#include "bindings/session.h"

namespace deepnvme::bindings {

class AioHandle {
public:
    AioHandle(EngineOptions options, bool overlap_events);
    AioHandle(std::unique_ptr<Engine> engine, bool overlap_events);

    // Start a transfer; its end is collected by wait().
    int start(Direction direction, nb::handle buffer, nb::handle filename, std::int64_t offset, bool validate);
    // Start many at once; see Session::transfer_many.
    int start_many(Direction direction, nb::handle buffers, nb::handle filenames, nb::handle offsets);
    int start_descriptor(nb::handle buffer, int fd, std::int64_t offset);
    // Transfer and wait for this transfer alone, leaving what is pending to wait(). Returns 1, the operations completed.
    int finish(Direction direction, nb::handle buffer, nb::handle filename, std::int64_t offset, bool validate);

    // Operations completed since the last wait. Raises the first error, once all have ended.
    int wait();

    Session& session() noexcept { return session_; }
    bool overlap_events() const noexcept { return overlap_events_; }

private:
    Session session_;
    bool overlap_events_;
    std::deque<std::shared_ptr<Pending>> started_;
};

// What Python sees of it but for its constructor, whose arguments handle_options takes apart. Throws ValueError and TypeError.
nb::class_<AioHandle> define_handle(nb::module_& module, const char* name, const char* doc);
EngineOptions handle_options(nb::handle block_size, nb::handle queue_depth, bool single_submit, nb::handle intra_op_parallelism,
                             const nb::object& num_threads, std::string backend = "auto");

inline constexpr std::int64_t kHandleBlockSize = 1 << 20;
inline constexpr std::int64_t kHandleQueueDepth = 128;

}  // namespace deepnvme::bindings

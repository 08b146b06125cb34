// An engine used from Python, and what has to outlive its requests.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>

#include "bindings/pending.h"
#include "engine/engine.h"

namespace deepnvme::bindings {

// A file opened once for many transfers.
struct OpenFile {
    std::shared_ptr<File> file;  // null once closed
    std::string path;
    std::uint64_t generation = process_generation();  // of the process that opened it: its lock is no use to a forked child

    File& get() const;
};

// Names a capsule with an OpenFile, which File has for our other ops: their classes are different ones, but the layout is the same if
// the compiler is.
inline constexpr const char* kSharedFile = "deepnvme file, " NB_PLATFORM_ABI_TAG;

// An engine whose requests keep their tensors' storages alive. All methods are called with the GIL held.
class Session {
public:
    explicit Session(std::unique_ptr<Engine> engine);
    explicit Session(const EngineOptions& options);
    // Waits for every request, unless this is a forked child.
    ~Session();
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;

    bool usable_here() const noexcept { return engine_->usable_here(); }
    // Throws std::runtime_error in a forked child, where even asking could hang on a lock.
    Engine& engine() const;
    // For C++ that starts transfers of its own, and keeps their memory.
    std::shared_ptr<Engine> shared_engine() const;

    // `target`: a path or an OpenFile; for write_descriptor, an open file descriptor.
    std::shared_ptr<Pending> transfer(Direction direction, nb::handle tensor, nb::handle target, std::int64_t offset,
                                      bool validate = false);
    std::shared_ptr<Pending> write_descriptor(nb::handle tensor, int fd, std::int64_t offset);
    std::shared_ptr<Pending> sync(nb::handle target);
    // `targets`: one for all tensors, or a sequence of one for each. If this throws, nothing is under way any more, unless a
    // signal handler has thrown.
    std::shared_ptr<Pending> transfer_many(Direction direction, nb::handle tensors, nb::handle targets, nb::handle offsets);
    std::shared_ptr<Pending> transfer_records(Direction direction, nb::handle file, nb::handle ids, nb::handle rows,
                                              nb::handle record_size, std::int64_t base);

    // Have all requests under way end as soon as may be; returns how many there were. See Engine::cancel.
    std::size_t cancel();

    // What is under way: "2 transfers, the oldest: write of 4096 bytes at offset 0 'file'".
    std::string describe_pending() const;

    // Wait for all requests, then close the engine. False if the time ran out first: the engine stays open then.
    bool close(std::optional<std::chrono::nanoseconds> timeout);

    // The same, but for an engine of another process nothing. Says on stderr what it waits for after some seconds; Ctrl-C then
    // gives the engine up, with all that its requests use, so that the process can end: by SIGINT, once everybody else has been
    // asked.
    void close_at_exit();

    nb::dict stats() const;

    // Let go of the memory of requests that have ended, up to the first that has not. Behind it as well once there may be many.
    // `ended_so_far`: how many requests of this process have ended so far.
    void forget_ended(std::uint64_t ended_so_far = 0);

private:
    void check_process() const;
    template <typename Submit>
    std::shared_ptr<Pending> remember(std::shared_ptr<Pending> pending, Submit submit);
    template <typename Transfers>
    std::shared_ptr<Pending> start_many(Transfers transfers);

    std::shared_ptr<Engine> engine_;  // futures have it as well: a request may end in the midst of its cancel()
    bool given_up_ = false;  // at exit: nothing is waited for any more
    // Submitted and not known to have ended, oldest first.
    std::deque<std::shared_ptr<Pending>> pending_;
    std::uint64_t ended_at_last_full_scan_ = 0;  // the number of ended requests at the last look at all of pending_
};

}  // namespace deepnvme::bindings

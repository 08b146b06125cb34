// Transfers between memory and files, asynchronously: what the bindings, and any C++ caller, use.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/file.h"
#include "engine/backend.h"
#include "engine/device_fence.h"
#include "engine/device_io.h"
#include "engine/open_files.h"
#include "engine/queue.h"
#include "engine/request.h"
#include "engine/statistics.h"
#include "engine/worker.h"

namespace deepnvme {

struct EngineOptions {
    std::string backend = "auto";          // or a name of backend_choices()
    std::int64_t block_size = 1 << 20;     // bytes, [512, 1 GiB]
    std::int64_t queue_depth = 128;        // blocks under way per worker, [1, 4096]
    std::int64_t num_threads = 1;          // workers, [1, 256]
    bool single_submit = false;            // one system call a block
};

// Where memory is that is not the host's, and the stream of the caller's after whose work it is transferred.
struct DeviceMemory {
    CudaDevice device;
    CudaStreamHandle stream;
};

// Thread-safe. Every method but close() returns without waiting for a transfer, though opening a file can take its time.
class Engine {
public:
    // Throws std::invalid_argument for an option out of range, IoError when the kernel refuses the backend asked for.
    explicit Engine(EngineOptions options);
    // For a backend that is not one of backend_choices(). `device_io`: the way that device memory goes, with a backend that knows it;
    // `strict`: never another.
    Engine(EngineOptions options, std::string name, BackendFactory make_backend, std::shared_ptr<DeviceIo> device_io = nullptr,
           bool strict = false);
    // Like close(). After a fork the child must not call it: see usable_here().
    ~Engine();

    // The memory must stay valid, and a read's be left alone, until the request is done. With `device` it is a device's: a write
    // sees what the stream had been given before, and what is read is there when the request is done.
    //
    // All throw std::invalid_argument for a range that cannot be (negative, past 2^63; PastEndError on a read past the end of the
    // file) and a closed engine, IoError for what opening or reserving space says, std::runtime_error in a forked child: nothing has been
    // transferred then. std::runtime_error also where there is no CUDA for device memory.
    std::shared_ptr<Request> read(std::byte* memory, std::uint64_t length, const std::string& path, std::int64_t offset,
                                  std::optional<DeviceMemory> device = {});
    std::shared_ptr<Request> read(std::byte* memory, std::uint64_t length, std::shared_ptr<File> file, std::int64_t offset,
                                  std::optional<DeviceMemory> device = {});
    std::shared_ptr<Request> write(std::byte* memory, std::uint64_t length, const std::string& path, std::int64_t offset,
                                  std::optional<DeviceMemory> device = {});
    std::shared_ptr<Request> write(std::byte* memory, std::uint64_t length, std::shared_ptr<File> file, std::int64_t offset,
                                  std::optional<DeviceMemory> device = {});
    // The descriptor may be closed once this returns.
    std::shared_ptr<Request> write(std::byte* memory, std::uint64_t length, int fd, std::int64_t offset,
                                  std::optional<DeviceMemory> device = {});
    // Begins when every write submitted to this engine before has ended.
    std::shared_ptr<Request> sync(const std::string& path);
    std::shared_ptr<Request> sync(std::shared_ptr<File> file);

    // Have this called after each request's end, by the thread that ended it. To be set before the first request.
    void tell_of_ends(void (*told)() noexcept) noexcept { told_of_ends_ = told; }

    // Wait for every request, then end the workers. Idempotent.
    void close();
    bool closed() const noexcept { return closed_.load(std::memory_order_acquire); }

    // False in a child forked from the process that made the engine: its workers did not come along.
    bool usable_here() const noexcept;
    // Throws what the submitting calls throw on a closed or forked engine.
    void check_usable() const;

    const std::string& backend() const noexcept { return backend_; }
    const EngineOptions& options() const noexcept { return options_; }
    Statistics statistics() const;

    // Count in the statistics that something slower is used, and why.
    void note_fallback(const std::string& reason);

    // Of all engines of this process: why direct I/O could not be used, once for each file system.
    static std::vector<std::string> take_warnings();

private:
    struct Barrier {
        std::uint64_t epoch;
        std::uint64_t remaining;  // writes of this epoch or before that are under way
        Request* request;
    };

    void start(const std::string& name, const BackendFactory& make_backend);
    std::unique_ptr<const DeviceFence> fence_before(Request::Kind kind, std::uint64_t length, std::int64_t offset,
                                                    const std::optional<DeviceMemory>& device, const std::string& path);
    std::shared_ptr<Request> submit(Request::Kind kind, std::byte* memory, std::uint64_t length, std::shared_ptr<File> file,
                                    std::int64_t offset, std::optional<DeviceMemory> device,
                                    std::unique_ptr<const DeviceFence> fence, OpenFilePlace place);
    std::shared_ptr<void> open_for_device(File& file);
    void end_workers();
    void fence_passed(Request& request, const std::optional<IoError>& error);
    void ended(Request& request);
    void fell_back(File& file, const std::string& reason);

    EngineOptions options_;
    BlockLimits limits_;
    std::string backend_;
    std::shared_ptr<DeviceIo> device_io_;
    bool strict_ = false;
    const std::uint64_t generation_;
    void (*told_of_ends_)() noexcept = nullptr;

    mutable std::mutex mutex_;  // guards everything up to queue_
    std::condition_variable idle_;
    std::atomic<bool> closed_{false};  // set under the mutex, so that nothing is submitted after close() has looked
    std::uint64_t under_way_ = 0;
    std::uint64_t writes_under_way_ = 0;
    std::uint64_t epoch_ = 0;  // fsyncs so far
    std::vector<Barrier> barriers_;
    Statistics totals_;

    Queue queue_;
    std::vector<std::unique_ptr<Worker>> workers_;
    std::unique_ptr<DeviceFenceWatch> fences_;  // made when first needed, under the mutex
};

}  // namespace deepnvme

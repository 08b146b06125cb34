// Transfers between memory and files, asynchronously: what the bindings, and any C++ caller, use.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/file.h"
#include "core/grow_only_list.h"
#include "engine/backend.h"
#include "engine/device_fence.h"
#include "engine/device_io.h"
#include "engine/drive.h"
#include "engine/open_files.h"
#include "engine/request.h"
#include "engine/statistics.h"

namespace deepnvme {

struct EngineOptions {
    std::string backend = "auto";          // or a name of backend_choices()
    std::int64_t block_size = 1 << 20;     // bytes, [512, 1 GiB]
    std::int64_t queue_depth = 128;        // blocks under way per worker, [1, 4096]
    std::int64_t num_threads = 1;          // workers for each drive, [1, 256]
    bool single_submit = false;            // one system call a block
    std::optional<std::int64_t> in_flight_bytes = std::nullopt;  // under way per worker, after which no further block is started

    // Bytes of blocks of full size.
    std::int64_t most_in_flight() const {
        const std::int64_t queued = queue_depth * block_size;
        return std::min(in_flight_bytes.value_or(queued), queued);
    }
};

// Where memory is that is not the host's, and the stream of the caller's after whose work it is transferred.
struct DeviceMemory {
    CudaDevice device;
    CudaStreamHandle stream;
};

// A file, or the path of one, for several requests. One by path is opened with the first and closed with the last that ends,
// which is told what closing it says.
struct SharedFile {
    explicit SharedFile(std::shared_ptr<File> file) : file(std::move(file)), path(this->file->path()), by_path(false) {}
    explicit SharedFile(std::string path) : path(std::move(path)), by_path(true) {}

    std::shared_ptr<File> file;
    std::string path;
    bool by_path;
};

// Requests of one call on their way to their drive: handed over some at a time, so that a worker that sleeps is woken less often
// and what it gives the kernel is more than one block. Not thread-safe.
class RequestGroup {
public:
    RequestGroup() = default;
    RequestGroup(const RequestGroup&) = delete;
    RequestGroup& operator=(const RequestGroup&) = delete;
    ~RequestGroup() { hand_over(); }

    // The request is admitted, no fsync, and has bytes to move. From here on it may end at any time.
    void add(Drive& drive, Request& request) noexcept;
    // Before anything that waits for requests to end.
    void hand_over() noexcept;

private:
    using Clock = std::chrono::steady_clock;

    std::array<Request*, 16> requests_;
    std::size_t count_ = 0;
    std::size_t enough_ = 1;  // grows, so that the drive has work at once
    Drive* drive_ = nullptr;  // of them
    Clock::time_point since_;
};

// Which drive a file lies on. Files with the same number share a queue.
using DriveOf = std::function<std::uint64_t(const File&)>;

// Each drive (by st_dev) has a queue and workers of its own: the first to be used those that the engine starts with, others from
// their first transfer on.
//
// Thread-safe. Every method but close() returns without waiting for a transfer, though opening a file can take its time.
class Engine {
public:
    // Throws std::invalid_argument for an option out of range, IoError when the kernel refuses the backend asked for.
    explicit Engine(EngineOptions options);
    // For a backend that is not one of backend_choices(). `device_io`: the way that device memory goes, with a backend that knows
    // it; `strict`: never another.
    Engine(EngineOptions options, std::string name, BackendFactory make_backend, std::shared_ptr<DeviceIo> device_io = nullptr,
           bool strict = false);
    // Like close(). After a fork the child must not call it: see usable_here().
    ~Engine();

    // The memory must stay valid, and a read's be left alone, until the request is done. With `device` it is a device's: a write
    // sees what the stream had been given before, and what is read is there when the request is done.
    //
    // All throw std::invalid_argument for a range that cannot be (negative, past 2^63; PastEndError on a read past the end of the
    // file) and a closed engine, IoError for what opening or reserving space says, std::runtime_error in a forked child: nothing
    // has been transferred then. std::runtime_error also where there is no CUDA for device memory.
    std::shared_ptr<Request> read(std::byte* memory, std::uint64_t length, const std::string& path, std::int64_t offset,
                                  std::optional<DeviceMemory> device = {}, RequestGroup* group = nullptr);
    std::shared_ptr<Request> read(std::byte* memory, std::uint64_t length, std::shared_ptr<File> file, std::int64_t offset,
                                  std::optional<DeviceMemory> device = {}, RequestGroup* group = nullptr);
    std::shared_ptr<Request> write(std::byte* memory, std::uint64_t length, const std::string& path, std::int64_t offset,
                                  std::optional<DeviceMemory> device = {}, RequestGroup* group = nullptr);
    std::shared_ptr<Request> write(std::byte* memory, std::uint64_t length, std::shared_ptr<File> file, std::int64_t offset,
                                  std::optional<DeviceMemory> device = {}, RequestGroup* group = nullptr);
    // The descriptor may be closed once this returns.
    std::shared_ptr<Request> write(std::byte* memory, std::uint64_t length, int fd, std::int64_t offset,
                                  std::optional<DeviceMemory> device = {});
    // Many transfers of one file by one request, which goes on with the others when one fails. `last`: no other request is made
    // with `shared`, which gives up its file.
    std::shared_ptr<Request> transfer(Request::Kind kind, std::unique_ptr<Pieces> pieces, SharedFile& shared, bool last,
                                      std::optional<DeviceMemory> device = {});
    // Begins when every write submitted to this engine and drive before has ended.
    std::shared_ptr<Request> sync(const std::string& path);
    std::shared_ptr<Request> sync(std::shared_ptr<File> file);

    // Have a request end as soon as may be, with IoError(ECANCELED). False if it has ended already. Does not wait: blocks that a
    // drive or file system has begun may go on, and the request's end with them. What was transferred before stays so.
    static bool cancel(Request& request);
    // "write of 4096 bytes at offset 0 'file'"; empty if it has ended.
    static std::string describe(Request& request);

    // Have this called after each request's end, by the thread that ended it. To be set before the first request.
    void on_request_end(void (*callback)() noexcept) noexcept;
    // Instead of by st_dev. To be set before the first request.
    void set_drive_of(DriveOf drive_of) { drive_of_ = std::move(drive_of); }

    // Wait until nothing is under way. False if the time ran out first.
    bool wait_until_idle(std::chrono::nanoseconds time);
    // Take no more requests, wait for those under way, then end the workers. Idempotent.
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
    void note_fallback(const std::string& reason) { fallbacks_.add(reason); }

    // Of all engines of this process: why direct I/O could not be used, once for each file system.
    static std::vector<std::string> take_warnings();

private:
    // A file system and the drive that serves it, which several share if there are too many.
    struct DriveEntry {
        std::uint64_t device;
        Drive* drive;
    };

    void start(const std::string& name, const BackendFactory& make_backend);
    Drive& drive_of(const File& file);
    Drive* find_drive(std::uint64_t device) const;
    Drive& add_drive(std::uint64_t device, const File& file);
    std::unique_ptr<const DeviceFence> fence_before(Request::Kind kind, std::uint64_t length, std::int64_t offset,
                                                    const std::optional<DeviceMemory>& device, const std::string& path);
    std::shared_ptr<Request> submit(Request::Kind kind, std::byte* memory, std::uint64_t length, std::shared_ptr<File> file,
                                    std::int64_t offset, std::optional<DeviceMemory> device,
                                    std::unique_ptr<const DeviceFence> fence, OpenFilePermit permit,
                                    RequestGroup* group = nullptr);
    void launch(Drive& drive, const std::shared_ptr<Request>& request, std::unique_ptr<const DeviceFence> fence,
                RequestGroup* group = nullptr);
    std::shared_ptr<void> open_for_device(File& file);
    void fence_passed(Request& request, const std::optional<IoError>& error) noexcept;
    void note_and_warn(File& file, const char* consequence, const std::string& reason);

    EngineOptions options_;
    BlockLimits limits_;
    std::string backend_;
    std::shared_ptr<DeviceIo> device_io_;
    bool strict_ = false;
    const std::uint64_t generation_;
    DriveOf drive_of_ = [](const File& file) { return file.device(); };
    DriveOptions drive_options_;
    void (*end_callback_)() noexcept = nullptr;

    std::atomic<bool> closed_{false};
    GrowOnlyList<DriveEntry> entries_;  // added to with mutex_ held
    FallbackCounts fallbacks_;

    std::mutex stopping_;  // one close() at a time ends the workers

    mutable std::mutex mutex_;  // guards everything below
    std::vector<std::unique_ptr<Drive>> drives_;
    std::unique_ptr<DeviceFenceWatch> fences_;  // made when first needed
};

}  // namespace deepnvme

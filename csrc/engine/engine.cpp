#include "engine/engine.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <utility>

#include "core/process.h"

namespace deepnvme {

namespace {

constexpr std::uint64_t kStagingSlot = 1ull << 20;
constexpr std::uint64_t kSmallestSlot = 64ull << 10;  // no sector is larger
// Shared by its workers. Writes: the drive must have enough to do while a worker does not get its core, which others use as well.
// On two busy cores, overwriting ran at 0.43 of pinned memory with 8 MiB, at 0.84 with 32, at 0.91 with 64 (docs/engine.md).
constexpr std::uint64_t kStagingPerDrive = 64ull << 20;
// Reads: what stays in the processor's cache between the drive and the copy is faster. With 8 MiB they ran at 1.06 of the rate
// with 4 (paired, better in 58 of 82 rounds), with 12 and more slower again.
constexpr std::uint64_t kStagedReadsPerWorker = 8ull << 20;
// For device memory: a slot is also in use while the device copies.
constexpr std::uint64_t kDeviceStagingPerWorker = 16ull << 20;

// Drives that get workers of their own, each engine: more than a server has, fewer threads than containers with many small mounts
// would make.
constexpr std::size_t kMostDrives = 32;

void require(const char* name, std::int64_t value, std::int64_t least, std::int64_t most) {
    if (value >= least && value <= most) return;
    throw std::invalid_argument(std::string(name) + " must be in [" + std::to_string(least) + ", " + std::to_string(most) +
                                "], got " + std::to_string(value));
}

EngineOptions checked(EngineOptions options) {
    require("block_size", options.block_size, 512, 1 << 30);
    require("queue_depth", options.queue_depth, 1, 4096);
    require("num_threads", options.num_threads, 1, 256);
    require("in_flight_bytes", options.in_flight_bytes.value_or(1), 1, std::numeric_limits<std::int64_t>::max());
    return options;
}

BlockLimits block_limits(const EngineOptions& options) {
    const auto page = static_cast<std::uint32_t>(::sysconf(_SC_PAGESIZE));
    const auto block = static_cast<std::uint64_t>(options.block_size);
    const std::uint64_t share = kStagingPerDrive / static_cast<std::uint64_t>(options.num_threads);
    const std::uint64_t wanted = std::bit_floor(std::clamp(block, kSmallestSlot, std::min(kStagingSlot, share)));
    const std::uint64_t slot = std::max<std::uint64_t>(wanted, page);
    return {static_cast<std::uint32_t>(block), static_cast<std::uint32_t>(slot), page};
}

// Whether [offset, offset + length) holds a whole page: only then is there something to transfer directly.
bool holds_a_page(std::int64_t offset, std::uint64_t length, std::uint64_t page) {
    const auto begin = (static_cast<std::uint64_t>(offset) + page - 1) / page * page;
    return begin + page <= static_cast<std::uint64_t>(offset) + length;
}

void check_range(std::uint64_t length, std::int64_t offset) {
    if (offset < 0) throw std::invalid_argument("offset must not be negative, got " + std::to_string(offset));
    if (length > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max() - offset))
        throw std::invalid_argument("offset " + std::to_string(offset) + " plus " + std::to_string(length) +
                                    " bytes is past the largest file offset");
}

void check_covered(File& file, std::uint64_t begin, std::uint64_t length) {
    if (file.covers(begin + length)) return;
    const std::uint64_t size = file.size();
    throw PastEndError("read of bytes [" + std::to_string(begin) + ", " + std::to_string(begin + length) +
                           ") is past the end of '" + file.path() + "', which has " + std::to_string(size) + " bytes",
                       size);
}

// A request that is ready waits for others of its group at most so long.
constexpr auto kLongestDelay = std::chrono::microseconds(200);

// What is kept back has files open that others may wait for.
std::function<void()> hand_over(RequestGroup* group) {
    if (!group) return {};
    return [group] { group->hand_over(); };
}

// Its permit is given back when it is closed.
struct FileWithPermit {
    explicit FileWithPermit(OpenFilePermit taken) : permit(std::move(taken)) {}

    OpenFilePermit permit;
    std::shared_ptr<File> file;
};

// Warnings queued until the GIL is next held; one of a kind per file system.
struct Warnings {
    struct Given {
        std::uint64_t device;
        std::string_view consequence;  // of a literal
        bool operator==(const Given&) const = default;
    };

    GrowOnlyList<Given> given;
    std::mutex mutex;  // held to add one, and for
    std::vector<std::string> pending;
    std::atomic<bool> any{false};

    static Warnings& get() {
        static auto* warnings = new Warnings;
        return *warnings;
    }
};

}  // namespace

Engine::Engine(EngineOptions options)
    : options_(checked(std::move(options))), limits_(block_limits(options_)), generation_(process_generation()) {
    std::string tried;
    for (const auto& choice : backend_choices()) {
        if (options_.backend != "auto" && options_.backend != choice.name) continue;
        try {
            start(choice.name, choice.make);
            return;
        } catch (const IoError& error) {
            if (options_.backend != "auto") throw;
            fallbacks_.add("backend " + choice.name + ": " + error.what());
            tried += (tried.empty() ? "" : "; ") + choice.name + ": " + error.what();
        }
    }
    if (!tried.empty()) throw std::runtime_error("no backend works here: " + tried);
    std::string names = "auto";
    for (const auto& choice : backend_choices()) names += ", " + choice.name;
    throw std::invalid_argument("backend must be one of " + names + ", got '" + options_.backend + "'");
}

Engine::Engine(EngineOptions options, std::string name, BackendFactory make_backend, std::shared_ptr<DeviceIo> device_io,
               bool strict)
    : options_(checked(std::move(options))),
      limits_(block_limits(options_)),
      device_io_(std::move(device_io)),
      strict_(strict),
      generation_(process_generation()) {
    start(name, make_backend);
}

Engine::~Engine() { close(); }

void Engine::start(const std::string& name, const BackendFactory& make_backend) {
    IoError::out_of_memory();  // made while there is memory for it
    const auto slots = [&](std::uint64_t per_worker) {
        const std::uint64_t staging = std::min({per_worker, kStagingPerDrive / static_cast<std::uint64_t>(options_.num_threads),
                                                static_cast<std::uint64_t>(options_.most_in_flight())});
        return std::max(static_cast<std::uint32_t>(staging / limits_.staging_size), 1u);
    };
    WorkerOptions worker;
    worker.queue_depth = static_cast<std::uint32_t>(options_.queue_depth);
    // A block has more than block_size bytes where the drive's sectors are larger: the queue's depth alone does not limit bytes.
    constexpr auto kNoLimit = std::numeric_limits<std::int64_t>::max();
    worker.in_flight_bytes = static_cast<std::uint64_t>(options_.in_flight_bytes.value_or(kNoLimit));
    worker.single_submit = options_.single_submit;
    worker.staging_size = limits_.staging_size;
    worker.staging_slots = slots(kStagingPerDrive);
    worker.device_slots = slots(kDeviceStagingPerWorker);
    worker.page_size = limits_.page_size;
    worker.device_io = device_io_.get();
    // Where there is less of it, half, so that reads are on their way while others are copied.
    worker.staged_reads = std::min(kStagedReadsPerWorker, std::uint64_t{worker.staging_size} * worker.staging_slots / 2);
    drive_options_ = {static_cast<std::size_t>(options_.num_threads), worker, make_backend,
                      [this](File& file, const char* consequence, const std::string& reason) {
                          note_and_warn(file, consequence, reason);
                      }};
    drives_.push_back(std::make_unique<Drive>(drive_options_));
    backend_ = name;
}

bool Engine::usable_here() const noexcept { return generation_ == process_generation(); }

void Engine::check_usable() const {
    if (!usable_here())
        throw std::runtime_error(
            "this engine belongs to the parent process: its threads do not survive a fork; make a new one in the child");
    if (closed()) throw std::invalid_argument("the engine is closed");
}

std::shared_ptr<Request> Engine::read(std::byte* memory, std::uint64_t length, const std::string& path, std::int64_t offset,
                                     std::optional<DeviceMemory> device, RequestGroup* group) {
    check_usable();
    check_range(length, offset);
    auto fence = fence_before(Request::Kind::read, length, offset, device, path);
    const auto before_waiting = hand_over(group);
    auto permit = OpenFilePermit::take(before_waiting);
    auto file = permit.open(path, Access::read, Creation::must_exist, holds_a_page(offset, length, limits_.page_size), {},
                           before_waiting);
    return submit(Request::Kind::read, memory, length, std::move(file), offset, device, std::move(fence), std::move(permit),
                  group);
}

std::shared_ptr<Request> Engine::write(std::byte* memory, std::uint64_t length, const std::string& path, std::int64_t offset,
                                     std::optional<DeviceMemory> device, RequestGroup* group) {
    check_usable();
    check_range(length, offset);
    auto fence = fence_before(Request::Kind::write, length, offset, device, path);
    const auto before_waiting = hand_over(group);
    auto permit = OpenFilePermit::take(before_waiting);
    auto file = permit.open(path, Access::write, Creation::provisional, holds_a_page(offset, length, limits_.page_size),
                           {static_cast<std::uint64_t>(offset), length}, before_waiting);
    return submit(Request::Kind::write, memory, length, std::move(file), offset, device, std::move(fence), std::move(permit),
                  group);
}

std::shared_ptr<Request> Engine::write(std::byte* memory, std::uint64_t length, int fd, std::int64_t offset,
                                     std::optional<DeviceMemory> device) {
    check_usable();
    check_range(length, offset);
    auto permit = OpenFilePermit::take();
    auto file = std::make_shared<File>(fd, Access::write);
    auto fence = fence_before(Request::Kind::write, length, offset, device, file->path());
    return submit(Request::Kind::write, memory, length, std::move(file), offset, device, std::move(fence), std::move(permit));
}

std::shared_ptr<Request> Engine::sync(const std::string& path) {
    check_usable();
    auto permit = OpenFilePermit::take();
    auto file = permit.open(path, Access::read, Creation::must_exist, false);
    return submit(Request::Kind::sync, nullptr, 0, std::move(file), 0, {}, nullptr, std::move(permit));
}

std::shared_ptr<Request> Engine::read(std::byte* memory, std::uint64_t length, std::shared_ptr<File> file, std::int64_t offset,
                                     std::optional<DeviceMemory> device, RequestGroup* group) {
    if (!file->readable()) throw std::invalid_argument("'" + file->path() + "' was not opened for reading");
    auto fence = fence_before(Request::Kind::read, length, offset, device, file->path());
    return submit(Request::Kind::read, memory, length, std::move(file), offset, device, std::move(fence), {}, group);
}

std::shared_ptr<Request> Engine::write(std::byte* memory, std::uint64_t length, std::shared_ptr<File> file, std::int64_t offset,
                                     std::optional<DeviceMemory> device, RequestGroup* group) {
    if (!file->writable()) throw std::invalid_argument("'" + file->path() + "' was not opened for writing");
    auto fence = fence_before(Request::Kind::write, length, offset, device, file->path());
    return submit(Request::Kind::write, memory, length, std::move(file), offset, device, std::move(fence), {}, group);
}

std::shared_ptr<Request> Engine::sync(std::shared_ptr<File> file) {
    return submit(Request::Kind::sync, nullptr, 0, std::move(file), 0, {}, nullptr, {});
}

// What the caller's stream has to do before the request may begin; null if nothing. Asked for before its file is created, and
// before space is reserved: what CUDA turns down leaves no trace.
std::unique_ptr<const DeviceFence> Engine::fence_before(Request::Kind kind, std::uint64_t length, std::int64_t offset,
                                                        const std::optional<DeviceMemory>& device, const std::string& path) {
    if (!device || length == 0) return nullptr;
    check_usable();
    try {
        auto fence = std::make_unique<const DeviceFence>(device->device, device->stream);
        if (fence->passed()) return nullptr;  // as it is with a tensor that nothing is computed for
        std::lock_guard lock(mutex_);
        if (!fences_ && !closed())
            fences_ = std::make_unique<DeviceFenceWatch>([this](Request& passed, const std::optional<IoError>& error) {
                fence_passed(passed, error);
            });
        return fence;
    } catch (const IoError& error) {
        const auto begin = static_cast<std::uint64_t>(offset);
        throw IoError(error.error(), Request::describe(kind, length, begin) + ": " + error.operation(), path);
    }
}

std::shared_ptr<Request> Engine::submit(Request::Kind kind, std::byte* memory, std::uint64_t length, std::shared_ptr<File> file,
                                        std::int64_t offset, std::optional<DeviceMemory> device,
                                        std::unique_ptr<const DeviceFence> fence, OpenFilePermit permit,
                                        RequestGroup* group) {
    check_usable();
    check_range(length, offset);
    const auto begin = static_cast<std::uint64_t>(offset);
    if (kind == Request::Kind::read) check_covered(*file, begin, length);
    const bool by_device_io = device && device_io_ && holds_a_page(offset, length, limits_.page_size);
    auto device_file = by_device_io ? open_for_device(*file) : nullptr;
    // Extending direct writes are serialised by ext4 and XFS, whatever the queue depth; space reserved first keeps it:
    // 1.3 -> 3.3 GB/s for a fresh 1 GiB file (docs/engine.md). It also tells a full disk before the first byte.
    if (kind == Request::Kind::write) file->preallocate(begin, length);

    Drive& drive = drive_of(*file);
    const auto on_device = device ? std::optional(device->device) : std::nullopt;
    auto request = std::make_shared<Request>(kind, std::move(file), memory, begin, length, on_device);
    request->device_file = std::move(device_file);
    request->permit_ = std::move(permit);
    request->closes_file_ = static_cast<bool>(request->permit_);
    if (kind != Request::Kind::sync) {
        const auto limits = request->file_->limits();
        request->plan_ = plan({begin, length, reinterpret_cast<std::uintptr_t>(memory), on_device.has_value(),
                               request->device_file != nullptr, request->file_->ownership()},
                              limits, limits_);
        request->cursor_ = begin;
        if (!limits && length > 0) note_and_warn(*request->file_, kBuffered, request->file_->refusal());
    }
    launch(drive, request, std::move(fence), group);
    return request;
}

std::shared_ptr<Request> Engine::transfer(Request::Kind kind, std::unique_ptr<Pieces> pieces, SharedFile& shared, bool last,
                                          std::optional<DeviceMemory> device) {
    check_usable();
    const bool read = kind == Request::Kind::read;
    const std::string& path = shared.path;
    if (shared.file && !(read ? shared.file->readable() : shared.file->writable()))
        throw std::invalid_argument("'" + path + "' was not opened for " + (read ? "reading" : "writing"));
    const std::uint64_t bytes = pieces->bytes();
    const Piece first = pieces->count() > 0 ? (*pieces)[0] : Piece{}, furthest = pieces->count() > 0 ? pieces->last() : Piece{};
    const bool expect_direct = pieces->hold_a_page(limits_.page_size);
    auto fence = fence_before(kind, bytes, static_cast<std::int64_t>(first.offset), device, path);
    if (!shared.file) {
        auto opened = std::make_shared<FileWithPermit>(OpenFilePermit::take());
        OpenFilePermit& permit = opened->permit;
        opened->file = read ? permit.open(path, Access::read, Creation::must_exist, expect_direct)
                            : permit.open(path, Access::write, Creation::provisional, expect_direct, {first.offset, bytes});
        shared.file = std::shared_ptr<File>(opened, opened->file.get());
    }
    auto file = last ? std::move(shared.file) : shared.file;
    if (read) check_covered(*file, furthest.offset, furthest.length);
    auto device_file = device && device_io_ && expect_direct ? open_for_device(*file) : nullptr;
    if (!read && bytes > 0 && !file->covers(furthest.end()))
        for (const Piece& range : pieces->ranges_past(file->size())) file->preallocate(range.offset, range.length);

    Drive& drive = drive_of(*file);
    const auto limits = file->limits();
    if (!limits && bytes > 0) note_and_warn(*file, kBuffered, file->refusal());
    pieces->begin({limits, limits_, device.has_value(), device_file != nullptr, file->ownership()});
    const auto on_device = device ? std::optional(device->device) : std::nullopt;
    auto request = std::make_shared<Request>(kind, std::move(file), nullptr, 0, bytes, on_device);
    request->device_file = std::move(device_file);
    request->pieces_ = std::move(pieces);
    request->closes_file_ = shared.by_path;
    launch(drive, request, std::move(fence));
    return request;
}

// Hand a request that is complete to its drive, or to what it has to wait for.
void Engine::launch(Drive& drive, const std::shared_ptr<Request>& request, std::unique_ptr<const DeviceFence> fence,
                    RequestGroup* group) {
    request->self_ = request;
    const bool fenced = fence != nullptr;
    bool admitted = false;
    try {
        admitted = drive.admit(*request, closed_);
        if (!admitted) throw std::invalid_argument("the engine is closed");
        if (fenced) fences_->add(*request, std::move(fence));
    } catch (...) {
        if (admitted) drive.dismiss(*request);
        request->self_.reset();
        throw;
    }
    if (fenced) return;
    if (group && request->length > 0) group->add(drive, *request);
    else drive.start(*request);
}

void RequestGroup::add(Drive& drive, Request& request) noexcept {
    if (drive_ != &drive) hand_over();
    drive_ = &drive;
    requests_[count_++] = &request;
    const auto now = Clock::now();
    if (count_ == 1) since_ = now;
    if (count_ < enough_ && now - since_ < kLongestDelay) return;
    enough_ = std::min(2 * enough_, requests_.size());
    hand_over();
}

void RequestGroup::hand_over() noexcept {
    if (count_ > 0) drive_->start(std::span(requests_).first(std::exchange(count_, 0)));
}

// No lock on the way of a transfer.
Drive& Engine::drive_of(const File& file) {
    const std::uint64_t device = drive_of_(file);
    Drive* known = find_drive(device);
    return known ? *known : add_drive(device, file);
}

Drive* Engine::find_drive(std::uint64_t device) const {
    const DriveEntry* entry = entries_.find([device](const DriveEntry& each) { return each.device == device; });
    return entry ? entry->drive : nullptr;
}

Drive& Engine::add_drive(std::uint64_t device, const File& file) {
    std::lock_guard lock(mutex_);
    if (Drive* known = find_drive(device)) return *known;
    if (closed()) throw std::invalid_argument("the engine is closed");
    std::unique_ptr<Drive> added;
    std::string why_not;
    // The workers that the engine started with serve the first drive.
    if (!entries_.empty() && drives_.size() >= kMostDrives) {
        why_not = "there are " + std::to_string(kMostDrives) + " already";
    } else if (!entries_.empty()) {
        try {
            added = std::make_unique<Drive>(drive_options_);
            added->on_request_end(end_callback_);
        } catch (const IoError& error) {
            why_not = error.what();
        }
    }
    drives_.reserve(drives_.size() + 1);
    Drive& drive = added ? *added : *drives_.front();
    if (why_not.empty()) drive.run_near(file.device());
    else fallbacks_.add("no workers of its own for the drive of '" + file.path() + "': " + why_not);
    entries_.add(device, &drive);
    if (added) drives_.push_back(std::move(added));
    return drive;
}

bool Engine::cancel(Request& request) {
    if (!request.hold()) return false;
    try {
        request.fail(IoError(ECANCELED, request.describe(), request.file().path()));
    } catch (const std::bad_alloc&) {
        request.fail(IoError::out_of_memory());
    }
    request.drive_->cancel(request);
    if (request.release()) request.drive_->end_without_blocking(request);
    return true;
}

std::string Engine::describe(Request& request) {
    if (!request.hold()) return {};
    std::string text;
    try {
        text = request.describe() + " '" + request.file().path() + "'";
    } catch (const std::bad_alloc&) {
    }
    if (request.release()) request.drive_->end_without_blocking(request);
    return text;
}

void Engine::on_request_end(void (*callback)() noexcept) noexcept {
    end_callback_ = callback;
    for (const auto& drive : drives_) drive->on_request_end(callback);
}

// The file as the DeviceIo knows it; null where it cannot take it, unless nothing else will do.
std::shared_ptr<void> Engine::open_for_device(File& file) {
    std::string reason;
    try {
        if (auto opened = file.attachment([this](int fd) { return device_io_->open(fd); })) return opened;
        reason = file.refusal();
    } catch (const IoError& error) {
        if (strict_) throw IoError(error.error(), error.operation(), file.path());
        reason = error.operation();
    }
    if (strict_) throw IoError(ENOTSUP, "GPUDirect Storage: " + reason, file.path());
    note_fallback("not by GPUDirect Storage, through host memory: " + reason);
    return nullptr;
}

void Engine::fence_passed(Request& request, const std::optional<IoError>& error) noexcept {
    if (!error) return request.drive_->start(request);
    try {
        request.fail(IoError(error->error(), request.describe() + ": the work on the device before it: " + error->operation(),
                             request.file().path()));
    } catch (const std::bad_alloc&) {
        request.fail(*error);
    }
    if (request.release()) request.drive_->end_without_blocking(request);
}

void Engine::note_and_warn(File& file, const char* consequence, const std::string& reason) {
    note_fallback(reason);
    Warnings& warnings = Warnings::get();
    const Warnings::Given warning{file.device(), consequence};
    const auto warned = [&] { return warnings.given.find([&](const Warnings::Given& each) { return each == warning; }); };
    if (warned()) return;
    std::lock_guard lock(warnings.mutex);
    if (warned()) return;
    warnings.given.add(warning);
    warnings.pending.push_back("transfers of '" + file.path() + "' " + consequence + ": " + reason);
    warnings.any.store(true, std::memory_order_release);
}

std::vector<std::string> Engine::take_warnings() {
    Warnings& warnings = Warnings::get();
    if (!warnings.any.exchange(false, std::memory_order_acq_rel)) return {};
    std::lock_guard lock(warnings.mutex);
    return std::exchange(warnings.pending, {});
}

void Engine::close() {
    std::unique_ptr<DeviceFenceWatch> fences;
    {
        std::lock_guard lock(mutex_);  // no drive is being added
        closed_ = true;
    }
    for (const auto& drive : drives_) drive->wait_until_idle(std::nullopt);
    {
        std::lock_guard lock(mutex_);
        fences.swap(fences_);
    }
    fences.reset();
    std::lock_guard stopping(stopping_);
    for (const auto& drive : drives_) drive->stop();
}

bool Engine::wait_until_idle(std::chrono::nanoseconds time) {
    const auto end = std::chrono::steady_clock::now() + time;
    std::vector<Drive*> drives;
    {
        std::lock_guard lock(mutex_);
        for (const auto& drive : drives_) drives.push_back(drive.get());
    }
    return std::all_of(drives.begin(), drives.end(), [end](Drive* drive) { return drive->wait_until_idle(end); });
}

Statistics Engine::statistics() const {
    std::lock_guard lock(mutex_);
    Statistics sum;
    sum.fallbacks = fallbacks_.get();
    for (const auto& drive : drives_) drive->add_to(sum);
    return sum;
}

}  // namespace deepnvme

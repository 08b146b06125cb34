// What every way of doing asynchronous I/O here can do: take operations, give back their results.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace deepnvme {

class DeviceIo;

// One system-level transfer. Lives, unmoved, until its completion is reaped.
struct Operation {
    enum class Kind : std::uint8_t { read, write, sync };

    Kind kind;
    int fd;
    std::uint32_t index;   // below the backend's capacity, and no other operation's while this one is under way
    std::uint32_t length;  // bytes
    std::byte* memory;
    std::uint64_t offset;  // bytes into the file
    void* device_file = nullptr;  // what DeviceIo::open gave, if the memory is a device's
    int device = -1;
};

struct Completion {
    Operation* operation;
    std::int64_t result;  // bytes moved, or -errno
};

// Used by one thread, the one that made it; only wake() may be called by others. Throws nothing but IoError, if the backend
// itself is broken, and std::bad_alloc, before it has begun anything.
class Backend {
public:
    virtual ~Backend() = default;

    virtual std::string_view name() const noexcept = 0;

    // Take operations, in order; return how many were taken. Fewer than given: the system is full just now, so reap, then offer
    // the rest again. No more than the capacity are ever under way. They may stay unstarted until flush() or reap().
    virtual std::size_t submit(std::span<Operation* const> operations) = 0;

    // Start what was taken, without waiting. What the system turns away just now starts with the next flush or reap.
    virtual void flush() = 0;

    // Start what was taken, and block until an operation completes or somebody calls wake(); fill in what has completed and
    // return how many (zero after a wake or a signal).
    virtual std::size_t reap(std::span<Completion> completions) = 0;

    // Ask for the end of an operation that was taken and not reaped. Does not block. Its completion is reaped as ever, with
    // -ECANCELED if it was given up, or else with its result, whenever that comes: most file systems finish what a drive has
    // begun. False if the system takes no such wish just now: then ask again later.
    virtual bool cancel(Operation& operation) noexcept = 0;

    // Cancel what was submitted and block until none of it uses its memory or its file any more: as long as a drive that hangs
    // takes, since nothing else makes the memory safe. None of it is reaped, and only wake() may be called from then on. False if
    // even waiting fails: then memory and files may be used for ever.
    virtual bool stop() noexcept = 0;

    // Make the reap under way, or else the next one, return. Any thread.
    virtual void wake() noexcept = 0;
};

// Makes a backend for at most `capacity` operations under way. Throws IoError when the kernel refuses.
using BackendFactory = std::function<std::unique_ptr<Backend>(unsigned capacity)>;

// A backend by its name. Every build has all of them; the kernel may refuse one.
struct BackendChoice {
    std::string name;
    BackendFactory make;
};

// In order of preference.
const std::vector<BackendChoice>& backend_choices();

std::unique_ptr<Backend> make_uring_backend(unsigned capacity);
std::unique_ptr<Backend> make_libaio_backend(unsigned capacity);
std::unique_ptr<Backend> make_thread_backend(unsigned capacity);
// The same, for operations on device memory as well. Those do not go through the others.
std::unique_ptr<Backend> make_device_backend(unsigned capacity, std::shared_ptr<DeviceIo> device_io);

}  // namespace deepnvme

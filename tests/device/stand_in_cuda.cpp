// A libcuda.so.1 for tests on machines without a GPU. A device pointer is the address of host memory that only this library can
// reach: its pages are mapped twice, and the address handed out allows no access. So a program that touches device memory other than
// through the driver crashes, or is told EFAULT by the kernel.
//
// Streams are threads that do their work in order, and late, so that whoever does not wait is seen. It can be told to fail.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using Result = int;
constexpr Result kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kInvalidContext = 201, kInvalidHandle = 400, kNotReady = 600,
                 kIllegalAddress = 700, kAlreadyRegistered = 712, kNotRegistered = 713;
constexpr std::size_t kPage = 4096;

struct Device;

struct Event {
    explicit Event(Device* of) : device(of) {}

    Device* const device;
    std::mutex mutex;
    std::condition_variable changed;
    std::uint64_t recorded = 0;  // times
    std::uint64_t reached = 0;
    Result result = kSuccess;
};

class Stream {
public:
    explicit Stream(Device* of) : device(of), thread_([this] { serve(); }) {}
    ~Stream() {
        {
            std::lock_guard lock(mutex_);
            stopping_ = true;
        }
        changed_.notify_all();
        thread_.join();
    }
    void add(std::function<void()> work) {
        {
            std::lock_guard lock(mutex_);
            work_.push_back(std::move(work));
        }
        changed_.notify_all();
    }
    // At once if there is nothing before it, which the caller then finds done: as an event on an idle device mostly is.
    void mark(const std::function<void()>& event) {
        std::unique_lock lock(mutex_);
        if (work_.empty() && !working_) return event();
        lock.unlock();
        add(event);
    }
    Device* const device;
    Result failed = kSuccess;  // of the stream's own thread

private:
    void serve() {
        std::unique_lock lock(mutex_);
        while (true) {
            changed_.wait(lock, [this] { return stopping_ || !work_.empty(); });
            if (work_.empty()) return;
            auto work = std::move(work_.front());
            work_.pop_front();
            working_ = true;
            lock.unlock();
            work();
            lock.lock();
            working_ = false;
        }
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> work_;
    bool working_ = false;
    bool stopping_ = false;
    std::thread thread_;
};

struct Device {
    int references = 0;
    std::unique_ptr<Stream> default_stream;
};

// Device memory. What streams have still to do with it keeps it.
struct Memory {
    void* handed_out;
    std::byte* inside;  // the second mapping
    std::size_t size;
    Device* device;

    ~Memory() {
        ::munmap(handed_out, size);
        ::munmap(inside, size);
    }
};

// A place in it, where it can be reached; nullptr for what is no device memory.
using Place = std::shared_ptr<std::byte>;

struct Control {
    std::mutex mutex;
    std::map<int, Device> devices;
    std::map<std::uintptr_t, std::shared_ptr<Memory>> memories;  // by the address handed out
    std::map<std::uintptr_t, std::size_t> registered;  // host memory
    std::map<std::string, std::pair<int, Result>> failures;  // by function: calls until it fails, and with what
    std::map<std::string, int> calls;
    std::atomic<int> delay_microseconds = 200;
    std::atomic<std::uint64_t> live_streams = 0, live_events = 0;
    std::atomic<std::uint64_t> pageable_copies = 0;  // from or to host memory that was not registered
    std::uint64_t most_registered = 0;               // bytes at a time

    static Control& get() {
        static auto* control = new Control;
        return *control;
    }
};

thread_local std::deque<Device*> contexts;

// What a function is to fail with now.
Result verdict(const char* function) {
    auto& control = Control::get();
    std::lock_guard lock(control.mutex);
    ++control.calls[function];
    const auto found = control.failures.find(function);
    if (found == control.failures.end() || found->second.first-- > 0) return kSuccess;
    const Result result = found->second.second;
    control.failures.erase(found);
    return result;
}

// Null for another device's too, if one is given.
Place reachable(std::uintptr_t address, std::size_t size, const Device* device = nullptr) {
    auto& control = Control::get();
    std::lock_guard lock(control.mutex);
    auto after = control.memories.upper_bound(address);
    if (after == control.memories.begin()) return nullptr;
    const auto& [begin, memory] = *std::prev(after);
    if (address + size > begin + memory->size || (device && memory->device != device)) return nullptr;
    return Place(memory, memory->inside + (address - begin));
}

bool is_registered(const void* host, std::size_t size) {
    auto& control = Control::get();
    std::lock_guard lock(control.mutex);
    const auto address = reinterpret_cast<std::uintptr_t>(host);
    auto after = control.registered.upper_bound(address);
    return after != control.registered.begin() && address + size <= std::prev(after)->first + std::prev(after)->second;
}

// Null, without the context that the stream belongs to.
Stream* stream_of(void* handle) {
    Device* device = contexts.empty() ? nullptr : contexts.back();
    if (!device) return nullptr;
    if (handle) return static_cast<Stream*>(handle)->device == device ? static_cast<Stream*>(handle) : nullptr;
    auto& control = Control::get();
    std::lock_guard lock(control.mutex);
    if (!device->default_stream) device->default_stream = std::make_unique<Stream>(device);
    return device->default_stream.get();
}

Result copy(const char* name, void* host, std::uintptr_t device, std::size_t size, void* handle, bool to_device) {
    if (const Result result = verdict(name)) return result;
    Stream* stream = stream_of(handle);
    if (!stream) return kInvalidContext;
    const Place memory = reachable(device, size, stream->device);
    if (!memory) return kInvalidValue;
    auto& control = Control::get();
    const Result late = verdict((std::string(name) + " later").c_str());
    if (!is_registered(host, size)) ++control.pageable_copies;
    stream->add([=, &control] {
        std::this_thread::sleep_for(std::chrono::microseconds(control.delay_microseconds.load()));
        if (late) stream->failed = late;
        if (stream->failed) return;
        if (to_device) std::memcpy(memory.get(), host, size);
        else std::memcpy(host, memory.get(), size);
    });
    return kSuccess;
}

}  // namespace

// -- the driver --------------------------------------------------------------------------------------------------------

EXPORT Result cuInit(unsigned) { return verdict("cuInit"); }

EXPORT Result cuDevicePrimaryCtxRetain(void** context, int device) {
    if (const Result result = verdict("cuDevicePrimaryCtxRetain")) return result;
    auto& control = Control::get();
    std::lock_guard lock(control.mutex);
    Device& found = control.devices[device];
    ++found.references;
    *context = &found;
    return kSuccess;
}

EXPORT Result cuCtxPushCurrent_v2(void* context) {
    if (const Result result = verdict("cuCtxPushCurrent")) return result;
    contexts.push_back(static_cast<Device*>(context));
    return kSuccess;
}

EXPORT Result cuCtxPopCurrent_v2(void** context) {
    if (contexts.empty()) return kInvalidContext;
    *context = contexts.back();
    contexts.pop_back();
    return kSuccess;
}

EXPORT Result cuCtxGetCurrent(void** context) {
    if (const Result result = verdict("cuCtxGetCurrent")) return result;
    *context = contexts.empty() ? nullptr : contexts.back();
    return kSuccess;
}

EXPORT Result cuStreamCreate(void** stream, unsigned) {
    if (const Result result = verdict("cuStreamCreate")) return result;
    if (contexts.empty()) return kInvalidContext;
    *stream = new Stream(contexts.back());
    ++Control::get().live_streams;
    return kSuccess;
}

EXPORT Result cuStreamDestroy_v2(void* stream) {
    if (const Result result = verdict("cuStreamDestroy")) return result;
    if (contexts.empty()) return kInvalidContext;
    delete static_cast<Stream*>(stream);
    --Control::get().live_streams;
    return kSuccess;
}

EXPORT Result cuEventCreate(void** event, unsigned) {
    if (const Result result = verdict("cuEventCreate")) return result;
    if (contexts.empty()) return kInvalidContext;
    *event = new std::shared_ptr<Event>(std::make_shared<Event>(contexts.back()));
    ++Control::get().live_events;
    return kSuccess;
}

EXPORT Result cuEventDestroy_v2(void* event) {
    if (const Result result = verdict("cuEventDestroy")) return result;
    if (contexts.empty()) return kInvalidContext;
    delete static_cast<std::shared_ptr<Event>*>(event);
    --Control::get().live_events;
    return kSuccess;
}

EXPORT Result cuEventRecord(void* handle, void* stream_handle) {
    if (const Result result = verdict("cuEventRecord")) return result;
    Stream* stream = stream_of(stream_handle);
    if (!stream) return kInvalidContext;
    auto event = *static_cast<std::shared_ptr<Event>*>(handle);
    if (event->device != stream->device) return kInvalidHandle;
    std::uint64_t turn;
    {
        std::lock_guard lock(event->mutex);
        turn = ++event->recorded;
    }
    stream->mark([event, turn, stream] {
        {
            std::lock_guard lock(event->mutex);
            event->reached = turn;
            event->result = stream->failed;
        }
        event->changed.notify_all();
    });
    return kSuccess;
}

EXPORT Result cuEventSynchronize(void* handle) {
    if (const Result result = verdict("cuEventSynchronize")) return result;
    if (contexts.empty()) return kInvalidContext;
    auto event = *static_cast<std::shared_ptr<Event>*>(handle);
    std::unique_lock lock(event->mutex);
    event->changed.wait(lock, [&] { return event->reached == event->recorded; });
    return event->result;
}

EXPORT Result cuEventQuery(void* handle) {
    if (const Result result = verdict("cuEventQuery")) return result;
    if (contexts.empty()) return kInvalidContext;
    auto event = *static_cast<std::shared_ptr<Event>*>(handle);
    std::lock_guard lock(event->mutex);
    return event->reached == event->recorded ? event->result : kNotReady;
}

EXPORT Result cuStreamSynchronize(void* handle) {
    if (const Result result = verdict("cuStreamSynchronize")) return result;
    Stream* stream = stream_of(handle);
    if (!stream) return kInvalidContext;
    std::promise<Result> done;
    stream->add([&] { done.set_value(stream->failed); });
    return done.get_future().get();
}

EXPORT Result cuMemcpyHtoDAsync_v2(std::uint64_t device, const void* host, std::size_t size, void* stream) {
    return copy("cuMemcpyHtoDAsync", const_cast<void*>(host), device, size, stream, true);
}

EXPORT Result cuMemcpyDtoHAsync_v2(void* host, std::uint64_t device, std::size_t size, void* stream) {
    return copy("cuMemcpyDtoHAsync", host, device, size, stream, false);
}

EXPORT Result cuMemHostRegister_v2(void* memory, std::size_t size, unsigned) {
    if (const Result result = verdict("cuMemHostRegister")) return result;
    if (contexts.empty()) return kInvalidContext;
    auto& control = Control::get();
    std::lock_guard lock(control.mutex);
    if (!control.registered.emplace(reinterpret_cast<std::uintptr_t>(memory), size).second) return kAlreadyRegistered;
    std::uint64_t sum = 0;
    for (const auto& [begin, length] : control.registered) sum += length;
    control.most_registered = std::max(control.most_registered, sum);
    return kSuccess;
}

EXPORT Result cuMemHostUnregister(void* memory) {
    if (const Result result = verdict("cuMemHostUnregister")) return result;
    if (contexts.empty()) return kInvalidContext;
    auto& control = Control::get();
    std::lock_guard lock(control.mutex);
    return control.registered.erase(reinterpret_cast<std::uintptr_t>(memory)) ? kSuccess : kNotRegistered;
}

EXPORT Result cuGetErrorName(Result error, const char** name) {
    switch (error) {
        case kInvalidValue: *name = "CUDA_ERROR_INVALID_VALUE"; return kSuccess;
        case kOutOfMemory: *name = "CUDA_ERROR_OUT_OF_MEMORY"; return kSuccess;
        case kInvalidContext: *name = "CUDA_ERROR_INVALID_CONTEXT"; return kSuccess;
        case kIllegalAddress: *name = "CUDA_ERROR_ILLEGAL_ADDRESS"; return kSuccess;
        default: *name = nullptr; return kInvalidValue;
    }
}

EXPORT Result cuGetErrorString(Result error, const char** text) {
    *text = error == kIllegalAddress ? "an illegal memory access was encountered" : "as the test asked";
    return kSuccess;
}

// -- what tests do with it ---------------------------------------------------------------------------------------------

// Device memory of whole pages; 0 if there is none.
EXPORT std::uint64_t standin_allocate(int device, std::size_t size) {
    size = (size + kPage - 1) / kPage * kPage;
    const int file = ::memfd_create("device", MFD_CLOEXEC);
    if (file < 0 || ::ftruncate(file, static_cast<off_t>(size)) != 0) return 0;
    void* handed_out = ::mmap(nullptr, size, PROT_NONE, MAP_SHARED, file, 0);
    void* inside = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    ::close(file);
    auto& control = Control::get();
    std::lock_guard lock(control.mutex);
    control.memories[reinterpret_cast<std::uintptr_t>(handed_out)] =
        std::shared_ptr<Memory>(new Memory{handed_out, static_cast<std::byte*>(inside), size, &control.devices[device]});
    return reinterpret_cast<std::uintptr_t>(handed_out);
}

EXPORT void standin_free(std::uint64_t address) {
    auto& control = Control::get();
    std::lock_guard lock(control.mutex);
    control.memories.erase(address);
}

// The address at which the test may look at device memory and change it.
EXPORT void* standin_reach(std::uint64_t address, std::size_t size) { return reachable(address, size).get(); }

// A stream of the caller's, on the device whose number is given.
EXPORT void* standin_stream(int device) {
    auto& control = Control::get();
    std::lock_guard lock(control.mutex);
    return new Stream(&control.devices[device]);
}

// Work for a stream: after `microseconds`, `size` bytes from `host` are in device memory. `host` is not needed any more on return.
EXPORT void standin_enqueue(void* stream, std::uint64_t address, const void* host, std::size_t size, int microseconds) {
    const Place memory = reachable(address, size);
    const auto* begin = static_cast<const std::byte*>(host);
    static_cast<Stream*>(stream)->add([=, bytes = std::vector<std::byte>(begin, begin + size)] {
        std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
        std::memcpy(memory.get(), bytes.data(), size);
    });
}

// The reverse: after `microseconds`, `size` bytes of device memory are at `host`.
EXPORT void standin_enqueue_back(void* stream, std::uint64_t address, void* host, std::size_t size, int microseconds) {
    const Place memory = reachable(address, size);
    static_cast<Stream*>(stream)->add([=] {
        std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
        std::memcpy(host, memory.get(), size);
    });
}

// The stream does nothing until it is let go on, by the one call to standin_go_on() for what this returns.
EXPORT void* standin_hold(void* stream) {
    auto* gate = new std::promise<void>;
    static_cast<Stream*>(stream)->add([open = gate->get_future().share()] { open.wait(); });
    return gate;
}

EXPORT void standin_go_on(void* held) {
    const std::unique_ptr<std::promise<void>> gate(static_cast<std::promise<void>*>(held));
    gate->set_value();
}

// What the stream is given next fails, and all after it.
EXPORT void standin_break_stream(void* stream, int microseconds, int result) {
    auto* broken = static_cast<Stream*>(stream);
    broken->add([=] {
        std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
        broken->failed = result;
    });
}

// Ends when the stream has done all its work.
EXPORT void standin_free_stream(void* stream) { delete static_cast<Stream*>(stream); }

// The call of `function` after `calls` more fails with `result`; for a copy, "cuMemcpyHtoDAsync later" fails when it is done.
EXPORT void standin_fail(const char* function, int calls, int result) {
    auto& control = Control::get();
    std::lock_guard lock(control.mutex);
    control.failures[function] = {calls, result};
}

EXPORT void standin_forget_failures() {
    auto& control = Control::get();
    std::lock_guard lock(control.mutex);
    control.failures.clear();
}

// In between nothing can be called but by this thread's own standin_unlock.
EXPORT void standin_lock() { Control::get().mutex.lock(); }
EXPORT void standin_unlock() { Control::get().mutex.unlock(); }

EXPORT void standin_delay(int microseconds) { Control::get().delay_microseconds = microseconds; }

EXPORT int standin_calls(const char* function) {
    auto& control = Control::get();
    std::lock_guard lock(control.mutex);
    return control.calls[function];
}

EXPORT std::uint64_t standin_most_registered_bytes() {
    auto& control = Control::get();
    std::lock_guard lock(control.mutex);
    return std::exchange(control.most_registered, 0);
}

EXPORT std::uint64_t standin_live_streams() { return Control::get().live_streams; }
EXPORT std::uint64_t standin_live_events() { return Control::get().live_events; }
EXPORT std::uint64_t standin_pageable_copies() { return Control::get().pageable_copies; }
EXPORT std::uint64_t standin_registered_bytes() {
    auto& control = Control::get();
    std::lock_guard lock(control.mutex);
    std::uint64_t sum = 0;
    for (const auto& [begin, size] : control.registered) sum += size;
    return sum;
}

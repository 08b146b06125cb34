// Holds requests back until the caller's own work on the device, which they have to come after, is done. Held by a worker instead, they
// would keep its slots and its staging from requests that could go on.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "core/cuda.h"
#include "core/error.h"

namespace deepnvme {

class Request;

// What a stream of the caller's has been given by now: a write must see what it computes, and a read must not overwrite what it still
// uses.
class DeviceFence {
public:
    // Throws IoError, or std::runtime_error where there is no CUDA.
    DeviceFence(CudaDevice device, CudaStreamHandle stream);

    CudaDevice device() const noexcept { return device_; }
    CudaStreamHandle stream() const noexcept { return stream_; }

    // False while the stream is at work on it. Throws IoError if that failed.
    bool passed() const;
    // Sleep until the stream has done it. Throws IoError if that failed.
    void wait() const;

private:
    CudaDevice device_;
    CudaStreamHandle stream_;
    CudaEvent event_;
};

// Threads that sleep until fences have passed: one for each stream that is being waited for, since CUDA can wait for one event at a
// time only. It could call back instead, but does not when a device fails, and callbacks hold up the stream behind them.
class DeviceFenceWatch {
public:
    // `passed`: called on a thread of the watch, once for each request, with the error if its fence failed. Throws IoError where the
    // system allows no thread.
    explicit DeviceFenceWatch(std::function<void(Request&, const std::optional<IoError>&)> passed);
    // Nothing is waiting any more.
    ~DeviceFenceWatch();

    // Where there is no memory to remember the fence it is waited for here. Where no more threads are to be had, a stream is waited
    // for once another has none waiting any more.
    void add(Request& request, std::unique_ptr<const DeviceFence> fence) noexcept;

private:
    struct Waiting {
        Request* request = nullptr;
        std::unique_ptr<const DeviceFence> fence;
    };

    // A stream comes to its fences in order, so that only the first of them has to be waited for.
    struct Line {
        CudaDevice device = 0;
        CudaStreamHandle stream = nullptr;
        std::deque<Waiting> waiting;
        bool served = false;  // by a thread, which removes the line when nothing waits there any more
    };

    void put_in_line(Request& request, std::unique_ptr<const DeviceFence>& fence);
    void serve();
    void wait_and_pass_on(Request& request, std::unique_ptr<const DeviceFence> fence) noexcept;

    const std::function<void(Request&, const std::optional<IoError>&)> passed_;
    std::mutex mutex_;  // guards everything below
    std::condition_variable changed_;
    std::list<Line> lines_;
    bool stopping_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace deepnvme

// Holds requests back until the caller's own work on the device, which they have to come after, is done. Held by a worker instead, they
// would keep its slots and its staging from requests that could go on.
#pragma once

#include <condition_variable>
#include <functional>
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

private:
    CudaDevice device_;
    CudaStreamHandle stream_;
    CudaEvent event_;
};

// A thread that looks at fences every so often: CUDA can wait for one at a time only, or call back, which it does not when a device
// fails.
class DeviceFenceWatch {
public:
    // `passed`: called on the watch's thread, once for each request, with the error if its fence failed.
    explicit DeviceFenceWatch(std::function<void(Request&, const std::optional<IoError>&)> passed);
    // Nothing is waiting any more.
    ~DeviceFenceWatch();

    void add(Request& request, std::unique_ptr<const DeviceFence> fence);

private:
    struct Waiting {
        Request* request;
        std::unique_ptr<const DeviceFence> fence;
    };

    void serve();

    const std::function<void(Request&, const std::optional<IoError>&)> passed_;
    std::mutex mutex_;  // guards everything below
    std::condition_variable changed_;
    std::vector<Waiting> added_;  // and not yet seen by the thread
    bool stopping_ = false;
    std::thread thread_;
};

}  // namespace deepnvme

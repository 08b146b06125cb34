// Moves blocks between staging and device memory, while the worker goes on feeding the drive.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "core/cuda.h"

namespace deepnvme {

// The caller's work that a transfer has to come after, on the device whose memory is transferred: a write must see what it
// computes, and a read must not overwrite what it still uses.
class DeviceFence {
public:
    // After all that `stream` has been given by now. Throws IoError, or std::runtime_error where there is no CUDA.
    DeviceFence(CudaDevice device, CudaStreamHandle stream);
    ~DeviceFence();

    CudaDevice device() const noexcept { return device_; }
    CudaEventHandle event() const noexcept { return event_.get(); }

private:
    CudaDevice device_;
    CudaEvent event_;
};

// One for each worker, whose thread calls start() and take(); a thread of its own waits for the device. That costs a thread where
// CUDA's callbacks would not, but they are silent when the device fails, and nobody would ever hear of those copies.
class DeviceCopier {
public:
    enum class Way { to_device, from_device, none };  // none: only what comes before is waited for

    struct Copied {
        void* tag;
        CudaResult result;
    };

    // `wake`: called, on any thread, when take() has something new.
    explicit DeviceCopier(std::function<void()> wake);
    // Waits for the copies under way.
    ~DeviceCopier();

    // Begin a copy that comes after `fence`, and return. Throws IoError, and then nothing has begun. Without a copy (Way::none) the
    // other arguments do not matter.
    void start(Way way, std::byte* host, std::byte* device_memory, std::size_t length, const DeviceFence& fence, void* tag);

    // Those that have ended since it was last called, in the order they were started.
    std::vector<Copied> take();

    // Wait until every copy started has ended.
    void drain();

private:
    // Of one device. A direction each, so that a copy that must wait for its fence does not keep those of the other direction waiting.
    struct Lane {
        CudaStream to_device;
        CudaStream from_device;
    };

    struct Copying {
        CudaDevice device;
        CudaEvent event;
        void* tag;
    };

    void serve();

    const std::function<void()> wake_;
    std::map<CudaDevice, Lane> lanes_;  // of the worker's thread alone

    std::mutex mutex_;  // guards everything below
    std::condition_variable changed_;
    std::deque<Copying> under_way_;  // the first of them is being waited for
    std::vector<Copied> ended_;
    std::vector<std::pair<CudaDevice, CudaEvent>> spare_;
    bool stopping_ = false;
    std::thread thread_;
};

}  // namespace deepnvme

// Moves blocks between staging and device memory, while the worker goes on feeding the drive.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "core/cuda.h"
#include "core/error.h"

namespace deepnvme {

// One for each worker, whose thread calls start() and take(); a thread of its own waits for the device. That costs a thread where
// CUDA's callbacks would not, but they are silent when the device fails, and nobody would ever hear of those copies.
class DeviceCopier {
public:
    enum class Way { to_device, from_device };

    struct Copied {
        void* tag;
        std::optional<IoError> error;
    };

    // `wake`: called, on any thread, when take() has something new.
    explicit DeviceCopier(std::function<void()> wake);
    // Waits for the copies under way.
    ~DeviceCopier();

    // Begin a copy, and return. Throws IoError and std::bad_alloc, and then nothing has begun.
    void start(Way way, std::byte* host, CudaDevice device, std::byte* device_memory, std::size_t length, void* tag);

    // Those that have ended since it was last called, in the order they were started. Throws std::bad_alloc, and then nothing is taken.
    std::vector<Copied> take();

    // Wait until every copy started has ended.
    void drain();

private:
    // Of one device, which can copy both ways at a time.
    struct Lane {
        CudaStream to_device;
        CudaStream from_device;
    };

    struct Copying {
        CudaDevice device;
        CudaStreamHandle stream;
        CudaEvent event;
        CudaResult recorded;  // of the event; it marks the copy's end unless this is an error
        void* tag;
    };

    void serve() noexcept;
    static std::optional<IoError> wait_for(const Copying& copying);

    const std::function<void()> wake_;
    std::map<CudaDevice, Lane> lanes_;  // of the worker's thread alone

    std::mutex mutex_;  // guards everything below
    std::condition_variable changed_;
    std::list<Copying> under_way_;  // the first of them is being waited for
    std::vector<Copied> ended_;
    std::vector<std::pair<CudaDevice, CudaEvent>> spare_;
    bool stopping_ = false;
    std::thread thread_;
};

}  // namespace deepnvme

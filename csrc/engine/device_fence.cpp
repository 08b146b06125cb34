#include "engine/device_fence.h"

#include <chrono>
#include <deque>
#include <map>
#include <utility>

#include "core/threads.h"

namespace deepnvme {

namespace {

// A tenth of what a drive takes for a block of 1 MiB; each look costs about a microsecond for each stream.
constexpr auto kFenceInterval = std::chrono::microseconds(100);

}  // namespace

DeviceFence::DeviceFence(CudaDevice device, CudaStreamHandle stream) : device_(device), stream_(stream) {
    const CudaContextGuard context(device);
    event_ = CudaEvent::create();
    const CudaDriver& driver = CudaDriver::get();
    driver.check(driver.event_record(event_.get(), stream), "cuEventRecord");
}

bool DeviceFence::passed() const {
    const CudaContextGuard context(device_);
    const CudaDriver& driver = CudaDriver::get();
    const CudaResult result = driver.event_query(event_.get());
    if (result == kCudaNotReady) return false;
    driver.check(result, "cuEventQuery");
    return true;
}

DeviceFenceWatch::DeviceFenceWatch(std::function<void(Request&, const std::optional<IoError>&)> passed)
    : passed_(std::move(passed)), thread_(start_thread([this] { serve(); })) {}

DeviceFenceWatch::~DeviceFenceWatch() {
    {
        std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    changed_.notify_all();
    thread_.join();
}

void DeviceFenceWatch::add(Request& request, std::unique_ptr<const DeviceFence> fence) {
    // Notified under the lock: once the thread has the request, it may end, and the engine with it.
    std::lock_guard lock(mutex_);
    added_.push_back({&request, std::move(fence)});
    changed_.notify_all();
}

void DeviceFenceWatch::serve() {
    // A stream comes to its fences in order, so that only the first of them has to be asked.
    std::map<std::pair<CudaDevice, CudaStreamHandle>, std::deque<Waiting>> lines;
    while (true) {
        {
            std::unique_lock lock(mutex_);
            const auto news = [this] { return stopping_ || !added_.empty(); };
            if (lines.empty()) changed_.wait(lock, news);
            else changed_.wait_for(lock, kFenceInterval, news);
            if (lines.empty() && added_.empty()) return;
            for (Waiting& waiting : added_) {
                auto& line = lines[{waiting.fence->device(), waiting.fence->stream()}];
                line.push_back(std::move(waiting));
            }
            added_.clear();
        }
        for (auto& [stream, line] : lines) {
            while (!line.empty()) {
                std::optional<IoError> error;
                try {
                    if (!line.front().fence->passed()) break;
                } catch (const IoError& thrown) {
                    error = thrown;
                }
                Request& request = *line.front().request;
                line.pop_front();
                passed_(request, error);
            }
        }
        std::erase_if(lines, [](const auto& line) { return line.second.empty(); });
    }
}

}  // namespace deepnvme

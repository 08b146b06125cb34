#include "engine/device_fence.h"

#include <algorithm>
#include <exception>
#include <new>
#include <utility>

#include "core/threads.h"

namespace deepnvme {

namespace {

// Streams that are waited for at a time. No program is known to compute on as many.
constexpr std::size_t kMostFenceThreads = 64;

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

void DeviceFence::wait() const {
    const CudaContextGuard context(device_);
    const CudaDriver& driver = CudaDriver::get();
    driver.check(driver.event_synchronize(event_.get()), "cuEventSynchronize");
}

DeviceFenceWatch::DeviceFenceWatch(std::function<void(Request&, const std::optional<IoError>&)> passed) : passed_(std::move(passed)) {
    threads_.reserve(kMostFenceThreads);
    threads_.push_back(start_thread([this] { serve(); }));
}

DeviceFenceWatch::~DeviceFenceWatch() {
    {
        std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

void DeviceFenceWatch::add(Request& request, std::unique_ptr<const DeviceFence> fence) noexcept {
    try {
        put_in_line(request, fence);
    } catch (const std::bad_alloc&) {
        wait_and_pass_on(request, std::move(fence));
    }
}

void DeviceFenceWatch::put_in_line(Request& request, std::unique_ptr<const DeviceFence>& fence) {
    std::lock_guard lock(mutex_);
    auto line = std::find_if(lines_.begin(), lines_.end(), [&](const Line& known) {
        return known.device == fence->device() && known.stream == fence->stream();
    });
    std::list<Line> added;
    if (line == lines_.end()) {
        line = added.emplace(added.end());
        line->device = fence->device();
        line->stream = fence->stream();
    }
    line->waiting.emplace_back() = {&request, std::move(fence)};  // filled once there is memory for it: the fence is not lost
    if (added.empty()) return;
    lines_.splice(lines_.end(), added);
    if (threads_.size() < std::min(lines_.size(), kMostFenceThreads)) {
        try {
            threads_.push_back(start_thread([this] { serve(); }));
        } catch (const std::exception&) {
            // One of those that there are will come to it.
        }
    }
    // Under the lock: once a thread has the request, it may end, and the engine with it.
    changed_.notify_one();
}

void DeviceFenceWatch::serve() {
    std::unique_lock lock(mutex_);
    while (true) {
        auto line = lines_.end();
        changed_.wait(lock, [&] {
            line = std::find_if(lines_.begin(), lines_.end(), [](const Line& known) { return !known.served; });
            return stopping_ || line != lines_.end();
        });
        if (line == lines_.end()) return;
        line->served = true;
        while (!line->waiting.empty()) {
            Waiting first = std::move(line->waiting.front());
            line->waiting.pop_front();
            lock.unlock();
            wait_and_pass_on(*first.request, std::move(first.fence));
            lock.lock();
        }
        lines_.erase(line);
    }
}

void DeviceFenceWatch::wait_and_pass_on(Request& request, std::unique_ptr<const DeviceFence> fence) noexcept {
    std::optional<IoError> error;
    try {
        fence->wait();
    } catch (const IoError& thrown) {
        error = thrown;
    } catch (const std::bad_alloc&) {
        error = IoError::out_of_memory();
    }
    fence.reset();
    passed_(request, error);
}

}  // namespace deepnvme

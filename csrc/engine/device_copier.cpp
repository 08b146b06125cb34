#include "engine/device_copier.h"

#include <algorithm>
#include <utility>

#include "core/threads.h"

namespace deepnvme {

DeviceCopier::DeviceCopier(std::function<void()> wake) : wake_(std::move(wake)), thread_(start_thread([this] { serve(); })) {}

DeviceCopier::~DeviceCopier() {
    {
        std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    changed_.notify_all();
    thread_.join();
}

void DeviceCopier::start(Way way, std::byte* host, CudaDevice device, std::byte* device_memory, std::size_t length, void* tag) {
    const CudaDriver& driver = CudaDriver::get();
    const CudaContextGuard context(device);
    Lane& lane = lanes_[device];
    CudaStream& stream = way == Way::to_device ? lane.to_device : lane.from_device;
    if (!stream.get()) stream = CudaStream::create();

    std::list<Copying> copying(1);  // made before the copy begins
    CudaEvent& event = copying.front().event;
    {
        std::lock_guard lock(mutex_);
        // So is the room that it needs when it has ended. What is not taken yet keeps its own.
        ended_.reserve(ended_.size() + under_way_.size() + 1);
        spare_.reserve(spare_.size() + under_way_.size() + 1);
        const auto fits = [&](const auto& spare) { return spare.first == device; };
        if (const auto found = std::find_if(spare_.begin(), spare_.end(), fits); found != spare_.end()) {
            event = std::move(found->second);
            spare_.erase(found);
        }
    }
    if (!event.get()) event = CudaEvent::create();

    const auto address = reinterpret_cast<CudaDevicePointer>(device_memory);
    if (way == Way::to_device) driver.check(driver.copy_to_device(address, host, length, stream.get()), "cuMemcpyHtoDAsync");
    else driver.check(driver.copy_from_device(host, address, length, stream.get()), "cuMemcpyDtoHAsync");
    // From here on the copy may be under way, so that nothing may be thrown before somebody has waited for it.
    Copying& begun = copying.front();
    begun.device = device;
    begun.stream = stream.get();
    begun.recorded = driver.event_record(event.get(), stream.get());
    begun.tag = tag;
    {
        std::lock_guard lock(mutex_);
        under_way_.splice(under_way_.end(), copying);
    }
    changed_.notify_all();
}

std::vector<DeviceCopier::Copied> DeviceCopier::take() {
    std::lock_guard lock(mutex_);
    std::vector<Copied> next;
    next.reserve(under_way_.size());
    return std::exchange(ended_, std::move(next));
}

void DeviceCopier::drain() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return under_way_.empty(); });
}

void DeviceCopier::serve() noexcept {
    std::unique_lock lock(mutex_);
    while (true) {
        changed_.wait(lock, [this] { return stopping_ || !under_way_.empty(); });
        if (under_way_.empty()) return;
        const Copying& first = under_way_.front();
        lock.unlock();
        auto error = wait_for(first);
        lock.lock();
        Copying copied = std::move(under_way_.front());
        under_way_.pop_front();
        spare_.emplace_back(copied.device, std::move(copied.event));
        ended_.push_back({copied.tag, std::move(error)});
        if (under_way_.empty()) changed_.notify_all();
        lock.unlock();
        wake_();
        lock.lock();
    }
}

std::optional<IoError> DeviceCopier::wait_for(const Copying& copying) {
    const CudaDriver& driver = CudaDriver::get();
    std::optional<CudaContextGuard> context;
    try {
        context.emplace(copying.device);
    } catch (const std::exception&) {
        // It is waited for all the same: its memory is used again once this returns.
    }
    try {
        driver.check(copying.recorded, "cuEventRecord");
        driver.check(driver.event_synchronize(copying.event.get()), "cuEventSynchronize");
        return std::nullopt;
    } catch (const IoError& error) {
        driver.stream_synchronize(copying.stream);  // the copy itself may go on
        return error;
    } catch (const std::bad_alloc&) {
        driver.stream_synchronize(copying.stream);
        return IoError::out_of_memory();
    }
}

}  // namespace deepnvme

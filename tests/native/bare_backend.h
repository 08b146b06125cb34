// A backend without an engine, for tests of what the engine asks of it only seldom.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "engine/backend.h"
#include "engine/device_io.h"

namespace deepnvme::testing {

// Device memory whose reads hang until all are released, and then move nothing.
class HangingDevice final : public DeviceIo {
public:
    std::shared_ptr<void> open(int) override { return nullptr; }
    std::int64_t read(void*, CudaDevice, std::byte*, std::size_t, std::uint64_t) override {
        std::unique_lock lock(mutex_);
        ++hanging_;
        released_.wait(lock, [this] { return open_; });
        --hanging_;
        return 0;
    }
    std::int64_t write(void*, CudaDevice, const std::byte*, std::size_t, std::uint64_t) override { throw std::bad_alloc(); }
    IoError explain(std::int64_t result) const override { return IoError(static_cast<int>(-result), "", ""); }

    unsigned hanging() const {
        std::lock_guard lock(mutex_);
        return hanging_;
    }
    void release() {
        std::lock_guard lock(mutex_);
        open_ = true;
        released_.notify_all();
    }

private:
    mutable std::mutex mutex_;
    std::condition_variable released_;
    unsigned hanging_ = 0;
    bool open_ = false;
};

// Operations go by their index; each has a page of memory. To be used by the thread that made it, and destroyed by any.
class BareBackend {
public:
    static constexpr std::size_t kPage = 4096;

    // Operations on no descriptor (-1) are on the hanging device's memory, for which there is the backend "threads" only.
    BareBackend(const std::string& name, unsigned capacity)
        : operations_(capacity), memory_(new Page[capacity]()), completions_(capacity) {
        for (const auto& choice : backend_choices()) {
            if (choice.name == name)
                backend_ = name == "threads" ? make_device_backend(capacity, device_) : choice.make(capacity);
        }
        if (!backend_) throw std::invalid_argument("no backend '" + name + "'");
    }
    ~BareBackend() { device_->release(); }

    bool submit(std::uint32_t index, int fd, bool write, std::uint32_t length, std::uint64_t offset) {
        Operation& operation = operations_.at(index);
        operation = {write ? Operation::Kind::write : Operation::Kind::read, fd, index, length, memory_[index].bytes, offset};
        if (fd < 0) operation.device_file = device_.get();
        Operation* const one = &operation;
        return backend_->submit(std::span(&one, 1)) == 1;
    }
    void flush() { backend_->flush(); }
    std::vector<std::pair<std::uint32_t, std::int64_t>> reap() {
        const std::size_t count = backend_->reap(completions_);
        std::vector<std::pair<std::uint32_t, std::int64_t>> reaped;
        for (std::size_t i = 0; i < count; ++i) reaped.emplace_back(completions_[i].operation->index, completions_[i].result);
        return reaped;
    }
    void cancel(std::uint32_t index) { backend_->cancel(operations_.at(index)); }
    bool stop() { return backend_->stop(); }
    void wake() { backend_->wake(); }

    std::string memory(std::uint32_t index) const {
        return {reinterpret_cast<const char*>(memory_[index].bytes), operations_.at(index).length};
    }
    HangingDevice& device() { return *device_; }

private:
    struct alignas(kPage) Page {
        std::byte bytes[kPage];
    };

    std::vector<Operation> operations_;
    std::unique_ptr<Page[]> memory_;
    std::vector<Completion> completions_;
    std::shared_ptr<HangingDevice> device_ = std::make_shared<HangingDevice>();
    std::unique_ptr<Backend> backend_;  // last: while it goes, the rest may be in use
};

}  // namespace deepnvme::testing

// Plain pread and pwrite on a few threads: works on every kernel and file system.
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "core/error.h"
#include "core/threads.h"
#include "engine/backend.h"
#include "engine/device_io.h"

namespace deepnvme {

namespace {

// As many transfers as one drive needs to be kept busy with 1 MiB blocks; more threads cost memory and switches.
constexpr unsigned kMostThreads = 16;

class ThreadBackend final : public Backend {
public:
    ThreadBackend(unsigned capacity, std::shared_ptr<DeviceIo> device_io) : device_io_(std::move(device_io)) {
        const unsigned count = std::min(capacity, kMostThreads);
        threads_.reserve(count);
        try {
            for (unsigned i = 0; i < count; ++i) threads_.push_back(start_thread([this] { serve(); }));
        } catch (const IoError&) {
            // The system allows no more threads: fewer serve as well, none do not.
            if (threads_.empty()) throw;
        }
    }

    ~ThreadBackend() override { stop(); }

    std::string_view name() const noexcept override { return "threads"; }

    std::size_t submit(std::span<Operation* const> operations) override {
        {
            std::lock_guard lock(mutex_);
            queue_.insert(queue_.end(), operations.begin(), operations.end());
        }
        if (operations.size() == 1) work_.notify_one();
        else work_.notify_all();
        return operations.size();
    }

    std::size_t reap(std::span<Completion> completions) override {
        std::unique_lock lock(mutex_);
        completed_.wait(lock, [this] { return !results_.empty() || woken_; });
        woken_ = false;
        const std::size_t count = std::min(results_.size(), completions.size());
        std::copy_n(results_.begin(), count, completions.begin());
        results_.erase(results_.begin(), results_.begin() + static_cast<std::ptrdiff_t>(count));
        return count;
    }

    void stop() noexcept override {
        {
            std::lock_guard lock(mutex_);
            stopping_ = true;
            queue_.clear();
        }
        work_.notify_all();
        for (auto& thread : threads_) thread.join();
        threads_.clear();
    }

    void wake() noexcept override {
        {
            std::lock_guard lock(mutex_);
            woken_ = true;
        }
        completed_.notify_one();
    }

private:
    void serve() {
        std::unique_lock lock(mutex_);
        while (true) {
            work_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
            if (queue_.empty()) return;
            Operation* operation = queue_.front();
            queue_.pop_front();
            lock.unlock();
            const Completion completion{operation, perform(*operation)};
            lock.lock();
            results_.push_back(completion);
            completed_.notify_one();
        }
    }

    std::int64_t perform(const Operation& operation) const {
        if (operation.device_file) return perform_on_device(operation);
        const auto offset = static_cast<off_t>(operation.offset);
        ssize_t result = -1;
        switch (operation.kind) {
            case Operation::Kind::read: result = ::pread(operation.fd, operation.memory, operation.length, offset); break;
            case Operation::Kind::write: result = ::pwrite(operation.fd, operation.memory, operation.length, offset); break;
            case Operation::Kind::sync: result = ::fsync(operation.fd); break;
        }
        return result < 0 ? -errno : result;
    }

    std::int64_t perform_on_device(const Operation& operation) const {
        try {
            const auto& [kind, fd, index, length, memory, offset, file, device] = operation;
            return kind == Operation::Kind::read ? device_io_->read(file, device, memory, length, offset)
                                                 : device_io_->write(file, device, memory, length, offset);
        } catch (const IoError& error) {  // there is no context any more
            return -error.error();
        }
    }

    const std::shared_ptr<DeviceIo> device_io_;
    std::mutex mutex_;  // guards everything below
    std::condition_variable work_;
    std::condition_variable completed_;
    std::deque<Operation*> queue_;
    std::vector<Completion> results_;
    bool woken_ = false;
    bool stopping_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<Backend> make_thread_backend(unsigned capacity) { return make_device_backend(capacity, nullptr); }

std::unique_ptr<Backend> make_device_backend(unsigned capacity, std::shared_ptr<DeviceIo> device_io) {
    return std::make_unique<ThreadBackend>(capacity, std::move(device_io));
}

}  // namespace deepnvme

// Plain pread and pwrite on a few threads: works on every kernel and file system.
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstddef>
#include <exception>
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
        queue_.reserve(capacity);
        results_.reserve(capacity);
        threads_.reserve(count);
        try {
            for (unsigned i = 0; i < count; ++i) threads_.push_back(start_thread([this] { serve(); }));
        } catch (const std::exception&) {
            // The system allows no more threads, or memory for them: fewer serve as well, none do not.
            if (threads_.empty()) throw;
        }
    }

    ~ThreadBackend() override { stop(); }

    std::string_view name() const noexcept override { return "threads"; }

    std::size_t submit(std::span<Operation* const> operations) override {
        {
            std::lock_guard lock(mutex_);
            if (queue_.size() + operations.size() > queue_.capacity()) drop_begun();
            queue_.insert(queue_.end(), operations.begin(), operations.end());
        }
        if (operations.size() == 1) work_.notify_one();
        else work_.notify_all();
        return operations.size();
    }

    void flush() override {}  // submit starts what it takes

    std::size_t reap(std::span<Completion> completions) override {
        std::unique_lock lock(mutex_);
        completed_.wait(lock, [this] { return !results_.empty() || woken_; });
        woken_ = false;
        const std::size_t count = std::min(results_.size(), completions.size());
        std::copy_n(results_.begin(), count, completions.begin());
        results_.erase(results_.begin(), results_.begin() + static_cast<std::ptrdiff_t>(count));
        return count;
    }

    // Only what no thread has begun: a thread in a system call cannot be called back.
    bool cancel(Operation& operation) noexcept override {
        {
            std::lock_guard lock(mutex_);
            const auto found = std::find(queue_.begin() + begun_, queue_.end(), &operation);
            if (found == queue_.end()) return true;
            queue_.erase(found);
            results_.push_back({&operation, -ECANCELED});
        }
        completed_.notify_one();
        return true;
    }

    bool stop() noexcept override {
        {
            std::lock_guard lock(mutex_);
            stopping_ = true;
            queue_.clear();
            begun_ = 0;
        }
        work_.notify_all();
        for (auto& thread : threads_) thread.join();
        threads_.clear();
        return true;
    }

    void wake() noexcept override {
        {
            std::lock_guard lock(mutex_);
            woken_ = true;
        }
        completed_.notify_one();
    }

private:
    void serve() noexcept {
        std::unique_lock lock(mutex_);
        while (true) {
            work_.wait(lock, [this] { return stopping_ || has_work(); });
            if (!has_work()) return;
            Operation* operation = queue_[static_cast<std::size_t>(begun_++)];
            if (!has_work()) drop_begun();
            lock.unlock();
            const Completion completion{operation, perform(*operation)};
            lock.lock();
            results_.push_back(completion);
            completed_.notify_one();
        }
    }

    bool has_work() const noexcept { return begun_ < std::ssize(queue_); }

    void drop_begun() noexcept {
        queue_.erase(queue_.begin(), queue_.begin() + begun_);
        begun_ = 0;
    }

    std::int64_t perform(const Operation& operation) const noexcept {
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

    std::int64_t perform_on_device(const Operation& operation) const noexcept {
        try {
            const auto& [kind, fd, index, length, memory, offset, file, device] = operation;
            return kind == Operation::Kind::read ? device_io_->read(file, device, memory, length, offset)
                                                 : device_io_->write(file, device, memory, length, offset);
        } catch (const IoError& error) {  // there is no context any more
            return -error.error();
        } catch (const std::exception&) {
            return -ENOMEM;
        }
    }

    const std::shared_ptr<DeviceIo> device_io_;
    std::mutex mutex_;  // guards everything below
    std::condition_variable work_;
    std::condition_variable completed_;
    // With room for as many as are ever under way: nothing is allocated while one is.
    std::vector<Operation*> queue_;
    std::ptrdiff_t begun_ = 0;  // so many at the front of the queue are, by a thread
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

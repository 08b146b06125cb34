// Linux kernel AIO through libaio.
#include "engine/backend.h"

#ifdef DEEPNVME_HAVE_LIBAIO

#include <libaio.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "core/error.h"
#include "core/wake_event.h"

namespace deepnvme {

namespace {

class Context {
public:
    explicit Context(unsigned capacity) {
        const int error = -::io_setup(static_cast<int>(capacity), &context_);
        // EAGAIN: fs.aio-max-nr is used up.
        if (error) throw IoError(error, "io_setup for " + std::to_string(capacity) + " events (see fs.aio-max-nr)", "");
    }
    ~Context() { destroy(); }
    Context(const Context&) = delete;
    Context& operator=(const Context&) = delete;

    // Blocks until all that is under way has ended. False if the kernel refuses.
    bool destroy() noexcept { return !context_ || ::io_destroy(std::exchange(context_, nullptr)) == 0; }

    io_context_t get() const noexcept { return context_; }

private:
    io_context_t context_ = nullptr;
};

class LibaioBackend final : public Backend {
public:
    // One more than operations: the poll that listens for wake().
    explicit LibaioBackend(unsigned capacity)
        : blocks_(capacity), batch_(capacity), events_(capacity + 1), context_(capacity + 1) {
        refused_.reserve(capacity);  // so that nothing is allocated while operations are under way
        listen();
    }

    std::string_view name() const noexcept override { return "libaio"; }

    std::size_t submit(std::span<Operation* const> operations) override {
        const std::size_t count = std::min(operations.size(), batch_.size());
        for (std::size_t i = 0; i < count; ++i) batch_[i] = prepare(*operations[i]);
        std::size_t taken = 0;
        while (taken < count) {
            const int submitted = ::io_submit(context_.get(), static_cast<long>(count - taken), batch_.data() + taken);
            if (submitted > 0) {
                taken += static_cast<std::size_t>(submitted);
            } else if (submitted == -EAGAIN || submitted == -EINTR || submitted == 0) {
                break;
            } else {
                // The first of those left was turned down; that is its result, and no reason to hold up the others.
                refused_.push_back({operations[taken], submitted});
                ++taken;
            }
        }
        return taken;
    }

    void flush() override {}  // submit starts what it takes

    std::size_t reap(std::span<Completion> completions) override {
        if (!refused_.empty()) {
            const std::size_t count = std::min(refused_.size(), completions.size());
            std::copy_n(refused_.begin(), count, completions.begin());
            refused_.erase(refused_.begin(), refused_.begin() + static_cast<std::ptrdiff_t>(count));
            return count;
        }
        if (!listening_) listen();
        const std::size_t room = std::min(events_.size(), completions.size());
        const int got = ::io_getevents(context_.get(), 1, static_cast<long>(room), events_.data(), nullptr);
        if (got == -EINTR) return 0;
        if (got < 0) throw IoError(-got, "io_getevents", "");
        std::size_t count = 0;
        for (int i = 0; i < got; ++i) {
            if (events_[i].obj == &wake_block_) listening_ = false;
            else completions[count++] = {static_cast<Operation*>(events_[i].data), static_cast<long>(events_[i].res)};
        }
        if (!listening_) event_.clear();
        return count;
    }

    // The kernel refuses it for reads and writes of files, up to now. Where it does not, the completion comes as ever.
    bool cancel(Operation& operation) noexcept override {
        io_event unused;
        ::io_cancel(context_.get(), &blocks_[operation.index], &unused);
        return true;
    }

    bool stop() noexcept override { return context_.destroy(); }

    void wake() noexcept override { event_.signal(); }

private:
    iocb* prepare(Operation& operation) {
        iocb* block = &blocks_[operation.index];
        const auto offset = static_cast<long long>(operation.offset);
        switch (operation.kind) {
            case Operation::Kind::read:
                ::io_prep_pread(block, operation.fd, operation.memory, operation.length, offset);
                break;
            case Operation::Kind::write:
                ::io_prep_pwrite(block, operation.fd, operation.memory, operation.length, offset);
                break;
            case Operation::Kind::sync: ::io_prep_fsync(block, operation.fd); break;
        }
        block->data = &operation;
        return block;
    }

    void listen() {
        ::io_prep_poll(&wake_block_, event_.fd(), POLLIN);
        iocb* block = &wake_block_;
        const int submitted = ::io_submit(context_.get(), 1, &block);
        if (submitted != 1) throw IoError(submitted < 0 ? -submitted : EAGAIN, "io_submit of a poll (Linux 4.19 has it)", "");
        listening_ = true;
    }

    std::vector<iocb> blocks_;  // by operation index
    std::vector<iocb*> batch_;
    std::vector<io_event> events_;
    std::vector<Completion> refused_;
    iocb wake_block_{};
    bool listening_ = false;
    WakeEvent event_;
    Context context_;  // last: nothing may complete into what is gone
};

}  // namespace

std::unique_ptr<Backend> make_libaio_backend(unsigned capacity) { return std::make_unique<LibaioBackend>(capacity); }

}  // namespace deepnvme

#endif

// Linux AIO, which is called libaio as in DeepSpeed and fio. That library's part is little more than five system calls, so these
// are made here, and there is no library to find.
#include <linux/aio_abi.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "core/error.h"
#include "core/wake_event.h"
#include "engine/backend.h"

namespace deepnvme {

namespace {

constexpr std::uint16_t kPoll = 5;  // IOCB_CMD_POLL, Linux 4.19; a distribution's header may be older

class Context {
public:
    explicit Context(unsigned capacity) {
        const int error = ::syscall(SYS_io_setup, capacity, &context_) < 0 ? errno : 0;
        // EAGAIN: fs.aio-max-nr is used up.
        if (error) throw IoError(error, "io_setup for " + std::to_string(capacity) + " events (see fs.aio-max-nr)", "");
    }
    ~Context() { destroy(); }
    Context(const Context&) = delete;
    Context& operator=(const Context&) = delete;

    // Block until every operation has ended, then free the context. False if the kernel refuses.
    bool destroy() noexcept { return !context_ || ::syscall(SYS_io_destroy, std::exchange(context_, 0)) == 0; }

    // Each returns a count, or -errno. wait() blocks until at least one operation has completed; the others do not block.
    long submit(long count, iocb** blocks) noexcept { return result(::syscall(SYS_io_submit, context_, count, blocks)); }
    long wait(long most, io_event* events) noexcept {
        return result(::syscall(SYS_io_getevents, context_, 1L, most, events, nullptr));
    }
    long cancel(iocb* block) noexcept {
        io_event unused;
        return result(::syscall(SYS_io_cancel, context_, block, &unused));
    }

private:
    static long result(long returned) noexcept { return returned < 0 ? -errno : returned; }

    aio_context_t context_ = 0;
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
            const long submitted = context_.submit(static_cast<long>(count - taken), batch_.data() + taken);
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
        const long got = context_.wait(static_cast<long>(room), events_.data());
        if (got == -EINTR) return 0;
        if (got < 0) throw IoError(static_cast<int>(-got), "io_getevents", "");
        std::size_t count = 0;
        for (long i = 0; i < got; ++i) {
            const io_event& event = events_[static_cast<std::size_t>(i)];
            if (event.data == 0) listening_ = false;
            else completions[count++] = {reinterpret_cast<Operation*>(static_cast<std::uintptr_t>(event.data)), event.res};
        }
        if (!listening_) event_.clear();
        return count;
    }

    // So far the kernel refuses to cancel reads and writes of files. The operation then completes as ever.
    bool cancel(Operation& operation) noexcept override {
        context_.cancel(&blocks_[operation.index]);
        return true;
    }

    bool stop() noexcept override { return context_.destroy(); }

    void wake() noexcept override { event_.signal(); }

private:
    iocb* prepare(Operation& operation) {
        iocb& block = blocks_[operation.index] = {};
        block.aio_data = reinterpret_cast<std::uintptr_t>(&operation);
        block.aio_fildes = static_cast<std::uint32_t>(operation.fd);
        if (operation.kind == Operation::Kind::sync) {
            block.aio_lio_opcode = IOCB_CMD_FSYNC;
        } else {
            block.aio_lio_opcode = operation.kind == Operation::Kind::read ? IOCB_CMD_PREAD : IOCB_CMD_PWRITE;
            block.aio_buf = reinterpret_cast<std::uintptr_t>(operation.memory);
            block.aio_nbytes = operation.length;
            block.aio_offset = static_cast<std::int64_t>(operation.offset);
        }
        return &block;
    }

    void listen() {
        wake_block_ = {};  // its completion is told from an operation's by its data, which are null
        wake_block_.aio_lio_opcode = kPoll;
        wake_block_.aio_fildes = static_cast<std::uint32_t>(event_.fd());
        wake_block_.aio_buf = POLLIN;
        iocb* block = &wake_block_;
        const long submitted = context_.submit(1, &block);
        if (submitted != 1)
            throw IoError(submitted < 0 ? static_cast<int>(-submitted) : EAGAIN, "io_submit of a poll (Linux 4.19 has it)", "");
        listening_ = true;
    }

    std::vector<iocb> blocks_;  // by operation index
    std::vector<iocb*> batch_;
    std::vector<io_event> events_;
    std::vector<Completion> refused_;
    iocb wake_block_{};
    bool listening_ = false;
    WakeEvent event_;
    Context context_;  // destroyed first: it waits for operations that use the members above
};

}  // namespace

std::unique_ptr<Backend> make_libaio_backend(unsigned capacity) { return std::make_unique<LibaioBackend>(capacity); }

}  // namespace deepnvme

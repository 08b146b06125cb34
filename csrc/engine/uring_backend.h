// io_uring: a ring whose completions the drive reports by interrupts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "core/wake_event.h"
#include "engine/backend.h"
#include "engine/ring.h"

namespace deepnvme {

class UringBackend final : public Backend {
public:
    explicit UringBackend(unsigned capacity);  // throws IoError

    std::string_view name() const noexcept override { return "io_uring"; }

    std::size_t submit(std::span<Operation* const> operations) override;
    void flush() override;
    std::size_t reap(std::span<Completion> completions) override;
    bool cancel(Operation& operation) noexcept override;
    bool stop() noexcept override;
    void wake() noexcept override { event_.signal(); }

private:
    struct UnderWay {
        Operation* operation;  // null for none
        std::uint64_t user_data;
    };

    std::size_t wait(std::span<Completion> completions) noexcept;
    void require_operations();
    io_uring::SubmissionEntry* entry() noexcept;
    void listen() noexcept;
    void woken(int result) noexcept;

    std::vector<UnderWay> under_way_by_index_;
    std::size_t under_way_ = 0;
    std::uint32_t sequence_ = 0;
    bool listening_ = false;
    int poll_error_ = 0;
    WakeEvent event_;
    Ring ring_;
};

}  // namespace deepnvme

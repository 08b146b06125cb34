// An eventfd with one owner: how one thread makes another's blocking system call return.
#pragma once

#include "core/fd.h"

namespace deepnvme {

class WakeEvent {
public:
    // Throws IoError.
    WakeEvent();

    int fd() const noexcept { return fd_.get(); }
    void signal() noexcept;
    // Forget every signal so far.
    void clear() noexcept;

private:
    Fd fd_;
};

}  // namespace deepnvme

// What every thread of ours does first.
#pragma once

#include <pthread.h>
#include <signal.h>

namespace deepnvme {

// Signals are for the program's own threads.
inline void block_signals() {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, nullptr);
}

}  // namespace deepnvme

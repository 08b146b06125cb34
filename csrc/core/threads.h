// How every thread of ours begins.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <system_error>
#include <thread>
#include <utility>

#include "core/error.h"

namespace deepnvme {

// Signals are for the program's own threads: this one blocks them all. Throws IoError where the system allows no more threads.
template <class Function>
std::thread start_thread(Function run) {
    try {
        return std::thread([run = std::move(run)]() mutable {
            sigset_t all;
            ::sigfillset(&all);
            ::pthread_sigmask(SIG_SETMASK, &all, nullptr);
            run();
        });
    } catch (const std::system_error& error) {
        throw IoError(error.code().value(), "starting a thread", "");
    }
}

}  // namespace deepnvme

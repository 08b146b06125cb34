// What unpickling a stream takes, found before anything is made of it, in one pass over its operations.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace deepnvme {

struct PickleWalk {
    std::uint64_t deepest = 0;  // MARKs that are open at a time: how far what is pickled is nested
    // Lists, dicts, sets and results of calls at a time that are not in the memo yet, where a pickler enters each, and values dropped.
    std::uint64_t unregistered = 0;
    bool whole = false;  // whether it ends within the stream: by STOP, or by what is no operation
};

PickleWalk walk_pickle(std::span<const unsigned char> stream);

}  // namespace deepnvme

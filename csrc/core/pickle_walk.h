// What unpickling a stream takes, found before anything is made of it, in one pass over its operations.
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <string_view>

namespace deepnvme {

struct PickleWalk {
    // How far what is pickled is nested: MARKs that are open at a time, or tuples in tuples, which are hashed by recursion.
    std::uint64_t deepest = 0;
    // Containers and results of calls at a time that are not in the memo yet, where a pickler enters each, and values dropped.
    std::uint64_t unregistered = 0;
    std::uint64_t memo = 0;  // the largest number of the memo that something is entered under; picklers count from 0 on
    // What it names, once each: a module, a line's end, and a name. Whether that is all: not where it takes names from its stack,
    // or from the table of numbers that a process may have, or has more of them than any pickle of tensors.
    std::set<std::string_view> names;
    bool all_named = true;
    bool whole = false;  // whether it ends within the stream: by STOP, or by what is no operation
};

// Ends early where it is nested more than `most` times, or a number of the memo is no less than the stream has bytes; `whole` is
// false then.
PickleWalk walk_pickle(std::span<const unsigned char> stream, std::uint16_t most);

}  // namespace deepnvme

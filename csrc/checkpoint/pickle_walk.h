// What unpickling a stream would cost, found in one pass over its operations, without making any object.
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <string_view>

namespace deepnvme {

struct PickleWalk {
    // Deepest nesting: of open MARKs, or of tuples in tuples. Hashing a tuple recurses in C, and can overflow the stack.
    std::uint64_t nesting = 0;
    // Most containers and call results at one time that were not yet in the memo, values dropped, and memo entries of what is no
    // text, container, global or call result, or is in the memo already. Picklers memoize each of these once, and nothing else.
    std::uint64_t unregistered = 0;
    std::uint64_t largest_memo_index = 0;  // unpickling allocates a memo of this size; picklers count from 0
    std::set<std::string_view> names;      // globals that it names: "module\nname"; views into the stream
    // False if there may be others: taken from the stack (STACK_GLOBAL) or from copyreg's table (EXT), or more than 1000.
    bool all_named = true;
    bool changes_globals = false;  // sets the state of a class or a function that it names: for the whole process
    bool complete = false;         // it ends within the stream: at STOP, or at an unknown operation
};

// Stops early, with `complete` false, at more than `most_nested` levels (at most 16382), at more than `most_unregistered` objects,
// or at a memo index not below the stream's size.
PickleWalk walk_pickle(std::span<const unsigned char> stream, std::uint16_t most_nested,
                       std::uint64_t most_unregistered = ~std::uint64_t{0});

}  // namespace deepnvme

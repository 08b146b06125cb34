// The operations are those of protocols 0 to 5, as CPython's pickletools describes them.
#include "core/pickle_walk.h"

#include <algorithm>
#include <cstring>

namespace deepnvme {

namespace {

// Where the reading is; everything that is cut off leaves it at the end.
class Cursor {
public:
    explicit Cursor(std::span<const unsigned char> stream) : stream_(stream) {}

    bool ended() const { return at_ == stream_.size(); }
    unsigned char next() { return stream_[at_++]; }
    // False where less than that is left.
    bool skip(std::uint64_t nbytes) {
        const bool there = nbytes <= stream_.size() - at_;
        at_ = there ? at_ + nbytes : stream_.size();
        return there;
    }
    // Past as many bytes as a little-endian number of `width` bytes says.
    bool skip_counted(std::size_t width) {
        const std::size_t start = at_;
        if (!skip(width)) return false;
        std::uint64_t nbytes = 0;
        for (std::size_t i = 0; i < width; ++i) nbytes |= std::uint64_t{stream_[start + i]} << (8 * i);
        return skip(nbytes);
    }
    bool skip_lines(int count) {
        for (; count; --count) {
            const void* end = ended() ? nullptr : std::memchr(stream_.data() + at_, '\n', stream_.size() - at_);
            if (!end) return skip(stream_.size());
            at_ = static_cast<std::size_t>(static_cast<const unsigned char*>(end) - stream_.data()) + 1;
        }
        return true;
    }

private:
    std::span<const unsigned char> stream_;
    std::size_t at_ = 0;
};

}  // namespace

PickleWalk walk_pickle(std::span<const unsigned char> stream) {
    PickleWalk found;
    std::uint64_t open = 0;
    std::uint64_t unregistered = 0;
    const auto made = [&] { found.unregistered = std::max(found.unregistered, ++unregistered); };
    const auto registered = [&] { unregistered -= unregistered != 0; };
    Cursor cursor(stream);
    while (!cursor.ended()) {
        const unsigned char operation = cursor.next();
        switch (operation) {
            case '(': found.deepest = std::max(found.deepest, ++open); break;
            case 't': case 'e': case 'u': case 0x90: case 0x91:  // TUPLE, APPENDS, SETITEMS, ADDITEMS, FROZENSET
                open -= open != 0;
                break;
            case 'l': case 'd': case 'o':  // LIST, DICT, OBJ: from a MARK
            case '1':                      // POP_MARK
                open -= open != 0;
                made();
                break;
            case ']': case '}': case 0x8f:   // EMPTY_LIST, EMPTY_DICT, EMPTY_SET
            case 'R': case 0x81: case 0x92:  // REDUCE, NEWOBJ, NEWOBJ_EX
            case '0': case '2':              // POP, DUP
                made();
                break;
            case 0x94: registered(); break;  // MEMOIZE
            case 'q': registered(); if (!cursor.skip(1)) return found; break;        // BINPUT
            case 'r': registered(); if (!cursor.skip(4)) return found; break;        // LONG_BINPUT
            case 'p': registered(); if (!cursor.skip_lines(1)) return found; break;  // PUT
            case 'N': case ')': case 'a': case 'b': case 's': case 'Q':  // NONE, EMPTY_TUPLE, APPEND, BUILD, SETITEM, BINPERSID
            case 0x85: case 0x86: case 0x87: case 0x88: case 0x89:       // TUPLE1 to 3, NEWTRUE, NEWFALSE
            case 0x93: case 0x97: case 0x98:                             // STACK_GLOBAL, NEXT_BUFFER, READONLY_BUFFER
                break;
            case 'K': case 'h': case 0x80: case 0x82: if (!cursor.skip(1)) return found; break;  // BININT1, BINGET, PROTO, EXT1
            case 'M': case 0x83: if (!cursor.skip(2)) return found; break;                       // BININT2, EXT2
            case 'J': case 'j': case 0x84: if (!cursor.skip(4)) return found; break;             // BININT, LONG_BINGET, EXT4
            case 'G': case 0x95: if (!cursor.skip(8)) return found; break;                       // BINFLOAT, FRAME
            // SHORT_BINSTRING, SHORT_BINBYTES, SHORT_BINUNICODE, LONG1
            case 'U': case 'C': case 0x8c: case 0x8a: if (!cursor.skip_counted(1)) return found; break;
            // BINSTRING, BINBYTES, BINUNICODE, LONG4
            case 'T': case 'B': case 'X': case 0x8b: if (!cursor.skip_counted(4)) return found; break;
            // BINUNICODE8, BINBYTES8, BYTEARRAY8
            case 0x8d: case 0x8e: case 0x96: if (!cursor.skip_counted(8)) return found; break;
            // INT, LONG, FLOAT, STRING, UNICODE, PERSID, GET
            case 'I': case 'L': case 'F': case 'S': case 'V': case 'P': case 'g': if (!cursor.skip_lines(1)) return found; break;
            case 'c': if (!cursor.skip_lines(2)) return found; break;  // GLOBAL
            case 'i':                                                  // INST: from a MARK
                open -= open != 0;
                made();
                if (!cursor.skip_lines(2)) return found;
                break;
            default:  // STOP, or no operation
                found.whole = true;
                return found;
        }
    }
    return found;
}

}  // namespace deepnvme

// The operations are those of protocols 0 to 5, as CPython's pickletools describes them.
#include "core/pickle_walk.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <vector>

namespace deepnvme {

namespace {

constexpr std::uint64_t kMost = ~std::uint64_t{0};
constexpr std::size_t kMostNames = 1000;

// How deep the tuples are nested in each value that unpickling would have on its stack or in its memo.
class Values {
public:
    std::size_t open() const { return marks_.size(); }
    void mark() { marks_.push_back(stack_.size()); }
    void push(std::uint16_t depth = 0) { stack_.push_back(depth); }
    std::uint16_t top() const { return stack_.empty() ? std::uint16_t{0} : stack_.back(); }
    std::size_t since_mark() const { return stack_.size() - std::min(stack_.size(), marks_.empty() ? 0 : marks_.back()); }
    // The deepest of the `count` last ones, which go. Where fewer are left, unpickling fails.
    std::uint16_t pop(std::size_t count) {
        std::uint16_t deepest = 0;
        for (; count && !stack_.empty(); --count) {
            deepest = std::max(deepest, stack_.back());
            stack_.pop_back();
        }
        return deepest;
    }
    // Those since the last MARK, and that.
    std::uint16_t pop_mark() {
        const std::uint16_t deepest = pop(since_mark());
        if (!marks_.empty()) marks_.pop_back();
        return deepest;
    }
    // As POP: the MARK, where nothing is behind it.
    void drop() {
        if (!marks_.empty() && !since_mark()) marks_.pop_back();
        else pop(1);
    }
    std::uint64_t entered() const { return entered_; }
    void put(std::uint64_t number) {
        if (number >= memo_.size()) memo_.resize(number + 1);
        entered_ += memo_[number] == 0;
        memo_[number] = static_cast<std::uint16_t>(top() + 1);
    }
    void get(std::uint64_t number) { push(number < memo_.size() && memo_[number] ? static_cast<std::uint16_t>(memo_[number] - 1) : 0); }

private:
    std::deque<std::uint16_t> stack_;
    std::vector<std::size_t> marks_;
    std::vector<std::uint16_t> memo_;  // one more than the depth; 0: there is none
    std::uint64_t entered_ = 0;
};

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
    // Past a little-endian number of `width` bytes, into `value`.
    bool number(std::size_t width, std::uint64_t& value) {
        const std::size_t start = at_;
        value = 0;
        if (!skip(width)) return false;
        for (std::size_t i = 0; i < width; ++i) value |= std::uint64_t{stream_[start + i]} << (8 * i);
        return true;
    }
    // Past as many bytes as the number before them says.
    bool skip_counted(std::size_t width) {
        std::uint64_t nbytes = 0;
        return number(width, nbytes) && skip(nbytes);
    }
    bool skip_lines(int count) {
        for (; count; --count) {
            const void* end = ended() ? nullptr : std::memchr(stream_.data() + at_, '\n', stream_.size() - at_);
            if (!end) return skip(stream_.size());
            at_ = static_cast<std::size_t>(static_cast<const unsigned char*>(end) - stream_.data()) + 1;
        }
        return true;
    }
    // Past a module's and a name's line, into `name`, without the last line's end.
    bool name(std::string_view& name) {
        const std::size_t start = at_;
        if (!skip_lines(2)) return false;
        name = {reinterpret_cast<const char*>(stream_.data()) + start, at_ - start - 1};
        return true;
    }
    // Past a line of digits. What int() takes besides, no pickler writes: it is read as the largest number.
    bool decimal(std::uint64_t& value) {
        const std::size_t start = at_;
        if (!skip_lines(1)) return false;
        value = 0;
        for (std::size_t i = start; i + 1 < at_; ++i) {
            if (stream_[i] < '0' || stream_[i] > '9' || value > kMost / 10 - 1) {
                value = kMost;
                break;
            }
            value = 10 * value + (stream_[i] - '0');
        }
        return true;
    }

private:
    std::span<const unsigned char> stream_;
    std::size_t at_ = 0;
};

}  // namespace

PickleWalk walk_pickle(std::span<const unsigned char> stream, std::uint16_t most) {
    PickleWalk found;
    std::uint64_t unregistered = 0;
    Values values;
    Cursor cursor(stream);
    const auto made = [&] { found.unregistered = std::max(found.unregistered, ++unregistered); };
    const auto tuple = [&](std::uint16_t inside) {
        values.push(static_cast<std::uint16_t>(inside + 1));
        found.deepest = std::max<std::uint64_t>(found.deepest, inside + 1u);
        made();
    };
    const auto call = [&](std::size_t arguments) {
        values.pop(arguments);
        values.push();
        made();
    };
    const auto put = [&](std::uint64_t number) {
        unregistered -= unregistered != 0;
        found.memo = std::max(found.memo, number);
        if (number < stream.size()) values.put(number);
        return number < stream.size();
    };
    const auto named = [&](std::string_view name) {
        if (found.all_named) found.names.insert(name);
        found.all_named = found.all_named && found.names.size() <= kMostNames;
    };
    while (!cursor.ended() && found.deepest <= most) {
        const unsigned char operation = cursor.next();
        bool going_on = true;
        std::uint64_t number = 0;
        std::string_view name;
        switch (operation) {
            case '(':
                values.mark();
                found.deepest = std::max<std::uint64_t>(found.deepest, values.open());
                break;
            case 't':  // TUPLE
                if (values.since_mark()) {
                    tuple(values.pop_mark());
                } else {
                    values.pop_mark();
                    values.push();
                }
                break;
            case 0x85: case 0x86: case 0x87: tuple(values.pop(operation - 0x84u)); break;  // TUPLE1 to 3
            case 'e': case 'u': case 0x90: values.pop_mark(); break;                       // APPENDS, SETITEMS, ADDITEMS
            case 'l': case 'd': case 'o': case 0x91:                                       // LIST, DICT, OBJ, FROZENSET: from a MARK
                values.pop_mark();
                call(0);
                break;
            case '1':  // POP_MARK
                values.pop_mark();
                made();
                break;
            case ']': case '}': case 0x8f: call(0); break;  // EMPTY_LIST, EMPTY_DICT, EMPTY_SET
            case 'R': case 0x81: call(2); break;            // REDUCE, NEWOBJ
            case 0x92: call(3); break;                      // NEWOBJ_EX
            case '0':                                       // POP
                values.drop();
                made();
                break;
            case '2':  // DUP
                values.push(values.top());
                made();
                break;
            case 0x94: going_on = put(values.entered()); break;                             // MEMOIZE
            case 'q': going_on = cursor.number(1, number) && put(number); break;            // BINPUT
            case 'r': going_on = cursor.number(4, number) && put(number); break;            // LONG_BINPUT
            case 'p': going_on = cursor.decimal(number) && put(number); break;              // PUT
            case 'h': if ((going_on = cursor.number(1, number))) values.get(number); break;  // BINGET
            case 'j': if ((going_on = cursor.number(4, number))) values.get(number); break;  // LONG_BINGET
            case 'g':                                                                       // GET
                going_on = cursor.decimal(number);
                if (going_on && number == kMost) found.memo = number;
                going_on = going_on && number != kMost;
                values.get(number);
                break;
            case 'a': case 'b': values.pop(1); break;  // APPEND, BUILD
            case 's': values.pop(2); break;            // SETITEM
            case 'Q': case 0x93:                       // BINPERSID, STACK_GLOBAL
                values.pop(operation == 'Q' ? 1 : 2);
                values.push();
                if (operation != 'Q') found.all_named = false;
                break;
            case 'N': case ')': case 0x88: case 0x89: case 0x97: values.push(); break;  // NONE, EMPTY_TUPLE, NEWTRUE, NEWFALSE, NEXT_BUFFER
            case 0x98: break;                                                           // READONLY_BUFFER
            case 0x80: going_on = cursor.skip(1); break;                                // PROTO
            case 0x95: going_on = cursor.skip(8); break;                                // FRAME
            case 'K': values.push(); going_on = cursor.skip(1); break;                      // BININT1
            case 'M': values.push(); going_on = cursor.skip(2); break;                      // BININT2
            case 'J': values.push(); going_on = cursor.skip(4); break;                      // BININT
            case 0x82: case 0x83: case 0x84:                                                // EXT1, EXT2, EXT4
                values.push();
                found.all_named = false;
                going_on = cursor.skip(1u << (operation - 0x82));
                break;
            case 'G': values.push(); going_on = cursor.skip(8); break;                      // BINFLOAT
            // SHORT_BINSTRING, SHORT_BINBYTES, SHORT_BINUNICODE, LONG1
            case 'U': case 'C': case 0x8c: case 0x8a: values.push(); going_on = cursor.skip_counted(1); break;
            // BINSTRING, BINBYTES, BINUNICODE, LONG4
            case 'T': case 'B': case 'X': case 0x8b: values.push(); going_on = cursor.skip_counted(4); break;
            // BINUNICODE8, BINBYTES8, BYTEARRAY8
            case 0x8d: case 0x8e: case 0x96: values.push(); going_on = cursor.skip_counted(8); break;
            // INT, LONG, FLOAT, STRING, UNICODE, PERSID
            case 'I': case 'L': case 'F': case 'S': case 'V': case 'P': values.push(); going_on = cursor.skip_lines(1); break;
            case 'c':  // GLOBAL
                values.push();
                if ((going_on = cursor.name(name))) named(name);
                break;
            case 'i':  // INST: from a MARK
                values.pop_mark();
                call(0);
                if ((going_on = cursor.name(name))) named(name);
                break;
            default:  // STOP, or no operation
                found.whole = true;
                found.all_named = found.all_named && operation == '.';
                return found;
        }
        if (!going_on) return found;
    }
    return found;
}

}  // namespace deepnvme

// The operations are those of protocols 0 to 5, as CPython's pickletools describes them.
#include "checkpoint/pickle_walk.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <vector>

namespace deepnvme {

namespace {

constexpr std::uint64_t kNotANumber = ~std::uint64_t{0};  // instead of a memo index that is not only digits
constexpr std::size_t kMostNames = 1000;

// Whether picklers memoize what an operation makes: text, containers, globals and call results.
constexpr std::array<bool, 256> kMemoized = [] {
    std::array<bool, 256> memoized{};
    for (const unsigned char operation : std::string_view("SVUTXCB\x8c\x8d\x8e\x96t\x85\x86\x87l]d}\x8f\x91" "c\x93ioR\x81\x92"))
        memoized[operation] = true;
    return memoized;
}();

// In two bytes, since a stream may put a value into the memo for each of its own bytes.
struct Value {
    std::uint16_t depth : 14 = 0;   // of tuples in tuples
    std::uint16_t global : 1 = 0;   // a class or a function, found by its name
    std::uint16_t in_memo : 1 = 0;  // in the memo only: there is a value under this index
};
static_assert(sizeof(Value) == 2);
constexpr std::uint16_t kMostDepth = (1u << 14) - 1;

// The values that unpickling would have on its stack and in its memo. An empty one where unpickling would fail because there is
// no such value, or no MARK.
class Values {
public:
    std::size_t open_marks() const { return marks_.size(); }
    void mark() { marks_.push_back(stack_.size()); }
    void push(Value value = {}) { stack_.push_back(value); }
    void push_tuple(std::uint64_t depth) { stack_.push_back({.depth = static_cast<std::uint16_t>(depth & kMostDepth)}); }
    void push_global() { stack_.push_back({.global = 1}); }
    Value top() const { return stack_.empty() ? Value{} : stack_.back(); }
    std::size_t since_mark() const { return stack_.size() - std::min(stack_.size(), marks_.empty() ? 0 : marks_.back()); }
    // Removes the last `count` values. Returns the largest of their depths.
    std::uint16_t pop(std::size_t count) {
        std::uint16_t deepest = 0;
        for (; count && !stack_.empty(); --count) {
            deepest = std::max<std::uint16_t>(deepest, stack_.back().depth);
            stack_.pop_back();
        }
        return deepest;
    }
    // Removes the values since the last MARK, and the MARK. Returns the largest of their depths.
    std::uint16_t pop_mark() {
        const std::uint16_t deepest = pop(since_mark());
        if (!marks_.empty()) marks_.pop_back();
        return deepest;
    }
    // What POP does: removes the last value, or the last MARK if no value is behind it.
    void drop() {
        if (!marks_.empty() && !since_mark()) marks_.pop_back();
        else pop(1);
    }
    std::uint64_t memo_size() const { return memo_size_; }
    void put(std::uint64_t index) {
        if (index >= memo_.size()) memo_.resize(index + 1);
        memo_size_ += !memo_[index].in_memo;
        memo_[index] = top();
        memo_[index].in_memo = 1;
    }
    void get(std::uint64_t index) { push(index < memo_.size() ? memo_[index] : Value{}); }

private:
    std::deque<Value> stack_;
    std::vector<std::size_t> marks_;  // the stack's size at each
    std::vector<Value> memo_;
    std::uint64_t memo_size_ = 0;  // values in the memo
};

// A position in the stream. Where the stream is cut off, methods leave it at the end and return false.
class Cursor {
public:
    explicit Cursor(std::span<const unsigned char> stream) : stream_(stream) {}

    bool ended() const { return at_ == stream_.size(); }
    unsigned char next() { return stream_[at_++]; }
    bool skip(std::uint64_t nbytes) {
        const bool fits = nbytes <= stream_.size() - at_;
        at_ = fits ? at_ + nbytes : stream_.size();
        return fits;
    }
    // Reads a little-endian number of `width` bytes.
    bool number(std::size_t width, std::uint64_t& value) {
        const std::size_t start = at_;
        value = 0;
        if (!skip(width)) return false;
        for (std::size_t i = 0; i < width; ++i) value |= std::uint64_t{stream_[start + i]} << (8 * i);
        return true;
    }
    // Skips a number of `width` bytes, and as many bytes as it says.
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
    // Reads a line with a module and one with a name: "module\nname".
    bool name(std::string_view& name) {
        const std::size_t start = at_;
        if (!skip_lines(2)) return false;
        name = {reinterpret_cast<const char*>(stream_.data()) + start, at_ - start - 1};
        return true;
    }
    // Reads a line of digits, or anything else as kNotANumber.
    bool decimal(std::uint64_t& value) {
        const std::size_t start = at_;
        if (!skip_lines(1)) return false;
        value = 0;
        for (std::size_t i = start; i + 1 < at_; ++i) {
            if (stream_[i] < '0' || stream_[i] > '9' || value > kNotANumber / 10 - 1) {
                value = kNotANumber;
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

PickleWalk walk_pickle(std::span<const unsigned char> stream, std::uint16_t most_nested, std::uint64_t most_unregistered) {
    PickleWalk found;
    std::uint64_t unregistered = 0;
    bool memoized = false;  // the operation before made a value that picklers memoize
    most_nested = std::min<std::uint16_t>(most_nested, kMostDepth - 1);
    Values values;
    Cursor cursor(stream);
    const auto not_in_memo = [&] { found.unregistered = std::max(found.unregistered, ++unregistered); };
    const auto nested = [&](std::uint64_t levels) { found.nesting = std::max(found.nesting, levels); };
    const auto tuple = [&](std::uint16_t depth_inside) {
        values.push_tuple(depth_inside + 1u);
        nested(depth_inside + 1u);
        not_in_memo();
    };
    // A container, or the result of a call, from the last `arguments` values.
    const auto make = [&](std::size_t arguments = 0) {
        values.pop(arguments);
        values.push();
        not_in_memo();
    };
    const auto put = [&](std::uint64_t index) {
        if (memoized) unregistered -= unregistered != 0;
        else not_in_memo();  // an entry of None, say, or another one of the same value: no pickler makes it
        found.largest_memo_index = std::max(found.largest_memo_index, index);
        if (index >= stream.size()) return false;
        values.put(index);
        return true;
    };
    const auto global = [&](std::string_view name) {
        if (found.all_named) found.names.insert(name);
        found.all_named = found.all_named && found.names.size() <= kMostNames;
    };
    while (!cursor.ended() && found.nesting <= most_nested && found.unregistered <= most_unregistered) {
        const unsigned char operation = cursor.next();
        bool ok = true;  // neither cut off nor a memo index beyond the stream's size
        std::uint64_t number = 0;
        std::string_view name;
        switch (operation) {
            case '(':  // MARK
                values.mark();
                nested(values.open_marks());
                break;
            case 't':  // TUPLE
                if (values.since_mark()) {
                    tuple(values.pop_mark());
                } else {
                    values.pop_mark();
                    values.push();
                }
                break;
            // TUPLE1, TUPLE2, TUPLE3
            case 0x85: case 0x86: case 0x87: tuple(values.pop(operation - 0x84u)); break;
            // APPENDS, SETITEMS, ADDITEMS
            case 'e': case 'u': case 0x90: values.pop_mark(); break;
            // LIST, DICT, OBJ, FROZENSET: of what is behind the last MARK
            case 'l': case 'd': case 'o': case 0x91:
                values.pop_mark();
                make();
                break;
            case '1':  // POP_MARK
                values.pop_mark();
                not_in_memo();
                break;
            // EMPTY_LIST, EMPTY_DICT, EMPTY_SET
            case ']': case '}': case 0x8f: make(); break;
            // REDUCE, NEWOBJ
            case 'R': case 0x81: make(2); break;
            // NEWOBJ_EX
            case 0x92: make(3); break;
            case '0':  // POP
                values.drop();
                not_in_memo();
                break;
            case '2':  // DUP
                values.push(values.top());
                not_in_memo();
                break;
            // MEMOIZE, BINPUT, LONG_BINPUT, PUT
            case 0x94: ok = put(values.memo_size()); break;
            case 'q': ok = cursor.number(1, number) && put(number); break;
            case 'r': ok = cursor.number(4, number) && put(number); break;
            case 'p': ok = cursor.decimal(number) && put(number); break;
            // BINGET, LONG_BINGET, GET
            case 'h': if ((ok = cursor.number(1, number))) values.get(number); break;
            case 'j': if ((ok = cursor.number(4, number))) values.get(number); break;
            case 'g':
                ok = cursor.decimal(number);
                if (ok && number == kNotANumber) found.largest_memo_index = number;
                ok = ok && number != kNotANumber;
                values.get(number);
                break;
            // APPEND, BUILD
            case 'a': values.pop(1); break;
            case 'b':
                values.pop(1);
                found.changes_globals = found.changes_globals || values.top().global;
                break;
            // SETITEM
            case 's': values.pop(2); break;
            // BINPERSID, STACK_GLOBAL
            case 'Q': case 0x93:
                values.pop(operation == 'Q' ? 1 : 2);
                operation == 'Q' ? values.push() : values.push_global();
                if (operation != 'Q') found.all_named = false;
                break;
            // NONE, EMPTY_TUPLE, NEWTRUE, NEWFALSE, NEXT_BUFFER
            case 'N': case ')': case 0x88: case 0x89: case 0x97: values.push(); break;
            // READONLY_BUFFER
            case 0x98: break;
            // PROTO, FRAME
            case 0x80: ok = cursor.skip(1); break;
            case 0x95: ok = cursor.skip(8); break;
            // BININT1, BININT2, BININT, BINFLOAT
            case 'K': values.push(); ok = cursor.skip(1); break;
            case 'M': values.push(); ok = cursor.skip(2); break;
            case 'J': values.push(); ok = cursor.skip(4); break;
            case 'G': values.push(); ok = cursor.skip(8); break;
            // EXT1, EXT2, EXT4
            case 0x82: case 0x83: case 0x84:
                values.push_global();
                found.all_named = false;
                ok = cursor.skip(1u << (operation - 0x82));
                break;
            // SHORT_BINSTRING, SHORT_BINBYTES, SHORT_BINUNICODE, LONG1
            case 'U': case 'C': case 0x8c: case 0x8a: values.push(); ok = cursor.skip_counted(1); break;
            // BINSTRING, BINBYTES, BINUNICODE, LONG4
            case 'T': case 'B': case 'X': case 0x8b: values.push(); ok = cursor.skip_counted(4); break;
            // BINUNICODE8, BINBYTES8, BYTEARRAY8
            case 0x8d: case 0x8e: case 0x96: values.push(); ok = cursor.skip_counted(8); break;
            // INT, LONG, FLOAT, STRING, UNICODE, PERSID
            case 'I': case 'L': case 'F': case 'S': case 'V': case 'P': values.push(); ok = cursor.skip_lines(1); break;
            case 'c':  // GLOBAL
                values.push_global();
                if ((ok = cursor.name(name))) global(name);
                break;
            case 'i':  // INST: of what is behind the last MARK
                values.pop_mark();
                make();
                if ((ok = cursor.name(name))) global(name);
                break;
            default:  // STOP, or an unknown operation
                found.complete = true;
                found.all_named = found.all_named && operation == '.';
                return found;
        }
        if (!ok) return found;
        if (operation != 0x95) memoized = kMemoized[operation];  // a FRAME may stand between a long text and its MEMOIZE
    }
    return found;
}

}  // namespace deepnvme

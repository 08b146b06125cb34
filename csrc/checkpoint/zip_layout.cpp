#include "checkpoint/zip_layout.h"

#include <algorithm>
#include <initializer_list>

namespace deepnvme {

namespace {

constexpr std::uint64_t kLarge = 0xFFFFFFFF;  // from here on a size or an offset has its 8 bytes in an extra field
constexpr std::uint16_t kDescriptorFollows = 0x0008;
constexpr std::uint16_t kUtf8 = 0x0800;
constexpr std::uint16_t kZip64 = 1;
constexpr std::uint64_t kLocalHeader = 30, kField = 4;
constexpr std::uint64_t kZip64EndSize = 44;
constexpr std::uint64_t kCrcInDescriptor = 4, kCrcInEntry = 16;  // bytes from their beginnings
constexpr std::uint16_t kMadeBy = 0x031E, kNeeded = 45;

// Appends numbers, the least significant byte first.
class Writer {
public:
    explicit Writer(std::string& to) : to_(to) {}

    template <std::size_t width>
    void numbers(std::initializer_list<std::uint64_t> values) {
        for (std::uint64_t value : values) {
            char bytes[width];
            for (char& byte : bytes) {
                byte = static_cast<char>(value & 0xFF);
                value >>= 8;
            }
            to_.append(bytes, width);
        }
    }
    void text(std::string_view text) { to_.append(text); }

private:
    std::string& to_;
};

std::uint64_t shortened(std::uint64_t number) { return std::min(number, kLarge); }

}  // namespace

ZipLayout lay_out(std::span<const ZipRecord> records, std::uint64_t alignment) {
    ZipLayout layout;
    layout.header_sizes.reserve(records.size());
    layout.padding_sizes.reserve(records.size());
    layout.places.reserve(records.size());
    std::string directory;
    Writer between(layout.text), entries(directory);
    std::uint64_t position = 0;
    std::size_t text_before = 0;
    for (const auto& [name, size, crc32] : records) {
        const std::uint64_t header = position;
        const std::uint64_t flags = kUtf8 | (size > 0 ? kDescriptorFollows : 0);
        const bool large = size >= kLarge, far = header >= kLarge;
        std::string numbers;
        if (large || far) {
            Writer extra(numbers);
            extra.numbers<2>({kZip64, 8u * (2 * large + far)});
            if (large) extra.numbers<8>({size, size});
            if (far) extra.numbers<8>({header});
        }
        const std::uint64_t begin = header + kLocalHeader + name.size() + numbers.size() + kField;
        const std::uint64_t padding = (alignment - begin % alignment) % alignment;

        between.text("PK\3\4");
        between.numbers<2>({0, flags, 0, 0, 0});
        between.numbers<4>({0, 0, 0});  // the checksum and the sizes follow the data
        between.numbers<2>({name.size(), numbers.size() + kField + padding});
        between.text(name);
        between.text(numbers);
        between.text("FB");
        between.numbers<2>({padding});
        layout.header_sizes.push_back(layout.text.size() - text_before);
        layout.padding_sizes.push_back(padding);
        text_before = layout.text.size();
        const std::uint64_t data = begin + padding;
        layout.places.push_back({data, data + size + kCrcInDescriptor, directory.size() + kCrcInEntry});
        if (size > 0) {  // the data descriptor
            between.text("PK\7\10");
            between.numbers<4>({crc32});
            if (large || far) between.numbers<8>({size, size});
            else between.numbers<4>({size, size});
        }
        position = begin + padding + size + (layout.text.size() - text_before);

        entries.text("PK\1\2");
        entries.numbers<2>({0, 0, flags, 0, 0, 0});
        entries.numbers<4>({crc32, shortened(size), shortened(size)});
        entries.numbers<2>({name.size(), numbers.size(), 0, 0, 0});
        entries.numbers<4>({0, shortened(header)});
        entries.text(name);
        entries.text(numbers);
    }
    for (ZipPlaces& places : layout.places) places.directory_crc += position;
    const std::uint64_t count = records.size();
    const std::uint64_t few = std::min<std::uint64_t>(count, 0xFFFF);
    between.text(directory);
    between.text("PK\6\6");
    between.numbers<8>({kZip64EndSize});
    between.numbers<2>({kMadeBy, kNeeded});
    between.numbers<4>({0, 0});
    between.numbers<8>({count, count, directory.size(), position});
    between.text("PK\6\7");
    between.numbers<4>({0});
    between.numbers<8>({position + directory.size()});
    between.numbers<4>({1});
    between.text("PK\5\6");
    between.numbers<2>({0, 0, few, few});
    between.numbers<4>({directory.size(), shortened(position)});
    between.numbers<2>({0});
    return layout;
}

}  // namespace deepnvme

#include "checkpoint/checksums.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/crc32.h"

namespace deepnvme {

namespace {

constexpr std::uint64_t kCrcBytes = 4;

}  // namespace

Checksums::Checksums(std::vector<ChecksummedRecord> records) : records_(std::move(records)), crcs_(records_.size()) {
    std::uint64_t at = 0, listed = records_.empty() ? 0 : records_.back().descriptor_crc + kCrcBytes;
    for (const ChecksummedRecord& record : records_) {
        const bool in_order = record.size > 0 && record.begin >= at && record.descriptor_crc >= record.begin + record.size &&
                              record.directory_crc >= listed;
        if (!in_order) throw std::invalid_argument("records must be in the order of the file, and have data");
        at = record.descriptor_crc + kCrcBytes;
        listed = record.directory_crc + kCrcBytes;
    }
}

void Checksums::put(std::uint32_t crc, std::uint64_t field, std::uint64_t begin, std::byte* memory, std::size_t size) noexcept {
    for (std::uint64_t i = 0; i < kCrcBytes; ++i)
        if (field + i >= begin && field + i < begin + size) memory[field + i - begin] = static_cast<std::byte>(crc >> (8 * i));
}

void Checksums::advance(std::uint64_t begin, std::byte* memory, std::size_t size) {
    if (begin != position_)
        throw std::invalid_argument("the next bytes begin at " + std::to_string(position_) + ", got some at " + std::to_string(begin));
    const std::uint64_t end = position_ = begin + size;
    for (; summed_ < records_.size() && records_[summed_].begin < end; ++summed_) {
        const auto& [first, length, descriptor, directory] = records_[summed_];
        const std::uint64_t from = std::max(first, begin), to = std::min(first + length, end);
        if (from < to) crcs_[summed_] = crc32_by_threads(crcs_[summed_], memory + (from - begin), to - from);
        if (first + length > end) break;
    }
    for (; described_ < summed_ && records_[described_].descriptor_crc < end; ++described_) {
        put(crcs_[described_], records_[described_].descriptor_crc, begin, memory, size);
        if (records_[described_].descriptor_crc + kCrcBytes > end) break;
    }
    for (; listed_ < summed_ && records_[listed_].directory_crc < end; ++listed_) {
        put(crcs_[listed_], records_[listed_].directory_crc, begin, memory, size);
        if (records_[listed_].directory_crc + kCrcBytes > end) break;
    }
}

}  // namespace deepnvme

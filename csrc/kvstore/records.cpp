#include "kvstore/records.h"

#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>

#include "core/crc32.h"

namespace deepnvme::kvstore {

namespace {

std::uint32_t crc_of(const Record& record) noexcept {
    const auto* bytes = reinterpret_cast<const std::byte*>(&record);
    return crc32(0, bytes + sizeof record.crc, sizeof record - sizeof record.crc);
}

// Call pread or pwrite until everything is moved, or nothing more is. Returns the bytes moved.
template <typename Call, typename Bytes>
std::size_t transfer(Call call, const char* verb, File& file, std::uint64_t offset, Bytes bytes) {
    std::size_t done = 0;
    while (done < bytes.size()) {
        const ssize_t moved = call(file.buffered(), bytes.data() + done, bytes.size() - done, static_cast<off_t>(offset + done));
        if (moved == 0) break;
        if (moved > 0) done += static_cast<std::size_t>(moved);
        else if (errno != EINTR)
            throw IoError(errno, std::string(verb) + " of " + std::to_string(bytes.size()) + " bytes at offset " + std::to_string(offset), file.path());
    }
    return done;
}

}  // namespace

Record Record::of(std::string_view key, std::uint32_t length, std::uint32_t block_crc, std::uint64_t sequence) noexcept {
    Record record{.block_crc = block_crc, .length = length, .key_length = static_cast<std::uint32_t>(key.size()), .sequence = sequence};
    std::memcpy(record.key, key.data(), key.size());
    record.crc = crc_of(record);
    return record;
}

bool Record::valid(std::uint64_t most_bytes) const noexcept {
    return length > 0 && length <= most_bytes && key_length <= kMostKeyBytes && crc == crc_of(*this);
}

void read_records(File& file, std::uint64_t offset, std::span<Record> records) {
    const auto bytes = std::as_writable_bytes(records);
    const std::size_t done = transfer(::pread, "read", file, offset, bytes);
    std::memset(bytes.data() + done, 0, bytes.size() - done);
}

void write_records(File& file, std::uint64_t offset, std::span<const Record> records) {
    const auto bytes = std::as_bytes(records);
    if (transfer(::pwrite, "write", file, offset, bytes) < bytes.size()) throw IoError(EIO, "write of a part of the records", file.path());
}

}  // namespace deepnvme::kvstore

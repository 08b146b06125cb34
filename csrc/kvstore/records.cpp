#include "kvstore/records.h"

#include <fcntl.h>
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

}  // namespace

Record Record::of(std::string_view key, std::uint32_t length, std::uint32_t block_crc, std::uint64_t sequence) noexcept {
    Record record;
    record.block_crc = block_crc;
    record.length = length;
    record.key_length = static_cast<std::uint32_t>(key.size());
    record.sequence = sequence;
    std::memcpy(record.key, key.data(), key.size());
    record.crc = crc_of(record);
    return record;
}

bool Record::valid(std::uint64_t most_bytes) const noexcept {
    return length > 0 && length <= most_bytes && key_length <= kMostKeyBytes && crc == crc_of(*this);
}

RecordArea::RecordArea(const std::string& path, std::uint64_t begin, bool writable)
    : path_(path), begin_(begin), file_(::open(path.c_str(), (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC)) {
    if (!file_) throw IoError(errno, "open", path);
}

void RecordArea::read(std::uint32_t first, std::span<Record> records) const {
    const auto bytes = std::as_writable_bytes(records);
    const std::size_t done = transfer("read", first, bytes.size(), [&](std::size_t at, off_t offset) {
        return ::pread(file_.get(), bytes.data() + at, bytes.size() - at, offset);
    });
    std::memset(bytes.data() + done, 0, bytes.size() - done);
}

void RecordArea::write(std::uint32_t first, std::span<const Record> records) const {
    const auto bytes = std::as_bytes(records);
    transfer("write", first, bytes.size(), [&](std::size_t at, off_t offset) {
        return ::pwrite(file_.get(), bytes.data() + at, bytes.size() - at, offset);
    });
}

// Call `move` until everything is moved, or it moves nothing any more. Returns the bytes moved.
template <typename Move>
std::size_t RecordArea::transfer(const char* verb, std::uint32_t first, std::size_t bytes, Move move) const {
    const std::uint64_t begin = begin_ + first * sizeof(Record);
    std::size_t done = 0;
    while (done < bytes) {
        const ssize_t moved = move(done, static_cast<off_t>(begin + done));
        if (moved == 0) break;
        if (moved > 0) done += static_cast<std::size_t>(moved);
        else if (errno != EINTR)
            throw IoError(errno, std::string(verb) + " of " + std::to_string(bytes) + " bytes at offset " + std::to_string(begin), path_);
    }
    return done;
}

void RecordArea::flush() const {
    if (::fdatasync(file_.get()) != 0) throw IoError(errno, "fdatasync", path_);
}

}  // namespace deepnvme::kvstore

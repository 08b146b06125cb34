#include "kvstore/records.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
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

RecordArea::RecordArea(const std::string& path, std::uint64_t begin, std::uint32_t count, bool writable)
    : path_(path), begin_(begin), count_(count), file_(::open(path.c_str(), (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC)) {
    if (!file_) throw IoError(errno, "open", path);
}

void RecordArea::read(std::uint32_t first, std::span<Record> records) const {
    auto* to = reinterpret_cast<char*>(records.data());
    const std::uint64_t at = begin_ + first * sizeof(Record);
    std::size_t done = 0;
    while (done < records.size_bytes()) {
        const ssize_t moved = ::pread(file_.get(), to + done, records.size_bytes() - done, static_cast<off_t>(at + done));
        if (moved < 0 && errno == EINTR) continue;
        if (moved < 0)
            throw IoError(errno, "read of " + std::to_string(records.size_bytes()) + " bytes at offset " + std::to_string(at), path_);
        if (moved == 0) break;
        done += static_cast<std::size_t>(moved);
    }
    std::memset(to + done, 0, records.size_bytes() - done);
}

std::vector<bool> RecordArea::write(std::span<const std::uint32_t> slots, std::span<const Record> records, std::string& error) const {
    std::vector<bool> written(slots.size(), true);
    for (std::size_t begin = 0, end; begin < slots.size(); begin = end) {
        for (end = begin + 1; end < slots.size() && slots[end] == slots[end - 1] + 1;) ++end;
        const auto* from = reinterpret_cast<const char*>(&records[begin]);
        const std::uint64_t at = begin_ + slots[begin] * sizeof(Record), bytes = (end - begin) * sizeof(Record);
        std::uint64_t done = 0;
        while (done < bytes) {
            const ssize_t moved = ::pwrite(file_.get(), from + done, bytes - done, static_cast<off_t>(at + done));
            if (moved < 0 && errno == EINTR) continue;
            if (moved <= 0) {
                const std::string what = "write of " + std::to_string(bytes) + " bytes at offset " + std::to_string(at);
                error = IoError(moved < 0 ? errno : EIO, what, path_).what();
                std::fill(written.begin() + static_cast<std::ptrdiff_t>(begin + done / sizeof(Record)),
                          written.begin() + static_cast<std::ptrdiff_t>(end), false);
                break;
            }
            done += static_cast<std::uint64_t>(moved);
        }
    }
    return written;
}

void RecordArea::flush() const {
    if (::fdatasync(file_.get()) != 0) throw IoError(errno, "fdatasync", path_);
}

}  // namespace deepnvme::kvstore

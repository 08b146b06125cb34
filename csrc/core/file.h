// A file as the engine needs it: up to two descriptors of one inode (direct and buffered), its limits, its size.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "core/byte_range.h"
#include "core/error.h"
#include "core/fd.h"

namespace deepnvme {

// What the file system demands of direct transfers, in bytes.
struct DirectLimits {
    std::uint32_t memory_alignment;
    std::uint32_t offset_alignment;
    std::uint32_t cache_granule = 4096;  // what the page cache reads and writes back as one: a page or a file system block
};

// What belongs to one transfer alone, so that it may be transferred as a whole.
enum class Ownership : std::uint8_t {
    bytes,    // those that it names
    sectors,  // those that it names, where they are whole sectors: no transfer of the file, by whomever, has part of a sector
    pages,    // all of its last page, if it begins with one
};

enum class Access { read, write, read_write };
// provisional: as if_missing, but a file that this open created is removed with the object, unless keep() is called before, or
// anything is in it, or anybody else has it open. One that another open created is removed so only if its first write found no room.
enum class Creation { must_exist, if_missing, provisional, truncate, exclusive };

// Thread-safe. Descriptors are opened when first needed and closed with the object.
class File {
public:
    // Throws IoError naming the call, the path and errno; EISDIR for a directory, EINVAL for a pipe, socket or character device.
    // `expect_direct`: which of the two descriptors is opened now; the other follows if it is ever needed.
    // `ownership`: see the accessor.
    // `first_write`: if the file is missing and the file system has no room for it, throws IoError(ENOSPC) and creates nothing.
    File(std::string path, Access access, Creation creation, bool expect_direct = true, Ownership ownership = Ownership::bytes,
         ByteRange first_write = {});

    // A second owner of the caller's descriptor, which may be closed meanwhile. Throws IoError like the other constructor.
    File(int fd, Access access);

    ~File();

    // Something that was to create the file has succeeded: a provisional one stays.
    void keep() noexcept { keep_.store(true, std::memory_order_relaxed); }

    // Of a provisional file: whether its path was removed while it was being opened, as an empty one's can be.
    bool removed_meanwhile() const noexcept { return removed_meanwhile_; }

    // Give up this owner. If it is the last, the file is closed, and an error of close() is returned: NFS and FUSE report failed
    // writes there. If several owners give up at once, exactly one gets the error.
    static std::optional<IoError> release(std::shared_ptr<File>& file);

    const std::string& path() const noexcept { return path_; }
    bool readable() const noexcept { return access_ != Access::write; }
    bool writable() const noexcept { return access_ != Access::read; }
    // As Engine.open(whole_pages=True, or whole_sectors=True): with pages, a write that begins on a page may fill the rest of its last
    // page with zeros.
    Ownership ownership() const noexcept { return ownership_; }

    // Empty where direct I/O is not to be had; `refusal` then says why.
    std::optional<DirectLimits> limits() const;
    std::string refusal() const;

    // Descriptors for transfers; each throws IoError when it cannot be opened. direct() is -1 where there is no direct I/O.
    int direct();
    int buffered();
    // Whichever is open.
    int any_descriptor() const;

    // Whether [0, end) lies within the file, asking the system only when what is known does not settle it.
    bool covers(std::uint64_t end);
    std::uint64_t size();

    // Reserve the part of [offset, offset + length) that lies past the end, so that writes into it need not extend the file one
    // by one. Throws IoError(ENOSPC) when the file system has not the room: as a rule before anything is reserved, and the file as it
    // was; if others take the room meanwhile, with what was reserved given back.
    void preallocate(std::uint64_t offset, std::uint64_t length);

    // Called when the system turned down a direct transfer; from then on this file is buffered. True the first time.
    bool refuse_direct(const std::string& reason);

    // What is free in the file system, as text for the error of a write of so many bytes.
    std::string free_space_for(std::uint64_t length);

    // What a DeviceIo made of the direct descriptor, `make` being asked the first time and again after it threw. It is closed before
    // the descriptors are. Null where there is no direct I/O.
    std::shared_ptr<void> attachment(const std::function<std::shared_ptr<void>(int fd)>& make);

    // The device number of the file system, or of the block device that this is.
    std::uint64_t device() const noexcept { return device_; }

private:
    struct Facts;
    void learn(const Facts& facts);
    int base_descriptor() const;  // with mutex_ held, or before anybody else has the object
    void check_space_to_create(ByteRange first_write) const;
    Fd reopen(bool direct, int from);

    std::string path_;
    Access access_;
    Ownership ownership_ = Ownership::bytes;
    std::uint64_t device_ = 0;
    std::uint64_t file_system_ = 0;  // of a block device, the one that its node lies on
    std::uint64_t inode_ = 0;
    bool block_device_ = false;
    bool removed_meanwhile_ = false;
    bool provisional_ = false;
    std::optional<std::uint64_t> created_by_;  // of a file that this open created, the process_generation()
    std::atomic<bool> found_no_space_{false};   // a write, before it began
    std::atomic<bool> keep_{false};
    std::atomic<std::uint64_t> empty_size_{0};  // which a reservation that failed has left it
    std::atomic<std::uint64_t> known_size_{0};

    std::optional<DirectLimits> limits_;       // as learnt when the file was opened; void once refused_
    std::atomic<bool> refused_{false};
    std::atomic<int> direct_descriptor_{-1};  // of direct_, once it is open: asked for with every block, so without the lock

    mutable std::mutex mutex_;  // guards everything below
    std::string refusal_;
    Fd direct_;
    Fd buffered_;
    std::shared_ptr<void> attachment_;  // after the descriptors, to be closed before them
};

}  // namespace deepnvme

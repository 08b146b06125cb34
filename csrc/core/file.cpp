#include "core/file.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <utility>

#include "core/free_space.h"
#include "core/process.h"

#ifndef RAMFS_MAGIC
#define RAMFS_MAGIC 0x858458f6
#endif

namespace deepnvme {

namespace {

// struct statx of older C libraries ends before these (Linux 6.1); the kernel's layout is fixed, so they are read by position.
constexpr unsigned kStatxDioAlign = 0x2000;
constexpr std::size_t kDioMemoryAlign = 152;
constexpr std::size_t kDioOffsetAlign = 156;

// Any file system that takes direct I/O takes it page-aligned; used where statx cannot say.
constexpr std::uint32_t kPage = 4096;

// No file system has larger blocks. What statx reports beyond that is a network file system's favourite transfer.
constexpr std::uint32_t kLargestBlock = 64 << 10;

constexpr auto kFuse = 0x65735546;  // FUSE_SUPER_MAGIC of newer headers

std::uint32_t word_at(const struct statx& facts, std::size_t position) {
    std::uint32_t word;
    std::memcpy(&word, reinterpret_cast<const char*>(&facts) + position, sizeof word);
    return word;
}

int open_retrying(const char* path, int flags) {
    int fd;
    do fd = ::open(path, flags | O_CLOEXEC, 0666);
    while (fd < 0 && errno == EINTR);
    return fd;
}

int flags_of(Access access) {
    switch (access) {
        case Access::read: return O_RDONLY;
        case Access::write: return O_WRONLY;
        default: return O_RDWR;
    }
}

struct Inode {
    dev_t device;
    ino_t number;
    bool is(const struct stat& facts) const { return facts.st_dev == device && facts.st_ino == number; }
};

// FUSE grants leases without asking the machine that has the file, where others may have it open.
bool leases_are_local(int fd) {
    struct statfs system;
    return ::fstatfs(fd, &system) == 0 && system.f_type != kFuse;
}

// Remove the path if it still is this inode, with no other name, no byte that anybody wrote, and not open anywhere: a write lease
// is granted only then, and while it is held others wait with opening the file. `size`: what it may have besides 0 bytes, all of
// them a hole. Where there are no leases (NFS, FUSE), nothing is removed. Every descriptor of the caller's must be closed.
void remove_if_unused_and_empty(const char* path, Inode inode, std::uint64_t size) noexcept {
    // Never waits: somebody else may have a lease, or the path be a pipe by now.
    Fd fd(open_retrying(path, O_WRONLY | O_NOFOLLOW | O_NONBLOCK));
    if (!fd || !leases_are_local(fd.get())) return;
    const auto empty = [&] {
        struct stat now;
        if (::fstat(fd.get(), &now) != 0 || !inode.is(now) || !S_ISREG(now.st_mode) || now.st_nlink != 1) return false;
        if (now.st_size == 0) return true;
        return static_cast<std::uint64_t>(now.st_size) == size && ::lseek(fd.get(), 0, SEEK_DATA) < 0 && errno == ENXIO;
    };
    if (!empty()) return;
    // Who opens the file meanwhile has a signal sent to this process. SIGURG is ignored, as a rule; SIGIO would kill.
    if (::fcntl(fd.get(), F_SETSIG, SIGURG) != 0 || ::fcntl(fd.get(), F_SETLEASE, F_WRLCK) != 0) return;
    struct stat named;
    // Looked at again, since others may have come and gone before the lease; asked last, whether somebody waits for it by now.
    const auto awaited = [&] { return ::fcntl(fd.get(), F_GETLEASE) != F_WRLCK; };
    if (empty() && ::lstat(path, &named) == 0 && inode.is(named) && !awaited()) ::unlink(path);
    // Not left to the descriptor's end: a child that is forked just now has a copy of it.
    ::fcntl(fd.get(), F_SETLEASE, F_UNLCK);
}

// Free what is allocated in [begin, end) and holds no data. What others have written there meanwhile stays; only what they write
// between a look and the call after it is lost.
void give_back_reserved(int file, off_t begin, off_t end) {
    // The caller's descriptor may be a user's, whose position lseek would move.
    const Fd fd(open_retrying(("/proc/self/fd/" + std::to_string(file)).c_str(), O_WRONLY));
    while (fd && begin < end) {
        off_t data = ::lseek(fd.get(), begin, SEEK_DATA);
        if (data < 0 && errno != ENXIO) return;
        if (data < 0 || data > end) data = end;
        if (data > begin) ::fallocate(fd.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, begin, data - begin);
        begin = data < end ? ::lseek(fd.get(), data, SEEK_HOLE) : end;
        if (begin < 0) return;
    }
}

const char* verb_of(Access access) { return access == Access::read ? "open for reading" : "open for writing"; }

int flags_of(Creation creation) {
    switch (creation) {
        case Creation::if_missing:
        case Creation::provisional: return O_CREAT;
        case Creation::truncate: return O_CREAT | O_TRUNC;
        case Creation::exclusive: return O_CREAT | O_EXCL;
        default: return 0;
    }
}

}  // namespace

struct File::Facts {
    struct statx raw;

    // By descriptor when `path` is empty. Returns 0 or errno.
    int ask(int fd, const char* path) {
        const int flags = *path ? 0 : AT_EMPTY_PATH;
        return ::statx(*path ? AT_FDCWD : fd, path, flags, STATX_BASIC_STATS | kStatxDioAlign, &raw) == 0 ? 0 : errno;
    }
    mode_t type() const { return raw.stx_mode & S_IFMT; }
};

File::File(std::string path, Access access, Creation creation, bool expect_direct, Ownership ownership, ByteRange first_write)
    : path_(std::move(path)), access_(access), ownership_(ownership) {
    if (path_.empty()) throw IoError(ENOENT, verb_of(access), path_);
    Facts facts;
    // Asked before opening: the answer decides how to open, and opening a pipe would wait for its other end.
    const int error = facts.ask(-1, path_.c_str());
    const bool exists = error == 0;
    if (!exists && (error != ENOENT || creation == Creation::must_exist)) throw IoError(error, verb_of(access), path_);
    if (exists) learn(facts);
    else if (first_write.length > 0) check_space_to_create(first_write);

    int flags = flags_of(access) | flags_of(creation);
    bool created = !exists && creation != Creation::must_exist;
    const auto open = [&](int more) {
        Fd fd(open_retrying(path_.c_str(), flags | more | (created ? O_EXCL : 0)));
        if (fd || errno != EEXIST || !created || creation == Creation::exclusive) return fd;
        created = false;  // somebody else was faster, or it is a link to a file that is missing
        return Fd(open_retrying(path_.c_str(), flags | more));
    };
    if (expect_direct && (!exists || limits_)) {
        direct_ = open(O_DIRECT);
        if (!direct_) {
            if (errno != EINVAL) throw IoError(errno, verb_of(access), path_);
            refuse_direct("open with O_DIRECT was refused: " + describe_errno(EINVAL));
            flags &= ~O_EXCL;  // the refused open has created the file
            created = created && creation != Creation::exclusive;
        }
    }
    if (!direct_) {
        // One that the refused open has created is taken for somebody else's: no telling by now.
        buffered_ = open(0);
        if (!buffered_) throw IoError(errno, verb_of(access), path_);
    }
    if (created) created_by_ = process_generation();
    provisional_ = creation == Creation::provisional;
    // Of one that exists again: it may be somebody else's provisional file, which they remove just now.
    if (!exists || creation == Creation::provisional) {
        if (const int why = facts.ask(any_descriptor(), "")) throw IoError(why, "statx", path_);
        learn(facts);
        removed_meanwhile_ = facts.raw.stx_nlink == 0;
    }
    if (creation == Creation::truncate) known_size_ = 0;
}

File::File(int fd, Access access) : access_(access) {
    const int flags = ::fcntl(fd, F_GETFL);
    if (flags < 0) throw IoError(errno, "use of file descriptor " + std::to_string(fd), "");
    const int mode = flags & O_ACCMODE;
    if ((writable() && mode == O_RDONLY) || (readable() && mode == O_WRONLY))
        throw IoError(EBADF, std::string(writable() ? "write to" : "read from") + " file descriptor " + std::to_string(fd), "");

    Fd copy(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
    if (!copy) throw IoError(errno, "dup of file descriptor " + std::to_string(fd), "");
    const std::string link = "/proc/self/fd/" + std::to_string(fd);
    char target[4096];
    const ssize_t length = ::readlink(link.c_str(), target, sizeof target);
    path_ = length > 0 ? std::string(target, static_cast<std::size_t>(length)) : "file descriptor " + std::to_string(fd);

    Facts facts;
    if (const int error = facts.ask(copy.get(), "")) throw IoError(error, "statx", path_);
    learn(facts);
    // O_APPEND would move every write to the end of the file, wherever it was meant to go; a reopened descriptor hasn't it.
    const bool direct = flags & O_APPEND ? limits_.has_value() : (flags & O_DIRECT) != 0;
    if (flags & O_APPEND) {
        copy = reopen(direct, copy.get());
        if (!copy) throw IoError(errno, verb_of(access), path_);
    }
    (direct ? direct_ : buffered_) = std::move(copy);
}

namespace {

// Where the destructor leaves an error for the release() that runs it. Only the count in the shared_ptr knows which of several
// owners is the last, and it tells by running the destructor.
thread_local std::optional<IoError>* closing_error = nullptr;

}  // namespace

File::~File() {
    attachment_.reset();
    const int direct = direct_.close();
    const int buffered = buffered_.close();
    const int error = direct ? direct : buffered;
    // The file of a forked child is its parent's, who knows what has become of it.
    if (created_by_ == process_generation() && !keep_ && (provisional_ || found_no_space_))
        remove_if_unused_and_empty(path_.c_str(), {file_system_, inode_}, empty_size_);
    if (!error || !closing_error) return;
    try {
        *closing_error = IoError(error, "close", path_);
    } catch (const std::bad_alloc&) {
        *closing_error = IoError::out_of_memory();
    }
}

std::optional<IoError> File::release(std::shared_ptr<File>& file) {
    std::optional<IoError> error;
    closing_error = &error;
    file.reset();
    closing_error = nullptr;
    return error;
}

void File::learn(const Facts& facts) {
    if (facts.type() == S_IFDIR) throw IoError(EISDIR, verb_of(access_), path_);
    if (facts.type() != S_IFREG && facts.type() != S_IFBLK)
        throw IoError(EINVAL, std::string(verb_of(access_)) + " (neither a regular file nor a block device)", path_);
    block_device_ = facts.type() == S_IFBLK;
    file_system_ = ::makedev(facts.raw.stx_dev_major, facts.raw.stx_dev_minor);
    device_ = block_device_ ? ::makedev(facts.raw.stx_rdev_major, facts.raw.stx_rdev_minor) : file_system_;
    inode_ = facts.raw.stx_ino;
    known_size_ = facts.raw.stx_size;
    if (refused_) return;

    const auto granule = std::min(std::max(std::bit_ceil(facts.raw.stx_blksize), kPage), kLargestBlock);
    if (facts.raw.stx_mask & kStatxDioAlign) {
        const DirectLimits told{word_at(facts.raw, kDioMemoryAlign), word_at(facts.raw, kDioOffsetAlign), granule};
        if (told.memory_alignment && told.offset_alignment) limits_ = told;
        else refuse_direct("statx reports no direct I/O for this file");
        return;
    }
    struct statfs system;
    // Not for devices, whose nodes may themselves lie on a tmpfs.
    const int asked = block_device_ ? -1 : base_descriptor() >= 0 ? ::fstatfs(base_descriptor(), &system) : ::statfs(path_.c_str(), &system);
    // Newer kernels accept O_DIRECT on tmpfs and copy through the page cache all the same.
    if (asked == 0 && (system.f_type == TMPFS_MAGIC || system.f_type == RAMFS_MAGIC)) refuse_direct("tmpfs has no direct I/O");
    else limits_ = DirectLimits{kPage, kPage, granule};
}

int File::base_descriptor() const { return direct_ ? direct_.get() : buffered_.get(); }

int File::any_descriptor() const {
    std::lock_guard lock(mutex_);
    return base_descriptor();
}

Fd File::reopen(bool direct, int from) {
    const int flags = flags_of(access_) | (direct ? O_DIRECT : 0);
    // Through /proc, so that a file renamed or replaced meanwhile is still the same file.
    const std::string link = "/proc/self/fd/" + std::to_string(from);
    Fd fd(open_retrying(link.c_str(), flags));
    if (fd || errno != ENOENT) return fd;
    fd = Fd(open_retrying(path_.c_str(), flags));  // no /proc here
    struct stat now;
    if (fd && (::fstat(fd.get(), &now) != 0 || now.st_ino != inode_ || now.st_dev != file_system_)) {
        errno = ESTALE;
        return Fd();
    }
    return fd;
}

std::optional<DirectLimits> File::limits() const {
    return refused_.load(std::memory_order_acquire) ? std::nullopt : limits_;
}

std::string File::refusal() const {
    std::lock_guard lock(mutex_);
    return refusal_;
}

bool File::refuse_direct(const std::string& reason) {
    std::lock_guard lock(mutex_);
    if (refused_) return false;
    refusal_ = reason;
    refused_.store(true, std::memory_order_release);
    return true;
}

int File::direct() {
    if (refused_.load(std::memory_order_acquire)) return -1;
    const int open = direct_descriptor_.load(std::memory_order_acquire);
    if (open >= 0) return open;
    std::lock_guard lock(mutex_);
    if (refused_) return -1;
    if (!direct_) {
        direct_ = reopen(true, base_descriptor());
        if (!direct_) {
            if (errno == EMFILE || errno == ENFILE) throw IoError(errno, verb_of(access_), path_);
            // Also where a descriptor that was handed to us may do what its path no longer may: it goes on as it is.
            refusal_ = "open with O_DIRECT was refused: " + describe_errno(errno);
            refused_.store(true, std::memory_order_release);
            return -1;
        }
    }
    direct_descriptor_.store(direct_.get(), std::memory_order_release);
    return direct_.get();
}

std::shared_ptr<void> File::attachment(const std::function<std::shared_ptr<void>(int fd)>& make) {
    const int fd = direct();
    std::lock_guard lock(mutex_);
    if (!attachment_ && fd >= 0) attachment_ = make(fd);
    return attachment_;
}

int File::buffered() {
    std::lock_guard lock(mutex_);
    if (!buffered_) {
        buffered_ = reopen(false, base_descriptor());
        if (!buffered_) throw IoError(errno, verb_of(access_), path_);
    }
    return buffered_.get();
}

std::uint64_t File::size() {
    const int fd = any_descriptor();
    if (block_device_) {
        std::uint64_t bytes = 0;
        if (::ioctl(fd, BLKGETSIZE64, &bytes) != 0) throw IoError(errno, "BLKGETSIZE64", path_);
        return bytes;
    }
    struct stat now;
    if (::fstat(fd, &now) != 0) throw IoError(errno, "fstat", path_);
    return static_cast<std::uint64_t>(now.st_size);
}

bool File::covers(std::uint64_t end) {
    if (end <= known_size_.load(std::memory_order_relaxed)) return true;
    const std::uint64_t now = size();
    known_size_.store(now, std::memory_order_relaxed);
    return end <= now;
}

std::string File::free_space_for(std::uint64_t length) { return free_space_text(any_descriptor(), length); }

// If the directory cannot be asked, opening the file says why.
void File::check_space_to_create(ByteRange first_write) const {
    struct stat link;
    if (::lstat(path_.c_str(), &link) == 0) return;  // a link to a file that is missing, perhaps on another file system
    const auto slash = path_.rfind('/');
    const std::string directory = slash == std::string::npos ? "." : path_.substr(0, slash + 1);
    const Fd fd(open_retrying(directory.c_str(), O_RDONLY | O_DIRECTORY));
    if (fd) check_free_space(fd.get(), first_write.length, first_write, path_);
}

void File::preallocate(std::uint64_t offset, std::uint64_t length) {
    const std::uint64_t end = offset + length;
    if (length == 0 || covers(end)) return;
    if (block_device_) throw IoError(ENOSPC, "write past the end of the device, at byte " + std::to_string(end), path_);
    const std::uint64_t size = known_size_.load(std::memory_order_relaxed);
    const std::uint64_t begin = std::max(offset, size);
    const std::uint64_t needed = end - begin;
    const int fd = any_descriptor();
    try {
        check_free_space(fd, needed, {offset, length}, path_);
    } catch (const IoError&) {
        found_no_space_ = true;
        throw;
    }
    int error;
    do error = ::fallocate(fd, 0, static_cast<off_t>(begin), static_cast<off_t>(needed)) == 0 ? 0 : errno;
    while (error == EINTR);
    if (error == ENOSPC || error == EDQUOT) {
        found_no_space_ = true;
        // What was reserved before the room ran out goes back. The length stays as it is: others may be extending the file beside
        // us, and to cut it could cut off what they have written.
        give_back_reserved(fd, static_cast<off_t>(begin), static_cast<off_t>(end));
        struct stat now;
        if (size == 0 && ::fstat(fd, &now) == 0) empty_size_ = static_cast<std::uint64_t>(now.st_size);
    }
    if (error == ENOSPC) throw no_space(fd, needed, {offset, length}, path_);
    // Beyond a limit (EFBIG) nothing is reserved at all.
    if (error == EDQUOT || error == EFBIG)
        throw IoError(error, "write of " + std::to_string(length) + " bytes at offset " + std::to_string(offset), path_);
    // Anything else means "not supported here": the writes themselves then extend the file.
    if (error == 0) known_size_.store(end, std::memory_order_relaxed);
}

}  // namespace deepnvme

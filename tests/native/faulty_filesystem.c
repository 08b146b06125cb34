// A file system for tests: passes through to a directory, and fails on command. tests/faulty_filesystem.py starts it.
//
//     faulty_filesystem DIRECTORY MOUNTPOINT direct|cached|writeback
//
// direct: every read and write comes here (FOPEN_DIRECT_IO). cached: through the page cache, but for files opened with O_DIRECT.
// writeback: the page cache keeps writes until fsync.
//
// Says "mounted" on standard output; then each line of standard input is a command, answered with one line:
//
//     fault OPERATIONS EFFECT VALUE SKIP TIMES PER_MILLION SEED PATTERN
//         Of the next operations of these kinds (names with commas between) on files whose name matches the shell PATTERN, leave out
//         SKIP, then have each meet the effect with that probability, at most TIMES (-1: without end). Of several faults the first holds.
//         EFFECT and VALUE: error ERRNO; short BYTES, of a read or write of a direct one; hang MILLISECONDS, or until healed if that is 0, but no
//         longer than two minutes, since a process that waits for an answer cannot be killed; lie 0, by which a write is dropped and
//         called done.
//     heal
//         Forget all faults and let go of what hangs. The answer: what has met a fault since the last time, as operation:errno or
//         operation:effect.
//     resume
//         Let go of what hangs and forget the faults that made it hang. Others stay, and so does the list of what has met a fault.
//     count
//         The answer: how many operations of each kind there have been, as operation=number.
//
// At the end of standard input, so when who started it has died, it unmounts and ends.
//
// The low-level interface of libfuse, since its other one, by paths, cannot stat open files that have lost their names.

#define _GNU_SOURCE
#define FUSE_USE_VERSION 312  // an older library takes it for its newest
#include <fuse3/fuse_lowlevel.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

enum { LOOKUP, GETATTR, SETATTR, FTRUNCATE, MKDIR, UNLINK, RMDIR, RENAME, LINK, OPEN, CREATE, READ, WRITE, FLUSH, RELEASE, FSYNC,
       OPENDIR, READDIR, FSYNCDIR, STATFS, FALLOCATE, OPERATIONS };
static const char* const kNames[OPERATIONS] = {
    "lookup", "getattr", "setattr", "ftruncate", "mkdir", "unlink", "rmdir", "rename", "link", "open", "create", "read", "write", "flush",
    "release", "fsync", "opendir", "readdir", "fsyncdir", "statfs", "fallocate"};

enum { ERROR, SHORT, HANG, LIE, EFFECTS };
static const char* const kEffects[EFFECTS] = {"error", "short", "hang", "lie"};

// Faults. ------------------------------------------------------------------------------------------------------------------------

struct fault {
    uint32_t operations;
    int effect;
    long value;
    long skip;
    long times;
    long per_million;
    uint64_t random;
    char pattern[256];
};

enum { kMostFaults = 64, kMostMet = 256, kLongest = 120000 };
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;  // guards all of these
static pthread_cond_t healed;
static struct fault faults[kMostFaults];
static int fault_count;
static unsigned long healings;
static unsigned long counts[OPERATIONS];
static struct { int operation, effect; long value; } met[kMostMet];
static int met_count;

// What an operation has to do: fail with `error` unless 0, move at most `most` bytes, or pretend to.
struct verdict {
    int error;
    size_t most;
    bool lie;
};

static bool hits(struct fault* fault, int operation, const char* name) {
    if (!(fault->operations & 1u << operation) || fault->times == 0 || fnmatch(fault->pattern, name, 0) != 0) return false;
    if (fault->skip > 0) {
        --fault->skip;
        return false;
    }
    fault->random = fault->random * 6364136223846793005u + 1442695040888963407u;
    if ((long)((fault->random >> 33) % 1000000) >= fault->per_million) return false;
    if (fault->times > 0) --fault->times;
    return true;
}

// Waits where the fault says so. To be called once for each operation, first of all.
static struct verdict judge(int operation, const char* name) {
    struct verdict verdict = {0, SIZE_MAX, false};
    pthread_mutex_lock(&mutex);
    ++counts[operation];
    const struct fault* hit = NULL;
    for (int i = 0; i < fault_count && !hit; ++i)
        if (hits(&faults[i], operation, name)) hit = &faults[i];
    if (hit) {
        const int effect = hit->effect;
        const long value = hit->value;
        if (met_count < kMostMet) {
            met[met_count].operation = operation;
            met[met_count].effect = effect;
            met[met_count++].value = value;
        }
        if (effect == ERROR) verdict.error = (int)value;
        if (effect == SHORT) verdict.most = (size_t)value;
        if (effect == LIE) verdict.lie = true;
        if (effect == HANG) {
            const long milliseconds = value ? value : kLongest;
            struct timespec until;
            clock_gettime(CLOCK_MONOTONIC, &until);
            until.tv_sec += milliseconds / 1000;
            until.tv_nsec += milliseconds % 1000 * 1000000;
            if (until.tv_nsec >= 1000000000) {
                ++until.tv_sec;
                until.tv_nsec -= 1000000000;
            }
            const unsigned long now = healings;
            while (now == healings && pthread_cond_timedwait(&healed, &mutex, &until) == 0) continue;
        }
    }
    pthread_mutex_unlock(&mutex);
    return verdict;
}

static int index_of(const char* name, const char* const* names, int count) {
    for (int i = 0; i < count; ++i)
        if (strcmp(name, names[i]) == 0) return i;
    return -1;
}

static const char* add_fault(const char* words) {
    struct fault fault = {0};
    char operations[256], effect[16];
    if (sscanf(words, "%255s %15s %ld %ld %ld %ld %lu %255s", operations, effect, &fault.value, &fault.skip, &fault.times,
               &fault.per_million, &fault.random, fault.pattern) != 8)
        return "eight words are needed";
    fault.effect = index_of(effect, kEffects, EFFECTS);
    if (fault.effect < 0) return "no such effect";
    for (char *rest, *name = strtok_r(operations, ",", &rest); name; name = strtok_r(NULL, ",", &rest)) {
        const int operation = index_of(name, kNames, OPERATIONS);
        if (operation < 0) return "no such operation";
        fault.operations |= 1u << operation;
    }
    pthread_mutex_lock(&mutex);
    const bool full = fault_count == kMostFaults;
    if (!full) faults[fault_count++] = fault;
    pthread_mutex_unlock(&mutex);
    return full ? "too many faults" : "ok";
}

static void heal(void) {
    pthread_mutex_lock(&mutex);
    fault_count = 0;
    ++healings;
    pthread_cond_broadcast(&healed);
    for (int i = 0; i < met_count; ++i) {
        if (met[i].effect == ERROR) printf("%s:%ld ", kNames[met[i].operation], met[i].value);
        else printf("%s:%s ", kNames[met[i].operation], kEffects[met[i].effect]);
    }
    met_count = 0;
    pthread_mutex_unlock(&mutex);
    puts("");
}

static void resume(void) {
    pthread_mutex_lock(&mutex);
    int left = 0;
    for (int i = 0; i < fault_count; ++i)
        if (faults[i].effect != HANG) faults[left++] = faults[i];
    fault_count = left;
    ++healings;
    pthread_cond_broadcast(&healed);
    pthread_mutex_unlock(&mutex);
    puts("ok");
}

static void* obey(void* session) {
    char line[1024];
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = '\0';
        if (strncmp(line, "fault ", 6) == 0) puts(add_fault(line + 6));
        else if (strcmp(line, "heal") == 0) heal();
        else if (strcmp(line, "resume") == 0) resume();
        else if (strcmp(line, "count") == 0) {
            pthread_mutex_lock(&mutex);
            for (int i = 0; i < OPERATIONS; ++i) printf("%s=%lu ", kNames[i], counts[i]);
            pthread_mutex_unlock(&mutex);
            puts("");
        } else puts("no such command");
    }
    fuse_session_unmount(session);
    _exit(0);
}

// Files. -------------------------------------------------------------------------------------------------------------------------

// One file or directory that the kernel knows. Its descriptor keeps its number from being given to another.
struct node {
    struct node *next, *before;
    int fd;  // O_PATH
    dev_t device;
    ino_t number;
    uint64_t references;
    char name[256];  // the last one heard of; guarded by nodes_mutex, like the list
};

static pthread_mutex_t nodes_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct node root = {.next = &root, .before = &root, .references = 1, .name = "."};
static bool direct, writeback;
static double timeout;  // seconds for which the kernel may keep names and attributes

static struct node* node_of(fuse_ino_t ino) { return ino == FUSE_ROOT_ID ? &root : (struct node*)(uintptr_t)ino; }

static struct verdict judge_node(int operation, fuse_ino_t ino) {
    char name[256];
    pthread_mutex_lock(&nodes_mutex);
    memcpy(name, node_of(ino)->name, sizeof name);
    pthread_mutex_unlock(&nodes_mutex);
    return judge(operation, name);
}

static void remember_name(struct node* node, const char* name) {
    strncpy(node->name, name, sizeof node->name - 1);
}

// Replies with the error of the verdict, if there is one.
static bool refused(fuse_req_t request, struct verdict verdict) {
    if (verdict.error) fuse_reply_err(request, verdict.error);
    return verdict.error != 0;
}

static void reply_done(fuse_req_t request, int result) { fuse_reply_err(request, result < 0 ? errno : 0); }

// The way to the file behind an O_PATH descriptor.
struct link { char path[64]; };
static struct link link_of(int fd) {
    struct link link;
    snprintf(link.path, sizeof link.path, "/proc/self/fd/%d", fd);
    return link;
}

// 0 or errno.
static int find(fuse_ino_t parent, const char* name, struct fuse_entry_param* entry) {
    memset(entry, 0, sizeof *entry);
    entry->attr_timeout = entry->entry_timeout = timeout;
    const int fd = openat(node_of(parent)->fd, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) return errno;
    if (fstatat(fd, "", &entry->attr, AT_EMPTY_PATH) < 0) {
        const int error = errno;
        close(fd);
        return error;
    }
    pthread_mutex_lock(&nodes_mutex);
    struct node* node = root.next;
    while (node != &root && (node->number != entry->attr.st_ino || node->device != entry->attr.st_dev)) node = node->next;
    if (node != &root) {
        close(fd);
    } else {
        node = calloc(1, sizeof *node);
        node->fd = fd;
        node->number = entry->attr.st_ino;
        node->device = entry->attr.st_dev;
        node->next = root.next;
        node->before = &root;
        root.next->before = node;
        root.next = node;
    }
    ++node->references;
    remember_name(node, name);
    pthread_mutex_unlock(&nodes_mutex);
    entry->ino = (uintptr_t)node;
    return 0;
}

static void reply_found(fuse_req_t request, fuse_ino_t parent, const char* name) {
    struct fuse_entry_param entry;
    const int error = find(parent, name, &entry);
    if (error) fuse_reply_err(request, error);
    else fuse_reply_entry(request, &entry);
}

static void forget(fuse_ino_t ino, uint64_t references) {
    struct node* node = node_of(ino);
    if (node == &root) return;
    pthread_mutex_lock(&nodes_mutex);
    node->references -= references;
    const bool last = node->references == 0;
    if (last) {
        node->before->next = node->next;
        node->next->before = node->before;
    }
    pthread_mutex_unlock(&nodes_mutex);
    if (last) {
        close(node->fd);
        free(node);
    }
}

// Operations. --------------------------------------------------------------------------------------------------------------------

static void on_init(void* data, struct fuse_conn_info* connection) {
    (void)data;
    if (writeback) connection->want |= connection->capable & FUSE_CAP_WRITEBACK_CACHE;
    connection->max_background = 256;  // what hangs must not keep others out
    connection->congestion_threshold = 256;
}

static void on_lookup(fuse_req_t request, fuse_ino_t parent, const char* name) {
    if (!refused(request, judge(LOOKUP, name))) reply_found(request, parent, name);
}

static void on_forget(fuse_req_t request, fuse_ino_t ino, uint64_t references) {
    forget(ino, references);
    fuse_reply_none(request);
}

static void on_forget_multi(fuse_req_t request, size_t count, struct fuse_forget_data* forgotten) {
    for (size_t i = 0; i < count; ++i) forget(forgotten[i].ino, forgotten[i].nlookup);
    fuse_reply_none(request);
}

static void reply_attributes(fuse_req_t request, fuse_ino_t ino) {
    struct stat facts;
    if (fstatat(node_of(ino)->fd, "", &facts, AT_EMPTY_PATH) < 0) fuse_reply_err(request, errno);
    else fuse_reply_attr(request, &facts, timeout);
}

static void on_getattr(fuse_req_t request, fuse_ino_t ino, struct fuse_file_info* file) {
    (void)file;
    if (!refused(request, judge_node(GETATTR, ino))) reply_attributes(request, ino);
}

static void on_setattr(fuse_req_t request, fuse_ino_t ino, struct stat* facts, int which, struct fuse_file_info* file) {
    if (refused(request, judge_node(which & FUSE_SET_ATTR_SIZE ? FTRUNCATE : SETATTR, ino))) return;
    const struct link link = link_of(node_of(ino)->fd);
    int result = 0;
    if (which & FUSE_SET_ATTR_MODE) result = chmod(link.path, facts->st_mode);
    if (result == 0 && which & (FUSE_SET_ATTR_UID | FUSE_SET_ATTR_GID))
        result = chown(link.path, which & FUSE_SET_ATTR_UID ? facts->st_uid : (uid_t)-1, which & FUSE_SET_ATTR_GID ? facts->st_gid : (gid_t)-1);
    if (result == 0 && which & FUSE_SET_ATTR_SIZE)
        result = file ? ftruncate((int)file->fh, facts->st_size) : truncate(link.path, facts->st_size);
    if (result == 0 && which & (FUSE_SET_ATTR_ATIME | FUSE_SET_ATTR_MTIME)) {
        struct timespec times[2] = {{0, UTIME_OMIT}, {0, UTIME_OMIT}};
        if (which & FUSE_SET_ATTR_ATIME) times[0] = facts->st_atim;
        if (which & FUSE_SET_ATTR_MTIME) times[1] = facts->st_mtim;
        if (which & FUSE_SET_ATTR_ATIME_NOW) times[0].tv_nsec = UTIME_NOW;
        if (which & FUSE_SET_ATTR_MTIME_NOW) times[1].tv_nsec = UTIME_NOW;
        result = utimensat(AT_FDCWD, link.path, times, 0);
    }
    if (result < 0) fuse_reply_err(request, errno);
    else reply_attributes(request, ino);
}

static void on_mkdir(fuse_req_t request, fuse_ino_t parent, const char* name, mode_t mode) {
    if (refused(request, judge(MKDIR, name))) return;
    if (mkdirat(node_of(parent)->fd, name, mode) < 0) fuse_reply_err(request, errno);
    else reply_found(request, parent, name);
}

static void on_symlink(fuse_req_t request, const char* target, fuse_ino_t parent, const char* name) {
    if (symlinkat(target, node_of(parent)->fd, name) < 0) fuse_reply_err(request, errno);
    else reply_found(request, parent, name);
}

static void on_readlink(fuse_req_t request, fuse_ino_t ino) {
    char target[4096];
    const ssize_t length = readlinkat(node_of(ino)->fd, "", target, sizeof target - 1);
    if (length < 0) {
        fuse_reply_err(request, errno);
        return;
    }
    target[length] = '\0';
    fuse_reply_readlink(request, target);
}

static void on_link(fuse_req_t request, fuse_ino_t ino, fuse_ino_t parent, const char* name) {
    if (refused(request, judge(LINK, name))) return;
    if (linkat(AT_FDCWD, link_of(node_of(ino)->fd).path, node_of(parent)->fd, name, AT_SYMLINK_FOLLOW) < 0) fuse_reply_err(request, errno);
    else reply_found(request, parent, name);
}

static void on_unlink(fuse_req_t request, fuse_ino_t parent, const char* name) {
    if (!refused(request, judge(UNLINK, name))) reply_done(request, unlinkat(node_of(parent)->fd, name, 0));
}

static void on_rmdir(fuse_req_t request, fuse_ino_t parent, const char* name) {
    if (!refused(request, judge(RMDIR, name))) reply_done(request, unlinkat(node_of(parent)->fd, name, AT_REMOVEDIR));
}

static void on_rename(fuse_req_t request, fuse_ino_t parent, const char* name, fuse_ino_t new_parent, const char* new_name, unsigned flags) {
    if (refused(request, judge(RENAME, new_name))) return;
    struct stat facts;
    const int known = fstatat(node_of(parent)->fd, name, &facts, AT_SYMLINK_NOFOLLOW);
    const int result = renameat2(node_of(parent)->fd, name, node_of(new_parent)->fd, new_name, flags);
    if (result == 0 && known == 0) {
        pthread_mutex_lock(&nodes_mutex);
        for (struct node* node = root.next; node != &root; node = node->next)
            if (node->number == facts.st_ino && node->device == facts.st_dev) remember_name(node, new_name);
        pthread_mutex_unlock(&nodes_mutex);
    }
    reply_done(request, result);
}

// What the file here is opened with. The kernel reads what it caches, and moves what it writes to the end by itself.
static int flags_of(int flags) {
    flags &= ~(O_NOFOLLOW | O_DIRECT);
    if (writeback) {
        if ((flags & O_ACCMODE) == O_WRONLY) flags = (flags & ~O_ACCMODE) | O_RDWR;
        flags &= ~O_APPEND;
    }
    return flags | O_CLOEXEC;
}

static void on_create(fuse_req_t request, fuse_ino_t parent, const char* name, mode_t mode, struct fuse_file_info* file) {
    if (refused(request, judge(CREATE, name))) return;
    const int fd = openat(node_of(parent)->fd, name, (flags_of(file->flags) | O_CREAT) & ~O_NOFOLLOW, mode);
    if (fd < 0) {
        fuse_reply_err(request, errno);
        return;
    }
    struct fuse_entry_param entry;
    const int error = find(parent, name, &entry);
    if (error) {
        close(fd);
        fuse_reply_err(request, error);
        return;
    }
    file->fh = (uint64_t)fd;
    file->direct_io = direct;
    fuse_reply_create(request, &entry, file);
}

static void on_open(fuse_req_t request, fuse_ino_t ino, struct fuse_file_info* file) {
    if (refused(request, judge_node(OPEN, ino))) return;
    const int fd = open(link_of(node_of(ino)->fd).path, flags_of(file->flags));
    if (fd < 0) {
        fuse_reply_err(request, errno);
        return;
    }
    file->fh = (uint64_t)fd;
    file->direct_io = direct;
    fuse_reply_open(request, file);
}

// Only there: to the page cache a short read is the end of the file, and the kernel's size of it with that.
static size_t at_most(struct verdict verdict, size_t size) { return direct && verdict.most < size ? verdict.most : size; }

static void on_read(fuse_req_t request, fuse_ino_t ino, size_t size, off_t offset, struct fuse_file_info* file) {
    const struct verdict verdict = judge_node(READ, ino);
    if (refused(request, verdict)) return;
    char* const memory = malloc(size + 1);
    const ssize_t moved = pread((int)file->fh, memory, at_most(verdict, size), offset);
    if (moved < 0) fuse_reply_err(request, errno);
    else fuse_reply_buf(request, memory, (size_t)moved);
    free(memory);
}

static void on_write(fuse_req_t request, fuse_ino_t ino, const char* memory, size_t size, off_t offset, struct fuse_file_info* file) {
    const struct verdict verdict = judge_node(WRITE, ino);
    if (refused(request, verdict)) return;
    const ssize_t moved = verdict.lie ? (ssize_t)size : pwrite((int)file->fh, memory, at_most(verdict, size), offset);
    if (moved < 0) fuse_reply_err(request, errno);
    else fuse_reply_write(request, (size_t)moved);
}

static void on_flush(fuse_req_t request, fuse_ino_t ino, struct fuse_file_info* file) {
    (void)file;
    fuse_reply_err(request, judge_node(FLUSH, ino).error);
}

static void on_release(fuse_req_t request, fuse_ino_t ino, struct fuse_file_info* file) {
    const struct verdict verdict = judge_node(RELEASE, ino);
    close((int)file->fh);
    fuse_reply_err(request, verdict.error);
}

// Nothing is flushed further down: no test here pulls the plug.
static void on_fsync(fuse_req_t request, fuse_ino_t ino, int only_data, struct fuse_file_info* file) {
    (void)only_data, (void)file;
    fuse_reply_err(request, judge_node(FSYNC, ino).error);
}

static void on_fsyncdir(fuse_req_t request, fuse_ino_t ino, int only_data, struct fuse_file_info* file) {
    (void)only_data, (void)file;
    fuse_reply_err(request, judge_node(FSYNCDIR, ino).error);
}

static void on_opendir(fuse_req_t request, fuse_ino_t ino, struct fuse_file_info* file) {
    if (refused(request, judge_node(OPENDIR, ino))) return;
    DIR* const directory = opendir(link_of(node_of(ino)->fd).path);
    if (!directory) {
        fuse_reply_err(request, errno);
        return;
    }
    file->fh = (uintptr_t)directory;
    fuse_reply_open(request, file);
}

static void on_readdir(fuse_req_t request, fuse_ino_t ino, size_t size, off_t offset, struct fuse_file_info* file) {
    if (refused(request, judge_node(READDIR, ino))) return;
    DIR* const directory = (DIR*)(uintptr_t)file->fh;
    char* const memory = malloc(size);
    size_t filled = 0;
    seekdir(directory, offset);
    errno = 0;
    for (struct dirent* each; (each = readdir(directory));) {
        const struct stat facts = {.st_ino = each->d_ino, .st_mode = (mode_t)each->d_type << 12};
        const size_t needed = fuse_add_direntry(request, memory + filled, size - filled, each->d_name, &facts, each->d_off);
        if (needed > size - filled) break;
        filled += needed;
    }
    if (errno && filled == 0) fuse_reply_err(request, errno);
    else fuse_reply_buf(request, memory, filled);
    free(memory);
}

static void on_releasedir(fuse_req_t request, fuse_ino_t ino, struct fuse_file_info* file) {
    (void)ino;
    closedir((DIR*)(uintptr_t)file->fh);
    fuse_reply_err(request, 0);
}

static void on_statfs(fuse_req_t request, fuse_ino_t ino) {
    struct statvfs facts;
    if (refused(request, judge_node(STATFS, ino))) return;
    if (fstatvfs(root.fd, &facts) < 0) fuse_reply_err(request, errno);
    else fuse_reply_statfs(request, &facts);
}

static void on_fallocate(fuse_req_t request, fuse_ino_t ino, int mode, off_t offset, off_t length, struct fuse_file_info* file) {
    if (!refused(request, judge_node(FALLOCATE, ino))) reply_done(request, fallocate((int)file->fh, mode, offset, length));
}

static const struct fuse_lowlevel_ops kOperations = {
    .init = on_init,
    .lookup = on_lookup,
    .forget = on_forget,
    .forget_multi = on_forget_multi,
    .getattr = on_getattr,
    .setattr = on_setattr,
    .mkdir = on_mkdir,
    .symlink = on_symlink,
    .readlink = on_readlink,
    .link = on_link,
    .unlink = on_unlink,
    .rmdir = on_rmdir,
    .rename = on_rename,
    .create = on_create,
    .open = on_open,
    .read = on_read,
    .write = on_write,
    .flush = on_flush,
    .release = on_release,
    .fsync = on_fsync,
    .fsyncdir = on_fsyncdir,
    .opendir = on_opendir,
    .readdir = on_readdir,
    .releasedir = on_releasedir,
    .statfs = on_statfs,
    .fallocate = on_fallocate,
};

int main(int count, char** words) {
    if (count != 4) {
        fprintf(stderr, "usage: %s DIRECTORY MOUNTPOINT direct|cached|writeback\n", words[0]);
        return 2;
    }
    direct = strcmp(words[3], "direct") == 0;
    writeback = strcmp(words[3], "writeback") == 0;
    timeout = direct ? 0 : 1;
    umask(0);  // it is applied by the kernel
    setvbuf(stdout, NULL, _IOLBF, 0);
    root.fd = open(words[1], O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (root.fd < 0) {
        perror(words[1]);
        return 1;
    }
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&healed, &monotonic);

    char* options[] = {words[0], "-o", "fsname=faulty", NULL};
    struct fuse_args arguments = FUSE_ARGS_INIT(3, options);
    struct fuse_session* const session = fuse_session_new(&arguments, &kOperations, sizeof kOperations, NULL);
    if (!session || fuse_session_mount(session, words[2]) != 0) return 1;
    pthread_t control;
    pthread_create(&control, NULL, obey, session);
    puts("mounted");
#if FUSE_VERSION >= FUSE_MAKE_VERSION(3, 12)
    struct fuse_loop_config* const loop = fuse_loop_cfg_create();
    fuse_loop_cfg_set_max_threads(loop, 512);  // what hangs has one each
    fuse_loop_cfg_set_idle_threads(loop, 16);
    const int result = fuse_session_loop_mt(session, loop);
#else
    struct fuse_loop_config loop = {.clone_fd = 0, .max_idle_threads = 16};
    const int result = fuse_session_loop_mt(session, &loop);
#endif
    pthread_cancel(control);
    pthread_join(control, NULL);
    fuse_session_unmount(session);
    fuse_session_destroy(session);
    return result != 0;
}

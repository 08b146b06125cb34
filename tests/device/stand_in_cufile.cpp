// A libcufile.so.0 for tests on machines without a GPU, beside the stand-in libcuda.so.1, through which alone it reaches device memory.
//
// CUFILE_STANDIN_LOG names a file to which it adds a line for each call but reads and writes: what is done at exit is seen there.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/types.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct Status {
    int error, cuda;
};
struct Descriptor {
    int type;
    union {
        int fd;
        void* unused;
    } handle;
    const void* operations;
};
struct Handle {
    int fd;
};

constexpr int kBase = 5000;

struct Control {
    std::mutex mutex;
    std::map<std::string, std::pair<int, int>> failures;  // by function: calls until it fails, and with what
    std::map<std::string, int> calls;
    std::set<Handle*> handles;
    std::map<std::uintptr_t, std::size_t> registered;
    bool open = false, compatible = true;
    int version = 1140;
    std::size_t most = SIZE_MAX;  // bytes moved by a call
    std::uint64_t through_registered = 0;  // calls on registered memory

    static Control& get() {
        static auto* control = new Control;
        return *control;
    }
};

void note(const std::string& line) {
    const char* path = std::getenv("CUFILE_STANDIN_LOG");
    const int file = path ? ::open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666) : -1;
    if (file < 0) return;
    [[maybe_unused]] const auto written = ::write(file, (line + "\n").data(), line.size() + 1);
    ::close(file);
}

int verdict(const char* function) {
    auto& control = Control::get();
    std::lock_guard lock(control.mutex);
    ++control.calls[function];
    const auto found = control.failures.find(function);
    if (found == control.failures.end() || found->second.first-- > 0) return 0;
    const int result = found->second.second;
    control.failures.erase(found);
    return result;
}

template <class Function>
Function* of_cuda(const char* name) {
    return reinterpret_cast<Function*>(::dlsym(::dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), name));
}

// cuFile works in the context that is current.
bool in_context() {
    static const auto pop = of_cuda<int(void**)>("cuCtxPopCurrent_v2");
    static const auto push = of_cuda<int(void*)>("cuCtxPushCurrent_v2");
    void* context;
    return pop(&context) == 0 && push(context) == 0;
}

std::byte* reach(std::uintptr_t address, std::size_t size) {
    static const auto function = of_cuda<void*(std::uint64_t, std::size_t)>("standin_reach");
    return static_cast<std::byte*>(function(address, size));
}

// `result` of verdict(): a CUfileOpError is returned as its negative, anything below as an errno.
ssize_t move(const char* name, void* opaque, void* base, std::size_t size, off_t offset, off_t within, bool read) {
    if (const int error = verdict(name)) {
        if (error > kBase) return -error;
        errno = error;
        return -1;
    }
    if (!in_context()) return -(kBase + 47);
    auto& control = Control::get();
    Handle* handle = static_cast<Handle*>(opaque);
    {
        std::lock_guard lock(control.mutex);
        if (!control.open || !control.handles.contains(handle)) return -(kBase + 27);
        const auto address = reinterpret_cast<std::uintptr_t>(base);
        const auto found = control.registered.find(address);
        if (found != control.registered.end()) {
            if (static_cast<std::size_t>(within) + size > found->second) return -(kBase + 17);
            ++control.through_registered;
        }
        size = size < control.most ? size : control.most;
    }
    std::byte* memory = reach(reinterpret_cast<std::uintptr_t>(base) + static_cast<std::uintptr_t>(within), size);
    if (!memory) return -(kBase + 12);
    // Buffered, on a descriptor of its own: the kernel will not take this memory's alignment for granted.
    const std::string path = "/proc/self/fd/" + std::to_string(handle->fd);
    const int fd = ::open(path.c_str(), read ? O_RDONLY : O_WRONLY);
    if (fd < 0) return -1;
    const ssize_t moved = read ? ::pread(fd, memory, size, offset) : ::pwrite(fd, memory, size, offset);
    const int error = errno;
    ::close(fd);
    errno = error;
    return moved;
}

}  // namespace

EXPORT Status cuFileDriverOpen() {
    const char* log = std::getenv("CUFILE_LOGFILE_PATH");
    note(std::string("cuFileDriverOpen, compatible ") + (Control::get().compatible ? "yes" : "no") + ", log " + (log ? log : "here"));
    if (const int error = verdict("cuFileDriverOpen")) return {error, 0};
    if (Control::get().open) return {kBase + 26, 0};
    Control::get().open = true;
    return {0, 0};
}
EXPORT Status cuFileDriverClose_v2() {
    verdict("cuFileDriverClose");
    note("cuFileDriverClose with " + std::to_string(Control::get().handles.size()) + " files");
    Control::get().open = false;
    return {0, 0};
}
EXPORT Status cuFileHandleRegister(void** handle, Descriptor* descriptor) {
    if (const int error = verdict("cuFileHandleRegister")) return {error, 0};
    if (descriptor->type != 1) return {kBase + 18, 0};
    if (!(::fcntl(descriptor->handle.fd, F_GETFL) & O_DIRECT)) return {kBase + 20, 0};
    auto* made = new Handle{descriptor->handle.fd};
    *handle = made;
    std::lock_guard lock(Control::get().mutex);
    Control::get().handles.insert(made);
    return {0, 0};
}
EXPORT void cuFileHandleDeregister(void* handle) {
    auto* made = static_cast<Handle*>(handle);
    verdict("cuFileHandleDeregister");
    note("cuFileHandleDeregister");
    std::lock_guard lock(Control::get().mutex);
    // Its descriptor is open to the end.
    if (::fcntl(made->fd, F_GETFD) < 0) ++Control::get().calls["closed too early"];
    Control::get().handles.erase(made);
    delete made;
}
EXPORT Status cuFileBufRegister(const void* memory, std::size_t size, int) {
    if (const int error = verdict("cuFileBufRegister")) return {error, 0};
    if (!in_context() || !reach(reinterpret_cast<std::uintptr_t>(memory), size)) return {kBase + 12, 0};
    std::lock_guard lock(Control::get().mutex);
    const auto address = reinterpret_cast<std::uintptr_t>(memory);
    return {Control::get().registered.emplace(address, size).second ? 0 : kBase + 23, 0};
}
EXPORT Status cuFileBufDeregister(const void* memory) {
    verdict("cuFileBufDeregister");
    if (!in_context()) return {kBase + 47, 0};
    std::lock_guard lock(Control::get().mutex);
    return {Control::get().registered.erase(reinterpret_cast<std::uintptr_t>(memory)) ? 0 : kBase + 24, 0};
}
EXPORT ssize_t cuFileRead(void* handle, void* base, std::size_t size, off_t offset, off_t within) {
    return move("cuFileRead", handle, base, size, offset, within, true);
}
EXPORT ssize_t cuFileWrite(void* handle, const void* base, std::size_t size, off_t offset, off_t within) {
    return move("cuFileWrite", handle, const_cast<void*>(base), size, offset, within, false);
}
EXPORT Status cuFileGetVersion(int* version) {
    *version = Control::get().version;
    return {verdict("cuFileGetVersion"), 0};
}
EXPORT Status cuFileSetParameterBool(int parameter, bool value) {
    if (const int error = verdict("cuFileSetParameterBool")) return {error, 0};
    if (parameter == 1) Control::get().compatible = value;
    return {0, 0};
}

// -- what tests do with it ---------------------------------------------------------------------------------------------

EXPORT void cufile_standin_fail(const char* function, int calls, int result) {
    std::lock_guard lock(Control::get().mutex);
    Control::get().failures[function] = {calls, result};
}
EXPORT void cufile_standin_forget_failures() {
    std::lock_guard lock(Control::get().mutex);
    Control::get().failures.clear();
    Control::get().most = SIZE_MAX;
}
EXPORT int cufile_standin_calls(const char* function) {
    std::lock_guard lock(Control::get().mutex);
    return Control::get().calls[function];
}
EXPORT void cufile_standin_most(std::size_t bytes) { Control::get().most = bytes; }
EXPORT void cufile_standin_version(int version) { Control::get().version = version; }
EXPORT int cufile_standin_handles() { return static_cast<int>(Control::get().handles.size()); }
EXPORT int cufile_standin_registered() { return static_cast<int>(Control::get().registered.size()); }
EXPORT std::uint64_t cufile_standin_through_registered() { return Control::get().through_registered; }
EXPORT int cufile_standin_is_open() { return Control::get().open; }
EXPORT int cufile_standin_compatible() { return Control::get().compatible; }

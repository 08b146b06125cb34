#include "gds/cufile.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <utility>

#include "core/error.h"
#include "core/process.h"

namespace deepnvme::gds {

// cufile.h's types, of which only the layout matters.
struct Status {
    int error;  // CUfileOpError: 0 is success
    int cuda;   // CUresult, if the error is kCudaDriverError
};
struct Descriptor {
    int type = 1;  // CU_FILE_HANDLE_TYPE_OPAQUE_FD
    union {
        int fd;
        void* unused;
    } handle{};
    const void* operations = nullptr;
};
using Handle = void*;

namespace {

constexpr int kBase = 5000;
constexpr int kCudaDriverError = kBase + 11;
constexpr int kAllowCompatMode = 1;  // CUFILE_PARAM_PROPERTIES_ALLOW_COMPAT_MODE
constexpr std::size_t kLargestSector = CuFile::kLeastRegistered;
constexpr int kOldestVersion = 1080;  // 1.8, of CUDA 12.3: the first with parameters to set

struct Known {
    int error;
    int number;  // errno
    const char* text;
};
constexpr Known kKnown[] = {
    {kBase + 1, ENODEV, "the nvidia-fs driver is not loaded"},
    {kBase + 4, ENOTSUP, "the nvidia-fs driver is of another version"},
    {kBase + 7, ENOTSUP, "this platform has no GPUDirect Storage"},
    {kBase + 8, ENOTSUP, "this file's filesystem or drive has no GPUDirect Storage"},
    {kBase + 9, ENOTSUP, "this GPU has no GPUDirect Storage"},
    {kBase + 10, EIO, "the nvidia-fs driver failed"},
    {kCudaDriverError, EIO, "CUDA failed"},
    {kBase + 12, EFAULT, "not a pointer to device memory"},
    {kBase + 13, EFAULT, "device memory of a kind that cannot be transferred"},
    {kBase + 14, EFAULT, "a range that is not all of one allocation"},
    {kBase + 15, EINVAL, "the CUDA context is another one"},
    {kBase + 16, ENOMEM, "more device memory than can be pinned"},
    {kBase + 17, EFAULT, "a range beyond what is registered"},
    {kBase + 18, ENOTSUP, "files of this type have no GPUDirect Storage"},
    {kBase + 20, ENOTSUP, "the file was opened without O_DIRECT"},
    {kBase + 22, EINVAL, "an invalid argument"},
    {kBase + 23, EEXIST, "this device memory is registered already"},
    {kBase + 25, EACCES, "access to the driver or the file is denied"},
    {kBase + 33, ENODEV, "the nvidia-fs driver could not be initialised"},
    {kBase + 34, ENOTSUP, "GPUDirect Storage is disabled for this file in cufile.json"},
    {kBase + 36, ENOMEM, "device memory could not be pinned"},
    {kBase + 43, ENOMEM, "cuFile has no memory"},
};

const Known* known(int error) {
    for (const Known& each : kKnown)
        if (each.error == error) return &each;
    return nullptr;
}

std::string describe(int error) {
    const Known* found = known(error);
    return "cuFile error " + std::to_string(error) + (found ? std::string(" (") + found->text + ")" : "");
}

std::string describe(Status status) {
    if (status.error == kCudaDriverError) return "CUDA: " + CudaDriver::get().describe(status.cuda);
    return describe(status.error);
}

int errno_of(int error) {
    const Known* found = known(error);
    return found ? found->number : EIO;
}

template <class Function>
bool find(void* library, const char* name, Function*& function) {
    function = reinterpret_cast<Function*>(::dlsym(library, name));
    return function != nullptr;
}

template <class Function>
void bind_function(void* library, const char* name, Function*& function) {
    if (!find(library, name, function)) throw std::runtime_error(std::string("libcufile.so.0 lacks ") + name + ": install cuFile 1.8 or later");
}

}  // namespace

struct CuFile::Library {
    Status (*driver_open)();
    Status (*driver_close)();
    Status (*handle_register)(Handle*, Descriptor*);
    void (*handle_deregister)(Handle);
    Status (*buffer_register)(const void*, std::size_t, int);
    Status (*buffer_deregister)(const void*);
    ssize_t (*read)(Handle, void*, std::size_t, off_t, off_t);
    ssize_t (*write)(Handle, const void*, std::size_t, off_t, off_t);
    Status (*get_version)(int*);
    Status (*set_bool)(int, bool);

    std::mutex mutex;
    std::map<const std::byte*, std::size_t> registered;  // by first byte

    struct Place {
        std::byte* base;
        off_t within;        // bytes from base
        std::size_t length;  // as much as goes at once
    };

    // Where cuFile is to find memory: within the registered range that holds it all, or else by itself.
    Place place_of(const std::byte* memory, std::size_t length) {
        auto* base = const_cast<std::byte*>(memory);
        std::lock_guard lock(mutex);
        const auto after = registered.upper_bound(memory);
        if (after == registered.begin()) return {base, 0, length};
        const auto& [begin, size] = *std::prev(after);
        if (memory + length <= begin + size) return {const_cast<std::byte*>(begin), memory - begin, length};
        // Its address alone would be taken for the whole range, and refused beyond. The rest follows as after any short transfer.
        if (memory == begin) return {base, 0, size / kLargestSector * kLargestSector};
        return {base, 0, length};
    }
};

CuFile& CuFile::get() {
    // Tried once: what is missing does not come while a process runs, and half-opened drivers do not open better the second time.
    static std::optional<std::string> failure;
    static CuFile* const opened = []() -> CuFile* {
        try {
            // Destroyed at exit, and with it the driver closed.
            static CuFile made;
            return &made;
        } catch (const std::exception& error) {
            failure = error.what();
            return nullptr;
        }
    }();
    if (!opened) throw std::runtime_error(*failure);
    return *opened;
}

CuFile::CuFile() : library_(std::make_unique<Library>()), generation_(process_generation()) {
    CudaDriver::get();  // says best what is wrong without CUDA
    void* opened = ::dlopen("libcufile.so.0", RTLD_NOW | RTLD_LOCAL);
    if (!opened) {
        const char* reason = ::dlerror();
        throw std::runtime_error(std::string("cuFile is not to be had: ") + (reason ? reason : "libcufile.so.0 cannot be opened") +
                                 "; pip install nvidia-cufile");
    }
    Library& library = *library_;
    bind_function(opened, "cuFileDriverOpen", library.driver_open);
    if (!find(opened, "cuFileDriverClose_v2", library.driver_close)) bind_function(opened, "cuFileDriverClose", library.driver_close);
    bind_function(opened, "cuFileHandleRegister", library.handle_register);
    bind_function(opened, "cuFileHandleDeregister", library.handle_deregister);
    bind_function(opened, "cuFileBufRegister", library.buffer_register);
    bind_function(opened, "cuFileBufDeregister", library.buffer_deregister);
    bind_function(opened, "cuFileRead", library.read);
    bind_function(opened, "cuFileWrite", library.write);
    bind_function(opened, "cuFileGetVersion", library.get_version);

    int version = 0;
    if (const Status status = library.get_version(&version); status.error != 0)
        throw std::runtime_error("cuFileGetVersion: " + describe(status));
    version_ = std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
    if (version < kOldestVersion)
        throw std::runtime_error("cuFile " + version_ + " is installed and 1.8 is needed: pip install --upgrade nvidia-cufile");
    bind_function(opened, "cuFileSetParameterBool", library.set_bool);

    // cuFile otherwise writes cufile.log where the program was started.
    ::setenv("CUFILE_LOGFILE_PATH", "/dev/null", /*overwrite=*/0);
    if (const Status status = library.set_bool(kAllowCompatMode, false); status.error != 0)
        throw std::runtime_error("cuFileSetParameterBool: " + describe(status));
    if (const Status status = library.driver_open(); status.error != 0)
        throw std::runtime_error("cuFileDriverOpen: " + describe(status));
}

CuFile::~CuFile() {
    if (usable_here()) library_->driver_close();
}

// The child of a fork has neither cuFile's threads nor a CUDA that works, and the parent's driver and handles are not its to close.
bool CuFile::usable_here() const noexcept { return generation_ == process_generation(); }

void CuFile::register_memory(CudaDevice device, std::byte* memory, std::size_t size) {
    const CudaContextGuard context(device);
    if (const Status status = library_->buffer_register(memory, size, 0); status.error != 0)
        throw IoError(errno_of(status.error), "cuFileBufRegister of " + std::to_string(size) + " bytes: " + describe(status), "");
    std::lock_guard lock(library_->mutex);
    library_->registered[memory] = size;
}

bool CuFile::unregister_memory(CudaDevice device, const std::byte* memory) {
    const CudaContextGuard context(device);
    {
        std::lock_guard lock(library_->mutex);
        if (library_->registered.erase(memory) == 0) return false;
    }
    library_->buffer_deregister(memory);
    return true;
}

std::shared_ptr<void> CuFile::open(int fd) {
    Descriptor descriptor;
    descriptor.handle.fd = fd;
    Handle handle = nullptr;
    if (const Status status = library_->handle_register(&handle, &descriptor); status.error != 0)
        throw IoError(errno_of(status.error), "cuFileHandleRegister: " + describe(status), "");
    return {handle, [this](void* registered) {
                if (usable_here()) library_->handle_deregister(registered);
            }};
}

std::int64_t CuFile::read(void* file, CudaDevice device, std::byte* memory, std::size_t length, std::uint64_t offset) {
    const CudaContextGuard context(device);
    const auto [base, within, most] = library_->place_of(memory, length);
    const ssize_t result = library_->read(file, base, most, static_cast<off_t>(offset), within);
    return result == -1 ? -errno : result;
}

std::int64_t CuFile::write(void* file, CudaDevice device, const std::byte* memory, std::size_t length, std::uint64_t offset) {
    const CudaContextGuard context(device);
    const auto [base, within, most] = library_->place_of(memory, length);
    const ssize_t result = library_->write(file, base, most, static_cast<off_t>(offset), within);
    return result == -1 ? -errno : result;
}

IoError CuFile::explain(std::int64_t result) const {
    const auto error = static_cast<int>(-result);
    if (error < kBase) return IoError(error, "", "");
    return IoError(errno_of(error), describe(error), "");
}

}  // namespace deepnvme::gds

#include "core/cuda.h"

#include <dlfcn.h>

#include <array>
#include <cerrno>
#include <mutex>
#include <stdexcept>

#include "core/error.h"

namespace deepnvme {

namespace {

constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kEventBlockingSync = 1;
constexpr unsigned kEventDisableTiming = 2;
constexpr unsigned kHostRegisterPortable = 1;

template <class Function>
void bind(void* library, const char* name, Function*& function) {
    function = reinterpret_cast<Function*>(::dlsym(library, name));
    if (!function) throw std::runtime_error(std::string("libcuda.so.1 lacks ") + name + ": install a newer NVIDIA driver (525 or later)");
}

CudaDriver open_driver() {
    void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        const char* reason = ::dlerror();
        throw std::runtime_error(std::string("CUDA is not to be had: ") + (reason ? reason : "libcuda.so.1 cannot be opened") +
                                 "; install the NVIDIA driver");
    }
    CudaDriver driver;
    bind(library, "cuInit", driver.init);
    bind(library, "cuDevicePrimaryCtxRetain", driver.primary_context_retain);
    bind(library, "cuCtxPushCurrent_v2", driver.context_push);
    bind(library, "cuCtxPopCurrent_v2", driver.context_pop);
    bind(library, "cuStreamCreate", driver.stream_create);
    bind(library, "cuStreamDestroy_v2", driver.stream_destroy);
    bind(library, "cuStreamWaitEvent", driver.stream_wait_event);
    bind(library, "cuEventCreate", driver.event_create);
    bind(library, "cuEventRecord", driver.event_record);
    bind(library, "cuEventSynchronize", driver.event_synchronize);
    bind(library, "cuEventDestroy_v2", driver.event_destroy);
    bind(library, "cuMemcpyHtoDAsync_v2", driver.copy_to_device);
    bind(library, "cuMemcpyDtoHAsync_v2", driver.copy_from_device);
    bind(library, "cuMemHostRegister_v2", driver.host_register);
    bind(library, "cuMemHostUnregister", driver.host_unregister);
    bind(library, "cuGetErrorName", driver.error_name);
    bind(library, "cuGetErrorString", driver.error_string);
    const CudaResult result = driver.init(0);
    if (result != 0) throw std::runtime_error("CUDA is not to be had: cuInit: " + driver.describe(result));
    return driver;
}

// Retained once for the process, and not released: at exit the driver may be gone before us.
CudaContext primary_context(CudaDevice device) {
    static std::mutex mutex;
    static std::array<CudaContext, 64> contexts{};
    if (device < 0 || static_cast<std::size_t>(device) >= contexts.size())
        throw std::invalid_argument("CUDA device must be in [0, 63], got " + std::to_string(device));
    std::lock_guard lock(mutex);
    CudaContext& context = contexts[static_cast<std::size_t>(device)];
    if (!context) {
        const CudaDriver& driver = CudaDriver::get();
        driver.check(driver.primary_context_retain(&context, device), "cuDevicePrimaryCtxRetain");
    }
    return context;
}

}  // namespace

const CudaDriver& CudaDriver::get() {
    static const CudaDriver driver = open_driver();
    return driver;
}

void CudaDriver::check(CudaResult result, const char* call) const {
    if (result != 0) throw IoError(EIO, std::string(call) + ": " + describe(result), "");
}

std::string CudaDriver::describe(CudaResult result) const {
    const char *name = nullptr, *text = nullptr;
    if (error_name(result, &name) != 0 || !name) return "CUDA error " + std::to_string(result);
    if (error_string(result, &text) != 0 || !text) return name;
    return std::string(name) + " (" + text + ")";
}

CudaContextGuard::CudaContextGuard(CudaDevice device) {
    const CudaContext context = primary_context(device);
    const CudaDriver& driver = CudaDriver::get();
    driver.check(driver.context_push(context), "cuCtxPushCurrent");
}

CudaContextGuard::~CudaContextGuard() {
    CudaContext popped;
    CudaDriver::get().context_pop(&popped);
}

CudaStream CudaStream::create() {
    CudaStream made;
    const CudaDriver& driver = CudaDriver::get();
    driver.check(driver.stream_create(&made.handle_, kStreamNonBlocking), "cuStreamCreate");
    return made;
}

CudaStream::~CudaStream() {
    if (handle_) CudaDriver::get().stream_destroy(handle_);
}

CudaEvent CudaEvent::create() {
    CudaEvent made;
    const CudaDriver& driver = CudaDriver::get();
    driver.check(driver.event_create(&made.handle_, kEventBlockingSync | kEventDisableTiming), "cuEventCreate");
    return made;
}

CudaEvent::~CudaEvent() {
    if (handle_) CudaDriver::get().event_destroy(handle_);
}

CudaHostRegistration::CudaHostRegistration(void* memory, std::size_t size) {
    const CudaDriver& driver = CudaDriver::get();
    driver.check(driver.host_register(memory, size, kHostRegisterPortable), "cuMemHostRegister");
    memory_ = memory;
}

CudaHostRegistration::~CudaHostRegistration() {
    if (memory_) CudaDriver::get().host_unregister(memory_);
}

}  // namespace deepnvme

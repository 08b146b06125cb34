#include "core/cuda.h"

#include <dlfcn.h>

#include <array>
#include <cerrno>
#include <mutex>
#include <stdexcept>

#include "core/error.h"
#include "core/process.h"

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
    bind(library, "cuCtxGetCurrent", driver.context_current);
    bind(library, "cuStreamCreate", driver.stream_create);
    bind(library, "cuStreamDestroy_v2", driver.stream_destroy);
    bind(library, "cuStreamSynchronize", driver.stream_synchronize);
    bind(library, "cuEventCreate", driver.event_create);
    bind(library, "cuEventRecord", driver.event_record);
    bind(library, "cuEventQuery", driver.event_query);
    bind(library, "cuEventSynchronize", driver.event_synchronize);
    bind(library, "cuEventDestroy_v2", driver.event_destroy);
    bind(library, "cuMemcpyHtoDAsync_v2", driver.copy_to_device);
    bind(library, "cuMemcpyDtoHAsync_v2", driver.copy_from_device);
    bind(library, "cuMemHostRegister_v2", driver.host_register);
    bind(library, "cuMemHostUnregister", driver.host_unregister);
    bind(library, "cuGetErrorName", driver.error_name);
    bind(library, "cuGetErrorString", driver.error_string);
    driver.generation = process_generation();
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

CudaContext current_context(const CudaDriver& driver) {
    CudaContext context;
    driver.check(driver.context_current(&context), "cuCtxGetCurrent");
    return context;
}

// Have the driver release something of the context's. If it does not, the context is beyond use, and there is nobody to tell.
template <class Release>
void release_in(CudaContext context, Release release) {
    const CudaDriver& driver = CudaDriver::get();
    if (driver.generation != process_generation() || driver.context_push(context) != 0) return;
    release(driver);
    driver.context_pop(&context);
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
    made.context_ = current_context(driver);
    driver.check(driver.stream_create(&made.handle_, kStreamNonBlocking), "cuStreamCreate");
    return made;
}

CudaStream::~CudaStream() {
    if (handle_) release_in(context_, [this](const CudaDriver& driver) { driver.stream_destroy(handle_); });
}

CudaEvent CudaEvent::create() {
    CudaEvent made;
    const CudaDriver& driver = CudaDriver::get();
    made.context_ = current_context(driver);
    driver.check(driver.event_create(&made.handle_, kEventBlockingSync | kEventDisableTiming), "cuEventCreate");
    return made;
}

CudaEvent::~CudaEvent() {
    if (handle_) release_in(context_, [this](const CudaDriver& driver) { driver.event_destroy(handle_); });
}

CudaHostRegistration::CudaHostRegistration(void* memory, std::size_t size) {
    const CudaDriver& driver = CudaDriver::get();
    context_ = current_context(driver);
    driver.check(driver.host_register(memory, size, kHostRegisterPortable), "cuMemHostRegister");
    memory_ = memory;
}

CudaHostRegistration::~CudaHostRegistration() {
    if (memory_) release_in(context_, [this](const CudaDriver& driver) { driver.host_unregister(memory_); });
}

}  // namespace deepnvme

// CUDA's driver API, opened at run time: nothing here needs CUDA to be compiled, or a GPU to be loaded.
//
// What is declared is what the driver documents (cuda.h, CUDA 12); its entry points keep their names and arguments for good, and
// the ones that once changed have a new name (_v2).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace deepnvme {

using CudaResult = int;  // 0 is success
constexpr CudaResult kCudaNotReady = 600;
using CudaDevice = int;
using CudaContext = struct CudaContextOpaque*;
using CudaStreamHandle = struct CudaStreamOpaque*;
using CudaEventHandle = struct CudaEventOpaque*;
using CudaDevicePointer = std::uint64_t;

// The driver's functions. One for the process, never closed: the driver does not bear that.
struct CudaDriver {
    CudaResult (*init)(unsigned flags);
    CudaResult (*primary_context_retain)(CudaContext*, CudaDevice);
    CudaResult (*context_push)(CudaContext);
    CudaResult (*context_pop)(CudaContext*);
    CudaResult (*context_current)(CudaContext*);
    CudaResult (*stream_create)(CudaStreamHandle*, unsigned flags);
    CudaResult (*stream_destroy)(CudaStreamHandle);
    CudaResult (*stream_synchronize)(CudaStreamHandle);
    CudaResult (*event_create)(CudaEventHandle*, unsigned flags);
    CudaResult (*event_record)(CudaEventHandle, CudaStreamHandle);
    CudaResult (*event_query)(CudaEventHandle);
    CudaResult (*event_synchronize)(CudaEventHandle);
    CudaResult (*event_destroy)(CudaEventHandle);
    CudaResult (*copy_to_device)(CudaDevicePointer, const void*, std::size_t, CudaStreamHandle);
    CudaResult (*copy_from_device)(void*, CudaDevicePointer, std::size_t, CudaStreamHandle);
    CudaResult (*host_register)(void*, std::size_t, unsigned flags);
    CudaResult (*host_unregister)(void*);
    CudaResult (*error_name)(CudaResult, const char**);
    CudaResult (*error_string)(CudaResult, const char**);
    std::uint64_t generation;  // of the process that opened it

    // Opens libcuda the first time. Throws std::runtime_error saying what is missing; asked again, it tries again.
    static const CudaDriver& get();
    // Throws IoError(EIO) naming the call and CUDA's reason, unless `result` is success.
    void check(CudaResult result, const char* call) const;
    // "CUDA_ERROR_INVALID_VALUE (invalid argument)"
    std::string describe(CudaResult result) const;
};

// The device's primary context, the one that torch uses, is current on this thread while this lives. Every call on what belongs to a
// device wants that, even those that release it; what is below sees to it on its own when it goes. In a forked child, which has no use
// of its parent's driver, it goes without a call.
class CudaContextGuard {
public:
    // Throws IoError.
    explicit CudaContextGuard(CudaDevice device);
    ~CudaContextGuard();
    CudaContextGuard(const CudaContextGuard&) = delete;
    CudaContextGuard& operator=(const CudaContextGuard&) = delete;
};

// A stream of our own. Move-only; the context was current when it was made.
class CudaStream {
public:
    CudaStream() noexcept = default;
    // Not ordered with the default stream. Throws IoError.
    static CudaStream create();
    CudaStream(CudaStream&& other) noexcept { *this = std::move(other); }
    CudaStream& operator=(CudaStream&& other) noexcept {
        std::swap(context_, other.context_);
        std::swap(handle_, other.handle_);
        return *this;
    }
    ~CudaStream();

    CudaStreamHandle get() const noexcept { return handle_; }

private:
    CudaContext context_ = nullptr;
    CudaStreamHandle handle_ = nullptr;
};

// A point in a stream's work. Move-only; the context was current when it was made.
class CudaEvent {
public:
    CudaEvent() noexcept = default;
    // Whoever waits for it sleeps. Throws IoError.
    static CudaEvent create();
    CudaEvent(CudaEvent&& other) noexcept { *this = std::move(other); }
    CudaEvent& operator=(CudaEvent&& other) noexcept {
        std::swap(context_, other.context_);
        std::swap(handle_, other.handle_);
        return *this;
    }
    ~CudaEvent();

    CudaEventHandle get() const noexcept { return handle_; }

private:
    CudaContext context_ = nullptr;
    CudaEventHandle handle_ = nullptr;
};

// Host memory that every device can copy from and to without a detour, for as long as this lives. Move-only.
class CudaHostRegistration {
public:
    CudaHostRegistration() noexcept = default;
    // Throws IoError. The context of some device is current.
    CudaHostRegistration(void* memory, std::size_t size);
    CudaHostRegistration(CudaHostRegistration&& other) noexcept { *this = std::move(other); }
    CudaHostRegistration& operator=(CudaHostRegistration&& other) noexcept {
        std::swap(context_, other.context_);
        std::swap(memory_, other.memory_);
        return *this;
    }
    ~CudaHostRegistration();

private:
    CudaContext context_ = nullptr;
    void* memory_ = nullptr;
};

}  // namespace deepnvme

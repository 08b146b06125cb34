// Compiled and never run: what we declare of CUDA's driver and of cuFile is what their headers declare.
#include <cuda.h>
#include <cufile.h>

#include <cstddef>
#include <iterator>

#include "gds/cufile.cpp"

namespace deepnvme::gds {

template <class Function>
struct Shape;
template <class Result, class... Arguments>
struct Shape<Result (*)(Arguments...)> {
    static constexpr std::size_t count = sizeof...(Arguments);
    static constexpr std::size_t sizes[] = {sizeof(Result), sizeof(Arguments)...};
};

// Types have other names there; their number and sizes are what a call depends on.
template <class Ours, class Theirs>
constexpr bool alike() {
    using A = Shape<Ours>;
    using B = Shape<Theirs>;
    if (A::count != B::count) return false;
    for (std::size_t i = 1; i <= A::count; ++i)
        if (A::sizes[i] != B::sizes[i]) return false;
    return true;
}

#define ALIKE(member, function) static_assert(alike<decltype(CudaDriver::member), decltype(&function)>(), #function)
ALIKE(init, cuInit);
ALIKE(primary_context_retain, cuDevicePrimaryCtxRetain);
ALIKE(context_push, cuCtxPushCurrent_v2);
ALIKE(context_pop, cuCtxPopCurrent_v2);
ALIKE(context_current, cuCtxGetCurrent);
ALIKE(stream_create, cuStreamCreate);
ALIKE(stream_destroy, cuStreamDestroy_v2);
ALIKE(stream_synchronize, cuStreamSynchronize);
ALIKE(event_create, cuEventCreate);
ALIKE(event_record, cuEventRecord);
ALIKE(event_query, cuEventQuery);
ALIKE(event_synchronize, cuEventSynchronize);
ALIKE(event_destroy, cuEventDestroy_v2);
ALIKE(copy_to_device, cuMemcpyHtoDAsync_v2);
ALIKE(copy_from_device, cuMemcpyDtoHAsync_v2);
ALIKE(host_register, cuMemHostRegister_v2);
ALIKE(host_unregister, cuMemHostUnregister);
ALIKE(error_name, cuGetErrorName);
ALIKE(error_string, cuGetErrorString);
static_assert(CUDA_ERROR_NOT_READY == kCudaNotReady);
static_assert(CU_STREAM_NON_BLOCKING == 1 && CU_EVENT_BLOCKING_SYNC == 1 && CU_EVENT_DISABLE_TIMING == 2 && CU_MEMHOSTREGISTER_PORTABLE == 1);

static_assert(sizeof(Status) == sizeof(CUfileError_t) && offsetof(Status, cuda) == offsetof(CUfileError_t, cu_err));
static_assert(sizeof(Descriptor) == sizeof(CUfileDescr_t) && offsetof(Descriptor, handle) == offsetof(CUfileDescr_t, handle));
static_assert(offsetof(Descriptor, operations) == offsetof(CUfileDescr_t, fs_ops));
static_assert(CU_FILE_HANDLE_TYPE_OPAQUE_FD == 1 && CUFILE_PARAM_PROPERTIES_ALLOW_COMPAT_MODE == kAllowCompatMode);

constexpr int kTheirs[] = {
    CU_FILE_DRIVER_NOT_INITIALIZED, CU_FILE_DRIVER_VERSION_MISMATCH, CU_FILE_PLATFORM_NOT_SUPPORTED, CU_FILE_IO_NOT_SUPPORTED,
    CU_FILE_DEVICE_NOT_SUPPORTED, CU_FILE_NVFS_DRIVER_ERROR, CU_FILE_CUDA_DRIVER_ERROR, CU_FILE_CUDA_POINTER_INVALID,
    CU_FILE_CUDA_MEMORY_TYPE_INVALID, CU_FILE_CUDA_POINTER_RANGE_ERROR, CU_FILE_CUDA_CONTEXT_MISMATCH, CU_FILE_INVALID_MAPPING_SIZE,
    CU_FILE_INVALID_MAPPING_RANGE, CU_FILE_INVALID_FILE_TYPE, CU_FILE_DIO_NOT_SET, CU_FILE_INVALID_VALUE,
    CU_FILE_MEMORY_ALREADY_REGISTERED, CU_FILE_PERMISSION_DENIED, CU_FILE_NVFS_SETUP_ERROR, CU_FILE_IO_DISABLED,
    CU_FILE_GPU_MEMORY_PINNING_FAILED, CU_FILE_NOMEM_ERROR,
};
constexpr bool errors_are_theirs() {
    if (std::size(kKnown) != std::size(kTheirs)) return false;
    for (std::size_t i = 0; i < std::size(kTheirs); ++i)
        if (kKnown[i].error != kTheirs[i]) return false;
    return true;
}
static_assert(errors_are_theirs());

// CuFile::Library is private: its members' types once more, as calls.
static_assert(alike<ssize_t (*)(Handle, void*, std::size_t, off_t, off_t), decltype(&cuFileRead)>());
static_assert(alike<ssize_t (*)(Handle, const void*, std::size_t, off_t, off_t), decltype(&cuFileWrite)>());
static_assert(alike<Status (*)(Handle*, Descriptor*), decltype(&cuFileHandleRegister)>());
static_assert(alike<void (*)(Handle), decltype(&cuFileHandleDeregister)>());
static_assert(alike<Status (*)(const void*, std::size_t, int), decltype(&cuFileBufRegister)>());
static_assert(alike<Status (*)(const void*), decltype(&cuFileBufDeregister)>());
static_assert(alike<Status (*)(int*), decltype(&cuFileGetVersion)>());
static_assert(alike<Status (*)(int, bool), decltype(&cuFileSetParameterBool)>());

}  // namespace deepnvme::gds

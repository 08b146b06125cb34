// cuFile, NVIDIA's library for transfers between drives and GPU memory, opened at run time: nothing here needs it to be compiled.
//
// What is declared is what cufile.h of CUDA 12 and 13 documents.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>
#include <string>

#include "engine/device_io.h"

namespace deepnvme::gds {

// The library, opened, with its driver. One for the process: see get().
class CuFile : public DeviceIo {
public:
    // Opens the library and its driver the first time; the driver is closed at exit. cuFile's own detours through host memory are
    // switched off, so that what goes this way goes directly: our staging is the better detour. Throws std::runtime_error saying what
    // is missing, the same each time.
    static CuFile& get();

    // "1.14"
    const std::string& version() const noexcept { return version_; }

    // The whole range [memory, memory + size) is registered until unregister_memory(memory). Throws IoError. `size`: at least
    // kLeastRegistered. A block may begin where the range does and be longer: no sector of it would then be within.
    void register_memory(CudaDevice device, std::byte* memory, std::size_t size);
    static constexpr std::size_t kLeastRegistered = 4096;
    // False if no range began exactly here. Throws IoError, and then the range is registered still.
    bool unregister_memory(CudaDevice device, const std::byte* memory);

    std::shared_ptr<void> open(int fd) override;
    std::int64_t read(void* file, CudaDevice device, std::byte* memory, std::size_t length, std::uint64_t offset) override;
    std::int64_t write(void* file, CudaDevice device, const std::byte* memory, std::size_t length, std::uint64_t offset) override;
    IoError explain(std::int64_t result) const override;

    ~CuFile() override;
    CuFile(const CuFile&) = delete;
    CuFile& operator=(const CuFile&) = delete;

private:
    struct Library;
    CuFile();
    bool usable_here() const noexcept;

    std::unique_ptr<Library> library_;
    const std::uint64_t generation_;
    std::string version_;
};

}  // namespace deepnvme::gds

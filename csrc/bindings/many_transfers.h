// Calls for many transfers: from Python's lists of tensors, files and offsets to requests, one for each file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "bindings/pending.h"

namespace deepnvme::bindings {

// From a path or an OpenFile. Throws ValueError for a closed one.
SharedFile target_of(nb::handle target);

// The transfers of one call of read_many or write_many, sorted by file.
class ManyTransfers {
public:
    // Throws TypeError and ValueError for what can be seen without a look at the tensors or the files.
    ManyTransfers(Direction direction, nb::handle tensors, nb::handle targets, nb::handle offsets);

    // Start all of them, some at a time, so that the first are under way while the tensors of the last are looked at. If this
    // throws, those that were started before are in `many`, too.
    void start(Engine& engine, ManyParts& many);
    // What has to outlive them: filled by start().
    nb::object owner() const { return storages_; }

private:
    struct Memory {
        std::byte* data;
        std::uint64_t nbytes;
        std::optional<DeviceMemory> device;
    };

    std::size_t transfer(std::size_t position) const { return order_.empty() ? position : order_[position]; }
    std::uint32_t file_of(std::size_t transfer) const { return files_.empty() ? 0 : files_[transfer]; }
    Memory memory_of(std::size_t transfer);
    void start(Engine& engine, std::span<const Memory> memory, std::size_t begin, ManyParts& many);
    std::shared_ptr<Request> start(Engine& engine, std::span<const Memory> memory, std::size_t begin, RequestGroup& group);

    const Direction direction_;
    nb::tuple tensors_;
    nb::list storages_;  // of the tensors, and of the copies of those that are not contiguous
    std::vector<std::int64_t> offsets_;
    std::vector<SharedFile> targets_;        // the files, each once
    std::vector<std::uint32_t> files_;   // of each transfer its target; empty if there is one for all
    std::vector<std::uint32_t> counts_;  // transfers of each target
    std::vector<std::uint32_t> order_;   // the transfers file by file; empty if they are so as they came
    std::uint32_t current_ = UINT32_MAX;  // the target of the last transfer started
    std::size_t started_ = 0;             // transfers of that target
};

// Records of a file to be read into the rows of a tensor, or written from them: `Engine.gather` and `Engine.scatter`.
class RecordTransfers {
public:
    // Throws TypeError and ValueError.
    RecordTransfers(Direction direction, nb::handle file, nb::handle ids, nb::handle rows, nb::handle record_size,
                    std::int64_t base);

    void start(Engine& engine, ManyParts& many);
    nb::object owner() const { return rows_.storage; }

private:
    const Direction direction_;
    SharedFile file_;
    TensorMemory ids_;
    TensorMemory rows_;
    std::uint64_t base_;
};

}  // namespace deepnvme::bindings

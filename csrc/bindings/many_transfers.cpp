#include "bindings/many_transfers.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <unordered_map>
#include <utility>

#include "bindings/session.h"

namespace deepnvme::bindings {

namespace {

// Tensors looked at before their transfers start: few at first, so that the drive has work at once; then more, since between two
// such parts another thread can take the GIL, and keep it for some milliseconds.
constexpr std::size_t kFirstPart = 256;
constexpr std::size_t kLargestPart = 4096;

nb::tuple tuple_of(nb::handle sequence, const char* name) {
    PyObject* tuple = PySequence_Tuple(sequence.ptr());
    if (tuple) return nb::steal<nb::tuple>(tuple);
    if (!PyErr_ExceptionMatches(PyExc_TypeError)) throw nb::python_error();
    PyErr_Clear();
    throw type_error(std::string(name) + " must be a sequence, got " + name_of_type(sequence));
}

bool is_path(nb::handle target) {
    return PyUnicode_Check(target.ptr()) || PyBytes_Check(target.ptr()) || nb::hasattr(target, "__fspath__");
}

// Of a File of this op or of another of ours, which lives as long as that; null for anything else.
const OpenFile* open_file_of(nb::handle target) {
    if (PyUnicode_Check(target.ptr())) return nullptr;
    OpenFile* own = nullptr;
    if (nb::try_cast(target, own, false)) return own;  // null for None
    if (is_path(target)) return nullptr;
    const nb::object shared = nb::getattr(target, "_shared", nb::none());
    if (!PyCapsule_IsValid(shared.ptr(), kSharedFile)) return nullptr;
    return static_cast<const OpenFile*>(PyCapsule_GetPointer(shared.ptr(), kSharedFile));
}

bool is_one_target(nb::handle targets) { return is_path(targets) || open_file_of(targets); }

void require_as_many(const char* name, std::size_t count, std::size_t tensors) {
    if (count == tensors) return;
    throw value_error("there must be as many " + std::string(name) + " as tensors, got " + std::to_string(count) + " and " +
                          std::to_string(tensors));
}

std::vector<std::int64_t> offsets_of(nb::handle offsets, std::size_t tensors) {
    const nb::tuple numbers = tuple_of(offsets, "offsets");
    require_as_many("offsets", numbers.size(), tensors);
    std::vector<std::int64_t> values(tensors);
    for (std::size_t i = 0; i < tensors; ++i) {
        PyObject* number = PyTuple_GetItem(numbers.ptr(), static_cast<Py_ssize_t>(i));
        int overflow = PyLong_CheckExact(number) ? 0 : 1;
        if (!overflow) values[i] = PyLong_AsLongLongAndOverflow(number, &overflow);
        if (overflow) values[i] = integer_of(number, "offset");
        if (values[i] < 0)
            throw value_error("offset must not be negative, got " + std::to_string(values[i]) + " at " + std::to_string(i));
    }
    return values;
}

bool same_device(const std::optional<DeviceMemory>& left, const std::optional<DeviceMemory>& right) {
    return left.has_value() == right.has_value() && (!left || (left->device == right->device && left->stream == right->stream));
}

}  // namespace

SharedFile target_of(nb::handle target) {
    const OpenFile* const open = open_file_of(target);
    if (!open) return SharedFile(path_of(target));
    open->get();
    return SharedFile(open->file);
}

ManyTransfers::ManyTransfers(Direction direction, nb::handle tensors, nb::handle targets, nb::handle offsets)
    : direction_(direction), tensors_(tuple_of(tensors, "tensors")) {
    const std::size_t count = tensors_.size();
    if (count > UINT32_MAX) throw value_error("too many tensors for one call: " + std::to_string(count));
    const bool one = is_one_target(targets);
    if (!offsets.is_none()) offsets_ = offsets_of(offsets, count);
    else if (one && count > 0) throw value_error("offsets are needed for several tensors of one file");
    else offsets_.resize(count);
    if (one) {
        targets_.push_back(target_of(targets));
        counts_.push_back(static_cast<std::uint32_t>(count));
        return;
    }
    const nb::tuple listed = tuple_of(targets, direction == Direction::read ? "source" : "target");
    require_as_many("files", listed.size(), count);
    std::unordered_map<std::string, std::uint32_t> paths;
    std::unordered_map<File*, std::uint32_t> open;
    bool in_order = true;
    files_.reserve(count);
    for (const nb::handle each : listed) {
        SharedFile target = target_of(each);
        const auto next = static_cast<std::uint32_t>(targets_.size());
        const std::uint32_t file = target.file ? open.emplace(target.file.get(), next).first->second
                                               : paths.emplace(target.path, next).first->second;
        if (file == next) {
            targets_.push_back(std::move(target));
            counts_.push_back(0);
        }
        in_order = in_order && (files_.empty() || file >= files_.back());
        files_.push_back(file);
        ++counts_[file];
    }
    if (in_order) return;
    order_.resize(count);
    std::iota(order_.begin(), order_.end(), 0u);
    std::stable_sort(order_.begin(), order_.end(), [this](auto left, auto right) { return files_[left] < files_[right]; });
}

ManyTransfers::Memory ManyTransfers::memory_of(std::size_t transfer) {
    const nb::handle tensor = PyTuple_GetItem(tensors_.ptr(), static_cast<Py_ssize_t>(transfer));
    if (const auto plain = plain_memory_of(tensor)) {
        storages_.append(storage_of(tensor));
        return {plain->data(), plain->size(), std::nullopt};
    }
    const auto where = [transfer] { return "tensors[" + std::to_string(transfer) + "]: "; };
    try {
        const TensorMemory memory = bindings::memory_of(tensor, direction_);
        storages_.append(memory.storage);
        return {memory.data, memory.nbytes, memory.device};
    } catch (const nb::builtin_exception& error) {
        throw nb::builtin_exception(error.type(), (where() + error.what()).c_str());
    }
}

void ManyTransfers::start(Engine& engine, ManyParts& many) {
    std::vector<Memory> memory;
    std::size_t most = kFirstPart;
    for (std::size_t begin = 0; begin < tensors_.size(); begin += memory.size()) {
        const std::size_t end = std::min(begin + std::exchange(most, std::min(2 * most, kLargestPart)), tensors_.size());
        memory.clear();
        for (std::size_t position = begin; position < end; ++position) memory.push_back(memory_of(transfer(position)));
        nb::gil_scoped_release release;
        start(engine, memory, begin, many);
    }
}

// Start the transfers from `begin` on in the order of the files, whose memory is given. Without the GIL.
void ManyTransfers::start(Engine& engine, std::span<const Memory> memory, std::size_t begin, ManyParts& many) {
    RequestGroup group;
    for (std::size_t i = 0; i < memory.size();) {
        const std::uint32_t file = file_of(transfer(begin + i));
        std::size_t end = i + 1;
        const auto together = [&](std::size_t j) {
            return file_of(transfer(begin + j)) == file && same_device(memory[j].device, memory[i].device);
        };
        while (end < memory.size() && together(end)) ++end;
        if (std::exchange(current_, file) != file) started_ = 0;
        // In the list before anything is started, so that nothing started can be missing there.
        many.parts.push_back({nullptr, begin + i, {}, file});
        try {
            Part& part = many.parts.back();
            for (std::size_t j = i; j < end && !order_.empty(); ++j) part.indices.push_back(order_[begin + j]);
            part.request = start(engine, memory.subspan(i, end - i), begin + i, group);
        } catch (...) {
            many.parts.pop_back();
            throw;
        }
        many.unfinished = many.parts.size();
        many.transfers += end - i;
        many.nbytes += many.parts.back().request->length;
        i = end;
    }
}

// One request for transfers of one file and device.
std::shared_ptr<Request> ManyTransfers::start(Engine& engine, std::span<const Memory> memory, std::size_t begin,
                                              RequestGroup& group) {
    SharedFile& target = targets_[current_];
    if (counts_[current_] == 1) {  // as read() and write() do
        const auto& [data, nbytes, device] = memory[0];
        const std::int64_t offset = offsets_[transfer(begin)];
        const auto& [file, path, by_path] = target;
        if (direction_ == Direction::read)
            return file ? engine.read(data, nbytes, file, offset, device, &group)
                        : engine.read(data, nbytes, path, offset, device, &group);
        return file ? engine.write(data, nbytes, file, offset, device, &group)
                    : engine.write(data, nbytes, path, offset, device, &group);
    }
    std::vector<Piece> pieces;
    pieces.reserve(memory.size());
    for (std::size_t i = 0; i < memory.size(); ++i)
        pieces.push_back({memory[i].data, static_cast<std::uint64_t>(offsets_[transfer(begin + i)]), memory[i].nbytes});
    group.hand_over();  // the file is waited for otherwise
    const auto kind = direction_ == Direction::read ? Request::Kind::read : Request::Kind::write;
    started_ += memory.size();
    const bool last = started_ == counts_[current_];
    return engine.transfer(kind, std::make_unique<Pieces>(std::move(pieces)), target, last, memory[0].device);
}

RecordTransfers::RecordTransfers(Direction direction, nb::handle file, nb::handle ids, nb::handle rows, nb::handle record_size,
                                 std::int64_t base)
    : direction_(direction), file_(target_of(file)) {
    const char* const name = direction == Direction::read ? "out" : "values";
    require_tensor(ids);
    const auto torch = nb::module_::import_("torch");
    const nb::object dtype = ids.attr("dtype");
    try {
        torch.attr("iinfo")(dtype);
    } catch (const nb::python_error& error) {
        if (!error.matches(PyExc_TypeError)) throw;
        throw type_error("ids must be a tensor of integers, got one of " + text_of(dtype));
    }
    if (base < 0) throw value_error("base must not be negative, got " + std::to_string(base));
    base_ = static_cast<std::uint64_t>(base);
    rows_ = memory_of(rows, direction);
    ids_ = memory_of(ids.attr("to")(torch.attr("int64")), Direction::write);
    if (ids_.device) throw value_error("ids must be on the CPU");
    const nb::object shape = ids.attr("shape"), rows_shape = rows.attr("shape");
    if (!nb::object(rows_shape[nb::slice(nb::len(shape))]).equal(shape))
        throw value_error(std::string(name) + " must have the shape of ids, and that of a record after it, got " +
                              text_of(rows_shape) + " for " + text_of(shape));
    const std::uint64_t count = ids_.nbytes / sizeof(std::int64_t);
    if (!record_size.is_none() && static_cast<std::uint64_t>(integer_of(record_size, "record_size")) * count != rows_.nbytes)
        throw value_error("record_size is " + text_of(record_size) + ", but " + name + " has rows of " +
                              std::to_string(rows_.nbytes / count) + " bytes");
}

void RecordTransfers::start(Engine& engine, ManyParts& many) {
    const std::uint64_t count = ids_.nbytes / sizeof(std::int64_t);
    many.transfers = count;
    many.nbytes = rows_.nbytes;
    if (rows_.nbytes == 0) return;
    many.parts.reserve(1);
    const auto kind = direction_ == Direction::read ? Request::Kind::read : Request::Kind::write;
    nb::gil_scoped_release release;
    std::vector<std::int64_t> ids(count);
    std::memcpy(ids.data(), ids_.data, ids_.nbytes);
    auto pieces = std::make_unique<Pieces>(rows_.data, rows_.nbytes / count, base_, std::move(ids));
    auto request = engine.transfer(kind, std::move(pieces), file_, /*last=*/true, rows_.device);
    many.parts.push_back({std::move(request), 0, {}});
    many.unfinished = 1;
}

}  // namespace deepnvme::bindings

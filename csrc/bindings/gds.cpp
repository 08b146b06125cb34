// The gds module: DeepSpeed's gds_handle (DeepSpeed 0.19, py_ds_gds.cpp), and memory registered with cuFile.
#include <map>
#include <utility>

#include "bindings/aio_handle.h"
#include "bindings/bind_functions.h"
#include "gds/cufile.h"

namespace deepnvme::bindings {

namespace {

using namespace pybind11::literals;

// Of memory registered with cuFile, by its first byte: kept until it is unregistered, since it must not be freed before.
// With the GIL held.
std::map<std::uintptr_t, py::object>& registered_storages() {
    static auto* storages = new std::map<std::uintptr_t, py::object>;  // never destroyed: the interpreter may be gone by then
    return *storages;
}

std::unique_ptr<Engine> make_engine(const EngineOptions& options, bool strict) {
    std::string reason;
    try {
        // cuFile lives as long as the process.
        const std::shared_ptr<DeviceIo> cufile(std::shared_ptr<void>(), &gds::CuFile::get());
        const auto make_backend = [cufile](unsigned capacity) { return make_device_backend(capacity, cufile); };
        return std::make_unique<Engine>(options, "gds", make_backend, cufile, strict);
    } catch (const IoError&) {
        throw;
    } catch (const std::runtime_error& error) {
        if (strict) throw;
        reason = error.what();
    }
    auto engine = std::make_unique<Engine>(options);
    engine->note_fallback("not by GPUDirect Storage, through host memory: " + reason);
    return engine;
}

std::unique_ptr<AioHandle> make_handle(py::handle block_size, py::handle queue_depth, bool single_submit, bool overlap_events,
                                       py::handle intra_op_parallelism, const py::object& num_threads, bool strict) {
    const auto options = handle_options(block_size, queue_depth, single_submit, intra_op_parallelism, num_threads);
    std::unique_ptr<Engine> engine;
    {
        py::gil_scoped_release release;
        engine = make_engine(options, strict);
    }
    return std::make_unique<AioHandle>(std::move(engine), overlap_events);
}

// False where there is no GPUDirect Storage, and for less than cuFile ever transfers: that goes through host memory, and needs no
// registration.
bool pin_device_tensor(AioHandle& handle, py::handle tensor) {
    const TensorMemory memory = memory_of(tensor, Direction::read, "pin");
    if (!memory.device) throw py::value_error("pin_device_tensor takes a tensor on a CUDA device; new_cpu_locked_tensor gives pinned ones on the host");
    if (handle.session().engine().backend() != "gds" || memory.nbytes < gds::CuFile::kLeastRegistered) return false;
    {
        py::gil_scoped_release release;
        gds::CuFile::get().register_memory(memory.device->device, memory.data, memory.nbytes);
    }
    registered_storages()[reinterpret_cast<std::uintptr_t>(memory.data)] = memory.storage;
    return true;
}

bool unpin_device_tensor(AioHandle&, py::handle tensor) {
    const TensorMemory memory = memory_of(tensor, Direction::read, "unpin");
    if (!memory.device) throw py::value_error("unpin_device_tensor takes a tensor on a CUDA device");
    const auto found = registered_storages().find(reinterpret_cast<std::uintptr_t>(memory.data));
    if (found == registered_storages().end()) return false;
    {
        py::gil_scoped_release release;
        gds::CuFile::get().unregister_memory(memory.device->device, memory.data);
    }
    registered_storages().erase(found);
    return true;
}

py::object new_pinned_device_tensor(AioHandle& handle, py::handle num_elem, py::handle example) {
    require_tensor(example);
    const auto tensor = py::module_::import("torch").attr("empty")(integer_of(num_elem, "num_elem"), "dtype"_a = example.attr("dtype"),
                                                                  "device"_a = example.attr("device"));
    pin_device_tensor(handle, tensor);
    return tensor;
}

}  // namespace

}  // namespace deepnvme::bindings

PYBIND11_MODULE(DEEPNVME_EXTENSION_NAME, module) {
    using namespace deepnvme;
    using namespace deepnvme::bindings;
    using namespace pybind11::literals;
    module.attr("source_hash") = DEEPNVME_SOURCE_HASH;
    bind_errors(module);
    bind_pinned_buffer(module);
    define_handle(module, "gds_handle")
        .def(py::init(&make_handle), "block_size"_a = kHandleBlockSize, "queue_depth"_a = kHandleQueueDepth, "single_submit"_a = false,
             "overlap_events"_a = false, "intra_op_parallelism"_a = 1, py::kw_only(), "num_threads"_a = py::none(), "strict"_a = false)
        .def("new_pinned_device_tensor", &new_pinned_device_tensor, "num_elem"_a, "example_tensor"_a)
        .def("free_pinned_device_tensor", &unpin_device_tensor, "tensor"_a)
        .def("pin_device_tensor", &pin_device_tensor, "tensor"_a)
        .def("unpin_device_tensor", &unpin_device_tensor, "tensor"_a);
    module.def("adopt_pinned_ranges", [](const py::capsule& shared) { pinned_ranges::adopt(shared.get_pointer()); }, "shared"_a);
    module.def("version", [] { return gds::CuFile::get().version(); });
}

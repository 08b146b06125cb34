// The gds module: DeepSpeed's gds_handle (DeepSpeed 0.19, py_ds_gds.cpp), and memory registered with cuFile.
#include <nanobind/stl/string.h>

#include <map>
#include <utility>

#include "bindings/aio_handle.h"
#include "bindings/bind_functions.h"
#include "bindings/help_texts.h"
#include "gds/cufile.h"

namespace deepnvme::bindings {

namespace {

using namespace nanobind::literals;

// Of memory registered with cuFile, by its first byte: kept until it is unregistered, since it must not be freed before.
// With the GIL held.
std::map<std::uintptr_t, nb::object>& registered_storages() {
    static auto* storages = new std::map<std::uintptr_t, nb::object>;  // never destroyed: the interpreter may be gone by then
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

void make_handle(AioHandle* self, nb::handle block_size, nb::handle queue_depth, Flag single_submit, Flag overlap_events,
                 nb::handle intra_op_parallelism, const nb::object& num_threads, Flag strict) {
    const auto options = handle_options(block_size, queue_depth, single_submit, intra_op_parallelism, num_threads);
    std::unique_ptr<Engine> engine;
    {
        nb::gil_scoped_release release;
        engine = make_engine(options, strict);
    }
    new (self) AioHandle(std::move(engine), overlap_events);
}

// False where there is no GPUDirect Storage, and for less than cuFile ever transfers: that goes through host memory, and needs no
// registration.
bool pin_device_tensor(AioHandle& handle, nb::handle tensor) {
    const TensorMemory memory = memory_of(tensor, Direction::read, "pin");
    if (!memory.device) throw value_error("pin_device_tensor takes a tensor on a CUDA device; new_cpu_locked_tensor gives pinned ones on the host");
    if (handle.session().engine().backend() != "gds" || memory.nbytes < gds::CuFile::kLeastRegistered) return false;
    {
        nb::gil_scoped_release release;
        gds::CuFile::get().register_memory(memory.device->device, memory.data, memory.nbytes);
    }
    registered_storages()[reinterpret_cast<std::uintptr_t>(memory.data)] = memory.storage;
    return true;
}

bool unpin_device_tensor(AioHandle&, nb::handle tensor) {
    const TensorMemory memory = memory_of(tensor, Direction::read, "unpin");
    if (!memory.device) throw value_error("unpin_device_tensor takes a tensor on a CUDA device");
    const auto found = registered_storages().find(reinterpret_cast<std::uintptr_t>(memory.data));
    if (found == registered_storages().end()) return false;
    {
        nb::gil_scoped_release release;
        gds::CuFile::get().unregister_memory(memory.device->device, memory.data);
    }
    registered_storages().erase(found);
    return true;
}

nb::object new_pinned_device_tensor(AioHandle& handle, nb::handle num_elem, nb::handle example) {
    require_tensor(example);
    const auto tensor = nb::module_::import_("torch").attr("empty")(integer_of(num_elem, "num_elem"), "dtype"_a = example.attr("dtype"),
                                                                  "device"_a = example.attr("device"));
    pin_device_tensor(handle, tensor);
    return tensor;
}

}  // namespace

}  // namespace deepnvme::bindings

NB_MODULE(DEEPNVME_EXTENSION_NAME, module) {
    using namespace deepnvme;
    using namespace deepnvme::bindings;
    using namespace nanobind::literals;
    nb::set_leak_warnings(false);  // see async_io.cpp
    module.attr("source_hash") = DEEPNVME_SOURCE_HASH;
    bind_errors(module);
    bind_pinned_buffer(module);
    define_handle(module, "gds_handle", help::gds_handle)
        .def(
            "__init__", &make_handle,
            "block_size"_any = kHandleBlockSize, "queue_depth"_any = kHandleQueueDepth, "single_submit"_a = false,
            "overlap_events"_a = false, "intra_op_parallelism"_any = 1, nb::kw_only(), "num_threads"_a = nb::none(),
            "strict"_a = false,
            nb::sig("def __init__(self, block_size: int = 1048576, queue_depth: int = 128, single_submit: bool = False, "
                    "overlap_events: bool = False, intra_op_parallelism: int = 1, *, num_threads: int | None = None, strict: "
                    "bool = False) -> None"))
        .def("new_pinned_device_tensor", &new_pinned_device_tensor, "num_elem"_any, "example_tensor"_any,
             nb::sig("def new_pinned_device_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor"),
             help::gds_handle_new_pinned_device_tensor)
        .def("free_pinned_device_tensor", &unpin_device_tensor, "tensor"_any,
             nb::sig("def free_pinned_device_tensor(self, tensor: torch.Tensor) -> bool"),
             help::gds_handle_free_pinned_device_tensor)
        .def("pin_device_tensor", &pin_device_tensor, "tensor"_any,
             nb::sig("def pin_device_tensor(self, tensor: torch.Tensor) -> bool"),
             help::gds_handle_pin_device_tensor)
        .def("unpin_device_tensor", &unpin_device_tensor, "tensor"_any,
             nb::sig("def unpin_device_tensor(self, tensor: torch.Tensor) -> bool"),
             help::gds_handle_unpin_device_tensor);
    module.def("adopt_pinned_ranges", [](const nb::capsule& shared) { pinned_ranges::adopt(shared.data()); }, "shared"_a,
        help::adopt_pinned_ranges);
    module.def("version", [] { return gds::CuFile::get().version(); }, help::version);
}

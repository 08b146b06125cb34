// PinnedBuffer as Python sees it; async_io_op/__init__.pyi documents it.
#include "bindings/pinned_buffer.h"

#include <utility>

#include "bindings/bind_functions.h"
#include "bindings/conversions.h"

namespace deepnvme::bindings {

using namespace pybind11::literals;

namespace {

void warn_once(bool& warned, const std::string& text) {
    if (!std::exchange(warned, true) && PyErr_WarnEx(PyExc_RuntimeWarning, text.c_str(), 1) != 0) throw py::error_already_set();
}

void register_where_cuda_is_used(PinnedBuffer& buffer) {
    const auto cuda = py::module_::import("torch").attr("cuda");
    if (!cuda.attr("is_initialized")().cast<bool>()) return;
    const auto device = cuda.attr("current_device")().cast<CudaDevice>();
    static bool warned = false;
    std::string refusal;
    try {
        py::gil_scoped_release release;
        const CudaContextGuard context(device);
        buffer.register_with_cuda();
        return;
    } catch (const std::exception& error) {  // IoError, or there is no libcuda after all
        refusal = error.what();
    }
    warn_once(warned, "pinned memory could not be registered with CUDA, copies to and from devices are slower: " + refusal);
}

}  // namespace

std::unique_ptr<PinnedBuffer> make_pinned_buffer(std::int64_t nbytes, std::optional<int> node) {
    if (nbytes < 0) throw py::value_error("nbytes must not be negative, got " + std::to_string(nbytes));
    std::unique_ptr<PinnedBuffer> buffer;
    try {
        py::gil_scoped_release release;
        buffer = std::make_unique<PinnedBuffer>(static_cast<std::size_t>(nbytes), node);
    } catch (const std::bad_alloc&) {
        PyErr_SetString(PyExc_MemoryError, ("the system has no " + std::to_string(nbytes) + " bytes of memory to pin").c_str());
        throw py::error_already_set();
    }
    static bool warned = false;
    if (nbytes > 0 && !buffer->memory().locked())
        warn_once(warned, "mlock of " + std::to_string(nbytes) +
                              " bytes was refused: pinned tensors may be paged out; raise the limit with `ulimit -l`, or in limits.conf");
    static bool warned_of_node = false;
    if (const int error = buffer->memory().placement_error())
        warn_once(warned_of_node, "pinned memory could not be placed on NUMA node " + std::to_string(*node) + ": " + describe_errno(error));
    register_where_cuda_is_used(*buffer);
    return buffer;
}

bool is_pinned(py::handle tensor) {
    require_tensor(tensor);
    if (!tensor.attr("is_cpu").cast<bool>()) return false;
    const auto* data = reinterpret_cast<const std::byte*>(tensor.attr("data_ptr")().cast<std::uintptr_t>());
    return pinned_ranges::contains(data, tensor.attr("nbytes").cast<std::size_t>()) || tensor.attr("is_pinned")().cast<bool>();
}

void bind_pinned_buffer(py::module_& module) {
    py::class_<PinnedBuffer>(module, "PinnedBuffer", py::buffer_protocol(), py::module_local())
        .def_property_readonly("nbytes", [](const PinnedBuffer& self) { return self.memory().size(); })
        .def_property_readonly("locked", [](const PinnedBuffer& self) { return self.memory().locked(); })
        .def_buffer([](PinnedBuffer& self) {
            return py::buffer_info(reinterpret_cast<std::uint8_t*>(self.memory().data()), static_cast<py::ssize_t>(self.memory().size()));
        });
    const auto anywhere = [](std::int64_t nbytes, const py::none&) { return make_pinned_buffer(nbytes); };
    module.def("empty_pinned", anywhere, "nbytes"_a, "node"_a = py::none());
    module.def("empty_pinned", [](std::int64_t nbytes, int node) { return make_pinned_buffer(nbytes, node); }, "nbytes"_a, "node"_a);
    module.def("is_pinned", &is_pinned, "tensor"_a);
}

}  // namespace deepnvme::bindings

// PinnedBuffer as Python sees it; async_io_op/__init__.pyi documents it.
#include "bindings/pinned_buffer.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/unique_ptr.h>

#include <utility>

#include "bindings/bind_functions.h"
#include "bindings/help_texts.h"
#include "bindings/conversions.h"

namespace deepnvme::bindings {

using namespace nanobind::literals;

namespace {

void warn_once(bool& warned, const std::string& text) {
    if (!std::exchange(warned, true)) warn(text);
}

void register_where_cuda_is_used(PinnedBuffer& buffer) {
    const auto cuda = nb::module_::import_("torch").attr("cuda");
    if (!nb::cast<bool>(cuda.attr("is_initialized")())) return;
    const auto device = nb::cast<CudaDevice>(cuda.attr("current_device")());
    static bool warned = false;
    std::string refusal;
    try {
        nb::gil_scoped_release release;
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
    if (nbytes < 0) throw value_error("nbytes must not be negative, got " + std::to_string(nbytes));
    std::unique_ptr<PinnedBuffer> buffer;
    try {
        nb::gil_scoped_release release;
        buffer = std::make_unique<PinnedBuffer>(static_cast<std::size_t>(nbytes), node);
    } catch (const std::bad_alloc&) {
        PyErr_SetString(PyExc_MemoryError, ("the system has no " + std::to_string(nbytes) + " bytes of memory to pin").c_str());
        throw nb::python_error();
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

bool is_pinned(nb::handle tensor) {
    require_tensor(tensor);
    if (!nb::cast<bool>(tensor.attr("is_cpu"))) return false;
    const auto* data = reinterpret_cast<const std::byte*>(nb::cast<std::uintptr_t>(tensor.attr("data_ptr")()));
    return pinned_ranges::contains(data, nb::cast<std::size_t>(tensor.attr("nbytes"))) || nb::cast<bool>(tensor.attr("is_pinned")());
}

namespace {

int view_pinned_buffer(PyObject* self, Py_buffer* view, int flags) {
    if (!nb::inst_ready(self)) {  // made by PinnedBuffer.__new__
        PyErr_SetString(PyExc_BufferError, "the PinnedBuffer has no memory: empty_pinned makes one that has");
        return -1;
    }
    const PinnedMemory& memory = nb::inst_ptr<PinnedBuffer>(self)->memory();
    return PyBuffer_FillInfo(view, self, memory.data(), static_cast<Py_ssize_t>(memory.size()), /*readonly=*/0, flags);
}

const PyType_Slot buffer_protocol[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(&view_pinned_buffer)}, {0, nullptr}};

}  // namespace

void bind_pinned_buffer(nb::module_& module) {
    nb::class_<PinnedBuffer>(module, "PinnedBuffer", nb::type_slots(buffer_protocol), nb::is_weak_referenceable(),
                             help::PinnedBuffer)
        .def_prop_ro("nbytes", [](const PinnedBuffer& self) { return self.memory().size(); }, help::PinnedBuffer_nbytes)
        .def_prop_ro("locked", [](const PinnedBuffer& self) { return self.memory().locked(); }, help::PinnedBuffer_locked);
    module.def("empty_pinned", &make_pinned_buffer, "nbytes"_a, "node"_a = nb::none(), help::empty_pinned);
    module.def("is_pinned", &is_pinned, "tensor"_any, nb::sig("def is_pinned(tensor: torch.Tensor) -> bool"),
               help::is_pinned);
}

}  // namespace deepnvme::bindings

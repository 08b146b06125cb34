#include "bindings/conversions.h"

#include <utility>

#include "bindings/bind_functions.h"

namespace deepnvme::bindings {

namespace {

// DLPack's table of C functions (1.3), where torch has it: what a tensor's attributes say, without a Python object for each.
struct DlTensor {
    void* data;
    std::int32_t device_type, device;
    std::int32_t dimensions;
    std::uint8_t type, bits;
    std::uint16_t lanes;
    std::int64_t* shape;
    std::int64_t* strides;
    std::uint64_t byte_offset;
};
struct DlPackApi {
    std::uint32_t major, minor;
    void* older;
    void* allocate;
    void* from_python;
    void* to_python;
    int (*describe)(void* tensor, DlTensor* described);
};
constexpr std::int32_t kDlCpu = 1;
constexpr std::uint8_t kDlComplex = 5;

// Null where torch has none, or one with another layout.
const DlPackApi* dlpack_api(const py::object& tensor_type) {
    const py::object capsule = py::getattr(tensor_type, "__dlpack_c_exchange_api__", py::none());
    if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return nullptr;
    const auto* api = static_cast<const DlPackApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    return api->major == 1 && api->minor >= 3 ? api : nullptr;
}

// Looked up once: importing torch and interning names on every call would cost more than the call.
struct Torch {
    py::object tensor_type;
    py::object parameter_type;
    py::object strided;
    py::object is_neg_of;  // the method, to be called with the tensor
    const DlPackApi* dlpack = nullptr;
    py::str is_cpu{"is_cpu"}, is_cuda{"is_cuda"}, layout{"layout"}, is_contiguous{"is_contiguous"}, is_conj{"is_conj"}, is_neg{"is_neg"},
        data_ptr{"data_ptr"}, nbytes{"nbytes"}, untyped_storage{"untyped_storage"};

    static const Torch& get() {
        PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<Torch> storage;
        return storage
            .call_once_and_store_result([] {
                const auto torch = py::module_::import("torch");
                Torch made;
                made.tensor_type = torch.attr("Tensor");
                made.parameter_type = torch.attr("nn").attr("Parameter");
                made.strided = torch.attr("strided");
                made.is_neg_of = made.tensor_type.attr("is_neg");
                made.dlpack = dlpack_api(made.tensor_type);
                return made;
            })
            .get_stored();
    }
};

py::object attribute(py::handle object, py::handle name) {
    PyObject* value = PyObject_GetAttr(object.ptr(), name.ptr());
    if (!value) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(value);
}

py::object call(py::handle object, py::handle method) {
    PyObject* value = PyObject_CallMethodNoArgs(object.ptr(), method.ptr());
    if (!value) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(value);
}

std::uint64_t to_unsigned(const py::object& number) {
    const auto value = PyLong_AsUnsignedLongLong(number.ptr());
    if (PyErr_Occurred()) throw py::error_already_set();
    return value;
}

bool is_true(const py::object& value) { return value.ptr() == Py_True; }

std::string type_name(py::handle object) { return Py_TYPE(object.ptr())->tp_name; }

// The device of a CUDA tensor, and the stream that its caller gives work to there.
DeviceMemory current_stream(const py::object& tensor) {
    const auto device = tensor.attr("get_device")().cast<CudaDevice>();
    const auto stream = py::module_::import("torch").attr("cuda").attr("current_stream")(device).attr("cuda_stream").cast<std::uintptr_t>();
    return {device, reinterpret_cast<CudaStreamHandle>(stream)};
}

// A path, or a text with one in it, as Python has it: bytes that are no UTF-8 become surrogates.
py::object decoded(const std::string& text) {
    return py::reinterpret_steal<py::object>(PyUnicode_DecodeFSDefaultAndSize(text.data(), static_cast<Py_ssize_t>(text.size())));
}

}  // namespace

py::object storage_of(py::handle tensor) { return call(tensor, Torch::get().untyped_storage); }

py::object bytes_of(py::handle tensor) {
    return tensor.attr("detach")().attr("view")(-1).attr("view")(py::module_::import("torch").attr("uint8"));
}

void require_tensor(py::handle object) {
    if (!PyType_IsSubtype(Py_TYPE(object.ptr()), reinterpret_cast<PyTypeObject*>(Torch::get().tensor_type.ptr())))
        throw py::type_error("expected a torch.Tensor, got " + type_name(object));
}

std::int64_t integer_of(py::handle number, const char* name) {
    const auto index = py::reinterpret_steal<py::object>(PyNumber_Index(number.ptr()));
    if (!index) {
        PyErr_Clear();
        throw py::type_error(std::string(name) + " must be an integer, got " + py::repr(number).cast<std::string>());
    }
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
    if (overflow) throw py::value_error(std::string(name) + " is out of range: " + py::str(index).cast<std::string>());
    return value;
}

TensorMemory memory_of(py::handle tensor, Direction direction, const char* verb) {
    require_tensor(tensor);
    const Torch& torch = Torch::get();
    if (!attribute(tensor, torch.layout).is(torch.strided))
        throw py::type_error("expected a dense tensor, got one of layout " + py::str(attribute(tensor, torch.layout)).cast<std::string>());
    const bool on_device = !is_true(attribute(tensor, torch.is_cpu));
    if (on_device && !is_true(attribute(tensor, torch.is_cuda))) {
        const auto device = py::str(tensor.attr("device")).cast<std::string>();
        if (device == "meta") throw py::value_error("a meta tensor has no memory to transfer");
        throw py::value_error("tensors on the CPU and on CUDA devices can be transferred, got one on " + device + "; copy it with .cpu() first");
    }
    auto dense = py::reinterpret_borrow<py::object>(tensor);
    const bool lazy = is_true(call(dense, torch.is_conj)) || is_true(call(dense, torch.is_neg));
    const bool contiguous = is_true(call(dense, torch.is_contiguous));
    if (lazy || !contiguous) {
        if (direction == Direction::read)
            throw py::value_error("cannot " + std::string(verb) + " a tensor that is " +
                                  (lazy ? "a lazy conjugate or negative" : "not contiguous") + "; " + verb + " a contiguous one and copy it");
        if (lazy) dense = dense.attr("resolve_conj")().attr("resolve_neg")();
        dense = dense.attr("contiguous")();
    }
    const auto address = to_unsigned(call(dense, torch.data_ptr));
    const auto nbytes = to_unsigned(attribute(dense, torch.nbytes));
    if (nbytes > 0 && address == 0) throw py::value_error("the tensor has no memory to transfer (a fake or unallocated tensor?)");
    auto storage = storage_of(dense);
    // Looked up last: a tensor made contiguous above is the work of that stream.
    auto device = on_device ? std::optional(current_stream(dense)) : std::nullopt;
    return {std::move(dense), std::move(storage), reinterpret_cast<std::byte*>(address), nbytes, device};
}

std::optional<std::span<std::byte>> plain_memory_of(py::handle tensor) {
    const Torch& torch = Torch::get();
    const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(tensor.ptr()));
    if (!torch.dlpack || (type != torch.tensor_type.ptr() && type != torch.parameter_type.ptr())) return std::nullopt;
    DlTensor found;
    if (torch.dlpack->describe(tensor.ptr(), &found) != 0) {
        PyErr_Clear();
        return std::nullopt;
    }
    if (found.device_type != kDlCpu || found.type == kDlComplex || found.bits % 8 != 0 || found.lanes != 1) return std::nullopt;
    std::int64_t numel = 1;
    for (std::int32_t i = found.dimensions; i-- > 0;) {
        if (found.shape[i] != 1 && found.strides && found.strides[i] != numel) return std::nullopt;
        numel *= found.shape[i];
    }
    const auto is_neg = py::reinterpret_steal<py::object>(PyObject_CallOneArg(torch.is_neg_of.ptr(), tensor.ptr()));
    if (!is_neg) PyErr_Clear();
    if (is_neg.ptr() != Py_False || !found.data) return std::nullopt;
    return std::span(static_cast<std::byte*>(found.data) + found.byte_offset, static_cast<std::size_t>(numel) * (found.bits / 8));
}

std::span<const std::uint64_t> numbers_in(const py::buffer_info& buffer, const char* name) {
    const bool unsigned_64 = buffer.itemsize == sizeof(std::uint64_t) && (buffer.format == "Q" || buffer.format == "L");
    if (!unsigned_64 || buffer.ndim != 1)
        throw py::type_error(std::string(name) + " must be an array of uint64, such as array.array('Q'), got " +
                             std::to_string(buffer.ndim) + " dimension(s) of format '" + buffer.format + "'");
    if (buffer.size > 1 && buffer.strides[0] != buffer.itemsize) throw py::value_error(std::string(name) + " must be contiguous");
    return {static_cast<const std::uint64_t*>(buffer.ptr), static_cast<std::size_t>(buffer.size)};
}

std::string path_of(py::handle path) {
    PyObject* encoded = nullptr;
    if (!PyUnicode_FSConverter(path.ptr(), &encoded)) throw py::error_already_set();
    const auto bytes = py::reinterpret_steal<py::bytes>(encoded);
    return bytes;
}

py::object to_python(const IoError& error, const std::string& suffix) {
    const std::string text = describe_errno(error.error()) + ": " + error.operation() + suffix;
    if (error.path().empty()) return py::handle(PyExc_OSError)(error.error(), text);
    return py::handle(PyExc_OSError)(error.error(), text, decoded(error.path()));
}

void bind_errors(py::module_&) {
    py::register_local_exception_translator([](std::exception_ptr thrown) {
        try {
            if (thrown) std::rethrow_exception(thrown);
        } catch (const IoError& error) {
            const py::object converted = to_python(error);
            PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(converted.ptr())), converted.ptr());
        } catch (const PastEndError& error) {
            const py::object converted = py::handle(PyExc_ValueError)(decoded(error.what()));
            converted.attr("file_size") = error.file_size();
            PyErr_SetObject(PyExc_ValueError, converted.ptr());
        }
    });
}

}  // namespace deepnvme::bindings

#include "bindings/conversions.h"

#include <memory>
#include <string_view>
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
const DlPackApi* dlpack_api(const nb::object& tensor_type) {
    const nb::object capsule = nb::getattr(tensor_type, "__dlpack_c_exchange_api__", nb::none());
    if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return nullptr;
    const auto* api = static_cast<const DlPackApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    return api->major == 1 && api->minor >= 3 ? api : nullptr;
}

nb::str interned(const char* name) {
    PyObject* made = PyUnicode_InternFromString(name);
    if (!made) throw nb::python_error();
    return nb::steal<nb::str>(made);
}

// Looked up once: importing torch and interning names on every call would cost more than the call.
struct Torch {
    nb::object tensor_type;
    nb::object parameter_type;
    nb::object strided;
    nb::object is_neg_of;  // the method, to be called with the tensor
    const DlPackApi* dlpack = nullptr;
    nb::str is_cpu = interned("is_cpu"), is_cuda = interned("is_cuda"), layout = interned("layout"),
            is_contiguous = interned("is_contiguous"), is_conj = interned("is_conj"), is_neg = interned("is_neg"),
            data_ptr = interned("data_ptr"), nbytes = interned("nbytes"), untyped_storage = interned("untyped_storage");

    Torch() {
        const auto torch = nb::module_::import_("torch");
        tensor_type = torch.attr("Tensor");
        parameter_type = torch.attr("nn").attr("Parameter");
        strided = torch.attr("strided");
        is_neg_of = tensor_type.attr("is_neg");
        dlpack = dlpack_api(tensor_type);
    }

    static const Torch& get() {
        // Not a static object: importing lets others have the GIL, who would wait for the object with the GIL held.
        static const Torch* found = nullptr;
        if (!found) {
            auto made = std::make_unique<Torch>();
            if (!found) found = made.release();  // never destroyed: the interpreter may be gone by then
        }
        return *found;
    }
};

nb::object attribute(nb::handle object, nb::handle name) {
    PyObject* value = PyObject_GetAttr(object.ptr(), name.ptr());
    if (!value) throw nb::python_error();
    return nb::steal(value);
}

nb::object call(nb::handle object, nb::handle method) {
    PyObject* self = object.ptr();
    PyObject* value = PyObject_VectorcallMethod(method.ptr(), &self, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
    if (!value) throw nb::python_error();
    return nb::steal(value);
}

std::uint64_t to_unsigned(const nb::object& number) {
    const auto value = PyLong_AsUnsignedLongLong(number.ptr());
    if (PyErr_Occurred()) throw nb::python_error();
    return value;
}

bool is_true(const nb::object& value) { return value.ptr() == Py_True; }

// The device of a CUDA tensor, and the stream that its caller gives work to there.
DeviceMemory current_stream(const nb::object& tensor) {
    const auto device = nb::cast<CudaDevice>(tensor.attr("get_device")());
    const nb::object current = nb::module_::import_("torch").attr("cuda").attr("current_stream")(device);
    const auto stream = nb::cast<std::uintptr_t>(current.attr("cuda_stream"));
    return {device, reinterpret_cast<CudaStreamHandle>(stream)};
}

// What a warning or error shows of an object. Surrogates, which UTF-8 has not, are shown escaped.
std::string utf8(const nb::str& text) {
    const auto bytes = nb::steal<nb::bytes>(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace"));
    if (!bytes.is_valid()) throw nb::python_error();
    return {bytes.c_str(), bytes.size()};
}

}  // namespace

nb::builtin_exception value_error(const std::string& text) { return nb::value_error(text.c_str()); }

void warn(const std::string& text) {
    const auto level = nb::cast<int>(nb::module_::import_("deepnvme.telemetry.callers").attr("stack_level")());
    if (PyErr_WarnEx(PyExc_RuntimeWarning, text.c_str(), level) != 0) throw nb::python_error();
}

nb::builtin_exception type_error(const std::string& text) { return nb::type_error(text.c_str()); }

std::string text_of(nb::handle object) { return utf8(nb::str(object)); }

std::string name_of_type(nb::handle object) {
    const nb::handle type = object.type();
    const std::string module = text_of(nb::getattr(type, "__module__", nb::none())), name = text_of(type.attr("__qualname__"));
    return module == "builtins" || module == "__main__" ? name : module + "." + name;
}

nb::object decoded(const std::string& text) {
    PyObject* made = PyUnicode_DecodeFSDefaultAndSize(text.data(), static_cast<Py_ssize_t>(text.size()));
    if (!made) throw nb::python_error();
    return nb::steal(made);
}

nb::object storage_of(nb::handle tensor) { return call(tensor, Torch::get().untyped_storage); }

nb::object bytes_of(nb::handle tensor) {
    return tensor.attr("detach")().attr("view")(-1).attr("view")(nb::module_::import_("torch").attr("uint8"));
}

void require_tensor(nb::handle object) {
    if (!PyType_IsSubtype(Py_TYPE(object.ptr()), reinterpret_cast<PyTypeObject*>(Torch::get().tensor_type.ptr())))
        throw type_error("expected a torch.Tensor, got " + name_of_type(object));
}

std::int64_t integer_of(nb::handle number, const char* name) {
    const auto index = nb::steal(PyNumber_Index(number.ptr()));
    if (!index.is_valid()) {
        PyErr_Clear();
        throw type_error(std::string(name) + " must be an integer, got " + utf8(nb::repr(number)));
    }
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
    if (overflow) throw value_error(std::string(name) + " is out of range: " + text_of(index));
    return value;
}

TensorMemory memory_of(nb::handle tensor, Direction direction, const char* verb) {
    require_tensor(tensor);
    const Torch& torch = Torch::get();
    if (!attribute(tensor, torch.layout).is(torch.strided))
        throw type_error("expected a dense tensor, got one of layout " + text_of(attribute(tensor, torch.layout)));
    const bool on_device = !is_true(attribute(tensor, torch.is_cpu));
    if (on_device && !is_true(attribute(tensor, torch.is_cuda))) {
        const auto device = text_of(tensor.attr("device"));
        if (device == "meta") throw value_error("a meta tensor has no memory to transfer");
        throw value_error("tensors on the CPU and on CUDA devices can be transferred, got one on " + device + "; copy it with .cpu() first");
    }
    auto dense = nb::borrow(tensor);
    const bool lazy = is_true(call(dense, torch.is_conj)) || is_true(call(dense, torch.is_neg));
    const bool contiguous = is_true(call(dense, torch.is_contiguous));
    if (lazy || !contiguous) {
        if (direction == Direction::read)
            throw value_error("cannot " + std::string(verb) + " a tensor that is " +
                                  (lazy ? "a lazy conjugate or negative" : "not contiguous") + "; " + verb + " a contiguous one and copy it");
        if (lazy) dense = dense.attr("resolve_conj")().attr("resolve_neg")();
        dense = dense.attr("contiguous")();
    }
    const auto address = to_unsigned(call(dense, torch.data_ptr));
    const auto nbytes = to_unsigned(attribute(dense, torch.nbytes));
    if (nbytes > 0 && address == 0) throw value_error("the tensor has no memory to transfer (a fake or unallocated tensor?)");
    auto storage = storage_of(dense);
    // Looked up last: a tensor made contiguous above is the work of that stream.
    auto device = on_device ? std::optional(current_stream(dense)) : std::nullopt;
    return {std::move(dense), std::move(storage), reinterpret_cast<std::byte*>(address), nbytes, device};
}

std::optional<std::span<std::byte>> plain_memory_of(nb::handle tensor) {
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
    PyObject* const self = tensor.ptr();
    const auto is_neg = nb::steal(PyObject_Vectorcall(torch.is_neg_of.ptr(), &self, 1, nullptr));
    if (!is_neg.is_valid()) PyErr_Clear();
    if (is_neg.ptr() != Py_False || !found.data) return std::nullopt;
    return std::span(static_cast<std::byte*>(found.data) + found.byte_offset, static_cast<std::size_t>(numel) * (found.bits / 8));
}

BufferView::BufferView(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_STRIDES | PyBUF_FORMAT) != 0) throw nb::python_error();
}

std::span<const std::uint64_t> numbers_in(const BufferView& buffer, const char* name) {
    const std::string_view format = buffer->format ? buffer->format : "B";
    const bool unsigned_64 = buffer->itemsize == sizeof(std::uint64_t) && (format == "Q" || format == "L");
    if (!unsigned_64 || buffer->ndim != 1)
        throw type_error(std::string(name) + " must be an array of uint64, such as array.array('Q'), got " +
                         std::to_string(buffer->ndim) + " dimension(s) of format '" + std::string(format) + "'");
    const auto size = static_cast<std::size_t>(buffer->shape[0]);
    if (size > 1 && buffer->strides[0] != buffer->itemsize) throw value_error(std::string(name) + " must be contiguous");
    return {static_cast<const std::uint64_t*>(buffer->buf), size};
}

std::string path_of(nb::handle path) {
    PyObject* encoded = nullptr;
    if (!PyUnicode_FSConverter(path.ptr(), &encoded)) throw nb::python_error();
    const auto bytes = nb::steal<nb::bytes>(encoded);
    return {bytes.c_str(), bytes.size()};
}

nb::object to_python(const IoError& error, const std::string& suffix) {
    const std::string text = describe_errno(error.error()) + ": " + error.operation() + suffix;
    if (error.path().empty()) return nb::handle(PyExc_OSError)(error.error(), text.c_str());
    return nb::handle(PyExc_OSError)(error.error(), text.c_str(), decoded(error.path()));
}

void bind_errors(nb::module_&) {
    nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
        try {
            std::rethrow_exception(thrown);
        } catch (const IoError& error) {
            const nb::object converted = to_python(error);
            PyErr_SetObject(converted.type().ptr(), converted.ptr());
        } catch (const PastEndError& error) {
            const nb::object converted = nb::handle(PyExc_ValueError)(decoded(error.what()));
            converted.attr("file_size") = error.file_size();
            PyErr_SetObject(PyExc_ValueError, converted.ptr());
        }
    });
}

}  // namespace deepnvme::bindings

bool nanobind::detail::type_caster<deepnvme::bindings::Flag>::from_python(handle source, uint32_t, cleanup_list*) noexcept {
    // What has a length alone, such as a string, is no flag. None is False.
    if (!PyBool_Check(source.ptr()) && !source.is_none() && !PyType_GetSlot(Py_TYPE(source.ptr()), Py_nb_bool)) return false;
    const int truth = PyObject_IsTrue(source.ptr());
    if (truth < 0) PyErr_Clear();
    value.value = truth == 1;
    return truth >= 0;
}

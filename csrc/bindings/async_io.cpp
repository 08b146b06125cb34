// The async_io module.
#include <span>
#include <vector>

#include "bindings/pinned_buffer.h"
#include "bindings/python.h"
#include "core/copy.h"
#include "quantization/quantization.h"

using namespace deepnvme;
using namespace deepnvme::bindings;
using namespace pybind11::literals;

namespace {

// Every backend by name, with None or the reason that it does not work here. Each is tried: a container may refuse what the
// kernel's settings allow.
py::dict backends() {
    py::dict reasons;
    for (const auto& choice : backend_choices()) {
        py::object reason = py::none();
        if (!choice.make) {
            reason = py::str(choice.why_not);
        } else {
            try {
                py::gil_scoped_release release;
                choice.make(1);
            } catch (const IoError& error) {
                reason = py::str(error.what());
            }
        }
        reasons[py::str(choice.name)] = reason;
    }
    return reasons;
}

// The numbers in an array of uint64, valid for as long as `buffer` is.
std::span<const std::uint64_t> numbers_in(const py::buffer_info& buffer, const char* name) {
    const bool unsigned_64 = buffer.itemsize == sizeof(std::uint64_t) && (buffer.format == "Q" || buffer.format == "L");
    if (!unsigned_64 || buffer.ndim != 1)
        throw py::type_error(std::string(name) + " must be an array of uint64, such as array.array('Q'), got " +
                             std::to_string(buffer.ndim) + " dimension(s) of format '" + buffer.format + "'");
    if (buffer.size > 1 && buffer.strides[0] != buffer.itemsize) throw py::value_error(std::string(name) + " must be contiguous");
    return {static_cast<const std::uint64_t*>(buffer.ptr), static_cast<std::size_t>(buffer.size)};
}

void copy_many_ranges(const py::buffer& destinations, const py::buffer& sources, const py::buffer& lengths) {
    // Held until the end: arrays with a view cannot be resized.
    const py::buffer_info views[] = {destinations.request(), sources.request(), lengths.request()};
    const auto to = numbers_in(views[0], "destinations"), from = numbers_in(views[1], "sources"), sizes = numbers_in(views[2], "lengths");
    if (to.size() != sizes.size() || from.size() != sizes.size())
        throw py::value_error("destinations, sources and lengths must be as many, got " + std::to_string(to.size()) + ", " +
                              std::to_string(from.size()) + " and " + std::to_string(sizes.size()));
    for (std::size_t i = 0; i < sizes.size(); ++i)
        if (sizes[i] > 0 && (to[i] == 0 || from[i] == 0))
            throw py::value_error("range " + std::to_string(i) + ", of " + std::to_string(sizes[i]) + " bytes, has the address 0");
    py::gil_scoped_release release;
    copy_many(to, from, sizes);
}

// (scheme, dtype, rows, columns, address of the values, of the scales, of the codes)
Matrix matrix_of(const py::tuple& facts) {
    const auto scheme = facts[0].cast<std::string>(), type = facts[1].cast<std::string>();
    const auto number = [&](std::size_t index) { return facts[index].cast<std::uint64_t>(); };
    const auto memory = [&](std::size_t index) { return reinterpret_cast<std::byte*>(number(index)); };
    Matrix matrix{Scheme::int8, FloatType::float32, number(2), number(3), memory(4), memory(5), memory(6)};
    if (scheme == "int4") matrix.scheme = Scheme::int4;
    else if (scheme != "int8") throw py::value_error("scheme must be int8 or int4, got '" + scheme + "'");
    if (type == "bfloat16") matrix.type = FloatType::bfloat16;
    else if (type == "float16") matrix.type = FloatType::float16;
    else if (type != "float32") throw py::value_error("dtype must be float32, float16 or bfloat16, got '" + type + "'");
    return matrix;
}

void dequantize_matrices(const py::list& all, unsigned threads) {
    std::vector<Matrix> matrices;
    for (const py::handle facts : all) matrices.push_back(matrix_of(py::cast<py::tuple>(facts)));
    py::gil_scoped_release release;
    dequantize(matrices, threads);
}

// The row that was refused, or None.
py::object quantize_matrix(const py::tuple& facts, unsigned threads) {
    const Matrix matrix = matrix_of(facts);
    std::optional<std::uint64_t> refused;
    {
        py::gil_scoped_release release;
        refused = quantize(matrix, threads);
    }
    return refused ? py::object(py::int_(*refused)) : py::none();
}

}  // namespace

PYBIND11_MODULE(DEEPNVME_EXTENSION_NAME, module) {
    module.attr("source_hash") = DEEPNVME_SOURCE_HASH;
    bind_io_error(module);
    bind_pinned_buffer(module);
    bind_engine(module);
    bind_handle(module);
    module.def("backends", &backends);
    module.def("copy_many", &copy_many_ranges, "destinations"_a, "sources"_a, "lengths"_a);
    module.def("dequantize", &dequantize_matrices, "matrices"_a, "threads"_a);
    module.def("quantize", &quantize_matrix, "matrix"_a, "threads"_a);
    // For the gds module, so that both know all that is pinned.
    module.def("shared_pinned_ranges", [] { return py::capsule(pinned_ranges::shared(), "deepnvme pinned ranges"); });
}

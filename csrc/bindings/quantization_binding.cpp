// The submodule `quantization`: weights of a few bits, by the addresses of their parts.
#include "quantization/quantization.h"

#include <optional>
#include <string>
#include <vector>

#include "bindings/bind_functions.h"

namespace deepnvme::bindings {

namespace {

// (scheme, dtype, rows, columns, address of the values, of the scales, of the codes)
Matrix matrix_of(const py::tuple& facts) {
    if (facts.size() != 7) throw py::value_error("a matrix has 7 facts, got " + std::to_string(facts.size()));
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

// None is begun before the one before has ended: its values may overwrite the codes of that one.
void dequantize_in_turn(const py::list& matrices, unsigned threads) {
    std::vector<Matrix> all;
    for (const py::handle facts : matrices) all.push_back(matrix_of(py::cast<py::tuple>(facts)));
    py::gil_scoped_release release;
    for (const Matrix& matrix : all) dequantize({&matrix, 1}, threads);
}

// The row that was refused, or None.
py::object quantize_one(const py::tuple& facts, unsigned threads) {
    const Matrix matrix = matrix_of(facts);
    std::optional<std::uint64_t> refused;
    {
        py::gil_scoped_release release;
        refused = quantize(matrix, threads);
    }
    return refused ? py::object(py::int_(*refused)) : py::none();
}

}  // namespace

void bind_quantization(py::module_& module) {
    using namespace pybind11::literals;
    auto quantization = module.def_submodule("quantization");
    quantization.def("dequantize", &dequantize_in_turn, "matrices"_a, "threads"_a);
    quantization.def("quantize", &quantize_one, "matrix"_a, "threads"_a);
}

}  // namespace deepnvme::bindings

// The submodule `quantization`: weights of a few bits, by the addresses of their parts.
#include "quantization/quantization.h"

#include <nanobind/stl/string.h>

#include <optional>
#include <string>
#include <vector>

#include "bindings/bind_functions.h"
#include "bindings/conversions.h"

namespace deepnvme::bindings {

namespace {

// (scheme, dtype, rows, columns, address of the values, of the scales, of the codes), and for fp8 (rows, columns) of a block
Matrix matrix_of(const nb::tuple& facts) {
    if (facts.size() != 7 && facts.size() != 9) throw value_error("a matrix has 7 facts, or 9, got " + std::to_string(facts.size()));
    const auto scheme = nb::cast<std::string>(facts[0]), type = nb::cast<std::string>(facts[1]);
    const auto number = [&](std::size_t index) { return nb::cast<std::uint64_t>(facts[index]); };
    const auto memory = [&](std::size_t index) { return reinterpret_cast<std::byte*>(number(index)); };
    Matrix matrix{Scheme::int8, FloatType::float32, number(2), number(3), memory(4), memory(5), memory(6)};
    if (scheme == "int4") matrix.scheme = Scheme::int4;
    else if (scheme == "fp8") matrix.scheme = Scheme::fp8;
    else if (scheme != "int8") throw value_error("scheme must be int8, int4 or fp8, got '" + scheme + "'");
    if (facts.size() == 9) matrix.block_rows = number(7), matrix.block_columns = number(8);
    if ((matrix.scheme == Scheme::fp8) != (matrix.block_rows > 0 && matrix.block_columns > 0))
        throw value_error("fp8, and only it, has blocks of at least one row and one column");
    if (type == "bfloat16") matrix.type = FloatType::bfloat16;
    else if (type == "float16") matrix.type = FloatType::float16;
    else if (type != "float32") throw value_error("dtype must be float32, float16 or bfloat16, got '" + type + "'");
    return matrix;
}

// None is begun before the one before has ended: its values may overwrite the codes of that one.
void dequantize_in_turn(const nb::list& matrices, unsigned threads) {
    std::vector<Matrix> all;
    for (const nb::handle facts : matrices) all.push_back(matrix_of(nb::cast<nb::tuple>(facts)));
    nb::gil_scoped_release release;
    for (const Matrix& matrix : all) dequantize({&matrix, 1}, threads);
}

// The row that was refused, or None.
nb::object quantize_one(const nb::tuple& facts, unsigned threads) {
    const Matrix matrix = matrix_of(facts);
    if (matrix.scheme == Scheme::fp8) throw value_error("fp8 is only read");
    std::optional<std::uint64_t> refused;
    {
        nb::gil_scoped_release release;
        refused = quantize(matrix, threads);
    }
    return refused ? nb::object(nb::int_(*refused)) : nb::none();
}

}  // namespace

void bind_quantization(nb::module_& module) {
    using namespace nanobind::literals;
    auto quantization = module.def_submodule("quantization");
    quantization.def("dequantize", &dequantize_in_turn, "matrices"_a, "threads"_a);
    quantization.def("quantize", &quantize_one, "matrix"_a, "threads"_a);
}

}  // namespace deepnvme::bindings

// The submodule `memory`: copies between ranges of host memory, and checksums of it.
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "bindings/bind_functions.h"
#include "bindings/conversions.h"
#include "core/copy.h"
#include "core/crc32.h"

namespace deepnvme::bindings {

namespace {

void copy_many_ranges(nb::handle destinations, nb::handle sources, nb::handle lengths) {
    // Held until the end: arrays with a view cannot be resized.
    const BufferView views[] = {BufferView(destinations), BufferView(sources), BufferView(lengths)};
    const auto to = numbers_in(views[0], "destinations"), from = numbers_in(views[1], "sources"), sizes = numbers_in(views[2], "lengths");
    if (to.size() != sizes.size() || from.size() != sizes.size())
        throw value_error("destinations, sources and lengths must be as many, got " + std::to_string(to.size()) + ", " +
                              std::to_string(from.size()) + " and " + std::to_string(sizes.size()));
    for (std::size_t i = 0; i < sizes.size(); ++i)
        if (sizes[i] > 0 && (to[i] == 0 || from[i] == 0))
            throw value_error("range " + std::to_string(i) + ", of " + std::to_string(sizes[i]) + " bytes, has the address 0");
    nb::gil_scoped_release release;
    copy_many(to, from, sizes);
}

// A thread that releases the GIL for microseconds may wait 5 ms for another to give it back.
constexpr std::size_t kSmall = 64 << 10;

std::uint32_t crc32_of(nb::handle data, std::uint32_t crc, Flag tables) {
    const BufferView view(data);
    if (view->ndim != 1 || view->itemsize != 1 || (view->len > 1 && view->strides[0] != 1))
        throw value_error("data must be contiguous bytes of one dimension");
    const auto bytes = static_cast<const std::byte*>(view->buf);
    const auto size = static_cast<std::size_t>(view->len);
    const auto compute = [&] { return tables ? crc32_by_tables(crc, bytes, size) : crc32_by_threads(crc, bytes, size); };
    if (size < kSmall)
        return compute();
    nb::gil_scoped_release release;
    return compute();
}

std::vector<std::size_t> crc32_mismatches(nb::handle addresses, nb::handle lengths, nb::handle expected) {
    const BufferView views[] = {BufferView(addresses), BufferView(lengths), BufferView(expected)};
    const auto from = numbers_in(views[0], "addresses"), sizes = numbers_in(views[1], "lengths"), crcs = numbers_in(views[2], "expected");
    if (from.size() != sizes.size() || crcs.size() != sizes.size())
        throw value_error("addresses, lengths and expected must be as many, got " + std::to_string(from.size()) + ", " +
                              std::to_string(sizes.size()) + " and " + std::to_string(crcs.size()));
    nb::gil_scoped_release release;
    std::vector<std::size_t> found;
    for (std::size_t i = 0; i < sizes.size(); ++i)
        if (crc32(0, reinterpret_cast<const std::byte*>(from[i]), sizes[i]) != crcs[i]) found.push_back(i);
    return found;
}

}  // namespace

void bind_memory(nb::module_& module) {
    using namespace nanobind::literals;
    auto memory = module.def_submodule("memory");
    memory.def("copy_many", &copy_many_ranges, "destinations"_a, "sources"_a, "lengths"_a);
    memory.def("crc32", &crc32_of, "data"_a, "crc"_a = 0, "tables"_a = false);
    memory.def("crc32_combined", &crc32_combined, "first"_a, "second"_a, "nbytes"_a);
    memory.def("crc32_mismatches", &crc32_mismatches, "addresses"_a, "lengths"_a, "expected"_a);
    memory.def("crc32_method", &crc32_method);
}

}  // namespace deepnvme::bindings

// The submodule `memory`: copies between ranges of host memory.
#include "bindings/bind_functions.h"
#include "bindings/conversions.h"
#include "core/copy.h"

namespace deepnvme::bindings {

namespace {

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

}  // namespace

void bind_memory(py::module_& module) {
    using namespace pybind11::literals;
    auto memory = module.def_submodule("memory");
    memory.def("copy_many", &copy_many_ranges, "destinations"_a, "sources"_a, "lengths"_a);
}

}  // namespace deepnvme::bindings

// The async_io module.
#include <span>

#include "bindings/pinned_buffer.h"
#include "bindings/python.h"
#include "core/copy.h"

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

}  // namespace

PYBIND11_MODULE(DEEPNVME_EXTENSION_NAME, module) {
    module.attr("source_hash") = DEEPNVME_SOURCE_HASH;
    bind_io_error(module);
    bind_pinned_buffer(module);
    bind_engine(module);
    bind_handle(module);
    bind_quantization(module);
    module.def("backends", &backends);
    module.def("copy_many", &copy_many_ranges, "destinations"_a, "sources"_a, "lengths"_a);
    // For the gds module, so that both know all that is pinned.
    module.def("shared_pinned_ranges", [] { return py::capsule(pinned_ranges::shared(), "deepnvme pinned ranges"); });
}

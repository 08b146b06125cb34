// The submodule `checkpoint`: what checkpoints of many small tensors would spend their time on in Python.
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/bind_functions.h"
#include "bindings/conversions.h"
#include "checkpoint/checksums.h"
#include "checkpoint/pickle_walk.h"
#include "checkpoint/zip_layout.h"

namespace deepnvme::bindings {

namespace {

using namespace nanobind::literals;

// pickle asks it of every object, twenty times for each tensor: a call through nanobind, or of Python, would be half of the time.
// `state`: the types, and the function to ask.
PyObject* ask_unless_of_types(PyObject* state, PyObject* object) {
    const int known = PySet_Contains(PyTuple_GetItem(state, 0), reinterpret_cast<PyObject*>(Py_TYPE(object)));
    if (known < 0) return nullptr;
    if (known) Py_RETURN_NONE;
    return PyObject_Vectorcall(PyTuple_GetItem(state, 1), &object, 1, nullptr);
}

PyMethodDef ask_method = {"none_for", ask_unless_of_types, METH_O, nullptr};

nb::object none_for(const nb::frozenset& types, const nb::callable& otherwise) {
    const nb::tuple state = nb::make_tuple(types, otherwise);
    PyObject* made = PyCFunction_New(&ask_method, state.ptr());
    if (!made) throw nb::python_error();
    return nb::steal(made);
}

nb::object array_of(const std::vector<std::uint64_t>& numbers) {
    const nb::bytes raw(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(std::uint64_t));
    return nb::module_::import_("array").attr("array")("Q", raw);
}

constexpr std::size_t kPlaces = 3;  // numbers for each record

nb::tuple zip_layout(const nb::list& names, nb::handle sizes, nb::handle crcs, std::int64_t alignment) {
    const BufferView views[] = {BufferView(sizes), BufferView(crcs)};
    const auto nbytes = numbers_in(views[0], "sizes"), checksums = numbers_in(views[1], "crcs");
    if (nbytes.size() != names.size() || checksums.size() != names.size())
        throw value_error("names, sizes and crcs must be as many, got " + std::to_string(names.size()) + ", " +
                              std::to_string(nbytes.size()) + " and " + std::to_string(checksums.size()));
    if (alignment < 1 || alignment > kMostZipAlignment)
        throw value_error("alignment must be in [1, " + std::to_string(kMostZipAlignment) + "], got " + std::to_string(alignment));
    std::vector<ZipRecord> records(names.size());
    for (std::size_t i = 0; i < records.size(); ++i) {
        Py_ssize_t length = 0;
        const char* name = PyUnicode_AsUTF8AndSize(PyList_GetItem(names.ptr(), static_cast<Py_ssize_t>(i)), &length);
        if (!name) throw nb::python_error();
        records[i] = {{name, static_cast<std::size_t>(length)}, nbytes[i], static_cast<std::uint32_t>(checksums[i])};
    }
    const ZipLayout layout = lay_out(records, static_cast<std::uint64_t>(alignment));
    std::vector<std::uint64_t> places;
    places.reserve(kPlaces * layout.places.size());
    for (const auto& [data, descriptor_crc, directory_crc] : layout.places)
        places.insert(places.end(), {data, descriptor_crc, directory_crc});
    return nb::make_tuple(nb::bytes(layout.text.data(), layout.text.size()), array_of(layout.header_sizes), array_of(layout.padding_sizes), array_of(places));
}

Checksums checksums_of(nb::handle places, nb::handle sizes, const nb::bytes& wanted) {
    const BufferView views[] = {BufferView(places), BufferView(sizes)};
    const auto where = numbers_in(views[0], "places"), nbytes = numbers_in(views[1], "sizes");
    const std::string_view chosen(wanted.c_str(), wanted.size());
    if (where.size() != kPlaces * nbytes.size() || chosen.size() != nbytes.size())
        throw value_error("places must be three for each of sizes and wanted, got " + std::to_string(where.size()) + ", " +
                              std::to_string(nbytes.size()) + " and " + std::to_string(chosen.size()));
    std::vector<ChecksummedRecord> records;
    for (std::size_t i = 0; i < nbytes.size(); ++i)
        if (chosen[i] && nbytes[i] > 0)
            records.push_back({where[kPlaces * i], nbytes[i], where[kPlaces * i + 1], where[kPlaces * i + 2]});
    return Checksums(std::move(records));
}

void advance(Checksums& checksums, std::uint64_t begin, std::uintptr_t address, std::size_t size) {
    if (address == 0 && size > 0) throw value_error("memory must not be at the address 0");
    checksums.advance(begin, reinterpret_cast<std::byte*>(address), size);
}

nb::tuple pickle_walk(const nb::bytes& stream, std::uint16_t most_nested, std::uint64_t most_unregistered) {
    const std::string_view bytes(stream.c_str(), stream.size());
    PickleWalk found;
    {
        const nb::gil_scoped_release released;
        found = walk_pickle({reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size()}, most_nested, most_unregistered);
    }
    nb::object names = nb::none();
    if (found.complete && found.all_named) {
        nb::list all;
        for (const std::string_view name : found.names) all.append(nb::bytes(name.data(), name.size()));
        names = std::move(all);
    }
    return nb::make_tuple(found.nesting, found.unregistered, found.largest_memo_index, found.changes_globals, found.complete, names);
}

}  // namespace

void bind_checkpoint(nb::module_& module) {
    auto checkpoint = module.def_submodule("checkpoint");
    checkpoint.def("none_for", &none_for, "types"_a, "otherwise"_a);
    checkpoint.def("pickle_walk", &pickle_walk, "stream"_a, "most_nested"_a, "most_unregistered"_a = ~std::uint64_t{0});
    checkpoint.def("zip_layout", &zip_layout, "names"_a, "sizes"_a, "crcs"_a, "alignment"_a);
    nb::class_<Checksums>(checkpoint, "Checksums", nb::is_weak_referenceable())
        .def("__init__", [](Checksums* self, nb::handle places, nb::handle sizes, const nb::bytes& wanted) {
                new (self) Checksums(checksums_of(places, sizes, wanted));
            },
            "places"_a, "sizes"_a, "wanted"_a)
        .def("advance", &advance, "begin"_a, "address"_a, "nbytes"_a, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace deepnvme::bindings

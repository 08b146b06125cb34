// The functions that fill a module, each defined in the file that is named after what it binds.
#pragma once

#include <nanobind/nanobind.h>

namespace deepnvme::bindings {

namespace nb = nanobind;

// An argument that the function itself checks, None included, so that its errors say what they say of any other object. nanobind would
// show "| None" then: nb::sig has what help() shows.
constexpr auto operator""_any(const char* name, std::size_t) { return nb::arg(name).none(); }

// Has functions of this module raise, for IoError, what to_python makes of it (conversions.h), and for PastEndError a ValueError that
// has the file's size.
void bind_errors(nb::module_& module);

void bind_pinned_buffer(nb::module_& module);
void bind_engine(nb::module_& module);
void bind_handle(nb::module_& module);

// What the package has compiled besides I/O, each a submodule of its own: nothing of it is in DeepSpeed's contract.
void bind_checkpoint(nb::module_& module);
void bind_kvstore(nb::module_& module);
void bind_memory(nb::module_& module);
void bind_quantization(nb::module_& module);
void bind_tables(nb::module_& module);

}  // namespace deepnvme::bindings

// The functions that fill a module, each defined in the file that is named after what it binds.
#pragma once

#include <pybind11/pybind11.h>

namespace deepnvme::bindings {

namespace py = pybind11;

// Has functions of this module raise, for IoError, what to_python makes of it (conversions.h), and for PastEndError a ValueError that
// has the file's size.
void bind_errors(py::module_& module);

void bind_pinned_buffer(py::module_& module);
void bind_engine(py::module_& module);
void bind_handle(py::module_& module);

// What the package has compiled besides I/O, each a submodule of its own: nothing of it is in DeepSpeed's contract.
void bind_checkpoint(py::module_& module);
void bind_memory(py::module_& module);
void bind_quantization(py::module_& module);
void bind_tables(py::module_& module);

}  // namespace deepnvme::bindings

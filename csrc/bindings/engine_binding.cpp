// Engine, Future and File as Python sees them; async_io_op/__init__.pyi documents them.
#include <algorithm>
#include <cmath>
#include <utility>

#include "bindings/bind_functions.h"
#include "bindings/session.h"

namespace deepnvme::bindings {

namespace {

using namespace pybind11::literals;

// Seconds, or None to wait for as long as it takes.
std::optional<std::chrono::nanoseconds> time_limit(const py::object& timeout) {
    if (timeout.is_none()) return std::nullopt;
    // Beyond a year is as good as for ever, and would overflow the clock.
    const double asked = PyFloat_AsDouble(timeout.ptr());
    if (PyErr_Occurred()) throw py::error_already_set();
    if (std::isnan(asked)) throw py::value_error("timeout must be a number of seconds, got nan");
    return std::chrono::nanoseconds(static_cast<std::int64_t>(std::clamp(asked, 0.0, 3e7) * 1e9));
}

[[noreturn]] void throw_timeout(const std::string& what, const py::object& timeout) {
    const std::string text = what + " within " + py::str(timeout).cast<std::string>() + " s";
    PyErr_SetString(PyExc_TimeoutError, text.c_str());
    throw py::error_already_set();
}

// What Future.result and its kin share: the request has ended when this returns.
void await(Pending& pending, const py::object& timeout) {
    if (!pending.wait_for(time_limit(timeout))) throw_timeout(pending.describe() + " has not ended", timeout);
    pending.release_memory();
}

std::optional<std::int64_t> optional_integer_of(const py::object& number, const char* name) {
    return number.is_none() ? std::nullopt : std::optional(integer_of(number, name));
}

struct Mode {
    Access access;
    Creation creation;
};

Mode mode_of(const std::string& mode) {
    if (mode == "r") return {Access::read, Creation::must_exist};
    if (mode == "r+") return {Access::read_write, Creation::must_exist};
    if (mode == "w") return {Access::write, Creation::truncate};
    if (mode == "w+") return {Access::read_write, Creation::truncate};
    if (mode == "x") return {Access::write, Creation::exclusive};
    if (mode == "x+") return {Access::read_write, Creation::exclusive};
    if (mode == "rw") return {Access::read_write, Creation::if_missing};
    throw py::value_error("mode must be one of r, r+, rw, w, w+, x, x+, got '" + mode + "'");
}

OpenFile open_file(const Session& session, py::handle path, const std::string& mode, bool whole_pages,
                   bool whole_sectors) {
    session.engine().check_usable();
    if (whole_pages && whole_sectors) throw py::value_error("a file has whole_pages or whole_sectors, not both");
    const Mode how = mode_of(mode);
    const std::string name = path_of(path);
    const auto ownership = whole_pages ? Ownership::pages : whole_sectors ? Ownership::sectors : Ownership::bytes;
    py::gil_scoped_release release;
    return {std::make_shared<File>(name, how.access, how.creation, true, ownership), name};
}

// What could not be written, if the file is closed here: where a request has it still, that one tells.
std::optional<IoError> close_file(OpenFile& open) {
    auto file = std::exchange(open.file, nullptr);
    const bool writable = file && file->writable();
    py::gil_scoped_release release;
    const auto error = File::release(file);
    return writable ? error : std::nullopt;
}

py::object text_of(const std::string& text) { return py::reinterpret_steal<py::object>(PyUnicode_DecodeFSDefault(text.c_str())); }

// What repr() of a future says. Never blocks, also in a forked child.
py::object show_future(Pending& self) {
    if (!self.submitted()) return py::str("<Future, not submitted>");
    std::string under_way;
    try {
        under_way = self.describe_unfinished();
    } catch (const std::runtime_error&) {
        return py::str("<Future: {}, of the parent process>").format(text_of(self.describe()));
    }
    // Of one transfer, what is under way is told with its file.
    if (!under_way.empty())
        return py::str("<Future: {}, under way>").format(text_of(self.many ? self.describe() : under_way));
    const py::object error = self.error();
    const py::object what = text_of(self.describe());
    return error.is_none() ? py::str("<Future: {}, done>").format(what) : py::str("<Future: {}, failed: {}>").format(what, error);
}

// What repr() of a file says. Asks the system for nothing, and takes no lock, which in a forked child nobody might release.
py::object show_file(const OpenFile& self) {
    const char* state = "closed";
    if (self.file) {
        state = self.generation != process_generation()           ? "of the parent process"
                : self.file->readable() && self.file->writable() ? "for reading and writing"
                : self.file->readable()                          ? "for reading"
                                                                  : "for writing";
    }
    return py::str("<File '{}', {}>").format(text_of(self.path), state);
}

}  // namespace

void bind_engine(py::module_& module) {
    py::class_<Pending, std::shared_ptr<Pending>>(module, "Future", py::module_local())
        .def_property_readonly("nbytes", &Pending::nbytes)
        .def("done", &Pending::done)
        .def(
            "result",
            [](Pending& self, const py::object& timeout) {
                await(self, timeout);
                self.check();
                return self.nbytes();
            },
            "timeout"_a = py::none())
        .def(
            "exception",
            [](Pending& self, const py::object& timeout) {
                await(self, timeout);
                return self.error();
            },
            "timeout"_a = py::none())
        .def("cancel", &Pending::cancel)
        .def("__repr__", &show_future);

    py::class_<OpenFile>(module, "File", py::module_local())
        .def_property_readonly("path",
                               [](const OpenFile& self) {
                                   return py::reinterpret_steal<py::object>(PyUnicode_DecodeFSDefault(self.path.c_str()));
                               })
        .def_property_readonly("closed", [](const OpenFile& self) { return !self.file; })
        .def_property_readonly("direct", [](const OpenFile& self) { return self.get().limits().has_value(); })
        .def_property_readonly("alignment",
                               [](const OpenFile& self) {
                                   const auto limits = self.get().limits();
                                   return limits ? std::max({limits->memory_alignment, limits->offset_alignment, limits->cache_granule}) : 1;
                               })
        .def_property_readonly("sector_size",
                               [](const OpenFile& self) {
                                   const auto limits = self.get().limits();
                                   return limits ? std::max(limits->memory_alignment, limits->offset_alignment) : 1;
                               })
        .def("size", [](const OpenFile& self) { return self.get().size(); })
        .def("close",
             [](OpenFile& self) {
                 if (const auto error = close_file(self)) throw *error;
             })
        .def("__enter__", [](py::object self) { return self; })
        .def("__exit__", [](OpenFile& self, py::handle kind, py::handle, py::handle) {
            if (const auto error = close_file(self); error && kind.is_none()) throw *error;
        })
        .def("__repr__", &show_file);

    const EngineOptions defaults;
    py::class_<Session>(module, "Engine", py::module_local())
        .def(py::init([](std::string backend, py::handle block_size, py::handle queue_depth, py::handle num_threads,
                         bool single_submit, const py::object& in_flight_bytes) {
                 return std::make_unique<Session>(EngineOptions{std::move(backend), integer_of(block_size, "block_size"),
                                                                integer_of(queue_depth, "queue_depth"),
                                                                integer_of(num_threads, "num_threads"), single_submit,
                                                                optional_integer_of(in_flight_bytes, "in_flight_bytes")});
             }),
             "backend"_a = defaults.backend, "block_size"_a = defaults.block_size, "queue_depth"_a = defaults.queue_depth,
             "num_threads"_a = defaults.num_threads, "single_submit"_a = defaults.single_submit,
             "in_flight_bytes"_a = py::none())
        .def_property_readonly("backend", [](const Session& self) { return self.engine().backend(); })
        .def_property_readonly("block_size", [](const Session& self) { return self.engine().options().block_size; })
        .def_property_readonly("queue_depth", [](const Session& self) { return self.engine().options().queue_depth; })
        .def_property_readonly("in_flight_bytes", [](const Session& self) { return self.engine().options().most_in_flight(); })
        .def_property_readonly("num_threads", [](const Session& self) { return self.engine().options().num_threads; })
        .def_property_readonly("closed", [](const Session& self) { return self.engine().closed(); })
        .def(
            "read",
            [](Session& self, py::handle tensor, py::handle source, py::handle offset) {
                return self.transfer(Direction::read, tensor, source, integer_of(offset, "offset"));
            },
            "tensor"_a, "source"_a, "offset"_a = 0)
        .def(
            "write",
            [](Session& self, py::handle tensor, py::handle target, py::handle offset) {
                return self.transfer(Direction::write, tensor, target, integer_of(offset, "offset"));
            },
            "tensor"_a, "target"_a, "offset"_a = 0)
        .def(
            "read_many",
            [](Session& self, py::handle tensors, py::handle source, py::handle offsets) {
                return self.transfer_many(Direction::read, tensors, source, offsets);
            },
            "tensors"_a, "source"_a, "offsets"_a = py::none())
        .def(
            "write_many",
            [](Session& self, py::handle tensors, py::handle target, py::handle offsets) {
                return self.transfer_many(Direction::write, tensors, target, offsets);
            },
            "tensors"_a, "target"_a, "offsets"_a = py::none())
        .def(
            "gather",
            [](Session& self, py::handle source, py::handle ids, py::handle out, py::handle record_size, py::handle base) {
                return self.transfer_records(Direction::read, source, ids, out, record_size, integer_of(base, "base"));
            },
            "source"_a, "ids"_a, "out"_a, py::kw_only(), "record_size"_a = py::none(), "base"_a = 0)
        .def(
            "scatter",
            [](Session& self, py::handle target, py::handle ids, py::handle values, py::handle record_size, py::handle base) {
                return self.transfer_records(Direction::write, target, ids, values, record_size, integer_of(base, "base"));
            },
            "target"_a, "ids"_a, "values"_a, py::kw_only(), "record_size"_a = py::none(), "base"_a = 0)
        .def("fsync", &Session::sync, "target"_a)
        .def("open", &open_file, "path"_a, "mode"_a = "r", py::kw_only(), "whole_pages"_a = false, "whole_sectors"_a = false)
        .def("stats", &Session::stats)
        .def("cancel", &Session::cancel)
        .def(
            "close",
            [](Session& self, const py::object& timeout) {
                if (!self.close(time_limit(timeout))) throw_timeout(self.describe_pending() + " not ended", timeout);
            },
            "timeout"_a = py::none());
}

}  // namespace deepnvme::bindings

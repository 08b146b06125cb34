// Engine, Future and File as Python sees them; async_io_op/__init__.pyi documents them.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "bindings/bind_functions.h"
#include "bindings/help_texts.h"
#include "bindings/session.h"

namespace deepnvme::bindings {

namespace {

using namespace nanobind::literals;

// Seconds, or None to wait for as long as it takes.
std::optional<std::chrono::nanoseconds> time_limit(const nb::object& timeout) {
    if (timeout.is_none()) return std::nullopt;
    // Beyond a year is as good as for ever, and would overflow the clock.
    const double asked = PyFloat_AsDouble(timeout.ptr());
    if (PyErr_Occurred()) throw nb::python_error();
    if (std::isnan(asked)) throw value_error("timeout must be a number of seconds, got nan");
    return std::chrono::nanoseconds(static_cast<std::int64_t>(std::clamp(asked, 0.0, 3e7) * 1e9));
}

[[noreturn]] void throw_timeout(const std::string& what, const nb::object& timeout) {
    const std::string text = what + " within " + text_of(timeout) + " s";
    PyErr_SetString(PyExc_TimeoutError, text.c_str());
    throw nb::python_error();
}

// What Future.result and its kin share: the request has ended when this returns.
void await(Pending& pending, const nb::object& timeout) {
    if (!pending.wait_for(time_limit(timeout))) throw_timeout(pending.describe() + " has not ended", timeout);
    pending.release_memory();
}

std::optional<std::int64_t> optional_integer_of(const nb::object& number, const char* name) {
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
    throw value_error("mode must be one of r, r+, rw, w, w+, x, x+, got '" + mode + "'");
}

OpenFile open_file(const Session& session, nb::handle path, const std::string& mode, Flag whole_pages, Flag whole_sectors) {
    session.engine().check_usable();
    if (whole_pages && whole_sectors) throw value_error("a file has whole_pages or whole_sectors, not both");
    const Mode how = mode_of(mode);
    const std::string name = path_of(path);
    const auto ownership = whole_pages ? Ownership::pages : whole_sectors ? Ownership::sectors : Ownership::bytes;
    nb::gil_scoped_release release;
    return {std::make_shared<File>(name, how.access, how.creation, true, ownership), name};
}

// What could not be written, if the file is closed here: where a request has it still, that one tells.
std::optional<IoError> close_file(OpenFile& open) {
    auto file = std::exchange(open.file, nullptr);
    const bool writable = file && file->writable();
    nb::gil_scoped_release release;
    const auto error = File::release(file);
    return writable ? error : std::nullopt;
}

// What repr() of a future says. Never blocks, also in a forked child.
nb::object show_future(Pending& self) {
    if (!self.submitted()) return nb::str("<Future, not submitted>");
    std::string under_way;
    try {
        under_way = self.describe_unfinished();
    } catch (const std::runtime_error&) {
        return nb::str("<Future: {}, of the parent process>").format(decoded(self.describe()));
    }
    // Of one transfer, what is under way is told with its file.
    if (!under_way.empty())
        return nb::str("<Future: {}, under way>").format(decoded(self.many ? self.describe() : under_way));
    const nb::object error = self.error();
    const nb::object what = decoded(self.describe());
    return error.is_none() ? nb::str("<Future: {}, done>").format(what) : nb::str("<Future: {}, failed: {}>").format(what, error);
}

// What repr() of a file says. Asks the system for nothing, and takes no lock, which in a forked child nobody might release.
nb::object show_file(const OpenFile& self) {
    const char* state = "closed";
    if (self.file) {
        state = self.generation != process_generation()           ? "of the parent process"
                : self.file->readable() && self.file->writable() ? "for reading and writing"
                : self.file->readable()                          ? "for reading"
                                                                  : "for writing";
    }
    return nb::str("<File '{}', {}>").format(decoded(self.path), state);
}

}  // namespace

void bind_engine(nb::module_& module) {
    nb::class_<Pending>(module, "Future", nb::is_weak_referenceable(), help::Future)
        .def_prop_ro("nbytes", &Pending::nbytes, help::Future_nbytes)
        .def("done", &Pending::done, help::Future_done)
        .def(
            "result",
            [](Pending& self, const nb::object& timeout) {
                await(self, timeout);
                self.check();
                return self.nbytes();
            },
            "timeout"_a = nb::none(),
            nb::sig("def result(self, timeout: float | None = None) -> int"),
            help::Future_result)
        .def(
            "exception",
            [](Pending& self, const nb::object& timeout) {
                await(self, timeout);
                return self.error();
            },
            "timeout"_a = nb::none(),
            nb::sig("def exception(self, timeout: float | None = None) -> OSError | None"),
            help::Future_exception)
        .def("cancel", &Pending::cancel, help::Future_cancel)
        .def("__repr__", &show_future);

    nb::class_<OpenFile>(module, "File", nb::is_weak_referenceable(), help::File)
        .def_prop_ro("path", [](const OpenFile& self) { return decoded(self.path); }, help::File_path)
        .def_prop_ro("closed", [](const OpenFile& self) { return !self.file; }, help::File_closed)
        .def_prop_ro("direct", [](const OpenFile& self) { return self.get().limits().has_value(); }, help::File_direct)
        .def_prop_ro("alignment",
                     [](const OpenFile& self) {
                         const auto limits = self.get().limits();
                         return limits ? std::max({limits->memory_alignment, limits->offset_alignment, limits->cache_granule}) : 1;
                     }, help::File_alignment)
        .def_prop_ro("sector_size",
                     [](const OpenFile& self) {
                         const auto limits = self.get().limits();
                         return limits ? std::max(limits->memory_alignment, limits->offset_alignment) : 1;
                     }, help::File_sector_size)
        .def_prop_ro("_shared", [](const OpenFile& self) { return nb::capsule(&self, kSharedFile); })
        .def("size", [](const OpenFile& self) { return self.get().size(); }, help::File_size)
        .def("close",
             [](OpenFile& self) {
                 if (const auto error = close_file(self)) throw *error;
             }, help::File_close)
        .def("__enter__", [](nb::object self) { return self; })
        .def(
            "__exit__",
            [](OpenFile& self, nb::handle kind, nb::handle, nb::handle) {
                if (const auto error = close_file(self); error && kind.is_none()) throw *error;
            },
            "kind"_any, "error"_any, "trace"_any)
        .def("__repr__", &show_file);

    const EngineOptions defaults;
    nb::class_<Session>(module, "Engine", nb::is_weak_referenceable(), help::Engine)
        .def(
            "__init__",
            [](Session* self, std::string backend, nb::handle block_size, nb::handle queue_depth, nb::handle num_threads,
               Flag single_submit, const nb::object& in_flight_bytes) {
                new (self) Session(EngineOptions{std::move(backend), integer_of(block_size, "block_size"),
                                                 integer_of(queue_depth, "queue_depth"), integer_of(num_threads, "num_threads"),
                                                 single_submit, optional_integer_of(in_flight_bytes, "in_flight_bytes")});
            },
            "backend"_a = defaults.backend, "block_size"_any = defaults.block_size, "queue_depth"_any = defaults.queue_depth,
            "num_threads"_any = defaults.num_threads, "single_submit"_a = defaults.single_submit, "in_flight_bytes"_a = nb::none(),
            nb::sig("def __init__(self, backend: str = 'auto', block_size: int = 1048576, queue_depth: int = 128, "
                    "num_threads: int = 1, single_submit: bool = False, in_flight_bytes: int | None = None) -> None"))
        .def_prop_ro("backend", [](const Session& self) { return self.engine().backend(); })
        .def_prop_ro("block_size", [](const Session& self) { return self.engine().options().block_size; })
        .def_prop_ro("queue_depth", [](const Session& self) { return self.engine().options().queue_depth; })
        .def_prop_ro("in_flight_bytes", [](const Session& self) { return self.engine().options().most_in_flight(); })
        .def_prop_ro("num_threads", [](const Session& self) { return self.engine().options().num_threads; })
        .def_prop_ro("closed", [](const Session& self) { return self.engine().closed(); })
        .def(
            "read",
            [](Session& self, nb::handle tensor, nb::handle source, nb::handle offset) {
                return self.transfer(Direction::read, tensor, source, integer_of(offset, "offset"));
            },
            "tensor"_any, "source"_any, "offset"_any = 0,
            nb::sig("def read(self, tensor: torch.Tensor, source: str | bytes | os.PathLike | File, offset: int = 0) -> Future"))
        .def(
            "write",
            [](Session& self, nb::handle tensor, nb::handle target, nb::handle offset) {
                return self.transfer(Direction::write, tensor, target, integer_of(offset, "offset"));
            },
            "tensor"_any, "target"_any, "offset"_any = 0,
            nb::sig("def write(self, tensor: torch.Tensor, target: str | bytes | os.PathLike | File, offset: int = 0) -> Future"))
        .def(
            "read_many",
            [](Session& self, nb::handle tensors, nb::handle source, nb::handle offsets) {
                return self.transfer_many(Direction::read, tensors, source, offsets);
            },
            "tensors"_any, "source"_any, "offsets"_a = nb::none(),
            nb::sig("def read_many(self, tensors: Sequence[torch.Tensor], source: str | bytes | os.PathLike | File | "
                    "Sequence[str | bytes | os.PathLike | File], offsets: Sequence[int] | None = None) -> Future"))
        .def(
            "write_many",
            [](Session& self, nb::handle tensors, nb::handle target, nb::handle offsets) {
                return self.transfer_many(Direction::write, tensors, target, offsets);
            },
            "tensors"_any, "target"_any, "offsets"_a = nb::none(),
            nb::sig("def write_many(self, tensors: Sequence[torch.Tensor], target: str | bytes | os.PathLike | File | "
                    "Sequence[str | bytes | os.PathLike | File], offsets: Sequence[int] | None = None) -> Future"))
        .def(
            "gather",
            [](Session& self, nb::handle source, nb::handle ids, nb::handle out, nb::handle record_size, nb::handle base) {
                return self.transfer_records(Direction::read, source, ids, out, record_size, integer_of(base, "base"));
            },
            "source"_any, "ids"_any, "out"_any, nb::kw_only(), "record_size"_a = nb::none(), "base"_any = 0,
            nb::sig("def gather(self, source: str | bytes | os.PathLike | File, ids: torch.Tensor, out: torch.Tensor, *, "
                    "record_size: int | None = None, base: int = 0) -> Future"))
        .def(
            "scatter",
            [](Session& self, nb::handle target, nb::handle ids, nb::handle values, nb::handle record_size, nb::handle base) {
                return self.transfer_records(Direction::write, target, ids, values, record_size, integer_of(base, "base"));
            },
            "target"_any, "ids"_any, "values"_any, nb::kw_only(), "record_size"_a = nb::none(), "base"_any = 0,
            nb::sig("def scatter(self, target: str | bytes | os.PathLike | File, ids: torch.Tensor, values: torch.Tensor, *, "
                    "record_size: int | None = None, base: int = 0) -> Future"))
        .def("fsync", &Session::sync, "target"_any,
             nb::sig("def fsync(self, target: str | bytes | os.PathLike | File) -> Future"))
        .def("open", &open_file, "path"_any, "mode"_a = "r", nb::kw_only(), "whole_pages"_a = false, "whole_sectors"_a = false,
             nb::sig("def open(self, path: str | bytes | os.PathLike, mode: str = 'r', *, whole_pages: bool = False, "
                     "whole_sectors: bool = False) -> File"))
        .def("stats", &Session::stats)
        .def("cancel", &Session::cancel)
        .def(
            "close",
            [](Session& self, const nb::object& timeout) {
                if (!self.close(time_limit(timeout))) throw_timeout(self.describe_pending() + " not ended", timeout);
            },
            "timeout"_a = nb::none(),
            nb::sig("def close(self, timeout: float | None = None) -> None"));
}

}  // namespace deepnvme::bindings

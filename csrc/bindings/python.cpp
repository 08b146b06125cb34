#include "bindings/python.h"

#include <algorithm>
#include <set>
#include <stdexcept>
#include <vector>

namespace deepnvme::bindings {

namespace {

// Looked up once: importing torch and interning names on every call would cost more than the call.
struct Torch {
    py::object tensor_type;
    py::object strided;
    py::str is_cpu{"is_cpu"}, is_cuda{"is_cuda"}, layout{"layout"}, is_contiguous{"is_contiguous"}, is_conj{"is_conj"}, is_neg{"is_neg"},
        data_ptr{"data_ptr"}, nbytes{"nbytes"};

    static const Torch& get() {
        PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<Torch> storage;
        return storage
            .call_once_and_store_result([] {
                const auto torch = py::module_::import("torch");
                Torch made;
                made.tensor_type = torch.attr("Tensor");
                made.strided = torch.attr("strided");
                return made;
            })
            .get_stored();
    }
};

py::object attribute(py::handle object, py::handle name) {
    PyObject* value = PyObject_GetAttr(object.ptr(), name.ptr());
    if (!value) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(value);
}

py::object call(py::handle object, py::handle method) {
    PyObject* value = PyObject_CallMethodNoArgs(object.ptr(), method.ptr());
    if (!value) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(value);
}

std::uint64_t to_unsigned(const py::object& number) {
    const auto value = PyLong_AsUnsignedLongLong(number.ptr());
    if (PyErr_Occurred()) throw py::error_already_set();
    return value;
}

bool is_true(const py::object& value) { return value.ptr() == Py_True; }

std::string type_name(py::handle object) { return Py_TYPE(object.ptr())->tp_name; }

// An open file, or else the path of one.
std::pair<std::shared_ptr<File>, std::string> file_or_path(py::handle target) {
    if (!PyUnicode_Check(target.ptr())) {
        py::detail::make_caster<OpenFile> open;
        if (open.load(target, false)) {
            const auto& file = static_cast<OpenFile&>(open);
            file.get();
            return {file.file, {}};
        }
    }
    return {nullptr, path_of(target)};
}

void give_warnings() {
    for (const std::string& warning : Engine::take_warnings())
        if (PyErr_WarnEx(PyExc_RuntimeWarning, warning.c_str(), 1) != 0) throw py::error_already_set();
}

// The device of a CUDA tensor, and the stream that its caller gives work to there.
DeviceMemory current_stream(const py::object& tensor) {
    const auto device = tensor.attr("get_device")().cast<CudaDevice>();
    const auto stream = py::module_::import("torch").attr("cuda").attr("current_stream")(device).attr("cuda_stream").cast<std::uintptr_t>();
    return {device, reinterpret_cast<CudaStreamHandle>(stream)};
}

constexpr auto kSignalInterval = std::chrono::milliseconds(50);

// Engines to be drained before the interpreter takes their tensors away.
std::set<Session*>& live_sessions() {
    static auto* sessions = new std::set<Session*>;
    return *sessions;
}

void register_exit_hook() {
    static bool registered = false;
    if (registered) return;
    registered = true;
    py::module_::import("atexit").attr("register")(py::cpp_function([] {
        const std::vector<Session*> sessions(live_sessions().begin(), live_sessions().end());
        for (Session* session : sessions) {
            try {
                if (live_sessions().contains(session)) session->close_at_exit();
            } catch (py::error_already_set& error) {
                error.discard_as_unraisable("closing an engine at exit");  // the others still want to be closed
            }
        }
    }));
}

}  // namespace

void require_tensor(py::handle object) {
    if (!PyType_IsSubtype(Py_TYPE(object.ptr()), reinterpret_cast<PyTypeObject*>(Torch::get().tensor_type.ptr())))
        throw py::type_error("expected a torch.Tensor, got " + type_name(object));
}

std::int64_t integer_of(py::handle number, const char* name) {
    const auto index = py::reinterpret_steal<py::object>(PyNumber_Index(number.ptr()));
    if (!index) {
        PyErr_Clear();
        throw py::type_error(std::string(name) + " must be an integer, got " + py::repr(number).cast<std::string>());
    }
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
    if (overflow) throw py::value_error(std::string(name) + " is out of range: " + py::str(index).cast<std::string>());
    return value;
}

TensorMemory memory_of(py::handle tensor, Direction direction, const char* verb) {
    require_tensor(tensor);
    const Torch& torch = Torch::get();
    if (!attribute(tensor, torch.layout).is(torch.strided))
        throw py::type_error("expected a dense tensor, got one of layout " + py::str(attribute(tensor, torch.layout)).cast<std::string>());
    const bool on_device = !is_true(attribute(tensor, torch.is_cpu));
    if (on_device && !is_true(attribute(tensor, torch.is_cuda))) {
        const auto device = py::str(tensor.attr("device")).cast<std::string>();
        if (device == "meta") throw py::value_error("a meta tensor has no memory to transfer");
        throw py::value_error("tensors on the CPU and on CUDA devices can be transferred, got one on " + device + "; copy it with .cpu() first");
    }
    auto owner = py::reinterpret_borrow<py::object>(tensor);
    const bool lazy = is_true(call(owner, torch.is_conj)) || is_true(call(owner, torch.is_neg));
    const bool contiguous = is_true(call(owner, torch.is_contiguous));
    if (lazy || !contiguous) {
        if (direction == Direction::read)
            throw py::value_error("cannot " + std::string(verb) + " a tensor that is " +
                                  (lazy ? "a lazy conjugate or negative" : "not contiguous") + "; " + verb + " a contiguous one and copy it");
        if (lazy) owner = owner.attr("resolve_conj")().attr("resolve_neg")();
        owner = owner.attr("contiguous")();
    }
    const auto address = to_unsigned(call(owner, torch.data_ptr));
    const auto nbytes = to_unsigned(attribute(owner, torch.nbytes));
    if (nbytes > 0 && address == 0) throw py::value_error("the tensor has no memory to transfer (a fake or unallocated tensor?)");
    // Looked up last: a tensor made contiguous above is the work of that stream.
    auto device = on_device ? std::optional(current_stream(owner)) : std::nullopt;
    return {std::move(owner), reinterpret_cast<std::byte*>(address), nbytes, device};
}

std::span<const std::uint64_t> numbers_in(const py::buffer_info& buffer, const char* name) {
    const bool unsigned_64 = buffer.itemsize == sizeof(std::uint64_t) && (buffer.format == "Q" || buffer.format == "L");
    if (!unsigned_64 || buffer.ndim != 1)
        throw py::type_error(std::string(name) + " must be an array of uint64, such as array.array('Q'), got " +
                             std::to_string(buffer.ndim) + " dimension(s) of format '" + buffer.format + "'");
    if (buffer.size > 1 && buffer.strides[0] != buffer.itemsize) throw py::value_error(std::string(name) + " must be contiguous");
    return {static_cast<const std::uint64_t*>(buffer.ptr), static_cast<std::size_t>(buffer.size)};
}

std::string path_of(py::handle path) {
    PyObject* encoded = nullptr;
    if (!PyUnicode_FSConverter(path.ptr(), &encoded)) throw py::error_already_set();
    const auto bytes = py::reinterpret_steal<py::bytes>(encoded);
    return bytes;
}

py::object to_python(const IoError& error) {
    const std::string text = describe_errno(error.error()) + ": " + error.operation();
    if (error.path().empty()) return py::handle(PyExc_OSError)(error.error(), text);
    const auto path = py::reinterpret_steal<py::object>(
        PyUnicode_DecodeFSDefaultAndSize(error.path().data(), static_cast<Py_ssize_t>(error.path().size())));
    return py::handle(PyExc_OSError)(error.error(), text, path);
}

void bind_io_error(py::module_&) {
    py::register_local_exception_translator([](std::exception_ptr thrown) {
        try {
            if (thrown) std::rethrow_exception(thrown);
        } catch (const IoError& error) {
            const py::object converted = to_python(error);
            PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(converted.ptr())), converted.ptr());
        }
    });
}

bool wait_for(Request& request, std::optional<std::chrono::nanoseconds> timeout) {
    using Clock = std::chrono::steady_clock;
    if (!request.done()) request.check_process();
    const auto begin = Clock::now();
    while (!request.done()) {
        std::chrono::nanoseconds slice = kSignalInterval;
        if (timeout) {
            const auto left = *timeout - (Clock::now() - begin);
            if (left <= std::chrono::nanoseconds(0)) return false;
            slice = std::min(slice, std::chrono::duration_cast<std::chrono::nanoseconds>(left));
        }
        bool done;
        {
            py::gil_scoped_release release;
            done = request.wait_for(slice);
        }
        if (!done && PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
    give_warnings();
    return true;
}

File& OpenFile::get() const {
    if (generation != process_generation())
        throw std::runtime_error("'" + path + "' was opened by the parent process: open it again in the child");
    if (!file) throw py::value_error("the file is closed");
    return *file;
}

Session::Session(std::unique_ptr<Engine> engine) : engine_(std::move(engine)) {
    register_exit_hook();
    live_sessions().insert(this);
}

Session::Session(const EngineOptions& options) : Session([&] {
    py::gil_scoped_release release;
    return std::make_unique<Engine>(options);
}()) {}

Session::~Session() {
    live_sessions().erase(this);
    if (engine_->usable_here()) {
        {
            py::gil_scoped_release release;
            engine_->close();
        }
        return;
    }
    // The child of a fork has the parent's locks in whatever state they were in, and none of its threads: nothing here can be
    // waited for or taken down.
    for (auto& pending : pending_) new std::shared_ptr<Pending>(std::move(pending));
    [[maybe_unused]] Engine* left_alone = engine_.release();
}

std::shared_ptr<Pending> Session::transfer(Direction direction, py::handle tensor, py::handle target, std::int64_t offset,
                                           bool validate) {
    engine_->check_usable();
    TensorMemory memory = memory_of(tensor, direction);
    const auto [file, path] = file_or_path(target);
    std::shared_ptr<Request> request;
    {
        py::gil_scoped_release release;
        if (direction == Direction::read)
            request = file ? engine_->read(memory.data, memory.nbytes, file, offset, memory.device)
                           : engine_->read(memory.data, memory.nbytes, path, offset, memory.device);
        else
            request = file ? engine_->write(memory.data, memory.nbytes, file, offset, memory.device)
                           : engine_->write(memory.data, memory.nbytes, path, offset, memory.device);
    }
    return remember({std::move(request), std::move(memory.owner), path, validate});
}

std::shared_ptr<Pending> Session::write_descriptor(py::handle tensor, int fd, std::int64_t offset) {
    engine_->check_usable();
    TensorMemory memory = memory_of(tensor, Direction::write);
    std::shared_ptr<Request> request;
    {
        py::gil_scoped_release release;
        request = engine_->write(memory.data, memory.nbytes, fd, offset, memory.device);
    }
    return remember({std::move(request), std::move(memory.owner), "", false});
}

std::shared_ptr<Pending> Session::sync(py::handle target) {
    engine_->check_usable();
    const auto [file, path] = file_or_path(target);
    std::shared_ptr<Request> request;
    {
        py::gil_scoped_release release;
        request = file ? engine_->sync(file) : engine_->sync(path);
    }
    return remember({std::move(request), py::none(), "", false});
}

std::shared_ptr<Pending> Session::remember(Pending submitted) {
    auto pending = std::make_shared<Pending>(std::move(submitted));
    pending_.push_back(pending);
    forget_ended();
    return pending;
}

void Session::forget_ended() {
    // Taken out before any tensor is let go, which may run Python code that comes back here.
    std::vector<std::shared_ptr<Pending>> ended;
    while (!pending_.empty() && pending_.front()->request->done()) {
        ended.push_back(std::move(pending_.front()));
        pending_.pop_front();
    }
    for (auto& pending : ended)
        if (!pending->validate) pending->owner = py::none();
}

void Session::close() {
    check_process();
    // Here rather than in the engine, so that Ctrl-C is heard; the newest first, since by its end most others will have ended.
    const std::vector<std::shared_ptr<Pending>> pending(pending_.rbegin(), pending_.rend());
    for (const auto& each : pending) wait_for(*each->request, std::nullopt);
    {
        py::gil_scoped_release release;
        engine_->close();
    }
    forget_ended();
}

void Session::close_at_exit() {
    if (engine_->usable_here()) close();
}

void Session::check_process() const {
    if (!engine_->usable_here()) engine_->check_usable();
}

Engine& Session::engine() const {
    check_process();
    return *engine_;
}

py::dict Session::stats() const {
    const Statistics now = engine().statistics();
    py::dict stats;
    stats["backend"] = engine_->backend();
    stats["requests"] = now.requests;
    stats["failed_requests"] = now.failed_requests;
    stats["bytes_read"] = now.bytes_read;
    stats["bytes_written"] = now.bytes_written;
    stats["bytes_direct"] = now.bytes_zero_copy + now.bytes_staged + now.bytes_gds;
    stats["bytes_zero_copy"] = now.bytes_zero_copy;
    stats["bytes_staged"] = now.bytes_staged;
    stats["bytes_buffered"] = now.bytes_buffered;
    stats["bytes_gds"] = now.bytes_gds;
    stats["blocks"] = now.blocks;
    py::dict block_latency;
    for (std::size_t bin = 0; bin < kLatencyBins; ++bin)
        if (now.block_latency[bin] > 0) block_latency[py::int_(longest_in_bin(bin))] = now.block_latency[bin];
    stats["block_latency"] = block_latency;
    stats["short_transfers"] = now.short_transfers;
    stats["retries"] = now.retries;
    py::dict fallbacks;
    for (const auto& [reason, count] : now.fallbacks) fallbacks[py::str(reason)] = count;
    stats["fallbacks"] = fallbacks;
    return stats;
}

}  // namespace deepnvme::bindings

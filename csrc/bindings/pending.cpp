#include "bindings/pending.h"

#include <algorithm>
#include <set>

namespace deepnvme::bindings {

namespace {

using namespace nanobind::literals;

constexpr auto kSignalInterval = std::chrono::milliseconds(50);

void give_warnings() {
    for (const std::string& warning : Engine::take_warnings())
        warn(warning);
}

// The transfers of a part that have failed, or `all`, are added to `indices`.
void collect_failed(const Part& part, bool all, std::vector<std::uint64_t>& indices) {
    const auto number = [&](std::size_t piece) { return part.indices.empty() ? part.first + piece : part.indices[piece]; };
    const Pieces* pieces = part.request->pieces();
    if (!pieces) {
        if (all || part.request->error()) indices.push_back(number(0));
        return;
    }
    for (std::size_t i = 0; i < pieces->count(); ++i)
        if (all || pieces->failed(i)) indices.push_back(number(i));
}

}  // namespace

// A request that has not ended, the newest, since by its end most others will have; null if there is none.
Request* Pending::unfinished() {
    Request* newest = nullptr;
    if (!many) {
        if (!request->done()) newest = request.get();
    } else {
        while (many->unfinished > 0 && many->parts[many->unfinished - 1].request->done()) --many->unfinished;
        if (many->unfinished > 0) newest = many->parts[many->unfinished - 1].request.get();
    }
    if (newest) newest->check_process();
    return newest;
}

bool Pending::done() { return !unfinished(); }

bool Pending::wait_for(std::optional<std::chrono::nanoseconds> timeout) {
    using Clock = std::chrono::steady_clock;
    const auto begin = Clock::now();
    while (Request* request = unfinished()) {
        std::chrono::nanoseconds slice = kSignalInterval;
        if (timeout) {
            const auto left = *timeout - (Clock::now() - begin);
            if (left <= std::chrono::nanoseconds(0)) return false;
            slice = std::min(slice, std::chrono::duration_cast<std::chrono::nanoseconds>(left));
        }
        {
            nb::gil_scoped_release release;
            request->wait_for(slice);
        }
        if (!done() && PyErr_CheckSignals() != 0) throw nb::python_error();
    }
    give_warnings();
    return true;
}

std::string Pending::describe() const {
    if (!many) return request->describe();
    const bool read = many->parts.empty() || many->parts.front().request->kind == Request::Kind::read;
    return std::string(read ? "read" : "write") + " of " + std::to_string(many->nbytes) + " bytes in " +
           std::to_string(many->transfers) + " transfers";
}

nb::object Pending::error() const {
    if (!many) {
        const auto error = request->error();
        return error ? to_python(*error) : nb::none();
    }
    std::optional<IoError> first;
    std::set<std::uint32_t> lost_files;  // that could not be closed: their parts that ended before have failed as well
    for (const Part& part : many->parts) {
        if (!first) first = part.request->error();
        if (part.request->close_failed()) lost_files.insert(part.file);
    }
    if (!first) return nb::none();
    std::vector<std::uint64_t> indices;
    for (const Part& part : many->parts) collect_failed(part, lost_files.contains(part.file), indices);
    std::sort(indices.begin(), indices.end());
    const auto failed = " (" + std::to_string(indices.size()) + " of " + std::to_string(many->transfers) + " transfers failed)";
    const nb::object error = to_python(*first, failed);
    nb::list numbers;
    for (const std::uint64_t index : indices) numbers.append(index);
    error.attr("indices") = numbers;
    return error;
}

bool Pending::cancel() {
    if (done()) return false;
    nb::gil_scoped_release release;
    if (!many) return Engine::cancel(*request);
    bool cancelled = false;
    for (const Part& part : many->parts) cancelled |= Engine::cancel(*part.request);
    return cancelled;
}

std::string Pending::describe_unfinished() {
    Request* unended = unfinished();
    nb::gil_scoped_release release;  // if it ends meanwhile, its file is closed here
    return unended ? Engine::describe(*unended) : "";
}

Pending::~Pending() {
    if (submitted() && memory_lost()) owner.release();
}

void Pending::release_memory() {
    if (memory_lost()) owner.release();
    else owner = nb::none();
}

bool Pending::memory_lost() const {
    const auto lost = [](const Part& part) { return part.request->memory_lost(); };
    return many ? std::any_of(many->parts.begin(), many->parts.end(), lost) : request->memory_lost();
}

void Pending::check() const {
    const nb::object found = error();
    if (found.is_none()) return;
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(found.ptr())), found.ptr());
    throw nb::python_error();
}

}  // namespace deepnvme::bindings

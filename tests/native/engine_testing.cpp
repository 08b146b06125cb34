// A module for tests and for the engine's own benchmark: the engine with backends that the op does not have, and its planner.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <functional>
#include <thread>

#include "bare_backend.h"
#include "bindings/bind_functions.h"
#include "bindings/session.h"
#include "core/copy.h"
#include "core/numa.h"
#include "drive_simulation.h"
#include "failing_allocations.h"
#include "faulty_backend.h"

using namespace deepnvme;
using namespace deepnvme::bindings;
using namespace deepnvme::testing;
using namespace nanobind::literals;

namespace {

const char* name_of(Route route) {
    switch (route) {
        case Route::zero_copy: return "zero_copy";
        case Route::staged: return "staged";
        case Route::padded: return "padded";
        default: return "buffered";
    }
}

// [(begin, end, stride, route)] of a plan, and the blocks [(offset, length, route)] that it is cut into.
nb::tuple plan_of(std::uint64_t offset, std::uint64_t length, std::uint64_t address, nb::object alignment,
                  std::uint32_t block_size, std::uint32_t staging_size, std::uint32_t page_size, bool on_device,
                  bool whole_pages, std::uint32_t granule, bool whole_sectors) {
    std::optional<DirectLimits> direct;
    if (!alignment.is_none()) {
        const auto pair = nb::cast<nb::tuple>(alignment);
        direct = DirectLimits{nb::cast<std::uint32_t>(pair[0]), nb::cast<std::uint32_t>(pair[1]), std::max(granule, page_size)};
    }
    const Transfer transfer{offset, length, address, on_device, false,
                            whole_pages ? Ownership::pages : whole_sectors ? Ownership::sectors : Ownership::bytes};
    const Plan made = plan(transfer, direct, {block_size, staging_size, page_size});
    nb::list spans, blocks;
    for (std::uint32_t i = 0; i < made.count; ++i) {
        const Span& span = made.spans[i];
        spans.append(nb::make_tuple(span.begin, span.end, span.stride, name_of(span.route)));
        for (std::uint64_t at = span.begin; at < span.end; at += block_length(span, at))
            blocks.append(nb::make_tuple(at, block_length(span, at), name_of(span.route)));
    }
    return nb::make_tuple(spans, blocks);
}

BackendFactory real_backend(const std::string& name) {
    for (const auto& choice : backend_choices())
        if (choice.name == name) return choice.make;
    throw value_error("no backend '" + name + "'");
}

// Holds every backend made with it until released.
struct Gate {
    Hold held = std::make_shared<std::atomic<bool>>(false);

    void hold() { held->store(true); }
    void release() {
        held->store(false);
        held->notify_all();
    }
};

// [(submit or complete, read, write or sync, offset, length, result)], in the order in which it happened.
nb::list journal_entries(const std::shared_ptr<Journal>& journal) {
    constexpr const char* kKinds[] = {"read", "write", "sync"};
    nb::list entries;
    for (const auto& entry : journal->entries())
        entries.append(nb::make_tuple(entry.completed ? "complete" : "submit", kKinds[static_cast<int>(entry.kind)], entry.offset,
                                      entry.length, entry.result));
    return entries;
}

std::unique_ptr<Session> faulty_engine(const std::string& backend, std::int64_t block_size, std::int64_t queue_depth,
                                       std::int64_t num_threads, bool single_submit, const Faults& faults, const Gate* gate,
                                       const std::shared_ptr<Journal>& journal, bool drive_by_folder,
                                       std::optional<std::int64_t> in_flight_bytes) {
    const auto make = [inner = real_backend(backend), faults, held = gate ? gate->held : Hold(), journal,
                       made = std::make_shared<std::atomic<unsigned>>(0)](unsigned capacity) -> std::unique_ptr<Backend> {
        const unsigned count = ++*made;
        if (count > faults.most_backends && faults.most_backends) throw IoError(EAGAIN, "one backend too many", "");
        Faults own = faults;
        if (count > faults.break_first && faults.break_first) own.break_after = own.break_submit_after = 0;
        return std::make_unique<FaultyBackend>(inner(capacity), own, held, journal);
    };
    const EngineOptions options{backend, block_size, queue_depth, num_threads, single_submit, in_flight_bytes};
    auto engine = std::make_unique<Engine>(options, backend, make);
    if (drive_by_folder)
        engine->set_drive_of([](const File& file) {
            return std::hash<std::string>()(std::filesystem::path(file.path()).parent_path());
        });
    return std::make_unique<Session>(std::move(engine));
}

// Has the last two requests of a file end together, on a thread each, `rounds` times. The file's close fails, its descriptor
// having been closed behind its back. Returns the rounds in which one of both requests was told.
unsigned told_of_a_failed_close(const std::string& path, unsigned rounds) {
    Engine engine({});
    unsigned told = 0;
    for (unsigned round = 0; round < rounds; ++round) {
        auto first = std::make_shared<File>(path, Access::write, Creation::if_missing, /*expect_direct=*/false);
        auto second = first;
        ::close(first->any_descriptor());
        std::atomic<unsigned> failed{0}, ready{0};
        const auto write = [&](std::shared_ptr<File> file) {
            for (++ready; ready < 2;) {}
            if (engine.write(nullptr, 0, std::move(file), 0)->error()) ++failed;  // of no bytes: ends here
        };
        std::thread other(write, std::move(second));
        write(std::move(first));
        other.join();
        told += failed == 1;
    }
    return told;
}

std::shared_ptr<Pending> start(Session& session, const std::string& call, nb::handle first, nb::handle second, nb::handle third) {
    if (call == "read") return session.transfer(Direction::read, first, second, 0);
    if (call == "write") return session.transfer(Direction::write, first, second, 0);
    if (call == "read_many") return session.transfer_many(Direction::read, first, second, third);
    if (call == "write_many") return session.transfer_many(Direction::write, first, second, third);
    if (call == "gather") return session.transfer_records(Direction::read, first, second, third, nb::none(), 0);
    if (call == "fsync") return session.sync(first);
    throw value_error(call);
}

// Makes a call of an engine, with up to three arguments, and waits for its end if it is to, while an allocation fails: see
// FailingAllocations::arm. Returns its future, or None if the call has raised; how many allocations have failed; and whether the
// call or the wait has raised an OSError or MemoryError. Not done in Python, since nanobind does not survive it everywhere: it
// ends the process where there is no memory to wrap something.
nb::tuple with_failing_allocation(Session& session, long others, bool all_after, bool wait, const std::string& call,
                                  const nb::object& first, const nb::object& second, const nb::object& third) {
    std::shared_ptr<Pending> pending;
    bool raised = true;
    FailingAllocations::arm(others, all_after);
    long failed = 0;
    try {
        pending = start(session, call, first, second, third);
        if (wait) pending->wait_for(std::nullopt);
        if (wait) pending->check();
        raised = false;
        failed = FailingAllocations::disarm();
    } catch (const std::bad_alloc&) {
        failed = FailingAllocations::disarm();
        PyErr_Clear();
    } catch (const IoError&) {
        failed = FailingAllocations::disarm();
    } catch (nb::python_error& error) {
        failed = FailingAllocations::disarm();
        if (!error.matches(PyExc_OSError) && !error.matches(PyExc_MemoryError)) throw;
    } catch (...) {
        FailingAllocations::disarm();
        throw;
    }
    return nb::make_tuple(pending, failed, raised);
}

nb::list list_of(const std::vector<int>& numbers) {
    nb::list list;
    for (const int number : numbers) list.append(number);
    return list;
}

// What run_on(processors) says on a thread of its own, and what that may run on afterwards.
nb::tuple bound_to(const nb::list& wanted) {
    std::vector<int> processors, allowed;
    for (const nb::handle processor : wanted) processors.push_back(nb::cast<int>(processor));
    bool bound = false;
    std::thread([&] {
        bound = run_on(processors);
        allowed = allowed_processors();
    }).join();
    return nb::make_tuple(bound, list_of(allowed));
}

std::unique_ptr<Session> instant_engine(const Gate& gate, std::int64_t block_size, std::int64_t queue_depth,
                                        std::int64_t num_threads) {
    const auto make = [held = gate.held](unsigned capacity) -> std::unique_ptr<Backend> {
        return std::make_unique<InstantBackend>(held, capacity);
    };
    return std::make_unique<Session>(
        std::make_unique<Engine>(EngineOptions{"instant", block_size, queue_depth, num_threads, false}, "instant", make));
}

// Queues `count` requests of one block of `file` while a backend that completes at once holds everything back, then releases it.
// Returns the seconds from there until the last has ended, and the CPU seconds of the process meanwhile. No Python is involved.
std::pair<double, double> drain_requests(const std::string& path, std::uint32_t block_size, std::size_t count) {
    Gate gate;
    const auto make = [held = gate.held](unsigned capacity) -> std::unique_ptr<Backend> {
        return std::make_unique<InstantBackend>(held, capacity);
    };
    Engine engine(EngineOptions{"instant", block_size, 128, 1, false}, "instant", make);
    const auto file = std::make_shared<File>(path, Access::read, Creation::must_exist);
    const ReservedMemory memory(block_size);
    std::vector<std::shared_ptr<Request>> requests;
    requests.reserve(count);
    gate.hold();
    while (requests.size() < count) requests.push_back(engine.read(memory.data(), block_size, file, 0));
    const auto cpu_seconds = [] {
        timespec now;
        ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
        return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
    };
    const double busy = cpu_seconds();
    const auto begin = std::chrono::steady_clock::now();
    gate.release();
    requests.back()->wait();
    return {std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(), cpu_seconds() - busy};
}

void bind_simulation(nb::module_& module) {
    using State = SimulatedDrive::State;
    nb::class_<DriveModel>(module, "DriveModel", nb::is_weak_referenceable())
        .def(
            "__init__",
            [](DriveModel* self, double bytes_per_second, double operations_per_second, double latency, unsigned coalesced) {
                new (self) DriveModel{bytes_per_second, operations_per_second, latency, coalesced};
            },
            "bytes_per_second"_a, "operations_per_second"_a, "latency"_a, "coalesced"_a = 1);
    nb::class_<DriveClock>(module, "DriveClock", nb::is_weak_referenceable())
        .def(nb::init<DriveModel>(), "model"_a)
        .def("completion", &DriveClock::completion, "now"_a, "nbytes"_a, "slower"_a = 1);
    nb::class_<SimulatedDrive>(module, "SimulatedDrive", nb::is_weak_referenceable())
        .def(nb::init<DriveModel>(), "model"_a)
        .def("become",
             [](SimulatedDrive& self, const std::string& state) {
                 static const std::map<std::string, State> kStates{{"healthy", State::healthy},
                                                                   {"slow", State::slow},
                                                                   {"failing", State::failing},
                                                                   {"hanging", State::hanging},
                                                                   {"unplugged", State::unplugged}};
                 self.become(kStates.at(state));
             })
        .def_prop_ro("bytes", &SimulatedDrive::bytes)
        .def_prop_ro("operations", &SimulatedDrive::operations);
    const auto released = nb::call_guard<nb::gil_scoped_release>();
    nb::class_<BareLoad>(module, "BareLoad", nb::is_weak_referenceable())
        .def(nb::init<Drives, std::uint32_t, std::uint32_t, unsigned>(), "drives"_a, "block_size"_a, "depth"_a,
             "polling_threads"_a)
        .def("stop", &BareLoad::stop, released);
    nb::class_<EngineLoad>(module, "EngineLoad", nb::is_weak_referenceable())
        .def(nb::init<Drives, const std::vector<std::string>&, std::uint64_t, std::uint32_t, std::uint32_t, std::uint32_t,
                      bool>(),
             "drives"_a, "paths"_a, "file_size"_a, "block_size"_a, "depth"_a, "workers"_a, "single_blocks"_a)
        .def("stop", &EngineLoad::stop, released);
}

}  // namespace

NB_MODULE(DEEPNVME_EXTENSION_NAME, module) {
    module.attr("source_hash") = DEEPNVME_SOURCE_HASH;
    bind_errors(module);
    bind_pinned_buffer(module);
    bind_engine(module);
    bind_quantization(module);

    nb::class_<Faults>(module, "Faults", nb::is_weak_referenceable())
        .def(nb::init<>())
        .def_rw("short_every", &Faults::short_every)
        .def_rw("short_bytes", &Faults::short_bytes)
        .def_rw("error_every", &Faults::error_every)
        .def_rw("error", &Faults::error)
        .def_rw("error_limit", &Faults::error_limit)
        .def_rw("error_from", &Faults::error_from)
        .def_rw("refuse_every", &Faults::refuse_every)
        .def_rw("refuse_direct", &Faults::refuse_direct)
        .def_rw("break_after", &Faults::break_after)
        .def_rw("break_submit_after", &Faults::break_submit_after)
        .def_rw("out_of_memory_every", &Faults::out_of_memory_every)
        .def_rw("break_first", &Faults::break_first)
        .def_rw("most_backends", &Faults::most_backends)
        .def_rw("stop_fails", &Faults::stop_fails)
        .def_rw("refuse_cancels", &Faults::refuse_cancels);
    nb::class_<Gate>(module, "Gate", nb::is_weak_referenceable())
        .def(nb::init<>())
        .def("hold", &Gate::hold)
        .def("release", &Gate::release);
    nb::class_<Journal>(module, "Journal", nb::is_weak_referenceable())
        .def(nb::init<>())
        .def("entries", &journal_entries);
    const nb::call_guard<nb::gil_scoped_release> unlocked;
    nb::class_<BareBackend>(module, "BareBackend", nb::is_weak_referenceable())
        .def(nb::init<const std::string&, unsigned>(), "name"_a, "capacity"_a)
        .def("submit", &BareBackend::submit, "index"_a, "fd"_a, "write"_a = false, "length"_a = BareBackend::kPage,
             "offset"_a = 0)
        .def("flush", &BareBackend::flush)
        .def("reap", &BareBackend::reap, unlocked)
        .def("cancel", &BareBackend::cancel, "index"_a)
        .def("stop", &BareBackend::stop, unlocked)
        .def("wake", &BareBackend::wake)
        .def(
            "memory",
            [](const BareBackend& self, std::uint32_t index) {
                const std::string memory = self.memory(index);
                return nb::bytes(memory.data(), memory.size());
            },
            "index"_a)
        .def("hanging", [](BareBackend& backend) { return backend.device().hanging(); })
        .def("release", [](BareBackend& backend) { backend.device().release(); });
    module.def("faulty_engine", &faulty_engine, "backend"_a, "block_size"_a, "queue_depth"_a, "num_threads"_a, "single_submit"_a,
               "faults"_a, "gate"_a = nb::none(), "journal"_a = nb::none(), "drive_by_folder"_a = false,
               "in_flight_bytes"_a = nb::none());
    module.def("instant_engine", &instant_engine, "gate"_a, "block_size"_a, "queue_depth"_a, "num_threads"_a);

    module.def("with_failing_allocation", &with_failing_allocation, "engine"_a, "others"_a, "all_after"_a, "wait"_a, "call"_a,
               "first"_a, "second"_a = nb::none(), "third"_a = nb::none());

    bind_simulation(module);
    module.def("drain_requests", &drain_requests, "path"_a, "block_size"_a, "count"_a, nb::call_guard<nb::gil_scoped_release>());

    module.def("told_of_a_failed_close", &told_of_a_failed_close, "path"_a, "rounds"_a,
               nb::call_guard<nb::gil_scoped_release>());

    module.def("processors_near",
               [](unsigned device_major, unsigned device_minor, const std::string& sysfs) {
                   return list_of(processors_near(::makedev(device_major, device_minor), sysfs));
               });
    module.def("copy_threads", &copy_threads, "bytes"_a, "processors"_a);
    module.def("bound_to", &bound_to, "processors"_a);

    module.attr("latency_bins") = kLatencyBins;
    module.def("latency_bin", &latency_bin, "nanoseconds"_a);
    module.def("longest_in_bin", &longest_in_bin, "bin"_a);
    module.def("plan", &plan_of, "offset"_a, "length"_a, "address"_a, "alignment"_any, "block_size"_a, "staging_size"_a,
               "page_size"_a, "on_device"_a = false, "whole_pages"_a = false, "granule"_a = 0,
               "whole_sectors"_a = false);
}

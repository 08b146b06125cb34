// The submodule `kvstore`: blocks by key on drives. deepnvme/kvstore keeps the memory of jobs, whose addresses are not checked.
#include <fcntl.h>

#include <cerrno>
#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bind_functions.h"
#include "bindings/conversions.h"
#include "bindings/session.h"
#include "kvstore/block_store.h"

namespace deepnvme::bindings {

namespace {

using namespace kvstore;
using namespace nanobind::literals;

constexpr auto kLookEvery = std::chrono::milliseconds(50);

// A store or a job. A forked child must not destroy it: the threads that use it are the parent's.
template <typename Shared>
struct OfProcess {
    std::shared_ptr<Shared> thing;
    std::uint64_t generation = process_generation();

    explicit OfProcess(std::shared_ptr<Shared> thing) : thing(std::move(thing)) {}
    ~OfProcess() {
        if (generation != process_generation()) new std::shared_ptr<Shared>(std::move(thing));
    }
    // Shared, so that it outlives a call during which another thread closes the store.
    std::shared_ptr<Shared> get() const {
        if (generation != process_generation()) throw std::runtime_error("the store is the parent process's: a forked child cannot use it");
        if (!thing) throw value_error("the store is closed");
        return thing;
    }
};

using Store = OfProcess<BlockStore>;
using Ticket = OfProcess<Job>;

Keys keys_of(nb::handle sequence) {
    Keys keys;
    for (const nb::handle key : nb::iter(sequence)) {
        if (!PyBytes_Check(key.ptr())) throw type_error("a key must be bytes, got " + name_of_type(key) + " at " + std::to_string(keys.size()));
        const auto text = nb::borrow<nb::bytes>(key);
        if (text.size() > kMostKeyBytes)
            throw value_error("a key has at most " + std::to_string(kMostKeyBytes) + " bytes, got " + std::to_string(text.size()) + " at " +
                              std::to_string(keys.size()));
        keys.emplace_back(text.c_str(), text.size());
    }
    return keys;
}

nb::list flags_of(const Flags& flags) {
    nb::list all;
    for (const std::uint8_t flag : flags) all.append(nb::bool_(flag != 0));
    return all;
}

nb::list use_keys(Store& self, nb::handle sequence, Use how) {
    const Keys keys = keys_of(sequence);
    const auto store = self.get();
    Flags flags;
    {
        nb::gil_scoped_release release;
        flags = store->use(keys, how);
    }
    return flags_of(flags);
}

Ticket* submit_job(Store& self, Flag read, nb::handle sequence, nb::handle addresses, nb::handle lengths, int event) {
    Keys keys = keys_of(sequence);
    const BufferView views[] = {BufferView(addresses), BufferView(lengths)};
    const auto where = numbers_in(views[0], "addresses"), nbytes = numbers_in(views[1], "lengths");
    if (where.size() != keys.size() || nbytes.size() != keys.size())
        throw value_error("there must be as many blocks as keys, got " + std::to_string(where.size()) + " and " + std::to_string(keys.size()));
    std::vector<std::span<std::byte>> memory;
    for (std::size_t i = 0; i < where.size(); ++i) memory.emplace_back(reinterpret_cast<std::byte*>(where[i]), nbytes[i]);
    Fd own_event(event < 0 ? -1 : ::fcntl(event, F_DUPFD_CLOEXEC, 0));
    if (event >= 0 && !own_event) throw IoError(errno, "duplicating the eventfd", "");
    auto job = std::make_shared<Job>(read ? Job::Kind::get : Job::Kind::put, std::move(keys), std::move(memory), std::move(own_event));
    auto ticket = std::make_unique<Ticket>(job);
    self.get()->submit(std::move(job));
    return ticket.release();
}

bool wait_for_job(Ticket& self, double seconds) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(std::min(seconds, 3e7));
    while (!self.get()->done()) {
        const auto left = end - std::chrono::steady_clock::now();
        if (left.count() <= 0) return false;
        {
            nb::gil_scoped_release release;
            self.thing->wait_for(std::min<std::chrono::nanoseconds>(kLookEvery, std::chrono::duration_cast<std::chrono::nanoseconds>(left)));
        }
        if (!self.thing->done() && PyErr_CheckSignals() != 0) throw nb::python_error();
    }
    return true;
}

nb::dict figures_of(const Store& self) {
    const Figures now = self.get()->figures();
    nb::dict all;
    for (std::size_t i = 0; i < kFigures; ++i) all[kFigureNames[i]] = now[i];
    all["last_error"] = decoded(self.get()->last_error());
    return all;
}

// (address, rows, bytes from row to row, bytes of a row) of a buffer, whose rows are along its first dimension.
nb::tuple rows_of(nb::handle object, Flag writable) {
    const BufferView view(object);
    if (writable && view->readonly) throw value_error("the memory of a block must not be read-only");
    const std::int64_t rows = view->ndim > 0 ? view->shape[0] : 1, bytes = rows > 0 ? view->len / rows : 0;
    std::int64_t dense = view->itemsize;
    for (int i = view->ndim - 1; i > 0; dense *= view->shape[i--])
        if (view->shape[i] > 1 && view->strides[i] != dense) throw value_error("a block must be contiguous");
    return nb::make_tuple(reinterpret_cast<std::uintptr_t>(view->buf), rows, view->ndim > 0 ? view->strides[0] : bytes, bytes);
}

}  // namespace

void bind_kvstore(nb::module_& module) {
    auto kvstore = module.def_submodule("kvstore");
    kvstore.def("rows_of", &rows_of, "buffer"_a, "writable"_a);
    nb::class_<Ticket>(kvstore, "Job", nb::is_weak_referenceable())
        .def_prop_ro("done", [](const Ticket& self) { return self.get()->done(); })
        .def("wait", &wait_for_job, "seconds"_a)
        .def_prop_ro("flags", [](const Ticket& self) { return flags_of(self.get()->flags); })
        .def_prop_ro("memory_lost", [](const Ticket& self) { return self.get()->memory_lost.load(); });
    nb::class_<Store>(kvstore, "BlockStore", nb::is_weak_referenceable())
        .def(
            "__init__",
            [](Store* self, const Session& engine, const nb::list& paths, std::uint64_t block_bytes, std::uint64_t slot_bytes,
               std::uint64_t records_begin, std::uint64_t blocks_begin, Slot slots, Flag read_only) {
                const Layout layout{block_bytes, slot_bytes, records_begin, blocks_begin, slots};
                std::vector<std::string> names;
                for (const nb::handle path : paths) names.push_back(path_of(path));
                auto shared = engine.shared_engine();
                nb::gil_scoped_release release;
                new (self) Store(std::make_shared<BlockStore>(std::move(shared), names, layout, read_only));
            },
            nb::kw_only(), "engine"_a, "paths"_a, "block_bytes"_a, "slot_bytes"_a, "records_begin"_a, "blocks_begin"_a, "slots"_a,
            "read_only"_a)
        .def("submit", &submit_job, "read"_a, "keys"_a, "addresses"_a, "lengths"_a, "event"_a)
        .def("contains", [](Store& self, nb::handle keys) { return use_keys(self, keys, Use::none); }, "keys"_a)
        .def("touch", [](Store& self, nb::handle keys) { return use_keys(self, keys, Use::touch); }, "keys"_a)
        .def("pin", [](Store& self, nb::handle keys) { return use_keys(self, keys, Use::pin); }, "keys"_a)
        .def("unpin", [](Store& self, nb::handle keys) { return use_keys(self, keys, Use::unpin); }, "keys"_a)
        .def("remove", [](Store& self, nb::handle keys) { return use_keys(self, keys, Use::remove); }, "keys"_a)
        .def("clear", [](Store& self) {
            const auto store = self.get();
            nb::gil_scoped_release release;
            return store->clear();
        })
        .def("refresh", [](Store& self) {
            const auto store = self.get();
            nb::gil_scoped_release release;
            store->refresh();
        })
        .def("close", [](Store& self) {
            const auto store = self.get();
            self.thing.reset();  // the files are closed once no other thread is in a call
            nb::gil_scoped_release release;
            store->close();
        })
        .def("figures", &figures_of);
}

}  // namespace deepnvme::bindings

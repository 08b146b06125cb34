// The submodule `tables`: rows of tables in memory, by the addresses of their parts. Its callers have one call for a table at a time.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bind_functions.h"
#include "bindings/conversions.h"
#include "tables/row_batch.h"
#include "tables/row_cache.h"
#include "tables/write_batch.h"

namespace deepnvme::bindings {

namespace {

using namespace tables;
using Address = std::uintptr_t;

template <typename T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

std::span<const std::int64_t> rows_at(Address address, std::uint64_t count) {
    if (count > UINT32_MAX) throw value_error("too many rows for one call: " + std::to_string(count));
    return {at<const std::int64_t>(address), static_cast<std::size_t>(count)};
}

// A cache and where its rows are on the drive.
struct CachedTable {
    CachedTable(const Geometry& geometry, std::uint64_t slots, Address memory)
        : geometry(geometry), cache(geometry.rows, geometry.record_bytes, slots, at<std::byte>(memory)) {}

    const Geometry geometry;
    RowCache cache;
    VisibleEpochs visible;
};

using SharedTable = std::shared_ptr<CachedTable>;

struct Batch {
    Batch(SharedTable table, std::span<const std::int64_t> rows, const Destination& destination, Admission admission)
        : table(std::move(table)), rows(this->table->cache, this->table->geometry, rows, destination, admission) {}

    SharedTable table;
    RowBatch rows;
};

struct Writes {
    Writes(SharedTable table, std::size_t most, std::byte* staging)
        : table(std::move(table)), rows(this->table->cache, this->table->geometry, most, staging) {}

    SharedTable table;
    WriteBatch rows;
};

// Replace records of rows. Returns the positions of those that are not in memory, and were not changed.
std::vector<std::size_t> change(CachedTable& table, std::span<const std::int64_t> rows, const std::byte* records,
                                std::uint64_t epoch) {
    std::vector<std::size_t> absent;
    for (std::size_t i = 0; i < rows.size(); ++i) {
        const auto slot = table.cache.find(static_cast<std::uint64_t>(rows[i]));
        if (slot == RowCache::kNone) absent.push_back(i);
        else table.cache.change(slot, records + i * table.geometry.record_bytes, epoch);
    }
    return absent;
}

void bind_batches(nb::module_& tables) {
    using namespace nanobind::literals;
    nb::class_<Batch>(tables, "RowBatch", nb::is_weak_referenceable())
        .def(
            "__init__",
            [](Batch* self, SharedTable table, Address rows, std::uint64_t count, Address out, std::uint64_t begin, std::uint64_t width,
               Flag admit) {
                const auto admission = admit ? Admission::always : Admission::by_use;
                new (self) Batch(std::move(table), rows_at(rows, count), Destination{at<std::byte>(out), begin, width}, admission);
            },
            "table"_a, "rows"_a, "count"_a, "out"_a, "begin"_a, "width"_a, "admit"_a)
        .def("look_up", [](Batch& self) { self.rows.look_up(); }, nb::call_guard<nb::gil_scoped_release>())
        .def("awaited_parts", [](const Batch& self, const Batch& other) { return self.rows.awaited_parts(other.rows); }, "other"_a)
        .def("leave_out", [](Batch& self, const Batch& other) { self.rows.leave_out(other.rows); }, "other"_a)
        .def(
            "plan", [](Batch& self, std::uint64_t part_bytes, std::uint64_t gap_bytes) { self.rows.plan(part_bytes, gap_bytes); },
            "part_bytes"_a, "gap_bytes"_a, nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("hits", [](const Batch& self) { return self.rows.hits(); })
        .def_prop_ro("numbers", [](const Batch& self) { return self.rows.numbers(); })
        .def_prop_ro("missing", [](const Batch& self) { return self.rows.missing(); })
        // (volume, address of the units' numbers, how many), for each part
        .def_prop_ro("parts",
                               [](const Batch& self) {
                                   std::vector<std::tuple<std::uint64_t, Address, std::size_t>> parts;
                                   for (const auto& part : self.rows.parts()) {
                                       const auto units = self.rows.units(part);
                                       parts.emplace_back(part.volume, reinterpret_cast<Address>(units.data()), units.size());
                                   }
                                   return parts;
                               })
        .def(
            "deliver",
            [](Batch& self, std::size_t part, Address staging, const std::vector<std::uint64_t>& failed) {
                nb::gil_scoped_release release;
                self.rows.deliver(part, at<const std::byte>(staging), self.table->visible, failed);
            },
            "part"_a, "staging"_a, "failed"_a)
        .def_prop_ro("stale", [](const Batch& self) { return self.rows.stale(); })
        // (row, volume, offset, position), for each
        .def_prop_ro("failed_rows",
                               [](const Batch& self) {
                                   std::vector<std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, std::size_t>> rows;
                                   for (const auto& [row, volume, offset, position] : self.rows.failed_rows())
                                       rows.emplace_back(row, volume, offset, position);
                                   return rows;
                               });

    nb::class_<Writes>(tables, "WriteBatch", nb::is_weak_referenceable())
        .def(
            "__init__",
            [](Writes* self, SharedTable table, std::size_t most, Address staging) {
                nb::gil_scoped_release release;
                new (self) Writes(std::move(table), most, at<std::byte>(staging));
            },
            "table"_a, "most"_a, "staging"_a)
        // (volume, address of the versions' numbers, how many), for each part
        .def_prop_ro("parts",
                               [](const Writes& self) {
                                   std::vector<std::tuple<std::uint64_t, Address, std::size_t>> parts;
                                   for (const auto& part : self.rows.parts()) {
                                       const auto records = self.rows.records(part);
                                       parts.emplace_back(part.volume, reinterpret_cast<Address>(records.data()), records.size());
                                   }
                                   return parts;
                               })
        .def_prop_ro("rows", [](const Writes& self) { return self.rows.rows(); })
        .def("written", [](Writes& self, Flag succeeded) { self.rows.written(succeeded); }, "succeeded"_a);
}

}  // namespace

void bind_tables(nb::module_& module) {
    using namespace nanobind::literals;
    auto tables = module.def_submodule("tables");
    tables.attr("VERSION_HEADER_BYTES") = sizeof(VersionHeader);
    tables.def("slot_bytes", &RowCache::slot_bytes, "record_bytes"_a);
    tables.def("overhead_bytes", &RowCache::overhead_bytes, "rows"_a, "slots"_a);
    tables.def(
        "first_outside",
        [](Address rows, std::uint64_t count, std::uint64_t rows_of_table) {
            const auto numbers = rows_at(rows, count);
            nb::gil_scoped_release release;
            return RowBatch::first_outside(numbers, rows_of_table);
        },
        "rows"_a, "count"_a, "rows_of_table"_a);
    nb::class_<CachedTable>(tables, "RowCache", nb::is_weak_referenceable())
        .def(
            "__init__",
            [](CachedTable* self, std::uint64_t rows, std::uint64_t record_bytes, std::uint64_t base, std::uint64_t stride,
               std::uint64_t unit, std::uint64_t version_bytes, std::uint64_t volumes, std::uint64_t chunk,
               const std::vector<std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>>& shards, std::uint64_t slots,
               Address memory) {
                Geometry geometry{rows, record_bytes, base, stride, unit, version_bytes, volumes, chunk, {}};
                for (const auto& [first_row, first_byte, volume] : shards)
                    geometry.shards.push_back({first_row, first_byte, volume});
                new (self) CachedTable(geometry, slots, memory);
            },
            nb::kw_only(), "rows"_a, "record_bytes"_a, "base"_a, "stride"_a, "unit"_a, "version_bytes"_a, "volumes"_a, "chunk"_a,
            "shards"_a, "slots"_a, "memory"_a)
        .def(
            "set_visible",
            [](CachedTable& self, std::uint64_t last, std::vector<std::pair<std::uint64_t, std::uint64_t>> abandoned) {
                self.visible = {last, std::move(abandoned)};
            },
            "last"_a, "abandoned"_a)
        .def(
            "change",
            [](CachedTable& self, Address rows, std::uint64_t count, Address records, std::uint64_t epoch) {
                const auto numbers = rows_at(rows, count);
                nb::gil_scoped_release release;
                return change(self, numbers, at<const std::byte>(records), epoch);
            },
            "rows"_a, "count"_a, "records"_a, "epoch"_a)
        .def("clear", [](CachedTable& self) { self.cache.clear(); })
        .def("drop_changed", [](CachedTable& self, std::uint64_t epoch) { self.cache.drop_changed(epoch); }, "epoch"_a)
        .def_prop_ro("slots", [](const CachedTable& self) { return self.cache.slots(); })
        .def_prop_ro("used", [](const CachedTable& self) { return self.cache.used(); })
        .def_prop_ro("changed", [](const CachedTable& self) { return self.cache.changed(); })
        .def_prop_ro("writing", [](const CachedTable& self) { return self.cache.writing(); });
    bind_batches(tables);
}

}  // namespace deepnvme::bindings

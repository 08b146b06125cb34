// The engine, copy_many, lay_out, Checksums, walk_pickle and quantisation under load, without Python, for AddressSanitizer and
// ThreadSanitizer: several submitters, of one transfer or many pieces at a time, of host memory and of devices' (those of
// tests/device/stand_in_cuda.cpp), several workers, every backend, with and without injected faults. Contents are checked
// against a copy in memory. Then backends of two drives that fail, break, hang and run out of memory, under requests that are
// waited for, waited for a while, cancelled or forgotten, and an engine that is closed meanwhile. Then each allocation of a
// request fails. Exit status 0 when all was well.
//
// usage: stress DIRECTORY [ROUNDS]
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "checkpoint/checksums.h"
#include "checkpoint/pickle_walk.h"
#include "checkpoint/zip_layout.h"
#include "core/copy.h"
#include "core/crc32.h"
#include "engine/engine.h"
#include "failing_allocations.h"
#include "faulty_backend.h"
#include "quantization/quantization.h"

using namespace deepnvme;
using namespace deepnvme::testing;

extern "C" {
std::uint64_t standin_allocate(int device, std::size_t size);
void standin_free(std::uint64_t address);
void* standin_reach(std::uint64_t address, std::size_t size);
void* standin_stream(int device);
void standin_free_stream(void* stream);
void standin_enqueue(void* stream, std::uint64_t address, const void* host, std::size_t size, int microseconds);
std::uint64_t standin_live_streams();
std::uint64_t standin_live_events();
std::uint64_t standin_registered_bytes();
// Of LeakSanitizer; null without it.
[[gnu::weak]] void __lsan_do_leak_check();
}

namespace {

constexpr std::size_t kRegion = 1 << 20;  // of the file, for each submitter
constexpr unsigned kSubmitters = 4;

[[noreturn]] void complain(const std::string& what) {
    std::fprintf(stderr, "stress: %s\n", what.c_str());
    std::exit(1);
}

// Memory that a submitter transfers. On a device a stream of its own fills it, late.
class Memory {
public:
    explicit Memory(std::size_t size, std::optional<CudaDevice> device = {}) {
        if (device) {
            const std::uint64_t begin = standin_allocate(*device, size);
            address = reinterpret_cast<std::byte*>(begin);
            reachable_ = static_cast<std::byte*>(standin_reach(begin, size));
            where = DeviceMemory{*device, static_cast<CudaStreamHandle>(standin_stream(*device))};
        } else {
            on_host_.resize(size);
            address = reachable_ = on_host_.data();
        }
    }
    ~Memory() {
        if (!where) return;
        standin_free_stream(where->stream);
        standin_free(reinterpret_cast<std::uint64_t>(address));
    }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    void fill(std::size_t at, const std::byte* content, std::size_t size) {
        if (where) standin_enqueue(where->stream, reinterpret_cast<std::uint64_t>(address + at), content, size, 100);
        else std::memcpy(address + at, content, size);
    }
    const std::byte* content() const { return reachable_; }

    std::byte* address;
    std::optional<DeviceMemory> where;

private:
    std::byte* reachable_;
    std::vector<std::byte> on_host_;
};

void expect_nothing_left_with_the_driver() {
    if (standin_live_streams() + standin_live_events() + standin_registered_bytes() > 0)
        complain("the driver did not get everything back");
}

void expect_success(Request& request) {
    request.wait();
    if (const auto error = request.error()) complain(error->what());
}

// A range cut into pieces of any size, some of them empty, in any order; each begins as far into `memory` as into the range.
std::unique_ptr<Pieces> cut_at_random(std::byte* memory, std::size_t offset, std::size_t length, std::mt19937& random) {
    std::vector<Piece> pieces;
    for (std::size_t at = 0; at < length || random() % 2;) {
        const std::size_t size = std::min<std::size_t>(random() % 3 ? random() % 10'000 : random() % 3 * 4096, length - at);
        pieces.push_back({memory + at, offset + at, size});
        at += size;
    }
    if (random() % 2) std::shuffle(pieces.begin(), pieces.end(), random);
    return std::make_unique<Pieces>(std::move(pieces));
}

// `file`: null to have it opened by the path.
std::shared_ptr<Request> transfer(Engine& engine, Request::Kind kind, std::unique_ptr<Pieces> pieces, std::shared_ptr<File> file,
                                  const std::string& path, std::optional<DeviceMemory> where) {
    SharedFile shared = file ? SharedFile(std::move(file)) : SharedFile(path);
    return engine.transfer(kind, std::move(pieces), shared, /*last=*/true, where);
}

// Random writes and reads within one region of one file, compared with what the region should hold.
void submit_at_random(Engine& engine, const std::string& path, std::shared_ptr<File> file, unsigned seed) {
    std::mt19937 random(seed);
    const auto up_to = [&](std::size_t most) { return std::uniform_int_distribution<std::size_t>(0, most)(random); };
    // A prime past the region's start: neighbours share a page, and a sector.
    const std::size_t base = seed % kSubmitters * kRegion + 977;
    const auto device = seed % 2 ? std::optional<CudaDevice>(seed % kSubmitters / 2) : std::nullopt;
    std::vector<std::byte> truth(kRegion);
    Memory memory(kRegion + 64, device), back(kRegion + 64, device);
    for (auto& byte : truth) byte = static_cast<std::byte>(random());
    expect_success(*engine.write(truth.data(), kRegion, file, static_cast<std::int64_t>(base)));

    for (int step = 0; step < 40; ++step) {
        const std::size_t begin = up_to(kRegion - 1), length = up_to(kRegion - begin), shift = up_to(64);
        for (std::size_t i = 0; i < length; ++i) truth[begin + i] = static_cast<std::byte>(random());
        memory.fill(shift, truth.data() + begin, length);
        const auto offset = static_cast<std::int64_t>(base + begin);
        auto pieces = cut_at_random(memory.address + shift, base + begin, length, random);
        const auto open = step % 8 ? nullptr : file;
        const auto write = step % 4 == 0 ? transfer(engine, Request::Kind::write, std::move(pieces), open, path, memory.where)
                           : step % 2    ? engine.write(memory.address + shift, length, path, offset, memory.where)
                                         : engine.write(memory.address + shift, length, file, offset, memory.where);
        expect_success(*write);
        if (step % 8 == 0) engine.sync(file);  // forgotten at once: the engine must keep what it needs

        const std::size_t from = up_to(kRegion - 1), count = up_to(kRegion - from);
        // In two halves, both under way at a time.
        const std::size_t half = count / 2;
        const auto first = engine.read(back.address, half, file, static_cast<std::int64_t>(base + from), back.where);
        const auto middle = static_cast<std::int64_t>(base + from + half);
        const auto second = engine.read(back.address + half, count - half, path, middle, back.where);
        expect_success(*second);
        expect_success(*first);
        if (std::memcmp(back.content(), truth.data() + from, count) != 0) complain("contents differ in " + path);

        const std::uint64_t record = 1 + random() % 5000;
        std::vector<std::int64_t> ids;
        for (int i = 0; i < 100; ++i) ids.push_back((random() % 2 && i > 0 ? ids.back() + 1 : random()) % (kRegion / record));
        auto rows = std::make_unique<Pieces>(back.address, record, base, ids);
        expect_success(*transfer(engine, Request::Kind::read, std::move(rows), file, path, back.where));
        for (std::size_t i = 0; i < ids.size(); ++i)
            if (std::memcmp(back.content() + i * record, truth.data() + ids[i] * record, record) != 0)
                complain("records differ in " + path);
        pieces = cut_at_random(back.address, base + from, count, random);
        expect_success(*transfer(engine, Request::Kind::read, std::move(pieces), nullptr, path, back.where));
        if (std::memcmp(back.content(), truth.data() + from, count) != 0) complain("pieces differ in " + path);
        engine.statistics();
    }
}

void round(const std::string& directory, const BackendChoice& choice, const Faults& faults, unsigned seed) {
    const std::string path = directory + "/" + choice.name;
    EngineOptions options;
    options.block_size = 64 << 10;
    options.queue_depth = 8;
    options.num_threads = 2;
    Memory last(kRegion), last_on_device(kRegion, 1);
    {
        Engine engine(options, choice.name, [&](unsigned capacity) -> std::unique_ptr<Backend> {
            return std::make_unique<FaultyBackend>(choice.make(capacity), faults, nullptr, nullptr);
        });
        auto file = std::make_shared<File>(path, Access::read_write, Creation::if_missing);
        std::vector<std::thread> submitters;
        for (unsigned i = 0; i < kSubmitters; ++i)
            submitters.emplace_back([&, i] { submit_at_random(engine, path, file, seed * kSubmitters + i); });
        for (auto& submitter : submitters) submitter.join();
        // Left under way for the destructor to wait for.
        for (int i = 0; i < 16; ++i) {
            const Memory& memory = i % 2 ? last_on_device : last;
            engine.write(memory.address, kRegion, path, i * static_cast<std::int64_t>(kRegion), memory.where);
        }
    }
    expect_nothing_left_with_the_driver();
    if (std::filesystem::file_size(path) < 16 * kRegion) complain("a write under way when the engine went was lost");
    std::filesystem::remove(path);
}

// What a backend does to its engine's requests, and which errors they may end with.
struct Trouble {
    Faults faults;
    std::vector<int> errors;
    bool hangs = false;  // no completion is reported until the engine has been asked to close, and for a while after
    bool one = false;    // of each drive's two backends has the faults, the other none
    bool cancels = false;
};

// Requests of one thread, until there are enough or the engine is closed. Each has a part of the file and, to read into, of the
// memory of its own, since nobody waits for many of them.
void submit_in_trouble(Engine& engine, std::shared_ptr<File> file, const Memory& source, const Memory& out,
                       const Trouble& trouble, unsigned seed) {
    const std::string path = file->path();
    constexpr std::size_t kSlots = 32, kSlot = kRegion / kSlots;
    std::mt19937 random(seed);
    std::vector<std::shared_ptr<Request>> kept;
    for (std::size_t slot = 0; slot < kSlots; ++slot) {
        const std::size_t shift = random() % 64, length = random() % (kSlot - shift);
        const auto offset = static_cast<std::int64_t>(seed % kSubmitters * kRegion + slot * kSlot + shift);
        std::shared_ptr<Request> request;
        try {
            const auto many = [&](Request::Kind kind, std::shared_ptr<File> open, const Memory& memory, std::size_t at) {
                auto pieces = cut_at_random(memory.address + at, static_cast<std::size_t>(offset), length, random);
                return transfer(engine, kind, std::move(pieces), open, path, memory.where);
            };
            switch (random() % 7) {
                case 0: request = engine.sync(file); break;
                case 1: request = engine.write(source.address + shift, length, path, offset, source.where); break;
                case 2: request = engine.write(source.address + shift, length, file, offset, source.where); break;
                case 3: request = many(Request::Kind::write, file, source, shift); break;
                case 4: request = many(Request::Kind::read, nullptr, out, slot * kSlot + shift); break;
                case 5: request = engine.read(out.address + slot * kSlot + shift, length, path, offset, out.where); break;
                default: request = engine.read(out.address + slot * kSlot + shift, length, file, offset, out.where); break;
            }
        } catch (const std::invalid_argument&) {
            break;  // closed
        }
        if (trouble.cancels && random() % 2) Engine::cancel(*request);
        switch (random() % 4) {
            case 0: request->wait_for(std::chrono::microseconds(random() % 500)); break;
            case 1: kept.push_back(std::move(request)); break;
            default: break;  // forgotten
        }
        engine.statistics();
    }
    for (const auto& request : kept) {
        request->wait();
        const auto error = request->error();
        const auto& expected = trouble.errors;
        if (!error || (trouble.cancels && error->error() == ECANCELED)) continue;
        if (std::find(expected.begin(), expected.end(), error->error()) == expected.end()) complain(error->what());
    }
}

void trouble(const std::string& directory, const BackendChoice& choice, const Trouble& trouble, unsigned seed) {
    const std::string paths[] = {directory + "/trouble-" + choice.name, directory + "/other-" + choice.name};
    EngineOptions options;
    options.block_size = 16 << 10;
    options.queue_depth = 8;
    options.num_threads = 2;
    const Memory source(kRegion), source_on_device(kRegion, 1);
    std::vector<std::unique_ptr<Memory>> outs;
    for (unsigned i = 0; i < kSubmitters; ++i)
        outs.push_back(std::make_unique<Memory>(kRegion, i % 2 ? std::optional<CudaDevice>(i / 2) : std::nullopt));
    const Hold held = std::make_shared<std::atomic<bool>>(trouble.hangs);
    {
        std::atomic<unsigned> made{0};
        Engine engine(options, choice.name, [&](unsigned capacity) -> std::unique_ptr<Backend> {
            const Faults faults = trouble.one && made++ % 2 ? Faults() : trouble.faults;
            return std::make_unique<FaultyBackend>(choice.make(capacity), faults, held, nullptr);
        });
        engine.set_drive_of([&](const File& file) { return file.path() == paths[0]; });
        std::vector<std::shared_ptr<File>> files;
        for (const std::string& path : paths) {
            std::ofstream(path) << std::string(kSubmitters * kRegion, 'x');
            files.push_back(std::make_shared<File>(path, Access::read_write, Creation::must_exist));
        }
        std::vector<std::thread> threads;
        for (unsigned i = 0; i < kSubmitters; ++i)
            threads.emplace_back([&, i] {
                const Memory& from = i % 2 ? source_on_device : source;
                submit_in_trouble(engine, files[i / 2], from, *outs[i], trouble, seed * kSubmitters + i);
            });
        if (trouble.hangs) {
            std::this_thread::sleep_for(std::chrono::milliseconds(seed % 2 ? 1 : 20));
            threads.emplace_back([&] { engine.close(); });
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
            held->store(false);
            held->notify_all();
        }
        for (auto& thread : threads) thread.join();
        if (!trouble.hangs)  // left under way for the destructor to wait for
            for (int i = 0; i < 16; ++i) engine.write(source.address, kRegion, files[static_cast<std::size_t>(i) % 2], 0);
    }
    if (!trouble.faults.stop_fails) expect_nothing_left_with_the_driver();
    for (const std::string& path : paths) std::filesystem::remove(path);
}

std::vector<Trouble> troubles() {
    Trouble failing, mixed, breaking, hanging, starving;
    failing.faults.error_every = 5;
    failing.errors = {EIO};
    failing.cancels = true;
    mixed.faults.error_every = 7;
    mixed.faults.short_every = 3;
    mixed.faults.refuse_every = 4;
    mixed.faults.refuse_cancels = 5;
    mixed.errors = {EIO};
    breaking.faults.break_after = 60;
    breaking.errors = {EBADF};
    hanging.hangs = true;
    starving.faults.out_of_memory_every = 3;
    starving.cancels = true;
    Trouble hanging_and_failing = mixed, hanging_and_breaking = breaking, hanging_and_cancelled = mixed;
    hanging_and_failing.hangs = hanging_and_breaking.hangs = hanging_and_cancelled.hangs = true;
    hanging_and_cancelled.cancels = true;
    Trouble one_breaking = breaking;
    one_breaking.one = one_breaking.cancels = true;
    one_breaking.faults.break_after = 0;
    one_breaking.faults.break_submit_after = 20;
    return {failing,      mixed,   breaking, hanging, hanging_and_failing, hanging_and_breaking, hanging_and_cancelled,
            one_breaking, starving};
}

// The system may use what was under way for ever, as far as the engine knows, so that some of it is never freed.
std::vector<Trouble> lasting_troubles() {
    Trouble all, one;
    all.faults.break_after = 40;
    all.faults.stop_fails = true;
    all.errors = {EBADF};
    all.cancels = true;
    one = all;
    one.one = true;
    return {all, one};
}

// Each allocation from the submission of some requests to their end fails, alone and together with all after it. Of host memory
// only: the stand-in for CUDA's driver allocates like the rest of the program, which its callers need not expect.
void run_out_of_memory(const std::string& directory, const BackendChoice& choice) {
    constexpr std::size_t kLength = 20'000;
    const std::string path = directory + "/memory-" + choice.name;
    EngineOptions options;
    options.block_size = 4096;
    options.queue_depth = 4;
    {
        std::vector<std::byte> memory(kRegion);
        Engine engine(options, choice.name, choice.make);
        auto file = std::make_shared<File>(path, Access::read_write, Creation::if_missing);
        const auto start = [&](unsigned which) {
            switch (which) {
                case 0: return engine.write(memory.data() + 1, kLength, path, 0);
                case 1: return engine.write(memory.data(), kLength, file, 0);
                case 2: return engine.read(memory.data() + 1, kLength, path, 0);
                case 3: return engine.sync(path);
                default: {
                    constexpr std::size_t kHalf = kLength / 2;
                    std::vector<Piece> pieces{{memory.data(), 0, kHalf}, {memory.data() + kLength, kHalf, kHalf}};
                    auto cut = std::make_unique<Pieces>(std::move(pieces));
                    return transfer(engine, Request::Kind::write, std::move(cut), nullptr, path, {});
                }
            }
        };
        expect_success(*engine.write(memory.data(), kLength, file, 0));
        for (unsigned which = 0; which < 10; ++which) {
            const bool all_after = which >= 5;
            for (long others = 0, failed = 1; failed > 0; ++others) {
                std::shared_ptr<Request> request;
                FailingAllocations::arm(others, all_after);
                try {
                    request = start(which % 5);
                    request->wait();
                } catch (const std::bad_alloc&) {
                } catch (const IoError&) {
                }
                failed = FailingAllocations::disarm();
                const auto error = request ? request->error() : std::nullopt;
                if (error && (error->error() != ENOMEM || !failed)) complain(error->what());
                if (others % 4 == 0) expect_success(*engine.write(memory.data(), kLength, path, 0));
            }
        }
    }
    std::filesystem::remove(path);
}

// Ranges of any size at any address, enough for two threads, there and back.
void copy_at_random(unsigned seed) {
    constexpr std::size_t kEnough = 24 << 20;
    std::mt19937 random(seed);
    std::vector<std::uint64_t> sizes;
    std::size_t room = 0;
    while (room < kEnough) {
        sizes.push_back(sizes.size() % 16 ? random() % (64 << 10) : sizes.size() % 3 * (random() % (2 << 20)));
        room += sizes.back() + 64;
    }
    std::vector<std::byte> source(room), back(room);
    for (std::size_t i = 0; i < room; ++i) source[i] = static_cast<std::byte>(i * 31 + i / 251);
    std::vector<std::unique_ptr<std::byte[]>> pieces;  // each of just its size, so that a byte too much is seen
    std::vector<std::uint64_t> from, to, returned;
    std::size_t at = 0;
    for (const std::uint64_t size : sizes) {
        pieces.push_back(std::make_unique<std::byte[]>(size));
        from.push_back(reinterpret_cast<std::uint64_t>(&source[at + random() % 64]));
        to.push_back(reinterpret_cast<std::uint64_t>(pieces.back().get()));
        returned.push_back(reinterpret_cast<std::uint64_t>(&back[at + random() % 64]));
        at += size + 64;
    }
    copy_many(to, from, sizes);
    copy_many(returned, to, sizes);
    for (std::size_t i = 0; i < sizes.size(); ++i)
        if (std::memcmp(reinterpret_cast<const void*>(returned[i]), reinterpret_cast<const void*>(from[i]), sizes[i]) != 0)
            complain("a copy differs");
}

// Archives of records of any size: each begins where it should, and the directory is as long as it says.
void lay_out_at_random(unsigned seed) {
    std::mt19937_64 random(seed);
    std::vector<std::string> names;
    std::vector<ZipRecord> records;
    for (unsigned i = 0; i < 3000; ++i) names.push_back("data/" + std::to_string(random() >> random() % 64));
    for (const auto& name : names)
        records.push_back({name, random() >> (30 + random() % 34), static_cast<std::uint32_t>(random())});
    for (const std::uint64_t alignment : {std::uint64_t{1}, std::uint64_t{64}, std::uint64_t{4096}}) {
        const ZipLayout layout = lay_out(records, alignment);
        std::uint64_t position = 0, text = 0;
        for (std::size_t i = 0; i < records.size(); ++i) {
            text += layout.header_sizes[i];
            position += layout.header_sizes[i] + layout.padding_sizes[i];
            if (position % alignment != 0 || layout.padding_sizes[i] >= alignment) complain("a record is not aligned");
            position += records[i].size;
        }
        if (layout.text.compare(layout.text.size() - 22, 4, "PK\5\6") != 0 || text + 22 > layout.text.size())
            complain("no end of the archive");
    }
}

// A bit at a time.
std::uint32_t crc32_of(const std::byte* data, std::size_t size) {
    std::uint32_t crc = ~0u;
    for (std::size_t i = 0; i < size; ++i) {
        crc ^= static_cast<std::uint32_t>(data[i]);
        for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
    }
    return ~crc;
}

// A file of records that passes by in chunks of any size, which cut data and checksums anywhere.
void sum_at_random(unsigned seed) {
    std::mt19937_64 random(seed);
    std::vector<ChecksummedRecord> records;
    std::uint64_t at = random() % 50;
    for (unsigned i = 0; i < 200; ++i) {
        const std::uint64_t size = 1 + random() % 3000 + (i == 99 ? 17 << 20 : 0);  // enough for threads
        records.push_back({at, size, at + size + random() % 9, 0});
        at = records.back().descriptor_crc + 4 + random() % 50;
    }
    for (auto& record : records) {
        record.directory_crc = at + random() % 50;
        at = record.directory_crc + 4;
    }
    std::vector<std::byte> expected(at + random() % 50);
    for (auto& byte : expected) byte = static_cast<std::byte>(random());
    const std::vector<std::byte> file = expected;
    for (const auto& record : records) {
        const std::uint32_t crc = crc32_of(&file[record.begin], record.size);
        if (crc32(0, &file[record.begin], record.size) != crc || crc32_by_tables(0, &file[record.begin], record.size) != crc)
            complain("a CRC-32 differs");
        for (const std::uint64_t field : {record.descriptor_crc, record.directory_crc})
            for (unsigned i = 0; i < 4; ++i) expected[field + i] = static_cast<std::byte>(crc >> 8 * i);
    }
    for (const std::uint64_t largest : {std::uint64_t{30}, std::uint64_t{4096}, std::uint64_t{1} << 20, file.size()}) {
        Checksums checksums(records);
        for (std::uint64_t begin = 0; begin < file.size();) {
            const std::size_t size = std::min<std::uint64_t>(file.size() - begin, largest == file.size() ? largest : 1 + random() % largest);
            const auto chunk = std::make_unique<std::byte[]>(size);  // of just its size, so that a byte too much is seen
            std::memcpy(chunk.get(), &file[begin], size);
            checksums.advance(begin, chunk.get(), size);
            if (std::memcmp(chunk.get(), &expected[begin], size) != 0) complain("a checksum differs, or is elsewhere");
            begin += size;
        }
    }
}

// Matrices of odd widths in memory of just their size, there and back by several threads and by one.
void quantize_at_random(unsigned seed) {
    std::mt19937 random(seed);
    struct Parts {
        std::vector<std::byte> values, scales, codes;
    };
    for (const Scheme scheme : {Scheme::int8, Scheme::int4}) {
        std::vector<Parts> parts;
        std::vector<Matrix> matrices;
        for (const FloatType type : {FloatType::float32, FloatType::float16, FloatType::bfloat16}) {
            const std::uint64_t rows = 600 + random() % 200, columns = 1 + random() % 2000;
            const std::uint64_t size = type == FloatType::float32 ? 4 : 2;
            Parts made{std::vector<std::byte>(rows * columns * size),
                       std::vector<std::byte>(rows * row_of_scales(scheme, columns)),
                       std::vector<std::byte>(rows * row_of_codes(scheme, columns))};
            // Any bits but those of what is not finite: the exponent's highest is 0.
            for (std::size_t i = 0; i < made.values.size(); ++i)
                made.values[i] = static_cast<std::byte>(random()) & std::byte(i % size == size - 1 ? 0xbf : 0xff);
            parts.push_back(std::move(made));
            Parts& kept = parts.back();
            matrices.push_back({scheme, type, rows, columns, kept.values.data(), kept.scales.data(), kept.codes.data()});
            if (quantize(matrices.back(), 4)) complain("a finite value was refused");
        }
        dequantize(matrices, 4);
        for (std::size_t i = 0; i < parts.size(); ++i) {
            const std::vector<std::byte> shared = parts[i].values;
            dequantize({&matrices[i], 1}, 1);
            if (shared != parts[i].values) complain("threads that share the work find other values than one");
        }
    }
}

// Codes and scales of any bits, in blocks of any size.
void dequantize_fp8_at_random(unsigned seed) {
    std::mt19937 random(seed);
    for (const FloatType type : {FloatType::float32, FloatType::float16, FloatType::bfloat16}) {
        for (int round = 0; round < 10; ++round) {
            const std::uint64_t rows = 1 + random() % 900, columns = 1 + random() % 2000;
            const std::uint64_t block_rows = 1 + random() % 300, block_columns = 1 + random() % 300;
            const std::uint64_t grid = (rows + block_rows - 1) / block_rows * ((columns + block_columns - 1) / block_columns);
            std::vector<std::byte> codes(rows * columns), scales(grid * sizeof(float));
            for (std::byte& code : codes) code = static_cast<std::byte>(random());
            for (std::byte& part : scales) part = static_cast<std::byte>(random());
            std::vector<std::byte> shared(rows * columns * (type == FloatType::float32 ? 4 : 2)), alone(shared.size());
            Matrix matrix{Scheme::fp8, type, rows, columns, shared.data(), scales.data(), codes.data(), block_rows, block_columns};
            dequantize({&matrix, 1}, 4);
            matrix.values = alone.data();
            dequantize({&matrix, 1}, 1);
            if (shared != alone) complain("threads that share the work find other FP8 values than one");
        }
    }
}

// Pickles of random operations with fitting arguments, then damaged and cut off, each in memory of just its size: nothing is read
// beyond it, and what is found is within the limits.
void walk_pickles_at_random(unsigned seed) {
    std::mt19937_64 random(seed);
    constexpr unsigned kMostNested = 6;
    constexpr std::string_view kOperations =
        "(((((tttteulod10]}R0N2qqqrrrphhjgabsQ)KKMJGUCTBXILFSVPci."
        "\x80\x81\x82\x83\x84\x85\x85\x85\x86\x87\x88\x8a\x8b\x8c\x8d\x8f\x90\x91\x92"
        "\x93\x94\x94\x94\x95\x96\x97\x98";
    const auto number = [&](std::string& stream, unsigned width, std::uint64_t most) {
        const std::uint64_t value = random() % 50 ? random() % most : random();
        for (unsigned i = 0; i < width; ++i) stream += static_cast<char>(value >> (8 * i));
        return std::min<std::uint64_t>(value, 100);
    };
    std::uint64_t complete = 0, nested = 0, too_large = 0;
    for (unsigned pickle = 0; pickle < 20'000; ++pickle) {
        std::string stream;
        for (auto operations = random() % 300; operations; --operations) {
            const char operation = kOperations[random() % kOperations.size()];
            if (operation == '.' && random() % 100) continue;
            stream += operation;
            switch (static_cast<unsigned char>(operation)) {
                case 'q': case 'h': case 'K': case 0x80: case 0x82: number(stream, 1, 30); break;
                case 'M': case 0x83: number(stream, 2, 30); break;
                case 'r': case 'j': case 'J': case 0x84: number(stream, 4, 300); break;
                case 'G': case 0x95: number(stream, 8, 300); break;
                case 'U': case 'C': case 0x8c: case 0x8a: stream.append(number(stream, 1, 20), 'x'); break;
                case 'T': case 'B': case 'X': case 0x8b: stream.append(number(stream, 4, 20), 'x'); break;
                case 0x8d: case 0x8e: case 0x96: stream.append(number(stream, 8, 20), 'x'); break;
                case 'p': case 'g': case 'I': case 'L': case 'F': case 'S': case 'V': case 'P':
                    stream += std::to_string(random() % 30) + '\n';
                    break;
                case 'c': case 'i': stream += "module\nname" + std::to_string(random() % 30) + '\n'; break;
                default: break;
            }
        }
        if (random() % 2) stream += '.';
        for (auto damages = random() % 3; damages && !stream.empty(); --damages)
            stream[random() % stream.size()] = static_cast<char>(random());
        if (random() % 4 == 0) stream.resize(random() % (stream.size() + 1));
        const std::unique_ptr<unsigned char[]> exact(new unsigned char[stream.size()]);
        std::copy(stream.begin(), stream.end(), exact.get());
        const PickleWalk found = walk_pickle({exact.get(), stream.size()}, kMostNested);
        if (found.nesting > kMostNested + 1) complain("a pickle was walked deeper than was asked for");
        for (const std::string_view name : found.names)
            if (stream.find(name) == std::string::npos || name.find('\n') == std::string_view::npos)
                complain("no name of a pickle");
        const bool numbered = !stream.empty() && found.largest_memo_index >= stream.size();
        if (found.complete && (found.nesting > kMostNested || numbered)) complain("a pickle was not walked to its end");
        complete += found.complete;
        nested += found.nesting > kMostNested;
        too_large += numbered;
    }
    if (!complete || !nested || !too_large) complain("random pickles of one kind only");
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 2) complain("usage: stress DIRECTORY [ROUNDS]");
    const unsigned rounds = argc > 2 ? static_cast<unsigned>(std::atoi(argv[2])) : 2;
    Faults none, shorts, interruptions;
    shorts.short_every = 3;
    shorts.short_bytes = 1000;
    interruptions.error_every = 5;
    interruptions.error = EAGAIN;
    interruptions.refuse_every = 7;
    const std::vector<BackendChoice>& choices = backend_choices();
    for (unsigned seed = 0; seed < rounds; ++seed)
        for (const auto& choice : choices)
            for (const Faults& faults : {none, shorts, interruptions})
                round(argv[1], choice, faults, seed);
    for (unsigned seed = 0; seed < 5 * rounds; ++seed)
        for (const auto& choice : choices)
            for (const Trouble& made : troubles())
                trouble(argv[1], choice, made, seed);
    std::vector<std::thread> copying;
    for (unsigned seed = 0; seed < 3; ++seed) copying.emplace_back(copy_at_random, seed);
    for (unsigned seed = 0; seed < 2; ++seed) copying.emplace_back(quantize_at_random, seed), copying.emplace_back(dequantize_fp8_at_random, seed);
    for (auto& thread : copying) thread.join();
    for (unsigned seed = 0; seed < 3; ++seed) lay_out_at_random(seed);
    for (unsigned seed = 0; seed < 3; ++seed) sum_at_random(seed);
    for (unsigned seed = 0; seed < 3; ++seed) walk_pickles_at_random(seed);
    for (const auto& choice : backend_choices()) run_out_of_memory(argv[1], choice);
    if (__lsan_do_leak_check) __lsan_do_leak_check();  // not at the exit
    for (unsigned seed = 0; seed < 2 * rounds; ++seed)
        for (const auto& choice : backend_choices())
            for (const Trouble& made : lasting_troubles())
                trouble(argv[1], choice, made, seed);
    std::printf("stress: %u rounds, all contents as expected\n", rounds);
}

// The engine under load, without Python, for AddressSanitizer and ThreadSanitizer: several submitters, several workers, every
// backend, with and without injected faults. Contents are checked against a copy in memory. Exit status 0 when all was well.
//
// usage: stress DIRECTORY [ROUNDS]
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <random>
#include <thread>

#include "engine/engine.h"
#include "faulty_backend.h"

using namespace deepnvme;
using namespace deepnvme::testing;

namespace {

constexpr std::size_t kRegion = 1 << 20;  // of the file, for each submitter
constexpr unsigned kSubmitters = 3;

[[noreturn]] void complain(const std::string& what) {
    std::fprintf(stderr, "stress: %s\n", what.c_str());
    std::exit(1);
}

void expect_success(Request& request) {
    request.wait();
    if (const auto error = request.error()) complain(error->what());
}

// Random writes and reads within one region of one file, compared with what the region should hold.
void submit_at_random(Engine& engine, const std::string& path, std::shared_ptr<File> file, unsigned seed) {
    std::mt19937 random(seed);
    const auto up_to = [&](std::size_t most) { return std::uniform_int_distribution<std::size_t>(0, most)(random); };
    // A prime past the region's start: neighbours share a page, and a sector.
    const std::size_t base = seed % kSubmitters * kRegion + 977;
    std::vector<std::byte> truth(kRegion), memory(kRegion + 64), back(kRegion + 64);
    for (auto& byte : truth) byte = static_cast<std::byte>(random());
    expect_success(*engine.write(truth.data(), kRegion, file, static_cast<std::int64_t>(base)));

    for (int step = 0; step < 40; ++step) {
        const std::size_t begin = up_to(kRegion - 1), length = up_to(kRegion - begin), shift = up_to(64);
        for (std::size_t i = 0; i < length; ++i) memory[shift + i] = static_cast<std::byte>(random());
        std::memcpy(truth.data() + begin, memory.data() + shift, length);
        const auto offset = static_cast<std::int64_t>(base + begin);
        const auto write = step % 2 ? engine.write(memory.data() + shift, length, path, offset)
                                    : engine.write(memory.data() + shift, length, file, offset);
        expect_success(*write);
        if (step % 8 == 0) engine.sync(file);  // forgotten at once: the engine must keep what it needs

        const std::size_t from = up_to(kRegion - 1), count = up_to(kRegion - from);
        // In two halves, both under way at a time.
        const std::size_t half = count / 2;
        const auto first = engine.read(back.data(), half, file, static_cast<std::int64_t>(base + from));
        const auto second = engine.read(back.data() + half, count - half, path, static_cast<std::int64_t>(base + from + half));
        expect_success(*second);
        expect_success(*first);
        if (std::memcmp(back.data(), truth.data() + from, count) != 0) complain("contents differ in " + path);
        engine.statistics();
    }
}

void round(const std::string& directory, const BackendChoice& choice, const Faults& faults, unsigned seed) {
    const std::string path = directory + "/" + choice.name;
    EngineOptions options;
    options.block_size = 64 << 10;
    options.queue_depth = 8;
    options.num_threads = 2;
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
        static std::vector<std::byte> last(kRegion);
        for (int i = 0; i < 16; ++i) engine.write(last.data(), last.size(), path, i * static_cast<std::int64_t>(kRegion));
    }
    if (std::filesystem::file_size(path) < 16 * kRegion) complain("a write under way when the engine went was lost");
    std::filesystem::remove(path);
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
    for (unsigned seed = 0; seed < rounds; ++seed)
        for (const auto& choice : backend_choices())
            for (const Faults& faults : {none, shorts, interruptions})
                if (choice.make) round(argv[1], choice, faults, seed);
    std::printf("stress: %u rounds, all contents as expected\n", rounds);
}

// A BlockStore on files, used by several threads at a time, for AddressSanitizer and ThreadSanitizer; and its index against a map. What is
// read must be what was put under the key, also where memory is short. Exit status 0 when all was well.
//
// usage: kv_stress DIRECTORY [ROUNDS]
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "failing_allocations.h"
#include "kvstore/block_store.h"

using namespace deepnvme;
using namespace deepnvme::kvstore;

namespace {

[[noreturn]] void complain(const std::string& what) {
    std::fprintf(stderr, "kv_stress: %s\n", what.c_str());
    std::exit(1);
}

using Random = std::mt19937_64;

std::uint64_t below(Random& random, std::uint64_t most) { return random() % most; }

// The index alone: each key is where it was claimed until it is evicted or removed, and no slot has two.
void index_agrees_with_a_map(Random& random) {
    const Slot slots = static_cast<Slot>(1 + below(random, 100));
    BlockIndex index(slots);
    index.finish_placing({});
    const auto remove = [&](Slot slot) {
        if (!index.hold(slot)) complain("a block cannot be held");
        index.remove(slot, false);
        index.release(slot);
    };
    std::unordered_map<std::uint64_t, Slot> held;  // keys that cannot be evicted
    for (int turn = 0; turn < 5000; ++turn) {
        const std::uint64_t number = below(random, 2 * slots);
        const KeyHash key = hash_of({reinterpret_cast<const char*>(&number), sizeof number}, 1);
        const Slot slot = index.find(key);
        if (const auto found = held.find(number); found != held.end()) {
            if (slot != found->second) complain("a held block has moved");
            if (below(random, 2)) index.unpin(slot);
            else remove(slot);
            held.erase(found);
        } else if (slot == kNoSlot) {
            for (const Slot reserved : index.reserve(1)) {
                index.claim(reserved, key);
                if (below(random, 10) == 0) index.abandon(reserved, false);
                else index.publish(reserved, 1, 0);
            }
        } else if (below(random, 3) == 0) {
            if (!index.pin(slot)) complain("a block cannot be pinned");
            held.emplace(number, slot);
        } else if (below(random, 2)) {
            index.touch(slot);
        } else {
            remove(slot);
        }
        if (index.used() > slots || index.pinned() != held.size()) complain("the counts are wrong");
    }
}

constexpr std::uint64_t kBlock = 8192;
constexpr Slot kRoom = 64;

std::string key_of(std::uint64_t number) { return "key " + std::to_string(number); }

void fill(std::span<std::byte> block, std::uint64_t number) {
    for (std::size_t i = 0; i + 8 <= block.size(); i += 8) {
        const std::uint64_t word = number * 0x9E3779B97F4A7C15u + i;
        std::memcpy(block.data() + i, &word, sizeof word);
    }
}

std::shared_ptr<Job> job_of(Job::Kind kind, const std::vector<std::uint64_t>& numbers, std::vector<std::byte>& memory) {
    memory.resize(numbers.size() * kBlock);
    Keys keys;
    std::vector<std::span<std::byte>> blocks;
    for (std::size_t i = 0; i < numbers.size(); ++i) {
        keys.push_back(key_of(numbers[i]));
        blocks.push_back(std::span(memory).subspan(i * kBlock, kBlock));
        if (kind == Job::Kind::put) fill(blocks.back(), numbers[i]);
    }
    return std::make_shared<Job>(kind, std::move(keys), std::move(blocks), Fd());
}

std::shared_ptr<Job> run(BlockStore& store, Job::Kind kind, const std::vector<std::uint64_t>& numbers, std::vector<std::byte>& memory) {
    auto job = job_of(kind, numbers, memory);
    store.submit(job);
    while (!job->wait_for(std::chrono::seconds(1))) {}
    return job;
}

void work(BlockStore& store, std::uint64_t seed, int rounds) {
    Random random(seed);
    std::vector<std::byte> memory, expected(kBlock);
    for (int round = 0; round < rounds; ++round) {
        std::vector<std::uint64_t> numbers(1 + below(random, 8));
        Keys keys;
        for (std::uint64_t& number : numbers) keys.push_back(key_of(number = below(random, 2 * kRoom)));
        switch (below(random, 6)) {
            case 0: store.use(keys, Use::remove); break;
            case 1: store.use(keys, Use::touch); store.use(keys, Use::none); store.figures(); break;
            case 2: run(store, Job::Kind::put, numbers, memory); break;
            default: {
                const auto pinned = store.use(keys, Use::pin);
                const auto job = run(store, Job::Kind::get, numbers, memory);
                for (std::size_t i = 0; i < numbers.size(); ++i) {
                    if (!job->flags[i]) continue;
                    fill(expected, numbers[i]);
                    if (std::memcmp(memory.data() + i * kBlock, expected.data(), kBlock) != 0) complain("wrong bytes of " + key_of(numbers[i]));
                }
                Keys held;
                for (std::size_t i = 0; i < numbers.size(); ++i)
                    if (pinned[i]) held.push_back(keys[i]);
                for (const auto flag : store.use(held, Use::unpin))
                    if (!flag) complain("a pin is lost");
                if (round % 7 == 0) run(store, Job::Kind::put, numbers, memory);
            }
        }
    }
}

// Wherever an allocation fails, and all after it or only that one: jobs end, what is hit is right, and no slot is held for good.
void blocks_are_lost_where_memory_is_short(BlockStore& store) {
    using testing::FailingAllocations;
    std::vector<std::byte> memory, expected(kBlock);
    const std::vector<std::uint64_t> numbers{1, 2, 3, 3, 4, 5, 6, 7};
    Keys keys;
    for (const std::uint64_t number : numbers) keys.push_back(key_of(number));
    long failed = 0;
    const auto attempt = [&](long others, auto call) {
        FailingAllocations::arm(others, others % 2 != 0);
        try {
            call();
        } catch (const std::bad_alloc&) {
        }
        failed += FailingAllocations::disarm();
    };
    for (long others = 0; others < 80; ++others) {
        for (const Job::Kind kind : {Job::Kind::put, Job::Kind::get}) {
            if (kind == Job::Kind::get) run(store, Job::Kind::put, numbers, memory);
            const auto job = job_of(kind, numbers, memory);
            if (kind == Job::Kind::get) std::ranges::fill(memory, std::byte{0});
            attempt(others, [&] {
                store.submit(job);
                while (!job->wait_for(std::chrono::seconds(1))) {}
            });
            for (std::size_t i = 0; i < numbers.size(); ++i) {
                if (!job->flags[i]) continue;
                fill(expected, numbers[i]);
                if (std::memcmp(memory.data() + i * kBlock, expected.data(), kBlock) != 0) complain("wrong bytes where memory was short");
            }
        }
        attempt(others, [&] { store.use(keys, Use::remove); });
        run(store, Job::Kind::put, numbers, memory);
        attempt(others, [&] { store.clear(); });
        store.clear();
        if (store.figures()[kUsed] != 0) complain("a slot is held for good where memory was short");
    }
    if (failed == 0) complain("no allocation has failed");
}

}  // namespace

int main(int count, char** arguments) {
    if (count < 2) complain("usage: kv_stress DIRECTORY [ROUNDS]");
    const int rounds = count > 2 ? std::atoi(arguments[2]) : 300;
    Random random(7);
    for (int i = 0; i < 20; ++i) index_agrees_with_a_map(random);
    std::vector<std::string> paths;
    for (const char* name : {"/kv_a", "/kv_b"}) {
        paths.push_back(arguments[1] + std::string(name));
        const Fd file(::open(paths.back().c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600));
        if (!file || ::ftruncate(file.get(), 16384 + kRoom * kBlock) != 0) complain("cannot make " + paths.back());
    }
    const Layout layout{kBlock, kBlock, 4096, 16384, kRoom};
    const auto engine = std::make_shared<Engine>(EngineOptions{});
    for (int time = 0; time < 3; ++time) {  // opened again with what is there
        BlockStore store(engine, paths, layout, false);
        BlockStore reader(engine, paths, layout, true);
        std::atomic<bool> stopped{false};
        std::thread beside([&] {
            Random numbers(time);
            std::vector<std::byte> memory, expected(kBlock);
            while (!stopped) {
                reader.refresh();
                const std::uint64_t number = below(numbers, 2 * kRoom);
                if (!run(reader, Job::Kind::get, {number}, memory)->flags[0]) continue;
                fill(expected, number);
                if (std::memcmp(memory.data(), expected.data(), kBlock) != 0) complain("a reader got wrong bytes");
            }
        });
        std::vector<std::thread> threads;
        for (std::uint64_t seed = 0; seed < 4; ++seed)
            threads.emplace_back([&, seed] { work(store, 10 * static_cast<std::uint64_t>(time) + seed, rounds); });
        for (std::thread& thread : threads) thread.join();
        stopped = true;
        beside.join();
        const Figures figures = store.figures();
        if (figures[kPinned] != 0 || figures[kCorrupt] != 0 || figures[kHits] == 0) complain("the figures are wrong: " + store.last_error());
        if (store.clear() != figures[kUsed]) complain("a block is held for good");
        blocks_are_lost_where_memory_is_short(store);
    }
    std::puts("kv_stress: all well");
}

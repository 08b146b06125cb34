// What a future stands for: one request, or those of a call for many transfers.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings/conversions.h"
#include "engine/engine.h"

namespace deepnvme::bindings {

// One request of a call for many transfers, and which of them its pieces are.
struct Part {
    std::shared_ptr<Request> request;
    std::size_t first;                   // the transfer that its first piece is; the others follow it,
    std::vector<std::uint32_t> indices;  // unless they are listed here
    std::uint32_t file = 0;              // the same number for all parts of a file
};

struct ManyParts {
    std::vector<Part> parts;
    std::size_t transfers = 0;
    std::uint64_t nbytes = 0;
    std::size_t unfinished = 0;  // the parts from here on have ended
};

// Requests together with what has to outlive them. All methods are called with the GIL held.
struct Pending {
    explicit Pending(nb::object owner, std::string path = {}, bool validate = false)
        : owner(std::move(owner)), path(std::move(path)), validate(validate) {}
    ~Pending();
    Pending(const Pending&) = delete;
    Pending& operator=(const Pending&) = delete;

    std::shared_ptr<Engine> engine;    // of the requests
    std::shared_ptr<Request> request;  // null for many transfers, and while it is being submitted
    nb::object owner;                  // of the memory: storages; let go when every request has ended, or after validation
    std::string path;                  // of a transfer by path, for validation
    bool validate;                     // compare tensor and file afterwards
    std::unique_ptr<ManyParts> many;   // null for one transfer, and while they are being submitted

    bool submitted() const noexcept { return request || many; }
    // The rest is for what is submitted. Throws std::runtime_error in a forked child, where what has not ended never will.
    bool done();
    std::uint64_t nbytes() const noexcept { return many ? many->nbytes : request->length; }
    std::size_t transfers() const noexcept { return many ? many->transfers : 1; }
    std::string describe() const;
    // The OSError it ended with, or None. Of many transfers the first one's, with the numbers of all that failed (`indices`).
    nb::object error() const;
    // Raises it.
    void check() const;
    // False if all have ended already. See Engine::cancel.
    bool cancel();
    // What is under way, as Engine::describe().
    std::string describe_unfinished();
    // Every request has ended. Where the system may still use the memory, it is kept for good.
    void release_memory();

    // Wait with the GIL released and signals attended to. False if the time ran out; throws what a signal handler raised.
    bool wait_for(std::optional<std::chrono::nanoseconds> timeout);

private:
    Request* unfinished();
    bool memory_lost() const;
};

}  // namespace deepnvme::bindings

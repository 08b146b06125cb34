// The async_io module.
#include <nanobind/nanobind.h>

#include <cstdlib>

#include "bindings/bind_functions.h"
#include "bindings/conversions.h"
#include "bindings/help_texts.h"
#include "core/error.h"
#include "core/pinned_memory.h"
#include "engine/backend.h"

namespace deepnvme::bindings {

namespace {

// Every backend by name, with None or the reason that it does not work here. Each is tried: a container may refuse what the
// kernel's settings allow.
nb::dict backends() {
    nb::dict reasons;
    for (const auto& choice : backend_choices()) {
        nb::object reason = nb::none();
        try {
            nb::gil_scoped_release release;
            choice.make(1);
        } catch (const IoError& error) {
            reason = decoded(error.what());
        }
        reasons[decoded(choice.name)] = reason;
    }
    return reasons;
}

// An exit handler of Python cannot change the exit status. This one of C runs after all of Python's and knows the status. On Linux
// it may call exit(), which runs the other handlers of C.
void fail_at_exit() {
    ::on_exit([](int status, void*) { if (status == 0) std::exit(EXIT_FAILURE); }, nullptr);
}

}  // namespace

}  // namespace deepnvme::bindings

NB_MODULE(DEEPNVME_EXTENSION_NAME, module) {
    using namespace deepnvme;
    using namespace deepnvme::bindings;
    // What an engine has been given up with at exit, or the system may still use, is kept for good, and would be told of on stderr.
    nb::set_leak_warnings(false);
    module.attr("source_hash") = DEEPNVME_SOURCE_HASH;
    bind_errors(module);
    bind_pinned_buffer(module);
    bind_engine(module);
    bind_handle(module);
    bind_checkpoint(module);
    bind_kvstore(module);
    bind_memory(module);
    bind_quantization(module);
    bind_tables(module);
    module.def("backends", &backends, help::backends);
    module.def("fail_at_exit", &fail_at_exit, help::fail_at_exit);
    // For the gds module, so that both know all that is pinned.
    module.def("shared_pinned_ranges", [] { return nb::capsule(pinned_ranges::shared(), "deepnvme pinned ranges"); });
}

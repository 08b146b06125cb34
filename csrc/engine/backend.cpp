#include "engine/backend.h"

namespace deepnvme {

const std::vector<BackendChoice>& backend_choices() {
    static const std::vector<BackendChoice> choices{
        {"io_uring", make_uring_backend},
        {"libaio", make_libaio_backend},
        {"threads", make_thread_backend},
    };
    return choices;
}

}  // namespace deepnvme

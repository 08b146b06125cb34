#include "engine/backend.h"

namespace deepnvme {

const std::vector<BackendChoice>& backend_choices() {
    static const std::vector<BackendChoice> choices{
#ifdef DEEPNVME_HAVE_LIBURING
        {"io_uring", make_uring_backend, "", make_polling_backend},
#else
        {"io_uring", nullptr, "compiled out: the liburing headers were not found when the op was built"},
#endif
#ifdef DEEPNVME_HAVE_LIBAIO
        {"libaio", make_libaio_backend, ""},
#else
        {"libaio", nullptr, "compiled out: the libaio headers were not found when the op was built"},
#endif
        {"threads", make_thread_backend, ""},
    };
    return choices;
}

}  // namespace deepnvme

#include "core/error.h"

#include <cerrno>
#include <system_error>
#include <utility>

namespace deepnvme {

std::string describe_errno(int error) { return std::generic_category().message(error); }

IoError::IoError(int error, std::string what, std::string path)
    : std::runtime_error(what + (path.empty() ? "" : " '" + path + "'") + ": " + describe_errno(error)),
      error_(error),
      texts_(std::make_shared<const Texts>(Texts{std::move(what), std::move(path)})) {}

const IoError& IoError::out_of_memory() {
    static const auto* error = new IoError(ENOMEM, "a transfer", "");
    return *error;
}

}  // namespace deepnvme

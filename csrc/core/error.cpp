#include "core/error.h"

#include <system_error>
#include <utility>

namespace deepnvme {

std::string describe_errno(int error) { return std::generic_category().message(error); }

IoError::IoError(int error, std::string what, std::string path)
    : std::runtime_error(what + (path.empty() ? "" : " '" + path + "'") + ": " + describe_errno(error)),
      error_(error),
      operation_(std::move(what)),
      path_(std::move(path)) {}

}  // namespace deepnvme

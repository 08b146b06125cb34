// Whether a drive has poll queues, which it is asked for completions by (IORING_SETUP_IOPOLL). The kernel makes them where it is
// told to, by nvme.poll_queues=N for instance.
#pragma once

#include <sys/types.h>

#include <string>

namespace deepnvme {

// By the number of the block device: st_dev of a file on it, st_rdev of the device itself. A partition has its drive's queues.
// True where the system does not say (network and some stacked file systems). Reads `sysfs`. Throws std::bad_alloc.
bool may_have_poll_queues(dev_t device, const std::string& sysfs = "/sys");

}  // namespace deepnvme

// Drives that can be asked for completions: NVMe, virtio and others have queues for it if the kernel was told to make them.
#pragma once

#include <sys/types.h>

#include <string>

namespace deepnvme {

// Whether a block device has poll queues, given its number (st_dev of a file on it). A partition has its drive's. True where the
// system does not say (network and some stacked file systems). `sysfs`: where that file system is mounted. Throws std::bad_alloc.
bool has_poll_queues(dev_t device, const std::string& sysfs = "/sys");

}  // namespace deepnvme

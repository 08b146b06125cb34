// Processors and memory near a drive, on machines with several NUMA nodes. A transfer that crosses from one socket to the other
// shares the link between them with everything else.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace deepnvme {

// Processors that this thread may run on (sched_getaffinity), in order. Empty if the system does not say.
std::vector<int> allowed_processors();

// The processors of the NUMA node that a block device is attached to, given its number (st_dev of a file on it). Partitions, dm and
// md devices are followed to their disks. Empty if the node is not known (network and stacked file systems), if the disks below are
// on different nodes, or if the machine has only one node. `sysfs`: where that file system is mounted.
std::vector<int> processors_near(dev_t device, const std::string& sysfs = "/sys");

// Let a thread (gettid; 0: this one) run on those of `processors` that it is allowed. False, and nothing has changed, if there
// are none or the system refuses.
bool run_on(std::span<const int> processors, pid_t thread = 0);

// Whether the machine has a node of that number, with memory.
bool has_memory_node(int node, const std::string& sysfs = "/sys");

// Have pages of [begin, begin + size) that are not there yet come from the node, or from others once it is full. `begin` lies on a
// page. 0, or errno: containers may refuse it (EPERM).
int prefer_node(void* begin, std::size_t size, int node) noexcept;

}  // namespace deepnvme

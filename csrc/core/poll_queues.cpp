#include "core/poll_queues.h"

#include <sys/sysmacros.h>

#include <fstream>

namespace deepnvme {

bool may_have_poll_queues(dev_t device, const std::string& sysfs) {
    const std::string block = sysfs + "/dev/block/" + std::to_string(major(device)) + ":" + std::to_string(minor(device));
    for (const char* queue : {"/queue/io_poll", "/../queue/io_poll"})  // the second: of the drive that a partition is of
        if (std::string polls; std::ifstream(block + queue) >> polls) return polls != "0";
    return true;
}

}  // namespace deepnvme

#include "core/numa.h"

#include <sched.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <climits>
#include <filesystem>
#include <fstream>
#include <optional>
#include <system_error>

namespace deepnvme {

namespace {

namespace fs = std::filesystem;

// As many as Linux can be built for. A smaller mask than the kernel's own is refused.
constexpr std::size_t kMostProcessors = 8192;
constexpr std::size_t kMostNodes = 1024;
constexpr std::size_t kWordBits = sizeof(unsigned long) * CHAR_BIT;
constexpr int kPreferred = 1;  // MPOL_PREFERRED of <linux/mempolicy.h>
constexpr int kMostLayers = 16;  // of block devices upon block devices

using ProcessorMask = std::array<unsigned long, kMostProcessors / kWordBits>;

bool has(const ProcessorMask& mask, int processor) {
    const auto bit = static_cast<std::size_t>(processor);
    return processor >= 0 && bit < kMostProcessors && (mask[bit / kWordBits] >> (bit % kWordBits) & 1);
}

// All zeros if the system does not say. The system call itself: glibc's wrapper is for masks of 1024 processors.
ProcessorMask allowed_mask(pid_t thread = 0) {
    ProcessorMask mask{};
    ::syscall(SYS_sched_getaffinity, thread, sizeof mask, mask.data());
    return mask;
}

// The file's first line; empty if it cannot be read.
std::string line_of(const fs::path& path) {
    std::string line;
    std::ifstream(path) >> line;
    return line;
}

std::optional<int> number_in(std::string_view text) {
    int number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
    return number;
}

// "0-3,8" as sysfs writes lists.
std::vector<int> list_in(std::string_view text) {
    std::vector<int> numbers;
    while (!text.empty()) {
        const auto range = text.substr(0, text.find(','));
        text.remove_prefix(std::min(range.size() + 1, text.size()));
        const auto dash = range.find('-');
        const auto first = number_in(range.substr(0, dash));
        const auto last = dash == range.npos ? first : number_in(range.substr(dash + 1));
        if (!first || !last || *first < 0 || *last >= static_cast<int>(kMostProcessors)) return {};
        for (int number = *first; number <= *last; ++number) numbers.push_back(number);
    }
    return numbers;
}

std::vector<fs::path> entries_of(const fs::path& directory) {
    std::vector<fs::path> entries;
    std::error_code error;
    for (fs::directory_iterator at(directory, error), end; !error && at != end; at.increment(error)) entries.push_back(at->path());
    return entries;
}

// Of a block device or an NVMe controller, by its directory. Negative if it is not known.
int node_of(const fs::path& device, const fs::path& sysfs, int layers);

// Of devices that work together; negative unless they are all on one.
int common_node(const std::vector<fs::path>& devices, const fs::path& sysfs, int layers) {
    std::optional<int> common;
    for (const auto& device : devices) {
        const int node = node_of(device, sysfs, layers);
        if (node < 0 || common.value_or(node) != node) return -1;
        common = node;
    }
    return common.value_or(-1);
}

int node_of(const fs::path& device, const fs::path& sysfs, int layers) {
    std::error_code error;
    fs::path at = fs::canonical(device, error);
    if (error || layers == 0) return -1;
    if (fs::exists(at / "partition", error)) at = at.parent_path();
    if (const auto below = entries_of(at / "slaves"); !below.empty()) return common_node(below, sysfs, layers - 1);
    // A drive that can have several ports is no child of its controllers: those are entries of its subsystem.
    if (at.parent_path().filename().string().starts_with("nvme-subsys")) {
        auto controllers = entries_of(at.parent_path());
        std::erase_if(controllers, [](const fs::path& entry) {
            std::error_code ignored;
            return !fs::exists(entry / "cntlid", ignored);
        });
        return common_node(controllers, sysfs, layers - 1);
    }
    // The first of the devices above that knows: for NVMe the controller, for virtio and SCSI the PCI device further up.
    for (; at != sysfs && at.has_relative_path(); at = at.parent_path())
        if (const auto node = number_in(line_of(at / "numa_node"))) return *node;
    return -1;
}

fs::path node_directory(const std::string& sysfs) { return fs::path(sysfs) / "devices/system/node"; }

}  // namespace

std::vector<int> allowed_processors() {
    const ProcessorMask mask = allowed_mask();
    std::vector<int> processors;
    for (int processor = 0; processor < static_cast<int>(kMostProcessors); ++processor)
        if (has(mask, processor)) processors.push_back(processor);
    return processors;
}

std::vector<int> processors_near(dev_t device, const std::string& sysfs) {
    if (list_in(line_of(node_directory(sysfs) / "online")).size() < 2) return {};
    std::error_code error;
    const fs::path root = fs::canonical(sysfs, error);
    if (error) return {};
    const std::string number = std::to_string(major(device)) + ":" + std::to_string(minor(device));
    const int node = node_of(root / "dev/block" / number, root, kMostLayers);
    if (node < 0) return {};
    return list_in(line_of(node_directory(sysfs) / ("node" + std::to_string(node)) / "cpulist"));
}

bool run_on(std::span<const int> processors, pid_t thread) {
    const ProcessorMask allowed = allowed_mask(thread);
    ProcessorMask mask{};
    bool any = false;
    for (const int processor : processors) {
        if (!has(allowed, processor)) continue;
        const auto bit = static_cast<std::size_t>(processor);
        mask[bit / kWordBits] |= 1ul << (bit % kWordBits);
        any = true;
    }
    return any && ::syscall(SYS_sched_setaffinity, thread, sizeof mask, mask.data()) == 0;
}

bool has_memory_node(int node, const std::string& sysfs) {
    std::vector<int> nodes = list_in(line_of(node_directory(sysfs) / "has_memory"));
    if (nodes.empty()) nodes = {0};  // a kernel without NUMA
    return std::find(nodes.begin(), nodes.end(), node) != nodes.end();
}

int prefer_node(void* begin, std::size_t size, int node) noexcept {
    std::array<unsigned long, kMostNodes / kWordBits> mask{};
    const auto bit = static_cast<std::size_t>(node);
    if (node < 0 || bit >= kMostNodes) return EINVAL;
    mask[bit / kWordBits] = 1ul << (bit % kWordBits);
    return ::syscall(SYS_mbind, begin, size, kPreferred, mask.data(), kMostNodes + 1, 0) == 0 ? 0 : errno;  // + 1: it takes one less
}

}  // namespace deepnvme

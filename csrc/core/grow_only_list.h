// A list that only grows, at its front, so that it can be looked through without a lock.
#pragma once

#include <atomic>
#include <utility>

namespace deepnvme {

// For what is looked up with every transfer and seldom added to.
template <class Item>
class GrowOnlyList {
public:
    GrowOnlyList() = default;
    GrowOnlyList(const GrowOnlyList&) = delete;
    GrowOnlyList& operator=(const GrowOnlyList&) = delete;
    ~GrowOnlyList() {
        for (Node* node = first_.load(); node;) delete std::exchange(node, node->next);
    }

    // The newest item that matches; null if there is none. Any thread.
    template <class Matches>
    Item* find(Matches matches) const {
        for (Node* node = first_.load(std::memory_order_acquire); node; node = node->next)
            if (matches(node->item)) return &node->item;
        return nullptr;
    }

    template <class Visit>
    void for_each(Visit visit) const {
        find([&](const Item& item) {
            visit(item);
            return false;
        });
    }

    bool empty() const noexcept { return !first_.load(std::memory_order_relaxed); }

    // One thread at a time. The item stays where it is for as long as the list.
    template <class... Members>
    Item& add(Members&&... members) {
        auto* node = new Node{Item{std::forward<Members>(members)...}, first_.load(std::memory_order_relaxed)};
        first_.store(node, std::memory_order_release);
        return node->item;
    }

private:
    struct Node {
        Item item;
        Node* const next;
    };

    std::atomic<Node*> first_{nullptr};
};

}  // namespace deepnvme

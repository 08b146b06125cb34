// A singly linked list that items are only added to, at its front: readers need no lock.
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

    // The newest first.
    template <class Visit>
    void for_each(Visit visit) const {
        find([&](const Item& item) {
            visit(item);
            return false;
        });
    }

    bool empty() const noexcept { return !first_.load(std::memory_order_relaxed); }

    // One thread at a time. References to items stay valid until the list is destroyed.
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

// Finds children by (parent, token): a table with open addressing.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

class Children {
public:
    static uint32_t hash(uint32_t parent, int32_t token) {
        uint64_t x = (uint64_t(parent) << 32 | uint32_t(token)) * 0x9E3779B97F4A7C15u;
        x = (x ^ x >> 29) * 0xBF58476D1CE4E5B9u;
        return uint32_t(x >> 32);
    }

    // The child with this hash that `is(child)`; 0 if there is none.
    template <class Is>
    uint32_t find(uint32_t hash, Is is) const {
        for (uint64_t i = hash & mask(); slots_[i].child; i = (i + 1) & mask())
            if (slots_[i].hash == hash && is(slots_[i].child)) return slots_[i].child;
        return 0;
    }

    void insert(uint32_t hash, uint32_t child) {
        if (4 * (used_ + 1) > 3 * slots_.size()) grow();
        ++used_;
        put({child, hash});
    }

    void rename(uint32_t hash, uint32_t child, uint32_t other) { slots_[place(hash, child)].child = other; }

    void erase(uint32_t hash, uint32_t child) {
        uint64_t hole = place(hash, child);
        --used_;
        // What stands behind the hole moves into it, unless it would then stand before its own place.
        for (uint64_t i = (hole + 1) & mask(); slots_[i].child; i = (i + 1) & mask()) {
            const uint64_t way = (i - slots_[i].hash) & mask();
            if (way < ((i - hole) & mask())) continue;
            slots_[hole] = slots_[i];
            hole = i;
        }
        slots_[hole] = {};
    }

private:
    struct Slot {
        uint32_t child = 0, hash = 0;
    };
    std::vector<Slot> slots_ = std::vector<Slot>(16);
    uint64_t used_ = 0;

    uint64_t mask() const { return slots_.size() - 1; }

    uint64_t place(uint32_t hash, uint32_t child) const {
        uint64_t i = hash & mask();
        while (slots_[i].child != child) i = (i + 1) & mask();
        return i;
    }

    void put(Slot slot) {
        uint64_t i = slot.hash & mask();
        while (slots_[i].child) i = (i + 1) & mask();
        slots_[i] = slot;
    }

    void grow() {
        const std::vector<Slot> old = std::exchange(slots_, std::vector<Slot>(2 * slots_.size()));
        for (const Slot& slot : old)
            if (slot.child) put(slot);
    }
};

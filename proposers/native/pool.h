// Objects known by a number. They never move, and the numbers of dropped ones are given out again.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

template <class T>
class Pool {
public:
    T& operator[](uint32_t number) { return chunks_[number >> BITS][number & (SIZE - 1)]; }

    // The number of an object that the caller has to fill.
    uint32_t add() {
        if (!free_.empty()) {
            const uint32_t number = free_.back();
            free_.pop_back();
            return number;
        }
        if (used_ >> BITS == chunks_.size()) chunks_.emplace_back(new T[SIZE]);
        return used_++;
    }

    void drop(uint32_t number) { free_.push_back(number); }

    int64_t size() const { return int64_t(used_) - int64_t(free_.size()); }

private:
    static constexpr uint32_t BITS = 12, SIZE = 1u << BITS;
    std::vector<std::unique_ptr<T[]>> chunks_;
    std::vector<uint32_t> free_;
    uint32_t used_ = 0;
};

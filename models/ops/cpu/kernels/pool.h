// parallel_for over all cores, made for thousands of short loops a second.
//
// The calling thread works too and waits only for items that somebody has taken: a worker that the system does not
// run just then delays nobody. (OpenMP's barrier waits for every thread, which costs a time slice per loop as soon as
// another process wants a core.)
#pragma once
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <thread>

namespace pool {

// A ticket is epoch (20 bits), number of items (22), next item (22). Whoever gets a next item below the number owns
// that item of that very job, since no job is replaced before all its items are done.
constexpr int BITS = 22;
constexpr uint64_t MASK = (uint64_t{1} << BITS) - 1;

using Clock = std::chrono::steady_clock;
constexpr std::chrono::microseconds PATIENCE{300};
// Multiply-adds, or their like, below which waking a second core takes longer than the work.
constexpr int64_t WORTHWHILE = 200'000;

struct Pool {
    std::atomic<uint64_t> ticket{0};
    std::atomic<int64_t> done{0};
    std::atomic<int> sleepers{0};
    void (*call)(void*, int64_t) = nullptr;
    void* context = nullptr;
    std::mutex caller, sleep;
    std::condition_variable wake;
    int threads = 1;

    Pool() {
        // What the process may use, not this thread: MindSpore pins the threads that call kernels to a core each.
        cpu_set_t all;
        const bool known = sched_getaffinity(getpid(), sizeof all, &all) == 0;
        threads = known ? CPU_COUNT(&all) : static_cast<int>(std::thread::hardware_concurrency());
        // OMP_NUM_THREADS is no guide: MindSpore sets it to 1 for its own ends.
        if (const char* value = std::getenv("MS_SPEC_THREADS"))
            if (const int n = std::atoi(value); n > 0) threads = n;
        if (known) sched_setaffinity(0, sizeof all, &all);  // the workers inherit it
        for (int i = 1; i < threads; ++i) std::thread([this] { work(); }).detach();
    }

    bool take_one() {
        const uint64_t seen = ticket.load(std::memory_order_acquire);
        if ((seen & MASK) >= (seen >> BITS & MASK)) return false;
        const uint64_t mine = ticket.fetch_add(1, std::memory_order_acq_rel);
        const uint64_t item = mine & MASK;
        if (item >= (mine >> BITS & MASK)) return false;
        call(context, static_cast<int64_t>(item));
        done.fetch_add(1, std::memory_order_release);
        return true;
    }

    void work() {
        for (;;) {
            // Kernels of one graph follow within microseconds; beyond that a core is left to others.
            for (auto since = Clock::now(); Clock::now() - since < PATIENCE;) {
                while (take_one()) since = Clock::now();
                for (int i = 0; i < 4; ++i) pause();
            }
            std::unique_lock<std::mutex> lock(sleep);
            const uint64_t seen = ticket.load();
            sleepers.fetch_add(1);
            if ((ticket.load() & MASK) >= (ticket.load() >> BITS & MASK))
                wake.wait(lock, [&] { return ticket.load() != seen; });
            sleepers.fetch_sub(1);
        }
    }

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

    void run(int64_t n, void (*function)(void*, int64_t), void* argument) {
        call = function;
        context = argument;
        done.store(0, std::memory_order_relaxed);
        const uint64_t epoch = (ticket.load(std::memory_order_relaxed) >> 2 * BITS) + 1;
        ticket.store(epoch << 2 * BITS | static_cast<uint64_t>(n) << BITS);
        if (sleepers.load()) {
            std::lock_guard<std::mutex> lock(sleep);
            wake.notify_all();
        }
        while (take_one()) {
        }
        for (int spins = 0; done.load(std::memory_order_acquire) < n; ++spins) {
            pause();
            if (spins % 2000 == 1999) sched_yield();
        }
    }
};

inline Pool& shared() {
    static Pool* const one = new Pool;  // never destroyed: its threads end with the process
    return *one;
}

}  // namespace pool

// Threads that parallel_for may use.
inline int64_t threads() { return pool::shared().threads; }

// Calls f(0), ..., f(n - 1), in any order and on any core; here and in order where `work`, about the number of
// multiply-adds in all of them, is small. Calls from several threads at once are safe: the later run alone.
template <class F>
void parallel_for(int64_t n, int64_t work, F&& f) {
    if (n > 1 && work >= pool::WORTHWHILE && n < static_cast<int64_t>(pool::MASK) - 4096) {
        pool::Pool& p = pool::shared();
        if (p.threads > 1) {
            std::unique_lock<std::mutex> lock(p.caller, std::try_to_lock);
            if (lock.owns_lock()) {
                p.run(n, [](void* context, int64_t i) { (*static_cast<std::remove_reference_t<F>*>(context))(i); }, (void*)&f);
                return;
            }
        }
    }
    for (int64_t i = 0; i < n; ++i) f(i);
}

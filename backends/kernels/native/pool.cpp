// The pool's waiting: a short spin, because the next operation usually comes within microseconds, then a real sleep,
// so that an idle model costs nothing and the web front gets its core.
#include "pool.h"

#include <chrono>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
static inline void relax() { _mm_pause(); }
#elif defined(__aarch64__)
static inline void relax() { asm volatile("yield"); }
#else
static inline void relax() {}
#endif

namespace gainz {
namespace {
constexpr uint64_t FIELD = (uint64_t(1) << 20) - 1, ONE = uint64_t(1) << 20;
constexpr auto SPIN = std::chrono::microseconds(60);
constexpr int TURNS = 64;               // pauses between two looks at the clock
inline uint64_t next(uint64_t run) { return run >> 20 & FIELD; }
inline uint64_t end(uint64_t run) { return run & FIELD; }
}  // namespace

Pool::Pool(int threads) : runs_(static_cast<size_t>(threads)) {
    for (int i = 1; i < threads; i++) workers_.emplace_back([this, i] { work(i); });
}

Pool::~Pool() {
    stop_.store(true);
    { std::lock_guard<std::mutex> lock(mutex_); }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
}

// The owner goes forward through memory, as a processor's own prefetching likes it; others come from the end.
bool Pool::take_from(int owner, int thread) {
    std::atomic<uint64_t>& left = runs_[static_cast<size_t>(owner)].left;
    uint64_t run = left.load(std::memory_order_acquire);
    while (next(run) < end(run)) {
        const uint64_t chunk = owner == thread ? next(run) : end(run) - 1;
        if (left.compare_exchange_weak(run, owner == thread ? run + ONE : run - 1, std::memory_order_acq_rel,
                                       std::memory_order_acquire)) {
            job_(data_, static_cast<int64_t>(chunk), thread);       // cannot change before this chunk is done
            done_.fetch_add(1, std::memory_order_release);
            return true;
        }
    }
    return false;
}

bool Pool::take(int thread) {
    const int all = threads();
    for (int i = 0; i < all; i++)
        if (take_from((thread + i) % all, thread)) return true;
    return false;
}

void Pool::run(Job job, void* data, int64_t count) {
    std::lock_guard<std::mutex> turn(turn_);
    job_ = job;
    data_ = data;
    done_.store(0, std::memory_order_relaxed);
    const uint64_t now = control_.load(std::memory_order_relaxed) + 1, all = static_cast<uint64_t>(threads());
    for (uint64_t i = 0; i < all; i++)
        runs_[i].left.store(now << 40 | (i * uint64_t(count) / all) << 20 | (i + 1) * uint64_t(count) / all, std::memory_order_release);
    control_.store(now);                                            // seq_cst, see sleep()
    if (sleepers_.load() > 0) {
        { std::lock_guard<std::mutex> lock(mutex_); }
        wake_.notify_all();
    }
    while (take(0)) {}
    for (int turn = 0; done_.load(std::memory_order_acquire) != uint64_t(count); turn++) {
        relax();
        if (turn > 4096) { std::this_thread::yield(); turn = 0; }   // somebody else has the worker's core: let it run
    }
}

void Pool::sleep(uint64_t seen) {
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1);
    // Either run() sees this sleeper, or the test below sees run()'s new sequence: both are sequentially consistent.
    wake_.wait(lock, [&] { return stop_.load() || control_.load() != seen; });
    sleepers_.fetch_sub(1);
}

void Pool::work(int thread) {
    auto last = std::chrono::steady_clock::now();
    while (!stop_.load(std::memory_order_relaxed)) {
        const uint64_t seen = control_.load(std::memory_order_acquire);
        bool worked = false;
        while (take(thread)) worked = true;
        if (worked) last = std::chrono::steady_clock::now();
        for (int i = 0; i < TURNS && control_.load(std::memory_order_relaxed) == seen; i++) relax();
        if (control_.load(std::memory_order_relaxed) != seen) continue;
        if (std::chrono::steady_clock::now() - last > SPIN) {
            sleep(seen);
            last = std::chrono::steady_clock::now();
        }
    }
}

}  // namespace gainz

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
constexpr uint64_t FIELD = (uint64_t(1) << 20) - 1;
constexpr auto SPIN = std::chrono::microseconds(60);
constexpr int TURNS = 64;               // pauses between two looks at the clock
inline uint64_t sequence(uint64_t c) { return c >> 40; }
inline uint64_t chunks(uint64_t c) { return (c >> 20) & FIELD; }
inline uint64_t next(uint64_t c) { return c & FIELD; }
}  // namespace

Pool::Pool(int threads) {
    for (int i = 1; i < threads; i++) workers_.emplace_back([this, i] { work(i); });
}

Pool::~Pool() {
    stop_.store(true);
    { std::lock_guard<std::mutex> lock(mutex_); }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
}

bool Pool::take(uint64_t& seen, int thread) {
    uint64_t c = control_.load(std::memory_order_acquire);
    seen = sequence(c);
    while (next(c) < chunks(c)) {
        if (control_.compare_exchange_weak(c, c + 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
            job_(data_, static_cast<int64_t>(next(c)), thread);     // cannot change before this chunk is done
            done_.fetch_add(1, std::memory_order_release);
            return true;
        }
        seen = sequence(c);
    }
    return false;
}

void Pool::run(Job job, void* data, int64_t count) {
    job_ = job;
    data_ = data;
    done_.store(0, std::memory_order_relaxed);
    uint64_t seen = sequence(control_.load(std::memory_order_relaxed));
    control_.store(((seen + 1) & ((uint64_t(1) << 24) - 1)) << 40 | uint64_t(count) << 20);   // seq_cst, see sleep()
    if (sleepers_.load() > 0) {
        { std::lock_guard<std::mutex> lock(mutex_); }
        wake_.notify_all();
    }
    while (take(seen, 0)) {}
    for (int turn = 0; done_.load(std::memory_order_acquire) != uint64_t(count); turn++) {
        relax();
        if (turn > 4096) { std::this_thread::yield(); turn = 0; }   // somebody else has the worker's core: let it run
    }
}

void Pool::sleep(uint64_t seen) {
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1);
    // Either run() sees this sleeper, or the test below sees run()'s new sequence: both are sequentially consistent.
    wake_.wait(lock, [&] { return stop_.load() || sequence(control_.load()) != seen; });
    sleepers_.fetch_sub(1);
}

void Pool::work(int thread) {
    uint64_t seen = 0;
    auto last = std::chrono::steady_clock::now();
    while (!stop_.load(std::memory_order_relaxed)) {
        bool worked = false;
        while (take(seen, thread)) worked = true;
        if (worked) last = std::chrono::steady_clock::now();
        for (int i = 0; i < TURNS && sequence(control_.load(std::memory_order_relaxed)) == seen; i++) relax();
        if (sequence(control_.load(std::memory_order_relaxed)) != seen) continue;
        if (std::chrono::steady_clock::now() - last > SPIN) {
            sleep(seen);
            last = std::chrono::steady_clock::now();
        }
    }
}

}  // namespace gainz

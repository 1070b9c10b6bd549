// One pool of threads: the caller works too, each has a run of neighbouring chunks, and whoever is through helps the others from
// their ends. Who sleeps is not waited for.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace gainz {

class Pool {
public:
    typedef void (*Job)(void* data, int64_t chunk, int thread);
    explicit Pool(int threads);
    ~Pool();
    void run(Job job, void* data, int64_t chunks);      // returns when every chunk is done; several callers take turns
    int threads() const { return static_cast<int>(runs_.size()); }

private:
    void work(int thread);
    void sleep(uint64_t seen);
    bool take(int thread);
    bool take_from(int owner, int thread);
    // sequence (24 bits) | next chunk (20) | end (20): one word, so that a late thread can never take from a newer job
    struct alignas(64) Run { std::atomic<uint64_t> left{0}; };
    std::vector<Run> runs_;
    alignas(64) std::atomic<uint64_t> control_{0};      // the sequence: whoever sees it sees the runs of that job
    alignas(64) std::atomic<uint64_t> done_{0};
    alignas(64) Job job_ = nullptr;
    void* data_ = nullptr;
    alignas(64) std::atomic<int> sleepers_{0};
    std::atomic<bool> stop_{false};
    std::mutex turn_, mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
};

// for (chunk) body(chunk, thread), by whichever thread is free; a single chunk never leaves the caller
template <class F> static inline void parallel(Pool& pool, int64_t chunks, F& body) {
    if (chunks == 1 || pool.threads() == 1) {
        for (int64_t i = 0; i < chunks; i++) body(i, 0);
        return;
    }
    pool.run([](void* data, int64_t chunk, int thread) { (*static_cast<F*>(data))(chunk, thread); }, &body, chunks);
}

}  // namespace gainz

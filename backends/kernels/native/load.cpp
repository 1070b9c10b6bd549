// Quantized matrices from their files into the kernels' layout, on threads of its own, while the caller builds something else.
// Data is read, not mapped: a file that shrinks under us is an error then, not a signal. It knows rows, offsets and the layout of
// `Linear`; files are open already, and what a matrix is called Python knows.
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "stored.h"

namespace gainz {
namespace {

constexpr int64_t PIECE = 128 << 10;            // bytes of a file at a time: they stay in the second cache
constexpr int64_t AHEAD = int64_t(256) << 20;   // bytes that may wait; whoever adds more works on them first

struct Matrix {
    int64_t kind, file, at, rows, columns;      // `at`: where its rows begin in the file
    int64_t heads;                              // > 0: in each head rows 2j and 2j + 1 are to be row j of its two halves
    uint8_t *codes, *scale, *offset;
    int64_t number;                             // its name to the caller
};

struct Piece { Matrix matrix; int64_t first, count; };

int64_t divisor(int64_t a, int64_t b) { return b ? divisor(b, a % b) : a; }

bool read_whole(int file, uint8_t* out, int64_t bytes, int64_t at) {
    while (bytes > 0) {
        const ssize_t got = pread(file, out, static_cast<size_t>(bytes), static_cast<off_t>(at));
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return false;
        out += got; at += got; bytes -= got;
    }
    return true;
}

class Loader {
public:
    explicit Loader(int threads) : most_(threads) {}
    ~Loader() {
        { std::lock_guard<std::mutex> lock(mutex_); waiting_.clear(); stop_ = true; }
        more_.notify_all();
        for (auto& thread : threads_) thread.join();
    }

    void add(const Matrix& m) {
        const Shape shape = shape_of(m.kind);
        const int64_t row = m.columns / shape.weights * shape.bytes, head = m.heads ? m.rows / m.heads : 1;
        const int64_t unit = LANES / divisor(LANES, head) * head, each = most(1, PIECE / row / unit) * unit;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            for (int64_t first = 0; first < m.rows; first += each)
                waiting_.push_back({m, first, least(each, m.rows - first)});
            bytes_ += m.rows * row;
            while (static_cast<int>(threads_.size()) < most_) threads_.emplace_back([this] { serve(); });
        }
        more_.notify_all();
        std::unique_lock<std::mutex> lock(mutex_);
        std::vector<uint8_t> room;
        while (bytes_ > AHEAD && one(lock, room)) {}
    }

    // The number of a matrix whose file ended too early, or -1. Everything that was added is done then.
    int64_t finish() {
        std::unique_lock<std::mutex> lock(mutex_);
        std::vector<uint8_t> room;
        while (one(lock, room)) {}
        done_.wait(lock, [&] { return busy_ == 0; });
        return failed_;
    }

private:
    void serve() {
        std::unique_lock<std::mutex> lock(mutex_);
        std::vector<uint8_t> room;
        while (!stop_)
            if (!one(lock, room)) more_.wait(lock, [&] { return stop_ || !waiting_.empty(); });
    }

    bool one(std::unique_lock<std::mutex>& lock, std::vector<uint8_t>& room) {
        if (waiting_.empty()) return false;
        const Piece piece = waiting_.front();
        waiting_.pop_front();
        busy_++;
        lock.unlock();
        bool right = false;
        try { right = lay_out(piece, room); } catch (const std::bad_alloc&) {}
        lock.lock();
        const Shape shape = shape_of(piece.matrix.kind);
        bytes_ -= piece.count * (piece.matrix.columns / shape.weights * shape.bytes);
        if (!right && failed_ < 0) { failed_ = piece.matrix.number; waiting_.clear(); }
        if (--busy_ == 0) done_.notify_all();
        return true;
    }

    static bool lay_out(const Piece& piece, std::vector<uint8_t>& room) {
        const Matrix& m = piece.matrix;
        const Shape shape = shape_of(m.kind);
        const int64_t row = m.columns / shape.weights * shape.bytes, bytes = piece.count * row;
        room.resize(static_cast<size_t>(bytes * (m.heads ? 2 : 1)));
        if (!read_whole(static_cast<int>(m.file), room.data(), bytes, m.at + piece.first * row)) return false;
        const uint8_t* rows = room.data();
        if (m.heads) {
            halves(rows, piece.count, m.rows / m.heads, row, room.data() + bytes);
            rows += bytes;
        }
        const int64_t groups = m.columns / shape.weights * shape.groups;
        uint8_t* codes = m.codes + piece.first * m.columns * shape.bits / 8;
        uint8_t* scale = m.scale + piece.first * groups * shape.number;
        uint8_t* offset = m.offset ? m.offset + piece.first * groups * shape.number : nullptr;
        for (int64_t nb = 0; nb * LANES < piece.count; nb++)
            pack_any(m.kind, rows, piece.count, m.columns, nb, codes, scale, offset);
        return true;
    }

    // neighbours (2j, 2j + 1) of each head of `size` rows → (j, j + size / 2)
    static void halves(const uint8_t* rows, int64_t count, int64_t size, int64_t row, uint8_t* out) {
        for (int64_t r = 0; r < count; r++) {
            const int64_t in = r % size, to = r - in + in / 2 + in % 2 * (size / 2);
            std::memcpy(out + to * row, rows + r * row, static_cast<size_t>(row));
        }
    }

    const int most_;
    std::mutex mutex_;
    std::condition_variable more_, done_;
    std::deque<Piece> waiting_;
    std::vector<std::thread> threads_;
    int64_t bytes_ = 0, failed_ = -1;
    int busy_ = 0;
    bool stop_ = false;
};

}  // namespace
}  // namespace gainz

using namespace gainz;
#define API extern "C" __attribute__((visibility("default")))

// threads: beside the caller's own. Null: no memory.
API void* gainz_load_open(int64_t threads) { return new (std::nothrow) Loader(static_cast<int>(threads)); }

// words: the members of each Matrix in order. 0: taken; 2: no memory, or no thread.
API int gainz_load_add(void* loader, const int64_t* w, int64_t count) {
    try {
        for (const int64_t* end = w + 10 * count; w < end; w += 10)
            static_cast<Loader*>(loader)->add({w[0], w[1], w[2], w[3], w[4], w[5], ptr<uint8_t>(w[6]), ptr<uint8_t>(w[7]),
                                               ptr<uint8_t>(w[8]), w[9]});
        return 0;
    } catch (...) { return 2; }
}

API int64_t gainz_load_finish(void* loader) { return static_cast<Loader*>(loader)->finish(); }

// What still waits is dropped; what is being worked on is waited for.
API void gainz_load_close(void* loader) { delete static_cast<Loader*>(loader); }

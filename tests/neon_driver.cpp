// Runs the native kernels of another architecture for tests/neon_remote.py: whole buffers in, whole buffers out, by pipe.
// Each buffer ends (to 16 bytes) at a page that nobody may touch, so a read or write beyond it is a crash, not luck.
#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

struct Context;
class Pool;
extern "C" {
int64_t gainz_abi();
Pool* gainz_pool_open(int64_t threads);
Context* gainz_open(Pool* pool);
const char* gainz_isa(Context* c);
int gainz_run(Context* c, const int64_t* program, int64_t count);
void gainz_pack(Context* c, const uint8_t* codes, int64_t n, int64_t k, int64_t padded, const int32_t* gather, int64_t bits,
                int64_t shift, uint8_t* out);
void gainz_pack_floats(Context* c, const char* rows, int64_t n, int64_t k, int64_t type, char* out);
void gainz_pack_stored(Context* c, int64_t kind, const uint8_t* rows, int64_t n, int64_t k, uint8_t* codes, void* scale,
                       void* offset);
}

struct Buffer { char* data; size_t size; char* map; size_t mapped; };

static void get(void* to, size_t size) {
    if (fread(to, 1, size, stdin) != size) exit(0);        // the other side is gone
}
static int64_t word() { int64_t w; get(&w, 8); return w; }
static void put(const void* from, size_t size) { if (fwrite(from, 1, size, stdout) != size) exit(1); }

static Buffer take(size_t size) {
    const size_t page = 65536, whole = (size + page - 1) / page * page;
    char* map = (char*)mmap(nullptr, whole + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED) exit(2);
    mprotect(map + whole, page, PROT_NONE);
    char* data = map + whole - (size + 15) / 16 * 16;
    get(data, size);
    return Buffer{data, size, map, whole + page};
}

int main(int, char** argv) {
    Context* c = gainz_open(gainz_pool_open(atoi(argv[1])));
    const char* name = c ? gainz_isa(c) : "";
    const int64_t hello[2] = {gainz_abi(), (int64_t)strlen(name)};
    put(hello, 16);
    put(name, strlen(name));
    fflush(stdout);
    if (!c) return 0;
    for (;;) {              // kind, buffers, relocations; kind 0 runs, 1 packs codes, 2 floats, 3 stored blocks; buffer 0: the words
        const int64_t kind = word(), buffers = word(), relocations = word();
        std::vector<Buffer> b;
        for (int64_t i = 0; i < buffers; i++) { const int64_t size = word(); b.push_back(take((size_t)size)); }
        for (int64_t i = 0; i < relocations; i++) {
            const int64_t in = word(), at = word(), to = word(), offset = word();
            char* p = b[to].data + offset;
            memcpy(b[in].data + at, &p, 8);
        }
        const int64_t* w = (const int64_t*)b[0].data;
        int64_t code = 0;
        if (kind == 0) code = gainz_run(c, w, (int64_t)b[0].size / 96);
        else if (kind == 2) gainz_pack_floats(c, (const char*)w[0], w[1], w[2], w[3], (char*)w[4]);
        else if (kind == 3) gainz_pack_stored(c, w[0], (const uint8_t*)w[1], w[2], w[3], (uint8_t*)w[4], (void*)w[5], (void*)w[6]);
        else gainz_pack(c, (const uint8_t*)w[0], w[1], w[2], w[3], (const int32_t*)w[4], w[5], w[6], (uint8_t*)w[7]);
        put(&code, 8);
        for (size_t i = 1; i < b.size(); i++) put(b[i].data, b[i].size);
        fflush(stdout);
        for (Buffer& x : b) munmap(x.map, x.mapped);
    }
}

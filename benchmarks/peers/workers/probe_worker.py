"""How fast this machine reads memory: the bound of one-stream decoding. A few lines of C++, two passes over half a gigabyte."""

import ctypes
import os
import subprocess
import tempfile
from pathlib import Path

from wire import Wire, now

CODE = r"""
#include <cstdint>
#include <thread>
#include <vector>
#include <sys/mman.h>
static uint64_t* data; static int64_t words;
extern "C" void make(int64_t bytes) {
    words = bytes / 8;
    data = (uint64_t*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
#ifdef MADV_HUGEPAGE
    madvise(data, bytes, MADV_HUGEPAGE);
#endif
    for (int64_t i = 0; i < words; i++) data[i] = i;
}
static uint64_t sum(int64_t from, int64_t to) {
    uint64_t s[32] = {};
    for (int64_t i = from; i + 32 <= to; i += 32) {
        for (int k = 0; k < 32; k++) s[k] += data[i + k];
        __builtin_prefetch(data + i + 512);
    }
    for (int k = 1; k < 32; k++) s[0] += s[k];
    return s[0];
}
extern "C" uint64_t run(int threads) {
    std::vector<std::thread> all;
    std::vector<uint64_t> sums(threads * 8);
    for (int t = 0; t < threads; t++)
        all.emplace_back([&, t] { sums[t * 8] = sum(words * t / threads, words * (t + 1) / threads); });
    for (auto& thread : all) thread.join();
    return sums[0];
}
"""


class Probe:
    size = 1 << 29

    def __init__(self):
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder) / "probe.cpp", Path(folder) / "probe.so"
            source.write_text(CODE)
            subprocess.run([os.environ.get("CXX", "c++"), "-O3", "-march=native", "-shared", "-fPIC", "-pthread", str(source),
                            "-o", str(library)], check=True)
            self.lib = ctypes.CDLL(str(library))
        self.lib.make(ctypes.c_int64(self.size))

    def versions(self):
        return {}

    def load(self, name, model, threads, streams=1, context=0):
        self.threads = threads
        return {}

    def unload(self, name):
        return {}

    def probe(self, passes):
        """Bytes a second of each pass."""
        found = []
        for _ in range(passes):
            start = now()
            self.lib.run(self.threads)
            found.append(self.size / (now() - start))
        return {"rates": found}


wire = Wire()
wire.serve(Probe())

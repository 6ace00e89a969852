// Stands in for device.h: a block's threads as fibers of one CPU thread, and the warp's instructions by what
// the PTX manual says of their fragments. Copies behind a thread's back are done when it waits for them, not
// before. Threads run in an order that turns round at every pass, so that a forgotten barrier shows.

#define EMULATED
#define FOLLOW(p)
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <utility>

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong; // as the C library has it

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#define INTRINSIC static inline
#define copy16_of_line copy16

struct __align__(8) float2 { float x, y; };
struct __align__(16) float4 { float x, y, z, w; };
struct __align__(8) uint2 { uint x, y; };
struct __align__(16) uint4 { uint x, y, z, w; };
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline uint4 make_uint4(uint x, uint y, uint z, uint w) { return {x, y, z, w}; }

struct Dim { uint x, y, z; };
static Dim threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

enum { THREADS_MAX = 1024, STACK_BYTES = 128 << 10, SLOT_BYTES = 32, COPIES_MAX = 256 };
enum State { READY, AT_BLOCK_BARRIER, AT_WARP_BARRIER, DONE };

struct Copy { void* to; const void* from; bool present; uint group; };
struct Fiber {
    void* stack_pointer;
    char* stack;
    State state;
    uint exchanges, closed, copies;
    Copy pending[COPIES_MAX];
};
struct Warp {
    int operation;
    uint arrived, live;
    __align__(16) char slots[2][32][SLOT_BYTES];
};

static Fiber fibers[THREADS_MAX];
static Warp warps[THREADS_MAX / 32];
static void* scheduler;
static uint current, at_barrier, live;
static uchar* dynamic;
static char error[256];
static void (*body)();

extern "C" void emulator_switch(void** save, void* load);
asm(".text\n.hidden emulator_switch\n.globl emulator_switch\nemulator_switch:\n"
    "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
    "mov %rsp, (%rdi)\nmov %rsi, %rsp\n"
    "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n");

static void fail(const char* message) {
    if (!error[0])
        snprintf(error, sizeof error, "block (%u, %u, %u), thread %u: %s", blockIdx.x, blockIdx.y, blockIdx.z,
                 current, message);
}

static void yield(State state) {
    fibers[current].state = state;
    emulator_switch(&fibers[current].stack_pointer, scheduler);
}

static void release(State from, uint first, uint count) {
    for (uint i = first; i < first + count; ++i)
        if (fibers[i].state == from) fibers[i].state = READY;
}

static void block_barrier() {
    if (++at_barrier == live) {
        at_barrier = 0;
        release(AT_BLOCK_BARRIER, 0, blockDim.x);
        return;
    }
    yield(AT_BLOCK_BARRIER);
}

// Every lane gives `bytes` bytes; returns all lanes' slots once all have arrived.
static char (*exchange(int operation, const void* mine, uint bytes))[SLOT_BYTES] {
    Warp& warp = warps[current / 32];
    Fiber& fiber = fibers[current];
    char(*slots)[SLOT_BYTES] = warp.slots[fiber.exchanges++ % 2];
    memcpy(slots[current % 32], mine, bytes);
    if (warp.arrived == 0) warp.operation = operation;
    if (warp.operation != operation) fail("the lanes of a warp are at unlike instructions");
    if (++warp.arrived == warp.live) {
        warp.arrived = 0;
        release(AT_WARP_BARRIER, current / 32 * 32, 32);
    } else {
        yield(AT_WARP_BARRIER);
    }
    return slots;
}

static void entry() {
    body();
    Fiber& fiber = fibers[current];
    Warp& warp = warps[current / 32];
    if (warp.arrived) fail("a lane ended while others of its warp wait for it");
    --warp.live;
    if (--live > 0 && at_barrier == live) {
        at_barrier = 0;
        release(AT_BLOCK_BARRIER, 0, blockDim.x);
    }
    fiber.state = DONE;
    emulator_switch(&fiber.stack_pointer, scheduler);
}

static void start(Fiber& fiber) {
    if (!fiber.stack) fiber.stack = (char*)malloc(STACK_BYTES);
    void** top = (void**)(((size_t)fiber.stack + STACK_BYTES) & ~(size_t)15);
    *--top = nullptr;         // where `entry` would return to
    *--top = (void*)&entry;   // what the first switch returns to
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    fiber.stack_pointer = top;
    fiber.state = READY;
    fiber.exchanges = fiber.closed = fiber.copies = 0;
}

static void run_block() {
    live = blockDim.x;
    at_barrier = 0;
    for (uint w = 0; w < (blockDim.x + 31) / 32; ++w) {
        const uint rest = blockDim.x - 32 * w;
        warps[w].arrived = 0;
        warps[w].live = rest < 32 ? rest : 32;
    }
    for (uint i = 0; i < blockDim.x; ++i) start(fibers[i]);
    for (uint pass = 0; live > 0 && !error[0]; ++pass) {
        bool ran = false;
        for (uint i = 0; i < blockDim.x && !error[0]; ++i) {
            const uint next = pass % 2 == 0 ? i : blockDim.x - 1 - i;
            if (fibers[next].state != READY) continue;
            ran = true;
            current = next;
            threadIdx = {next, 0, 0};
            emulator_switch(&scheduler, fibers[next].stack_pointer);
        }
        if (!ran && live > 0) fail("deadlock: not all threads reach a barrier");
    }
}

struct Launch {
    uint grid[3], threads, shared_bytes;
    void** args;
};

template <class... A, size_t... I>
static void call(void (*kernel)(A...), void** args, std::index_sequence<I...>) {
    kernel(*(A*)args[I]...);
}

template <class... A> static int count_of(void (*)(A...)) { return sizeof...(A); }

template <class... A> static const char* run(void (*kernel)(A...), const Launch* launch) {
    static void (*the_kernel)(A...);
    static void** the_args;
    the_kernel = kernel;
    the_args = launch->args;
    body = [] { call(the_kernel, the_args, std::index_sequence_for<A...>{}); };
    error[0] = 0;
    gridDim = {launch->grid[0], launch->grid[1], launch->grid[2]};
    blockDim = {launch->threads, 1, 1};
    dynamic = (uchar*)aligned_alloc(16, (launch->shared_bytes + 31) / 16 * 16);
    for (uint z = 0; z < gridDim.z; ++z)
        for (uint y = 0; y < gridDim.y; ++y)
            for (uint x = 0; x < gridDim.x && !error[0]; ++x) {
                blockIdx = {x, y, z};
                memset(dynamic, 0xFF, launch->shared_bytes); // NaN in every type
                run_block();
            }
    free(dynamic);
    return error[0] ? error : nullptr;
}

} // namespace emulator

// What a kernel is found by: how many arguments it has, and its launch.
#define EXPORT extern "C" __attribute__((visibility("default")))
#define EMULATE(kernel)                                                                                          \
    EXPORT int count_##kernel() { return emulator::count_of(kernel); }                                           \
    EXPORT const char* emulate_##kernel(const emulator::Launch* launch) { return emulator::run(kernel, launch); }

#define SHARED_BYTES(name) uchar* const name = emulator::dynamic
static inline void __syncthreads() { emulator::block_barrier(); }

template <class To, class From> static inline To bits_of(From from) {
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
INTRINSIC float bits_to_float(uint bits) { return bits_of<float>(bits); }
INTRINSIC uint float_to_bits(float v) { return bits_of<uint>(v); }

INTRINSIC float product(float a, float b) { return a * b; }
INTRINSIC uint count_up(uint* count) { return (*count)++; }

INTRINSIC float half_to_float(ushort bits) { return (float)bits_of<_Float16>(bits); }
INTRINSIC uint bf16_bits(float v) {
    const uint bits = float_to_bits(v);
    return (v != v ? bits | 0x400000u : bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
}
INTRINSIC uint pack_bf16(float low, float high) { return bf16_bits(low) | bf16_bits(high) << 16; }
INTRINSIC uint pack_f16(float low, float high) {
    return bits_of<ushort>((_Float16)low) | (uint)bits_of<ushort>((_Float16)high) << 16;
}
INTRINSIC uint low_halves(uint a, uint b) { return (a & 0xFFFFu) | b << 16; }
INTRINSIC uint high_halves(uint a, uint b) { return a >> 16 | (b & 0xFFFF0000u); }
INTRINSIC float exp2_fast(float v) { return exp2f(v); }

enum Operation { SHUFFLE = 1, VOTE, BARRIER_OF_WARP, MMA, MATRICES };

template <class T> static inline T shuffled(T v, uint lane) {
    return *(T*)emulator::exchange(SHUFFLE, &v, sizeof v)[lane % 32];
}
INTRINSIC float shuffle_xor(float v, uint mask) { return shuffled(v, emulator::current % 32 ^ mask); }
INTRINSIC float shuffle(float v, uint lane) { return shuffled(v, lane); }
INTRINSIC uint shuffle_uint(uint v, uint lane) { return shuffled(v, lane); }
INTRINSIC bool any_lane(bool v) {
    char(*all)[emulator::SLOT_BYTES] = emulator::exchange(VOTE, &v, sizeof v);
    bool any = false;
    for (uint i = 0; i < 32; ++i) any |= *(bool*)all[i];
    return any;
}
INTRINSIC void warp_barrier() { emulator::exchange(BARRIER_OF_WARP, "", 1); }

INTRINSIC uint4 load_once16(const void* p) { return *(const uint4*)p; }
INTRINSIC uint2 load_once8(const void* p) { return *(const uint2*)p; }

static inline float element_bf16(uint pair, uint i) { return bits_to_float((i ? pair >> 16 : pair & 0xFFFFu) << 16); }
static inline float element_f16(uint pair, uint i) { return half_to_float((ushort)(i ? pair >> 16 : pair)); }

// PTX ISA, "Matrix Fragments for mma.m16n8k16": lane 4 g + t holds of A, two neighbours to a register, rows g,
// g + 8, g, g + 8 and columns 2t, 2t, 2t + 8, 2t + 8; of B rows 2t and 2t + 8, column g; of C and D rows g, g,
// g + 8, g + 8 and columns 2t, 2t + 1, 2t, 2t + 1.
template <float (*element)(uint, uint)> static inline void multiply(float* d, const uint* a, const uint* b) {
    const uint mine[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
    char(*all)[emulator::SLOT_BYTES] = emulator::exchange(MMA, mine, sizeof mine);
    const uint lane = emulator::current % 32, g = lane / 4, t = lane % 4;
    for (uint c = 0; c < 4; ++c) {
        const uint row = g + c / 2 * 8, column = 2 * t + c % 2;
        float sum = d[c];
        for (uint k = 0; k < 16; ++k) {
            const uint* left = (const uint*)all[row % 8 * 4 + k % 8 / 2];
            const uint* right = (const uint*)all[column * 4 + k % 8 / 2];
            sum += element(left[row / 8 + k / 8 * 2], k % 2) * element(right[4 + k / 8], k % 2);
        }
        d[c] = sum;
    }
}
INTRINSIC void mma_bf16(float* d, const uint* a, const uint* b) { multiply<element_bf16>(d, a, b); }
INTRINSIC void mma_f16(float* d, const uint* a, const uint* b) { multiply<element_f16>(d, a, b); }

// PTX ISA, "ldmatrix": lane 8 i + j gives row j of matrix i; lane 4 g + t gets of each matrix elements 2t and
// 2t + 1 of row g, or of column g when transposed.
static inline void matrices(uint* r, const void* row, bool transposed) {
    char(*all)[emulator::SLOT_BYTES] = emulator::exchange(MATRICES, &row, sizeof row);
    const uint lane = emulator::current % 32, g = lane / 4, t = lane % 4;
    for (uint i = 0; i < 4; ++i) {
        const auto at = [&](uint line, uint column) {
            return (uint)(*(const ushort* const*)all[8 * i + line])[column];
        };
        r[i] = transposed ? at(2 * t, g) | at(2 * t + 1, g) << 16 : at(g, 2 * t) | at(g, 2 * t + 1) << 16;
    }
    // nobody changes the rows before all lanes have read them
    emulator::exchange(MATRICES, &row, sizeof row);
}
INTRINSIC void load_matrices(uint* r, const void* row) { matrices(r, row, false); }
INTRINSIC void load_matrices_transposed(uint* r, const void* row) { matrices(r, row, true); }

INTRINSIC void copy16(void* to, const void* from, bool present) {
    emulator::Fiber& fiber = emulator::fibers[emulator::current];
    if (fiber.copies == emulator::COPIES_MAX) return emulator::fail("too many copies under way");
    if ((size_t)to % 16 || (size_t)from % 16) return emulator::fail("a copy that is not aligned");
    fiber.pending[fiber.copies++] = {to, from, present, fiber.closed};
}
INTRINSIC void copies_close() { ++emulator::fibers[emulator::current].closed; }
template <int pending> INTRINSIC void copies_wait() {
    emulator::Fiber& fiber = emulator::fibers[emulator::current];
    uint kept = 0;
    for (uint i = 0; i < fiber.copies; ++i) {
        const emulator::Copy copy = fiber.pending[i];
        if (copy.group + pending >= fiber.closed) {
            fiber.pending[kept++] = copy;
        } else if (copy.present) {
            memcpy(copy.to, copy.from, 16);
        } else {
            memset(copy.to, 0, 16);
        }
    }
    fiber.copies = kept;
}

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
enum { PRODUCTS_MAX = 64, ARRIVALS_MAX = 16, PHASES_MAX = 32, NAMED_MAX = 16, SHARED_MAX = 256 << 10 };
enum State { READY, AT_BLOCK_BARRIER, AT_WARP_BARRIER, AT_PHASE, AT_NAMED_BARRIER, DONE };

// A barrier of shared memory, 8 bytes; `number` counts them from 1.
struct Phases { ushort count, missing, phase, number; };
// An arrival that waits for the copies before it.
struct Arrival { Phases* barrier; ulong copies; };
// How many phases of each barrier.
struct Seen { ushort phases[PHASES_MAX]; };
// What the last copy to 16 bytes of shared memory arrived at; 0 while it is under way.
struct Written { ushort number, phase; };
struct Copy { void* to; const void* from; bool present; uint group; };
// A product of a warpgroup that was begun; `first` of its group to change `d`, which held `saved`.
struct Product {
    float* d;
    const uint* a_registers;
    ulong a, b;
    uint n, group;
    Seen shown;
    bool add, first;
    float (*element)(uint, uint);
    float saved[64];
};
struct Fiber {
    void* stack_pointer;
    char* stack;
    State state;
    uint exchanges, closed, copies;
    Copy pending[COPIES_MAX];
    ulong copies_done;
    uint arrivals;
    Arrival arrival[ARRIVALS_MAX];
    Phases* barrier; // and its parity, which this thread waits for
    uint parity;
    Seen waited, shown; // phases that this thread waited for, and those before `products_see_shared`
    uint products, products_closed;
    bool products_open;
    Product* product;
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
static uchar *allocation, *dynamic;
static uint dynamic_bytes;
static Written written[SHARED_MAX / 16];
static uint named[NAMED_MAX], phases_begun;
static char error[256];
static ulong copied_bytes; // to shared memory, by all launches
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

static void arrive(Phases* barrier) {
    if (barrier->missing == 0) return fail("a barrier of phases that nobody began");
    if (--barrier->missing > 0) return;
    barrier->missing = barrier->count;
    ++barrier->phase;
}

// Arrivals of a thread whose copies are done.
static void arrive_after_copies(Fiber& fiber) {
    uint kept = 0;
    for (uint i = 0; i < fiber.arrivals; ++i) {
        const Arrival arrival = fiber.arrival[i];
        if (arrival.copies <= fiber.copies_done)
            arrive(arrival.barrier);
        else
            fiber.arrival[kept++] = arrival;
    }
    fiber.arrivals = kept;
}

static Written* written_at(const void* to) {
    const size_t at = (uchar*)to - allocation;
    return at < dynamic_bytes ? &written[at / 16] : nullptr;
}

static void land(const Copy& copy) {
    copied_bytes += copy.present ? 16 : 0;
    if (copy.present)
        memcpy(copy.to, copy.from, 16);
    else
        memset(copy.to, 0, 16);
}

// Lands the `count` oldest copies of a thread.
static void land(Fiber& fiber, uint count) {
    for (uint i = 0; i < count; ++i) {
        const Copy& copy = fiber.pending[i];
        land(copy);
        // the first arrival behind it
        uint a = 0;
        while (a < fiber.arrivals && fiber.arrival[a].copies <= fiber.copies_done + i) ++a;
        const Phases* barrier = a < fiber.arrivals ? fiber.arrival[a].barrier : nullptr;
        const Written arrived = barrier ? Written{barrier->number, barrier->phase} : Written{};
        if (Written* at = written_at(copy.to)) *at = arrived;
    }
    memmove(fiber.pending, fiber.pending + count, (fiber.copies - count) * sizeof(Copy));
    fiber.copies -= count;
    fiber.copies_done += count;
    arrive_after_copies(fiber);
}

// Lands what the oldest arrival of each thread waits for; false if there is none.
static bool land_some() {
    bool any = false;
    for (uint i = 0; i < blockDim.x; ++i) {
        Fiber& fiber = fibers[i];
        if (fiber.arrivals == 0) continue;
        any = true;
        land(fiber, (uint)(fiber.arrival[0].copies - fiber.copies_done));
    }
    return any;
}

static void entry() {
    body();
    Fiber& fiber = fibers[current];
    if (fiber.products) fail("a thread ended before its products");
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
    fiber.exchanges = fiber.closed = fiber.copies = fiber.arrivals = 0;
    fiber.copies_done = 0;
    fiber.waited = fiber.shown = {};
    fiber.products = fiber.products_closed = fiber.products_open = 0;
}

static void run_block() {
    live = blockDim.x;
    at_barrier = 0;
    phases_begun = 0;
    memset(written, 0, (dynamic_bytes + 15) / 16 * sizeof(Written));
    memset(named, 0, sizeof named);
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
            if (fibers[next].state == AT_PHASE && (fibers[next].barrier->phase & 1) != fibers[next].parity)
                fibers[next].state = READY;
            if (fibers[next].state != READY) continue;
            ran = true;
            current = next;
            threadIdx = {next, 0, 0};
            emulator_switch(&scheduler, fibers[next].stack_pointer);
        }
        // copies behind a thread's back end when nobody can go on without them
        if (!ran && live > 0 && !land_some()) fail("deadlock: not all threads reach a barrier");
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
    // at an odd multiple of 16 bytes
    dynamic_bytes = 16 + launch->shared_bytes;
    allocation = (uchar*)aligned_alloc(1024, (dynamic_bytes + 1023) / 1024 * 1024);
    dynamic = allocation + 16;
    for (uint z = 0; z < gridDim.z; ++z)
        for (uint y = 0; y < gridDim.y; ++y)
            for (uint x = 0; x < gridDim.x && !error[0]; ++x) {
                blockIdx = {x, y, z};
                memset(dynamic, 0xFF, launch->shared_bytes); // NaN in every type
                run_block();
            }
    free(allocation);
    return error[0] ? error : nullptr;
}

} // namespace emulator

// What a kernel is found by: how many arguments it has, and its launch.
#define EXPORT extern "C" __attribute__((visibility("default")))
#define EMULATE(kernel)                                                                                      \
    EXPORT int count_##kernel() { return emulator::count_of(kernel); }                                       \
    EXPORT ulong copied_##kernel() { return emulator::copied_bytes; }                                        \
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
INTRINSIC uint select_bytes(uint a, uint b, uint which) {
    const ulong both = a | (ulong)b << 32;
    uint bytes = 0;
    for (uint i = 0; i < 4; ++i) bytes |= (uint)(both >> 8 * (which >> 4 * i & 7) & 0xFF) << 8 * i;
    return bytes;
}
INTRINSIC uint masked_or(uint a, uint mask, uint bits) { return (a & mask) | bits; }
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

// A product of two elements is exact in f32, and what kernels add to it too.
template <float (*element)(uint, uint)> static inline float fma_of(uint a, uint b, uint c, uint i) {
    return element(a, i) * element(b, i) + element(c, i);
}
INTRINSIC uint fma_bf16(uint a, uint b, uint c) {
    return pack_bf16(fma_of<element_bf16>(a, b, c, 0), fma_of<element_bf16>(a, b, c, 1));
}
INTRINSIC uint fma_f16(uint a, uint b, uint c) {
    return pack_f16(fma_of<element_f16>(a, b, c, 0), fma_of<element_f16>(a, b, c, 1));
}

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
    if (emulator::Written* at = emulator::written_at(to)) *at = {};
}
INTRINSIC void copies_close() { ++emulator::fibers[emulator::current].closed; }
template <int pending> INTRINSIC void copies_wait() {
    emulator::Fiber& fiber = emulator::fibers[emulator::current];
    uint done = 0;
    while (done < fiber.copies && fiber.pending[done].group + pending < fiber.closed) ++done;
    emulator::land(fiber, done);
}

#define WGMMA
#define GROWTH_MAX 0.25f // of prefill_wgmma.cu: so little that the tests' scores exceed it
INTRINSIC uint shared_address(const void* p) { return (uint)((const uchar*)p - emulator::allocation); }
INTRINSIC void copy16_at(uint to, const void* from, bool present) {
    copy16(emulator::allocation + to, from, present);
}
INTRINSIC const uchar* settled(const uchar* p) { return p; }
INTRINSIC uint lanes_where(bool v) {
    char(*all)[emulator::SLOT_BYTES] = emulator::exchange(VOTE, &v, sizeof v);
    uint bits = 0;
    for (uint i = 0; i < 32; ++i) bits |= (uint)*(bool*)all[i] << i;
    return bits;
}
template <int count> INTRINSIC void registers_fewer() {}
template <int count> INTRINSIC void registers_more() {}

INTRINSIC void phases_begin(ulong* barrier, uint count) {
    if (++emulator::phases_begun == emulator::PHASES_MAX) return emulator::fail("too many barriers of phases");
    *(emulator::Phases*)barrier = {(ushort)count, (ushort)count, 0, (ushort)emulator::phases_begun};
}
INTRINSIC void phase_arrive(ulong* barrier) { emulator::arrive((emulator::Phases*)barrier); }
INTRINSIC void phase_arrive_after_copies(ulong* barrier) {
    emulator::Fiber& fiber = emulator::fibers[emulator::current];
    if (fiber.arrivals == emulator::ARRIVALS_MAX) return emulator::fail("too many arrivals under way");
    fiber.arrival[fiber.arrivals++] = {(emulator::Phases*)barrier, fiber.copies_done + fiber.copies};
}
INTRINSIC void phase_wait(ulong* barrier, uint parity) {
    emulator::Fiber& fiber = emulator::fibers[emulator::current];
    fiber.barrier = (emulator::Phases*)barrier;
    fiber.parity = parity;
    if ((fiber.barrier->phase & 1) == parity) emulator::yield(emulator::AT_PHASE);
    fiber.waited.phases[fiber.barrier->number] = fiber.barrier->phase;
}

INTRINSIC void turn_give(uint barrier, uint threads) {
    if (barrier == 0 || barrier >= emulator::NAMED_MAX) return emulator::fail("no such barrier");
    if (++emulator::named[barrier] < threads) return;
    emulator::named[barrier] = 0;
    for (uint i = 0; i < blockDim.x; ++i) {
        emulator::Fiber& fiber = emulator::fibers[i];
        if (fiber.state == emulator::AT_NAMED_BARRIER && fiber.parity == barrier) fiber.state = emulator::READY;
    }
}
INTRINSIC void turn_wait(uint barrier, uint threads) {
    emulator::Fiber& fiber = emulator::fibers[emulator::current];
    fiber.parity = barrier;
    fiber.state = emulator::AT_NAMED_BARRIER;
    turn_give(barrier, threads);
    if (fiber.state == emulator::AT_NAMED_BARRIER) emulator::yield(emulator::AT_NAMED_BARRIER);
}

// Products read shared memory as late as they may, when a thread waits for them, and fail unless what they read
// are copies with an arrival that the thread waited for, then `products_see_shared`, then the product, and no copy
// to there since. What they change is NaN until then.
INTRINSIC void products_see_shared() {
    emulator::Fiber& fiber = emulator::fibers[emulator::current];
    fiber.shown = fiber.waited;
}
INTRINSIC void products_open() { emulator::fibers[emulator::current].products_open = true; }
INTRINSIC void products_close() {
    emulator::Fiber& fiber = emulator::fibers[emulator::current];
    fiber.products_open = false;
    ++fiber.products_closed;
}
template <int count> INTRINSIC void hold(float (&v)[count]) {}

namespace emulator {

static void begin(float* d, const uint* a_registers, ulong a, ulong b, uint n, bool add,
                  float (*element)(uint, uint)) {
    Fiber& fiber = fibers[current];
    if (!fiber.products_open) return fail("a product of a group that was not opened");
    if (fiber.products == PRODUCTS_MAX) return fail("too many products under way");
    if (!fiber.product) fiber.product = (Product*)malloc(PRODUCTS_MAX * sizeof(Product));
    Product& product = fiber.product[fiber.products];
    product = {d, a_registers, a, b, n, fiber.products_closed, fiber.shown, add, true, element};
    for (uint i = 0; i < fiber.products; ++i) product.first &= fiber.product[i].d != d;
    if (product.first) {
        memcpy(product.saved, d, n / 2 * sizeof(float));
        for (uint i = 0; i < n / 2; ++i) d[i] = bits_of<float>(0x7FC00000u);
    }
    ++fiber.products;
}

// PTX ISA, "Asynchronous Warpgroup Level Matrix Shared Memory Layout" and "Matrix Descriptor Format", for 16-bit
// elements in panels of 128 bytes, swizzled: element `k` of row `row`, whose rows lie along k, or across it.
static uint element_of(const Product& product, ulong matrix, uint row, uint k, bool across) {
    const uint start = (matrix & 0x3FFF) << 4, leading = (matrix >> 16 & 0x3FFF) << 4;
    const uint stride = (matrix >> 32 & 0x3FFF) << 4;
    const uint linear = across ? start + row / 64 * leading + row % 64 * 2 + k / 8 * stride + k % 8 * 128
                               : start + row / 8 * stride + row % 8 * 128 + k * 2;
    const uint at = linear ^ (linear >> 7 & 7) << 4;
    if (at + 2 > dynamic_bytes) {
        fail("a product reads outside of the shared memory");
        return 0;
    }
    const Written last = written[at / 16];
    if (last.number == 0 || last.phase >= product.shown.phases[last.number])
        fail("a product reads shared memory that it was not shown");
    return *(const ushort*)(allocation + at);
}

static void land(const Product& product) {
    for (const ulong matrix : {product.a, product.b})
        if (matrix && (matrix >> 62 != 1 || (matrix >> 49 & 7) != 0))
            fail("a matrix that is not swizzled by 128 bytes");
    const uint lane = current % 32, g = lane / 4, t = lane % 4, row0 = current / 32 % 4 * 16;
    float left[2][16]; // rows g and g + 8
    if (product.a_registers) {
        char(*all)[SLOT_BYTES] = exchange(MMA, product.a_registers, 16);
        for (uint i = 0; i < 2; ++i)
            for (uint k = 0; k < 16; ++k)
                left[i][k] = product.element(((const uint*)all[4 * g + k % 8 / 2])[i + k / 8 * 2], k % 2);
    } else {
        for (uint i = 0; i < 2; ++i)
            for (uint k = 0; k < 16; ++k)
                left[i][k] = product.element(element_of(product, product.a, row0 + 8 * i + g, k, false), 0);
    }
    if (product.first) memcpy(product.d, product.saved, product.n / 2 * sizeof(float));
    for (uint n = 0; n < product.n; ++n) {
        if (n % 8 / 2 != t) continue;
        float sums[2] = {0.0f, 0.0f};
        for (uint k = 0; k < 16; ++k) {
            const uint right = element_of(product, product.b, n, k, product.a_registers != nullptr);
            for (uint i = 0; i < 2; ++i) sums[i] += left[i][k] * product.element(right, 0);
        }
        for (uint i = 0; i < 2; ++i) {
            float& d = product.d[n / 8 * 4 + 2 * i + n % 2];
            d = product.add ? d + sums[i] : sums[i];
        }
    }
}

} // namespace emulator

template <int pending> INTRINSIC void products_wait() {
    emulator::Fiber& fiber = emulator::fibers[emulator::current];
    uint done = 0;
    while (done < fiber.products && fiber.product[done].group + pending < fiber.products_closed)
        emulator::land(fiber.product[done++]);
    fiber.products -= done;
    memmove(fiber.product, fiber.product + done, fiber.products * sizeof(emulator::Product));
}

#define PRODUCTS(T)                                                                                          \
    template <int count> INTRINSIC void product_of_shared_##T(float (&d)[count], ulong a, ulong b, bool add) { \
        emulator::begin(d, nullptr, a, b, 2 * count, add, element_##T);                                      \
    }                                                                                                        \
    template <int count> INTRINSIC void product_of_registers_##T(float (&d)[count], const uint* a, ulong b) { \
        emulator::begin(d, a, 0, b, 2 * count, true, element_##T);                                           \
    }
PRODUCTS(bf16)
PRODUCTS(f16)

// The instructions that kernels use beyond C, one function each: what a test on a CPU must replace. No header
// is needed, so that NVRTC alone compiles everything. Needs sm_80. The tests' stand-in for it comes first.
#ifndef EMULATED

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long long ulong;

// The shared memory whose size the launch gives.
#define SHARED_BYTES(name) extern __shared__ __align__(16) uchar name[]

#define INTRINSIC __device__ __forceinline__

INTRINSIC float bits_to_float(uint bits) { return __uint_as_float(bits); }
INTRINSIC uint float_to_bits(float v) { return __float_as_uint(v); }

// A product that the compiler does not contract with a sum.
INTRINSIC float product(float a, float b) { return __fmul_rn(a, b); }

// Counts up in shared memory and returns the count before.
INTRINSIC uint count_up(uint* count) { return atomicAdd(count, 1u); }

INTRINSIC float half_to_float(ushort bits) {
    float v;
    asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(bits));
    return v;
}

// Two values rounded to nearest even, the first in the low half.
INTRINSIC uint pack_bf16(float low, float high) {
    uint pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
INTRINSIC uint pack_f16(float low, float high) {
    uint pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// The low halves of two registers, and their high halves.
INTRINSIC uint low_halves(uint a, uint b) { return __byte_perm(a, b, 0x5410); }
INTRINSIC uint high_halves(uint a, uint b) { return __byte_perm(a, b, 0x7632); }

// Four of the bytes of a (0 to 3) and b (4 to 7), by the digits of `which`.
INTRINSIC uint select_bytes(uint a, uint b, uint which) { return __byte_perm(a, b, which); }

// (a & mask) | bits, in one instruction.
INTRINSIC uint masked_or(uint a, uint mask, uint bits) {
    uint v;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(v) : "r"(a), "r"(mask), "r"(bits));
    return v;
}

// a * b + c of two values each, rounded once.
INTRINSIC uint fma_bf16(uint a, uint b, uint c) {
    uint pair;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(c));
    return pair;
}
INTRINSIC uint fma_f16(uint a, uint b, uint c) {
    uint pair;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(c));
    return pair;
}

// 2^v within 2^-22, flushing subnormals.
INTRINSIC float exp2_fast(float v) {
    float e;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(v));
    return e;
}

// Among the 32 lanes of a warp; every lane calls them.
INTRINSIC float shuffle_xor(float v, uint mask) { return __shfl_xor_sync(0xFFFFFFFFu, v, mask); }
INTRINSIC float shuffle(float v, uint lane) { return __shfl_sync(0xFFFFFFFFu, v, lane); }
INTRINSIC uint shuffle_uint(uint v, uint lane) { return __shfl_sync(0xFFFFFFFFu, v, lane); }
INTRINSIC bool any_lane(bool v) { return __any_sync(0xFFFFFFFFu, v); }
// A bit for each lane.
INTRINSIC uint lanes_where(bool v) { return __ballot_sync(0xFFFFFFFFu, v); }
INTRINSIC void warp_barrier() { __syncwarp(); }

// 16 and 8 bytes that are read once: they do not displace what the first cache holds.
INTRINSIC uint4 load_once16(const void* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}
INTRINSIC uint2 load_once8(const void* p) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}

// d [16, 8] += a [16, 16] . b [16, 8]; fragments as in the PTX manual, "Matrix Fragments for mma.m16n8k16".
INTRINSIC void mma_bf16(float* d, const uint* a, const uint* b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
INTRINSIC void mma_f16(float* d, const uint* a, const uint* b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four 8 x 8 matrices of 16-bit elements; lane 8 i + j gives the address of row j of matrix i.
INTRINSIC void load_matrices(uint* r, const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((uint)__cvta_generic_to_shared(row))
                 : "memory");
}
INTRINSIC void load_matrices_transposed(uint* r, const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((uint)__cvta_generic_to_shared(row))
                 : "memory");
}

INTRINSIC uint shared_address(const void* p) { return (uint)__cvta_generic_to_shared(p); }

// 16 bytes to an address of shared memory, behind the thread's back; zeros where `present` is false.
INTRINSIC void copy16_at(uint to, const void* from, bool present) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(present ? 16 : 0)
                 : "memory");
}
INTRINSIC void copy16(void* to, const void* from, bool present) {
    copy16_at(shared_address(to), from, present);
}
// The same of weights: the rest of its line of 128 bytes is wanted soon.
INTRINSIC void copy16_of_line(void* to, const void* from, bool present) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"((uint)__cvta_generic_to_shared(to)),
                 "l"(from), "r"(present ? 16 : 0)
                 : "memory");
}
// Closes a group of copies; waits until at most `pending` groups of this thread are under way.
INTRINSIC void copies_close() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int pending> INTRINSIC void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory"); }

// From 9.0 on a kernel may be launched while the one before it ends (programmatic dependent launch): waits until
// that one is done and its memory is visible, and lets the next one be launched. Uses of the pointer stay behind it.
// The pointer goes through the address space of the device's memory, or what it points to would be loaded and stored as
// if it could be shared memory.
#if __CUDA_ARCH__ >= 900
template <class T> INTRINSIC T* followed(T* p) {
    size_t at = __cvta_generic_to_global(p);
    asm volatile("griddepcontrol.launch_dependents;\n\tgriddepcontrol.wait;" : "+l"(at) : : "memory");
    return (T*)__cvta_global_to_generic(at);
}
#define FOLLOW(p) p = followed(p)
#else
#define FOLLOW(p)
#endif

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// What only machine code of sm_90a has: products of a warpgroup, which is 128 neighbouring threads.
#define WGMMA

// The same address, which the compiler computes once.
INTRINSIC const uchar* settled(const uchar* p) {
    asm volatile("" : "+l"(p));
    return p;
}

// Registers of a thread from here on; a whole warpgroup calls them.
template <int count> INTRINSIC void registers_fewer() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count> INTRINSIC void registers_more() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

// A phase of a barrier ends with the last of `count` arrivals; phases have parities 0, 1, 0, ...
INTRINSIC void phases_begin(ulong* barrier, uint count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count)
                 : "memory");
}
INTRINSIC void phase_arrive(ulong* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Arrives once this thread's copies up to here are done.
INTRINSIC void phase_arrive_after_copies(ulong* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
                 : "memory");
}
INTRINSIC void phase_wait(ulong* barrier, uint parity) {
    uint done = 0;
    while (!done)
        asm volatile("{\n\t.reg .pred done;\n\t"
                     "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n\t"
                     "selp.u32 %0, 1, 0, done;\n\t}"
                     : "=r"(done)
                     : "r"(shared_address(barrier)), "r"(parity)
                     : "memory");
}

// Barriers 1 to 15 for `threads` of the block: waits for all, or is counted without waiting.
INTRINSIC void turn_wait(uint barrier, uint threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
INTRINSIC void turn_give(uint barrier, uint threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Shows the products below what was written to shared memory before.
INTRINSIC void products_see_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Comes before the first product of a group, after the last change of its registers.
INTRINSIC void products_open() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
INTRINSIC void products_close() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most `pending` groups are under way.
template <int pending> INTRINSIC void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}
// Keeps the compiler from moving uses of registers to before this place.
template <int count> INTRINSIC void hold(float (&v)[count]) {
#pragma unroll
    for (int i = 0; i < count; ++i) asm volatile("" : "+f"(v[i])::"memory");
}

#define D32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define D64 \
    D32 ", " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define HELD8(d, i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define HELD32(d, i) HELD8(d, i), HELD8(d, i + 8), HELD8(d, i + 16), HELD8(d, i + 24)

// d [64, n] = a [64, 16] . b [n, 16]^T (+ d), n twice the count of d, while the thread goes on. The fragment is as
// in the PTX manual, "Matrix Fragments for wgmma.mma_async.m64nNk16"; a and b are descriptors of shared memory,
// whose rows lie along k.
#define PRODUCT_OF_SHARED(T, n, list, held, a0, b0, add0) \
    asm volatile("{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %" #add0 ", 0;\n\t" \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." #T "." #T " {" list "}, %" #a0 ", %" #b0 \
                 ", add, 1, 1, 0, 0;\n\t}" \
                 : held \
                 : "l"(a), "l"(b), "r"((uint)add))
// The same with a in registers, as the left side of mma_bf16 has it for 16 rows of each warp, and the rows of b
// across k.
#define PRODUCT_OF_REGISTERS(T, n, list, held, a0, a1, a2, a3, b0) \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." #T "." #T " {" list "}, {%" #a0 ", %" #a1 \
                 ", %" #a2 ", %" #a3 "}, %" #b0 ", 1, 1, 1, 1;" \
                 : held \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define PRODUCTS(T) \
    INTRINSIC void product_of_shared_##T(float (&d)[64], ulong a, ulong b, bool add) { \
        PRODUCT_OF_SHARED(T, 128, D64, HELD32(d, 0) COMMA HELD32(d, 32), 64, 65, 66); \
    } \
    INTRINSIC void product_of_registers_##T(float (&d)[64], const uint* a, ulong b) { \
        PRODUCT_OF_REGISTERS(T, 128, D64, HELD32(d, 0) COMMA HELD32(d, 32), 64, 65, 66, 67, 68); \
    } \
    INTRINSIC void product_of_registers_##T(float (&d)[32], const uint* a, ulong b) { \
        PRODUCT_OF_REGISTERS(T, 64, D32, HELD32(d, 0), 32, 33, 34, 35, 36); \
    }
#define COMMA ,
PRODUCTS(bf16)
PRODUCTS(f16)
#endif

#endif

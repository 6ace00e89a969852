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

// 16 bytes to shared memory, behind the thread's back; zeros where `present` is false.
INTRINSIC void copy16(void* to, const void* from, bool present) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((uint)__cvta_generic_to_shared(to)), "l"(from),
                 "r"(present ? 16 : 0)
                 : "memory");
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
#if __CUDA_ARCH__ >= 900
#define FOLLOW(p) asm volatile("griddepcontrol.launch_dependents;\n\tgriddepcontrol.wait;" : "+l"(p) : : "memory")
#else
#define FOLLOW(p)
#endif

#endif

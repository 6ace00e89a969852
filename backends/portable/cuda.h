// The portable dialect in CUDA C++, over the functions of device.h. An operand is its own address. f16, bf16
// and f8 are storage types without a header: arithmetic is f32.

#define READS(T, p) const TYPE(T)* __restrict__ p
#define WRITES(T, p) TYPE(T)* p
#define START(p) FOLLOW(p)

#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads)
// With at least `blocks` blocks on a multiprocessor, which bounds the registers.
#define KERNEL_OF(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)
#define DEVICE __device__ __forceinline__
#define GLOBAL
#define LOCAL __shared__ // of a variable
#define IN_LOCAL         // of what a pointer points to
#define BARRIER() __syncthreads()
#define THREAD ((uint)threadIdx.x)
#define GROUP_X ((uint)blockIdx.x)
#define GROUP_Y ((uint)blockIdx.y)
#define EACH ((ulong)blockIdx.x * blockDim.x + threadIdx.x)

#define BARRIER_ALL() __syncthreads()
// The count before.
#define COUNT_UP(count) count_up(count)

// A product that is not contracted with a sum.
#define PRODUCT(a, b) product(a, b)
#define FLOOR(v) floorf(v)
#define LOG2(v) log2f(v)
#define FLOAT_BITS(v) float_to_bits(v)
#define BITS_FLOAT(v) bits_to_float(v)
#define EXP(v) expf(v)
#define SQRT(v) sqrtf(v)
#define FMAX(a, b) fmaxf(a, b)
#define MAD(a, b, c) fmaf(a, b, c)
#undef INFINITY
#undef NAN
#define INFINITY bits_to_float(0x7F800000u)
#define NAN bits_to_float(0x7FC00000u)

#define TYPE_f32 float
#define TYPE_bf16 ushort
#define TYPE_f16 ushort
#define TYPE_f8e4m3 uchar
#define TYPE_i8 signed char
#define TYPE_u32 uint

#define LOAD_f32(p, i) ((p)[i])
#define LOAD_bf16(p, i) bits_to_float((uint)(p)[i] << 16)
#define LOAD_f16(p, i) half_to_float((p)[i])
#define LOAD_f8e4m3(p, i) f8_to_float((p)[i])
#define LOAD_i8(p, i) ((float)(p)[i])

#define STORE_f32(p, i, v) ((p)[i] = (v))
#define STORE_bf16(p, i, v) ((p)[i] = (ushort)pack_bf16(v, 0.0f))
#define STORE_f16(p, i, v) ((p)[i] = (ushort)pack_f16(v, 0.0f))

// The code's exponent and fraction are those of an f32 that is 2^120 too small; 0x7F is NaN, there is no
// infinity (Micikevicius et al. 2022).
DEVICE float f8_to_float(uint code) {
    const uint magnitude = code & 0x7Fu;
    const float v = bits_to_float(magnitude << 20) * bits_to_float(0x7B800000u);
    const uint bits = magnitude == 0x7Fu ? 0x7FC00000u : float_to_bits(v);
    return bits_to_float(bits | (code & 0x80u) << 24);
}

// Two elements of a register, low half first.
DEVICE void unpack_bf16(uint pair, float* v) {
    v[0] = bits_to_float(pair << 16);
    v[1] = bits_to_float(pair & 0xFFFF0000u);
}
DEVICE void unpack_f16(uint pair, float* v) {
    v[0] = half_to_float((ushort)pair);
    v[1] = half_to_float((ushort)(pair >> 16));
}

// Eight elements at an address that is a multiple of 16 (f8: of 8).
DEVICE void load8_f32(const float* p, float* v) {
    const float4 a = ((const float4*)p)[0], b = ((const float4*)p)[1];
    v[0] = a.x; v[1] = a.y; v[2] = a.z; v[3] = a.w;
    v[4] = b.x; v[5] = b.y; v[6] = b.z; v[7] = b.w;
}
DEVICE void load8_bf16(const ushort* p, float* v) {
    const uint4 a = *(const uint4*)p;
    unpack_bf16(a.x, v); unpack_bf16(a.y, v + 2); unpack_bf16(a.z, v + 4); unpack_bf16(a.w, v + 6);
}
DEVICE void load8_f16(const ushort* p, float* v) {
    const uint4 a = *(const uint4*)p;
    unpack_f16(a.x, v); unpack_f16(a.y, v + 2); unpack_f16(a.z, v + 4); unpack_f16(a.w, v + 6);
}
DEVICE void load8_f8e4m3(const uchar* p, float* v) {
    const uint2 a = *(const uint2*)p;
    for (uint i = 0; i < 4; ++i) {
        v[i] = f8_to_float(a.x >> 8 * i & 0xFFu);
        v[4 + i] = f8_to_float(a.y >> 8 * i & 0xFFu);
    }
}
DEVICE void load8_i8(const signed char* p, float* v) {
    const uint2 a = *(const uint2*)p;
    for (uint i = 0; i < 4; ++i) {
        v[i] = (float)(signed char)(a.x >> 8 * i);
        v[4 + i] = (float)(signed char)(a.y >> 8 * i);
    }
}
DEVICE void store8_f32(float* p, const float* v) {
    ((float4*)p)[0] = make_float4(v[0], v[1], v[2], v[3]);
    ((float4*)p)[1] = make_float4(v[4], v[5], v[6], v[7]);
}
DEVICE void store8_bf16(ushort* p, const float* v) {
    *(uint4*)p = make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
}
DEVICE void store8_f16(ushort* p, const float* v) {
    *(uint4*)p = make_uint4(pack_f16(v[0], v[1]), pack_f16(v[2], v[3]), pack_f16(v[4], v[5]), pack_f16(v[6], v[7]));
}

// One, two or four elements at an address that is a multiple of their size.
#define LOAD_SMALL(T, unpack)                                                                                     \
    DEVICE void load1_##T(const TYPE_##T* p, float* v) { v[0] = LOAD_##T(p, 0); }                                 \
    DEVICE void load2_##T(const TYPE_##T* p, float* v) { unpack(*(const uint*)p, v); }                            \
    DEVICE void load4_##T(const TYPE_##T* p, float* v) {                                                          \
        const uint2 a = *(const uint2*)p;                                                                         \
        unpack(a.x, v);                                                                                           \
        unpack(a.y, v + 2);                                                                                       \
    }
LOAD_SMALL(bf16, unpack_bf16)
LOAD_SMALL(f16, unpack_f16)
// Of codes the compiler joins the loads, whose alignment it does not know, where it can.
#define LOAD_FEW(T, N)                                                                                            \
    DEVICE void load##N##_##T(const TYPE_##T* p, float* v) {                                                      \
        for (uint i = 0; i < N; ++i) v[i] = LOAD_##T(p, i);                                                       \
    }
LOAD_FEW(f8e4m3, 1)
LOAD_FEW(f8e4m3, 2)
LOAD_FEW(f8e4m3, 4)
LOAD_FEW(i8, 1)
LOAD_FEW(i8, 2)
LOAD_FEW(i8, 4)
DEVICE void load1_f32(const float* p, float* v) { v[0] = p[0]; }
DEVICE void load2_f32(const float* p, float* v) {
    const float2 a = *(const float2*)p;
    v[0] = a.x; v[1] = a.y;
}
DEVICE void load4_f32(const float* p, float* v) {
    const float4 a = *(const float4*)p;
    v[0] = a.x; v[1] = a.y; v[2] = a.z; v[3] = a.w;
}

#define LOAD_VEC8(T, p, i, v) CAT(load8_, T)((p) + (i), v)
#define STORE_VEC8(T, p, i, v) CAT(store8_, T)((p) + (i), v)

// The portable dialect in OpenCL C 1.2. Arithmetic is f32 everywhere: f16 is a storage type (vload_half
// needs no cl_khr_fp16) and bf16 is the upper half of an f32.
//
// An operand is a pointer to its buffer and an offset in elements: sub-buffers would impose the
// device's base alignment on every slice. START(p) makes the pointer that of the operand.

#define READS(T, p) global const TYPE(T)* p, ulong p##_at
#define WRITES(T, p) global TYPE(T)* p, ulong p##_at
#define START(p) p += p##_at

#define KERNEL(threads) kernel void
#define KERNEL_OF(threads, groups) kernel void
#define DEVICE
#define GLOBAL global
#define LOCAL local    // of a variable
#define IN_LOCAL local // of what a pointer points to
#define BARRIER() barrier(CLK_LOCAL_MEM_FENCE)
#define THREAD ((uint)get_local_id(0))
#define GROUP_X ((uint)get_group_id(0))
#define GROUP_Y ((uint)get_group_id(1))
#define EACH ((ulong)get_global_id(0))

#define BARRIER_ALL() barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE)
// The count before.
#define COUNT_UP(count) atomic_inc((volatile local uint*)(count))

// A product that is not contracted with a sum, where FP_CONTRACT is off.
#define PRODUCT(a, b) ((a) * (b))
#define FLOOR(v) floor(v)
#define LOG2(v) log2(v)
#define FLOAT_BITS(v) as_uint(v)
#define BITS_FLOAT(v) as_float(v)
#define EXP(v) exp(v)
#define SQRT(v) sqrt(v)
#define FMAX(a, b) fmax(a, b)
// mad() may be rounded twice; where fma is fast it is also exact
#ifdef FP_FAST_FMAF
#define MAD(a, b, c) fma(a, b, c)
#else
#define MAD(a, b, c) mad(a, b, c)
#endif

#define TYPE_f32 float
#define TYPE_bf16 ushort
#define TYPE_f16 half
#define TYPE_f8e4m3 uchar
#define TYPE_i8 char
#define TYPE_u32 uint

#define LOAD_f32(p, i) ((p)[i])
#define LOAD_bf16(p, i) as_float((uint)(p)[i] << 16)
#define LOAD_f16(p, i) vload_half(i, p)
#define LOAD_f8e4m3(p, i) f8_to_float((p)[i])
#define LOAD_i8(p, i) ((float)(p)[i])

#define STORE_f32(p, i, v) ((p)[i] = (v))
#define STORE_bf16(p, i, v) ((p)[i] = bf16_of(v))
#define STORE_f16(p, i, v) vstore_half_rte(v, i, p)

// The code's exponent is 120 too small for an f32; below it, units of 2^-9. 0x7F is NaN.
float f8_to_float(uint code) {
    const uint magnitude = code & 0x7Fu;
    const float small = (float)magnitude * as_float(0x3B000000u);
    const float v = magnitude < 8u ? small : as_float((magnitude << 20) + 0x3C000000u);
    const uint bits = magnitude == 0x7Fu ? 0x7FC00000u : as_uint(v);
    return as_float(bits | (code & 0x80u) << 24);
}

// round to nearest, ties to even; a NaN stays one
ushort bf16_of(float v) {
    const uint bits = as_uint(v);
    return (ushort)((isnan(v) ? bits | 0x400000u : bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

#define LOAD8_f32(p, i) vload8(0, (p) + (i))
#define LOAD8_bf16(p, i) as_float8(convert_uint8(vload8(0, (p) + (i))) << 16u)
#define LOAD8_f16(p, i) vload_half8(0, (p) + (i))
#define LOAD_VEC8(T, p, i, v) vstore8(CAT(LOAD8_, T)(p, i), 0, v)
#define STORE_VEC8(T, p, i, v)                                                                                   \
    do {                                                                                                         \
        for (uint lane = 0; lane < 8; ++lane) STORE(T, p, (i) + lane, (v)[lane]);                                \
    } while (0)

// Element types and vector widths. Arithmetic is f32 everywhere: f16 is a storage type (vload_half
// needs no cl_khr_fp16) and bf16 is the upper half of an f32.
//
// An operand is a pointer to its buffer and an offset in elements: sub-buffers would impose the
// device's base alignment on every slice.

#define CAT_(a, b) a##b
#define CAT(a, b) CAT_(a, b)
#define TYPE(T) CAT(TYPE_, T)
#define LOAD(T, p, i) CAT(LOAD_, T)(p, i)
#define STORE(T, p, i, v) CAT(STORE_, T)(p, i, v)
#define LOADW(T, p, i) CAT(LOADW_, T)(p, i)
#define STOREW(T, p, i, v) CAT(STOREW_, T)(p, i, v)

#define TYPE_f32 float
#define TYPE_bf16 ushort
#define TYPE_f16 half

#define LOAD_f32(p, i) ((p)[i])
#define LOAD_bf16(p, i) as_float((uint)(p)[i] << 16)
#define LOAD_f16(p, i) vload_half(i, p)

#define STORE_f32(p, i, v) ((p)[i] = (v))
#define STORE_bf16(p, i, v) ((p)[i] = bf16_of(v))
#define STORE_f16(p, i, v) vstore_half_rte(v, i, p)

#define IN(T) global const TYPE(T)*
#define OUT_(T) global TYPE(T)*

// mad() may be rounded twice; where fma is fast it is also exact
#ifdef FP_FAST_FMAF
#define MAD(a, b, c) fma(a, b, c)
#else
#define MAD(a, b, c) mad(a, b, c)
#endif

// round to nearest, ties to even; a NaN stays one
ushort bf16_of(float v) {
    const uint bits = as_uint(v);
    return (ushort)((isnan(v) ? bits | 0x400000u : bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

// Vectors of W elements along a row: 16, 8, or 1 where the row's length is no multiple of 8.
#ifndef W
#define W 16
#endif

#define WCAT_(a, b) a##b
#define WCAT(a, b) WCAT_(a, b)

#if W == 1
typedef float floatw;
#define LOADW_f32 LOAD_f32
#define LOADW_bf16 LOAD_bf16
#define LOADW_f16 LOAD_f16
#define STOREW_f32 STORE_f32
#define SUMW(v) (v)
#else
typedef WCAT(float, W) floatw;
#define LOADW_f32(p, i) WCAT(vload, W)(0, (p) + (i))
#define LOADW_bf16(p, i) WCAT(as_float, W)(WCAT(convert_uint, W)(WCAT(vload, W)(0, (p) + (i))) << 16u)
#define LOADW_f16(p, i) WCAT(vload_half, W)(0, (p) + (i))
#define STOREW_f32(p, i, v) WCAT(vstore, W)(v, 0, (p) + (i))
#define SUMW(v) WCAT(sum, W)(v)
#endif

float sum8(float8 v) {
    const float4 a = v.lo + v.hi;
    const float2 b = a.lo + a.hi;
    return b.x + b.y;
}

float sum16(float16 v) { return sum8(v.lo + v.hi); }

float max16(float16 v) {
    const float8 a = fmax(v.lo, v.hi);
    const float4 b = fmax(a.lo, a.hi);
    const float2 c = fmax(b.lo, b.hi);
    return fmax(c.x, c.y);
}

// Threads of a group in the kernels for GPUs; a power of two.
#define GROUP 64

// Sum and maximum over a group; every thread calls it and gets the result.
float group_sum(float v, local float* scratch) {
    const uint lid = get_local_id(0);
    barrier(CLK_LOCAL_MEM_FENCE);
    scratch[lid] = v;
    for (uint half_group = GROUP / 2; half_group > 0; half_group /= 2) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lid < half_group) scratch[lid] += scratch[lid + half_group];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    return scratch[0];
}

float group_max(float v, local float* scratch) {
    const uint lid = get_local_id(0);
    barrier(CLK_LOCAL_MEM_FENCE);
    scratch[lid] = v;
    for (uint half_group = GROUP / 2; half_group > 0; half_group /= 2) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lid < half_group) scratch[lid] = fmax(scratch[lid], scratch[lid + half_group]);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    return scratch[0];
}

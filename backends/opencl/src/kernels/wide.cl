// Vectors of W elements along a row, for CPUs: 16, 8, or 1 where the row's length is no multiple of 8.
#ifndef W
#define W 16
#endif

#define WCAT_(a, b) a##b
#define WCAT(a, b) WCAT_(a, b)
#define LOADW(T, p, i) WCAT(LOADW_, T)(p, i)
#define STOREW(T, p, i, v) WCAT(STOREW_, T)(p, i, v)

#if W == 1
typedef float floatw;
#define LOADW_f32 LOAD_f32
#define LOADW_bf16 LOAD_bf16
#define LOADW_f16 LOAD_f16
#define LOADW_f8e4m3 LOAD_f8e4m3
#define LOADW_i8 LOAD_i8
#define STOREW_f32 STORE_f32
#define SUMW(v) (v)
#else
typedef WCAT(float, W) floatw;
#define LOADW_f32(p, i) WCAT(vload, W)(0, (p) + (i))
#define LOADW_bf16(p, i) WCAT(as_float, W)(WCAT(convert_uint, W)(WCAT(vload, W)(0, (p) + (i))) << 16u)
#define LOADW_f16(p, i) WCAT(vload_half, W)(0, (p) + (i))
#define LOADW_f8e4m3(p, i) f8_to_floats(WCAT(convert_uint, W)(WCAT(vload, W)(0, (p) + (i))))
#define LOADW_i8(p, i) WCAT(convert_float, W)(WCAT(vload, W)(0, (p) + (i)))
#define STOREW_f32(p, i, v) WCAT(vstore, W)(v, 0, (p) + (i))
#define SUMW(v) WCAT(sum, W)(v)

// As f8_to_float.
typedef WCAT(uint, W) uintw;
floatw f8_to_floats(uintw code) {
    const uintw magnitude = code & 0x7Fu;
    const floatw small = WCAT(convert_float, W)(magnitude) * as_float(0x3B000000u);
    const floatw large = WCAT(as_float, W)((magnitude << 20u) + 0x3C000000u);
    const floatw v = select(large, small, magnitude < 8u);
    const uintw bits = select(WCAT(as_uint, W)(v), (uintw)0x7FC00000u, magnitude == 0x7Fu);
    return WCAT(as_float, W)(bits | (code & 0x80u) << 24u);
}
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

// KV of eight bits (mixfleet_hal::scaled): what a dtype's heads are, and codes.

#define KIND_f32 0
#define KIND_bf16 0
#define KIND_f16 0
#define KIND_f8e4m3 1
#define KIND_i8 2
// Which codes a dtype's heads have; 0 where they have none, and no scale.
#define KIND(T) CAT(KIND_, T)

#define SCALE_BYTES 4u
// Elements of a head with its scale.
#define HEAD_ELEMENTS(T, head_dim) ((head_dim) + (KIND(T) ? SCALE_BYTES : 0u))

#define STORE_f8e4m3(p, i, v) ((p)[i] = (uchar)f8_of(v))
#define STORE_i8(p, i, v) ((p)[i] = (TYPE_i8)i8_of(v))

// The nearest code, ties to even; below 2^-6 a step is 2^-9, which is that of sums with 2^14.
DEVICE uint f8_of(float v) {
    const uint bits = FLOAT_BITS(v), magnitude = bits & 0x7FFFFFFFu;
    const uint small = FLOAT_BITS(BITS_FLOAT(magnitude) + 16384.0f);
    const uint large = ((magnitude + 0x7FFFFu + (magnitude >> 20 & 1u)) >> 20) - 960u;
    return ((magnitude < 0x3C800000u ? small : large) & 0x7Fu) | (bits >> 24 & 0x80u);
}

// The sum with 1.5 * 2^23 has no fraction.
DEVICE uint i8_of(float v) { return FLOAT_BITS(v + 12582912.0f) & 0xFFu; }

// The least power of two times which the largest code is no less than `most`.
DEVICE float scale_of(uint kind, float most) {
    const uint carry = kind == 2u ? 0x1FFFFu : 0x1FFFFFu, exponent = kind == 2u ? 6u : 8u;
    const float least = BITS_FLOAT(0x0D800000u); // 2^-100
    const uint bits = (FLOAT_BITS(FMAX(most, least)) + carry) & 0x7F800000u;
    return BITS_FLOAT(bits - (exponent << 23));
}

DEVICE float inverse_of(float scale) { return BITS_FLOAT(0x7F000000u - FLOAT_BITS(scale)); }

DEVICE float load_scale(GLOBAL const uchar* at) { return *(GLOBAL const float*)at; }
DEVICE void store_scale(GLOBAL uchar* at, float scale) { *(GLOBAL float*)at = scale; }

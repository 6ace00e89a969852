// Weights as codes, scales and zeros (mixfleet_hal::quantised): matrices one after the other.
//
// CODE: 0 to 5 for u4, u5, u6, i8, e2m1, e4m3. SCALE: the dtype of scales and zeros; u32 for integers, below
// SUPERS f16 of 256 columns each. ZERO: 0 middle, 1 points, 2 minima. OUTER: whether an f32 scales all.
// Operands that a format has not repeat another one and are not read.

#define WEIGHTS                                                                                                 \
    READS(u32, codes), READS(u32, high), READS(SCALE, scales), READS(SCALE, zeros), READS(f16, supers),         \
        READS(f32, outer)

#define START_WEIGHTS                                                                                           \
    START(codes);                                                                                               \
    START(high);                                                                                                \
    START(scales);                                                                                              \
    START(zeros);                                                                                               \
    START(supers);                                                                                              \
    START(outer)

// A field of a row of words.
DEVICE uint field(GLOBAL const uint* words, ulong row, uint row_words, uint col, uint bits) {
    const uint per_word = 32u / bits;
    return words[row * row_words + col / per_word] >> (bits * (col % per_word)) & ((1u << bits) - 1u);
}

DEVICE float signed_byte(uint byte) { return (float)(byte & 127u) - (float)(byte & 128u); }

// No product of a subnormal: a device may take it for zero.
DEVICE float e4m3(uint code) {
    const uint magnitude = code & 127u;
    const float small = (float)magnitude * BITS_FLOAT(0x3B000000u); // 2^-9
    const float v = magnitude < 8u ? small : BITS_FLOAT((magnitude << 20) + 0x3C000000u);
    return code & 128u ? -v : v;
}

DEVICE float e2m1(uint code) {
    const uint magnitude = code & 7u;
    const float v = magnitude < 2u ? 0.5f * (float)magnitude : BITS_FLOAT((magnitude << 22) + 0x3F000000u);
    return code & 8u ? -v : v;
}

// The number of a code, less the middle where that is zero.
DEVICE float code_number(GLOBAL const uint* codes, GLOBAL const uint* high, ulong row, uint k, uint col) {
#if CODE == 0
    return (float)field(codes, row, k / 8u, col, 4u) - (ZERO ? 0.0f : 8.0f);
#elif CODE == 1
    const uint code = field(codes, row, k / 8u, col, 4u) | field(high, row, k / 32u, col, 1u) << 4;
    return (float)code - (ZERO ? 0.0f : 16.0f);
#elif CODE == 2
    const uint code = field(codes, row, k / 8u, col, 4u) | field(high, row, k / 16u, col, 2u) << 4;
    return (float)code - (ZERO ? 0.0f : 32.0f);
#elif CODE == 3
    return signed_byte(field(codes, row, k / 4u, col, 8u));
#elif CODE == 4
    return e2m1(field(codes, row, k / 8u, col, 4u));
#else
    return e4m3(field(codes, row, k / 4u, col, 8u));
#endif
}

// Scale or zero of a group; `which` of the f16 below which integers are.
#if SUPERS
#define GROUP_NUMBER(p, which)                                                                                  \
    (signed_byte(field(p, row, (k / group_cols + 3u) / 4u, col / group_cols, 8u)) *                             \
     LOAD(f16, supers, (row * (k / 256u) + col / 256u) * SUPERS + (which)))
#else
#define GROUP_NUMBER(p, which) LOAD(SCALE, p, row / group_rows * ((k + group_cols - 1u) / group_cols) + col / group_cols)
#endif

// The weight at (row, col), without the outer scale.
DEVICE float weight_at(GLOBAL const uint* codes, GLOBAL const uint* high, GLOBAL const TYPE(SCALE)* scales,
                       GLOBAL const TYPE(SCALE)* zeros, GLOBAL const TYPE(f16)* supers, ulong row, uint col, uint k,
                       uint group_rows, uint group_cols) {
    const float number = code_number(codes, high, row, k, col), scale = GROUP_NUMBER(scales, 0);
#if ZERO == 1
    return (number - GROUP_NUMBER(zeros, 1)) * scale;
#elif ZERO == 2
    return MAD(number, scale, -GROUP_NUMBER(zeros, 1));
#else
    return number * scale;
#endif
}

#define WEIGHT_AT(row, col) weight_at(codes, high, scales, zeros, supers, row, col, k, group_rows, group_cols)

// What follows a language's prologue in every program: elements by type, vectors of them, and
// reductions over a group.

#define CAT_(a, b) a##b
#define CAT(a, b) CAT_(a, b)
#define TYPE(T) CAT(TYPE_, T)
#define LOAD(T, p, i) CAT(LOAD_, T)(p, i)
#define STORE(T, p, i, v) CAT(STORE_, T)(p, i, v)

// VEC elements to and from `float v[VEC]`: 8, in aligned vectors where a row's length allows it, or 1.
#ifndef VEC
#define VEC 1
#endif
#if VEC == 8
#define LOAD_VEC(T, p, i, v) LOAD_VEC8(T, p, i, v)
#define STORE_VEC(T, p, i, v) STORE_VEC8(T, p, i, v)
#else
#define LOAD_VEC(T, p, i, v) ((v)[0] = LOAD(T, p, i))
#define STORE_VEC(T, p, i, v) STORE(T, p, i, (v)[0])
#endif

// Threads of a group; a power of two.
#ifndef GROUP
#define GROUP 64
#endif

// Sum and maximum over a group; every thread calls it and gets the result.
DEVICE float group_sum(float v, IN_LOCAL float* scratch) {
    const uint lid = THREAD;
    BARRIER();
    scratch[lid] = v;
    for (uint half_group = GROUP / 2; half_group > 0; half_group /= 2) {
        BARRIER();
        if (lid < half_group) scratch[lid] += scratch[lid + half_group];
    }
    BARRIER();
    return scratch[0];
}

DEVICE float group_max(float v, IN_LOCAL float* scratch) {
    const uint lid = THREAD;
    BARRIER();
    scratch[lid] = v;
    for (uint half_group = GROUP / 2; half_group > 0; half_group /= 2) {
        BARRIER();
        if (lid < half_group) scratch[lid] = FMAX(scratch[lid], scratch[lid + half_group]);
    }
    BARRIER();
    return scratch[0];
}

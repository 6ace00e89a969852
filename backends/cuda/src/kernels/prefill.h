// What the tensor-core kernels of prefill attention share.

#define CHUNKS (HEAD_DIM / 8) // of 16 bytes in a row
#define NOWHERE 0xFFFFFFFFu
#define LOG2E 1.4426950408889634f

DEVICE uint line_of(const Keys* keys, uint t, uint first, uint end) {
    if (t < first || t >= end) return NOWHERE;
    const uint page = keys->pages[t / keys->page_tokens];
    if (page >= keys->page_count) return NOWHERE;
    return (page * keys->kv_heads + keys->kv_head) * keys->page_tokens + t % keys->page_tokens;
}

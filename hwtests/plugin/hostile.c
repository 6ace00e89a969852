/* The example with a fault, which MIXFLEET_HOSTILE names. */
#define mixfleet_backend honest_backend
#include <stddef.h>

#include "example.c"
#undef mixfleet_backend

static int is(const char *fault) {
    const char *asked = getenv("MIXFLEET_HOSTILE");
    return asked && !strcmp(asked, fault);
}

static int32_t hostile_run(struct MixfleetDevice *device, const struct MixfleetOp *ops, uint32_t count,
                           struct MixfleetError *error) {
    if (is("crash")) abort();
    if (is("hang"))
        for (volatile int forever = 1; forever;) continue;
    if (is("silent")) return MIXFLEET_FAILED;
    if (is("unended")) {
        memset(error->text, 'x', sizeof error->text);
        return 77;
    }
    int32_t status = quick_run(device, ops, count, error);
    for (uint32_t i = 0; is("garbage") && i < count; i++)
        if (ops[i].kind == MIXFLEET_GEMM) arg(&ops[i], ops[i].shape.gemm.bias ? 3 : 2)[0] ^= 0x55;
    return status;
}

static int32_t hostile_info(uint32_t index, struct MixfleetInfo *out, struct MixfleetError *error) {
    int32_t status = info(index, out, error);
    if (is("alignment")) out->alignment_bytes = 3;
    if (is("memory")) out->memory_bytes = 0;
    if (is("pages")) out->kv_page_tokens = 0;
    if (is("unended")) memset(out->name, 'n', sizeof out->name);
    return status;
}

static int32_t hostile_count(struct MixfleetError *error) {
    if (is("none")) return fail(error, 0, "no card is plugged in"), 0;
    return is("many") ? 1 << 30 : is("negative") ? -5 : 1;
}

static int32_t hostile_alloc(struct MixfleetDevice *device, uint64_t bytes, struct MixfleetBuffer **buffer,
                             struct MixfleetError *error) {
    return is("nothing") ? MIXFLEET_OK : alloc(device, bytes, buffer, error);
}

static int32_t hostile_record(struct MixfleetDevice *device, const struct MixfleetOp *ops, uint32_t count,
                              struct MixfleetGraph **graph, struct MixfleetError *error) {
    return is("unrecorded") ? MIXFLEET_OK : record(device, ops, count, graph, error);
}

const struct MixfleetBackend *mixfleet_backend(uint32_t abi) {
    static struct MixfleetBackend lies;
    lies = *honest_backend(abi);
    lies.name = is("name") ? "No Name" : "hostile";
    lies.count = hostile_count;
    lies.info = hostile_info;
    lies.alloc = hostile_alloc;
    lies.run = is("incomplete") ? NULL : hostile_run;
    lies.record = hostile_record;
    if (is("half")) lies.replay = NULL;
    /* as of a library that was built before there were recorded batches */
    if (is("older")) lies.struct_bytes = offsetof(struct MixfleetBackend, record);
    if (is("short")) lies.struct_bytes = 24;
    if (is("version")) lies.abi = 9;
    return is("null") ? NULL : &lies;
}

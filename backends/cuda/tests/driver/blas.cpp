// A libcublasLt for tests: the products that the backend asks for, in plain loops, by the documented meaning of
// layouts, transposition, alpha, beta and the bias epilogue. Part of fake.cpp.

struct Layout { int type; unsigned long long rows, columns; long long leading; };
struct Description { int compute, scale, transposed[2], epilogue; Address bias; };
struct Preferences { size_t workspace; unsigned reduction, alignment[4]; };
struct Algorithm { unsigned long long data[8]; };
struct Heuristic { Algorithm algorithm; size_t workspace; int state; float waves; int reserved[4]; };
enum { NOT_SUPPORTED = 15, INVALID = 7, OP_T = 1, EPILOGUE_BIAS = 4, R_32F = 0, R_16F = 2, R_16BF = 14, R_8F = 28 };
static const unsigned long long CHOSEN = 0xA160;
static const unsigned long long REFUSED_COLUMNS = 176; // a refusal to order

static float element(int type, const void* p, size_t i) {
    if (type == R_32F) return ((const float*)p)[i];
    if (type == R_16F) return (float)((const _Float16*)p)[i];
    if (type == R_8F) {
        const unsigned code = ((const unsigned char*)p)[i], fraction = code & 7, exponent = code >> 3 & 15;
        const float v = exponent ? (8 + fraction) / 8.0f * exp2f((int)exponent - 7) : fraction / 8.0f * exp2f(-6);
        return code & 0x80 ? -v : v;
    }
    const unsigned bits = (unsigned)((const unsigned short*)p)[i] << 16;
    float v;
    memcpy(&v, &bits, 4);
    return v;
}
static void set_element(int type, void* p, size_t i, float v) {
    if (type == R_32F) { ((float*)p)[i] = v; return; }
    if (type == R_16F) { ((_Float16*)p)[i] = (_Float16)v; return; }
    unsigned bits;
    memcpy(&bits, &v, 4);
    ((unsigned short*)p)[i] = (unsigned short)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

API int cublasLtCreate(void** handle) {
    if (getenv("FAKE_CUBLAS_BROKEN")) return 1; // not initialized
    *handle = (void*)&CHOSEN;
    return 0;
}
API int cublasLtDestroy(void*) { return 0; }
API int cublasLtMatrixLayoutCreate(Layout** l, int type, unsigned long long rows, unsigned long long columns,
                                   long long leading) {
    *l = new Layout{type, rows, columns, leading};
    return 0;
}
API int cublasLtMatrixLayoutDestroy(Layout* l) { delete l; return 0; }
API int cublasLtMatmulDescCreate(Description** d, int compute, int scale) {
    *d = new Description{compute, scale, {0, 0}, 1, 0};
    return 0;
}
API int cublasLtMatmulDescDestroy(Description* d) { delete d; return 0; }
API int cublasLtMatmulDescSetAttribute(Description* d, int which, const void* value, size_t bytes) {
    if (which == 3 || which == 4) return bytes == 4 ? d->transposed[which - 3] = *(const int*)value, 0 : INVALID;
    if (which == 7) return bytes == 4 ? d->epilogue = *(const int*)value, 0 : INVALID;
    if (which == 8) return bytes == 8 ? d->bias = *(const Address*)value, 0 : INVALID;
    return INVALID;
}
API int cublasLtMatmulPreferenceCreate(Preferences** p) { *p = new Preferences{0, 7, {256, 256, 256, 256}}; return 0; }
API int cublasLtMatmulPreferenceDestroy(Preferences* p) { delete p; return 0; }
API int cublasLtMatmulPreferenceSetAttribute(Preferences* p, int which, const void* value, size_t bytes) {
    if (which == 1) return bytes == 8 ? p->workspace = *(const size_t*)value, 0 : INVALID;
    if (which == 3) return bytes == 4 ? p->reduction = *(const unsigned*)value, 0 : INVALID;
    if (which >= 5 && which <= 8) return bytes == 4 ? p->alignment[which - 5] = *(const unsigned*)value, 0 : INVALID;
    return INVALID;
}
API int cublasLtMatmulAlgoGetHeuristic(void*, Description* d, Layout* a, Layout* b, Layout* c, Layout* out,
                                       Preferences* p, int wanted, Heuristic* found, int* count) {
    COUNTED;
    *count = 0;
    if (a->columns == REFUSED_COLUMNS) return NOT_SUPPORTED;
    const bool shapes = d->transposed[0] == OP_T && d->transposed[1] == 0 && a->rows == b->rows &&
                        a->columns == out->rows && b->columns == out->columns && c->rows == out->rows;
    const bool dense = a->leading == (long long)a->rows && b->leading == (long long)b->rows &&
                       out->leading >= (long long)out->rows && c->leading == out->leading;
    // sums may not meet in place or in the output's type; f32 arithmetic with f32 scales
    if (!shapes || !dense || p->reduction != 2 || d->compute != 68 || d->scale != R_32F || wanted < 1) return INVALID;
    for (unsigned alignment : p->alignment)
        if (alignment < 16) return 0;
    memset(found, 0, sizeof *found);
    found->algorithm.data[0] = CHOSEN;
    found->workspace = p->workspace / 2;
    *count = 1;
    return 0;
}
API int cublasLtMatmul(void*, Description* d, const float* alpha, const void* a, Layout* al, const void* b, Layout* bl,
                       const float* beta, const void* c, Layout* cl, void* out, Layout* ol, const Algorithm* algorithm,
                       void* workspace, size_t workspace_bytes, Stream* stream) {
    ENTER;
    if (algorithm->data[0] != CHOSEN || (size_t)workspace % 256 || workspace_bytes < 1 << 20) return INVALID;
    const Layout A = *al, B = *bl, C = *cl, O = *ol;
    const Description how = *d;
    const float scale = *alpha, keep = *beta;
    return put(stream, [=] {
        memset(workspace, 0xFF, 4096);
        for (size_t j = 0; j < O.columns; ++j)
            for (size_t i = 0; i < O.rows; ++i) {
                float sum = 0.0f;
                for (size_t k = 0; k < A.rows; ++k)
                    sum += element(A.type, a, k + i * A.leading) * element(B.type, b, k + j * B.leading);
                sum *= scale;
                if (keep != 0.0f) sum += keep * element(C.type, c, i + j * C.leading);
                if (how.epilogue == EPILOGUE_BIAS) sum += element(O.type, (const void*)how.bias, i);
                set_element(O.type, out, i + j * O.leading, sum);
            }
    });
}

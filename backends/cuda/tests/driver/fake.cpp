// A libcuda, a libnvrtc, a libcublasLt and a libnvidia-ml for tests: devices of 2 multiprocessors in host memory, whose
// kernels are compiled by g++ over shim.h. What is put on a stream runs when an event behind it is asked for the second time or
// waited for, and not before: whoever forgets to wait sees old bytes. Copies that are asynchronous take pinned memory of
// the host alone: the real ones would wait for others. Only what the backend calls is here.
//
// A hollow device has the size of a large one on any host: its memory is counted and no byte of it is kept, kernels are
// compiled to nothing, steps end without having run, and the host reads zeros.

#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <deque>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

typedef unsigned long long Address;
enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700 };
enum { ALREADY_REGISTERED = 712, NOT_REGISTERED = 713, REFUSED = 801 };
enum { INVALID_CONTEXT = 201, NO_PEER = 217, INVALID_HANDLE = 400, PEER_ENABLED = 704 };

static std::recursive_mutex lock;
static const int DEVICES_MAX = 8;
// The context of a device is a place among these.
static char contexts[DEVICES_MAX];
static thread_local int current = 0; // the device whose context is the calling thread's
static int device_of(const void* context) { return (int)((const char*)context - contexts); }
static int faults[DEVICES_MAX]; // after a fault, the answer to everything that a device is asked
#define sticky faults[current]
static std::map<std::string, unsigned long long> calls;
#define COUNTED                                                                                                  \
    std::lock_guard<std::recursive_mutex> entered(lock);                                                         \
    ++calls[__func__]
#define ENTER                                                                                                    \
    COUNTED;                                                                                                     \
    if (sticky) return sticky

struct Graph {
    std::vector<std::function<void()>> steps;
    bool uploaded = false;
    int device = 0;
};
struct Stream {
    int device;
    std::deque<std::function<void()>> steps;
    Graph* capture = nullptr;
    unsigned long long issued = 0, done = 0;
    bool begun = false; // whether it has work since the last event or the begin of a capture
};
struct Event { int device; Stream* stream = nullptr; unsigned long long at = 0; bool asked = false; };

// What a test may choose by the environment: the device's name, its memory and how much of it a context takes, whether it
// is hollow, whether kernels are told of, whether cuBLASLt starts.
static const char* choice(const char* name, const char* otherwise) {
    const char* value = getenv(name);
    return value ? value : otherwise;
}
static bool hollow() {
    static const bool is = getenv("FAKE_CUDA_HOLLOW");
    return is;
}
// For tests that see another process: what takes time at first use.
static void tell(const char* what, const char* name) {
    if (getenv("FAKE_CUDA_TELL")) fprintf(stderr, "fake driver: %s %s\n", what, name);
}

static std::vector<Stream*> streams;
static void run(Stream* stream, unsigned long long until);

// FAKE_CUDA_ORDER=others: before work of a device is waited for, the other devices do all that does not wait for it.
static void run_others(int device) {
    static const bool first = !strcmp(choice("FAKE_CUDA_ORDER", ""), "others");
    for (size_t i = 0; first && i < streams.size(); ++i)
        if (streams[i]->device != device) run(streams[i], streams[i]->issued);
}

static void run(Stream* stream, unsigned long long until) {
    while (stream->done < until) {
        auto step = stream->steps.front();
        stream->steps.pop_front();
        ++stream->done;
        if (!faults[stream->device] && !hollow()) step();
    }
}

// What was recorded last is reached, or ends with its device's fault.
static int reach(const Event& event) {
    if (event.stream) run(event.stream, event.at);
    return faults[event.device];
}

static int put(Stream* stream, std::function<void()> step) {
    stream->begun = true;
    if (stream->capture) {
        stream->capture->steps.push_back(step);
    } else {
        stream->steps.push_back(step);
        ++stream->issued;
    }
    return SUCCESS;
}

struct Launch {
    unsigned grid[3], threads, shared_bytes;
    void** args;
};
struct Function {
    int count;
    const char* (*emulate)(const Launch*);
    unsigned shared_bytes_max = 48 << 10;
};

#define API extern "C" __attribute__((visibility("default")))

// For tests: a line with its name and count for each function that was called, up to `bytes`.
API int fake_calls(char* text, size_t bytes) {
    std::lock_guard<std::recursive_mutex> entered(lock);
    std::string lines;
    for (auto& [name, count] : calls) lines += name + " " + std::to_string(count) + "\n";
    if (lines.size() >= bytes) return INVALID_VALUE;
    return strcpy(text, lines.c_str()), SUCCESS;
}

static size_t memory_bytes() { return strtoull(choice("FAKE_CUDA_MEMORY_BYTES", "2147483648"), nullptr, 10); }

API int cuInit(unsigned) { return SUCCESS; }
API int cuGetErrorString(int code, const char** text) {
    *text = code == ILLEGAL_ADDRESS ? "an illegal memory access was encountered" : "an error of the fake driver";
    return SUCCESS;
}
API int cuGetErrorName(int, const char** text) { *text = "FAKE"; return SUCCESS; }
API int cuDriverGetVersion(int* version) { *version = 12080; return SUCCESS; }
API int cuDeviceGetCount(int* count) { *count = atoi(choice("FAKE_CUDA_DEVICES", "1")); return SUCCESS; }
API int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return SUCCESS; }
API int cuDeviceGetName(char* name, int length, int) { snprintf(name, length, "%s", choice("FAKE_CUDA_NAME", "Fake GPU")); return SUCCESS; }
API int cuDeviceTotalMem_v2(size_t* bytes, int) { *bytes = memory_bytes(); return SUCCESS; }
API int cuDeviceGetUuid_v2(char* uuid, int) {
    for (int i = 0; i < 16; ++i) uuid[i] = (char)(16 * i + i);
    return SUCCESS;
}
API int cuDeviceGetPCIBusId(char* id, int length, int) { snprintf(id, length, "0000:1A:00.0"); return SUCCESS; }
API int cuDeviceGetAttribute(int* value, int which, int) {
    *value = which == 75 ? 9 : which == 76 ? 0 : which == 16 ? 2 : which == 97 ? 232448 : 0;
    return SUCCESS;
}
API int cuDevicePrimaryCtxRetain(void** context, int device) { *context = &contexts[device]; return SUCCESS; }
API int cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }
API int cuCtxSetCurrent(void* context) { COUNTED; current = device_of(context); return sticky; }

API int cuStreamCreate(Stream** stream, unsigned) {
    ENTER;
    streams.push_back(*stream = new Stream{current});
    return SUCCESS;
}
API int cuStreamSynchronize(Stream* stream) {
    ENTER;
    run_others(stream->device);
    run(stream, stream->issued);
    return faults[stream->device];
}
API int cuStreamDestroy_v2(Stream* stream) {
    COUNTED;
    run(stream, stream->issued);
    return SUCCESS; // never freed: events still name it
}

API int cuEventCreate(Event** event, unsigned) { ENTER; *event = new Event{current}; return SUCCESS; }
API int cuEventRecord(Event* event, Stream* stream) {
    ENTER;
    if (event->device != stream->device) return INVALID_HANDLE;
    *event = {event->device, stream, stream->issued, false};
    stream->begun = false;
    return SUCCESS;
}
// These are asked of events of any device, whichever is the calling thread's.
API int cuEventQuery(Event* event) {
    ENTER;
    if (!event->asked && event->stream && event->stream->done < event->at) {
        event->asked = true;
        return NOT_READY;
    }
    run_others(event->device);
    return reach(*event);
}
API int cuEventSynchronize(Event* event) {
    ENTER;
    run_others(event->device);
    return reach(*event);
}
// A stream waits for what is recorded now; a fault before that is not its own.
API int cuStreamWaitEvent(Stream* stream, Event* event, unsigned flags) {
    ENTER;
    if (flags) return INVALID_VALUE;
    const Event recorded = *event;
    return put(stream, [=] { reach(recorded); });
}
// since 12.8 by another name; the older one stays
#ifdef OLD_DRIVER
API int cuEventElapsedTime(float* milliseconds, Event* start, Event* end) {
#else
API int cuEventElapsedTime_v2(float* milliseconds, Event* start, Event* end) {
#endif
    ENTER;
    if (end->stream->done < end->at) return NOT_READY;
    *milliseconds = (float)(end->at - start->at);
    return SUCCESS;
}
API int cuEventDestroy_v2(Event* event) { COUNTED; delete event; return SUCCESS; }

struct Allocation { size_t bytes; int device; };
static std::map<Address, Allocation> allocated;
static size_t allocated_of[DEVICES_MAX]; // beside the context
static size_t free_bytes(int device) {
    static const size_t context_bytes = strtoull(choice("FAKE_CUDA_CONTEXT_BYTES", "0"), nullptr, 10);
    return memory_bytes() - context_bytes - allocated_of[device];
}
// The device that has these bytes; -1 if they are the host's, or not all of one allocation.
static int device_with(Address first, size_t bytes) {
    auto after = allocated.upper_bound(first);
    if (after == allocated.begin()) return -1;
    auto& [start, allocation] = *--after;
    return first + bytes <= start + allocation.bytes ? allocation.device : -1;
}

static const size_t SMALL_BYTES = 64 << 20;

// What is small is filled, so that a read of what was not written is seen; the rest takes pages as they are touched.
API int cuMemAlloc_v2(Address* address, size_t bytes) {
    ENTER;
    if (bytes > free_bytes(current)) return OUT_OF_MEMORY;
    const bool small = bytes <= SMALL_BYTES && !hollow();
    void* memory = small ? aligned_alloc(256, (bytes + 255) / 256 * 256)
                         : mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (!memory || memory == MAP_FAILED) return OUT_OF_MEMORY;
    if (small) memset(memory, 0xFF, bytes);
    *address = (Address)memory;
    allocated[*address] = {bytes, current}, allocated_of[current] += bytes;
    return SUCCESS;
}
// The real one waits for the device; here memory must not be in use, nor is its address given back, so that a late
// access is seen as wrong bytes rather than a crash.
API int cuMemFree_v2(Address address) {
    COUNTED;
    auto found = allocated.find(address);
    if (found == allocated.end()) return INVALID_VALUE;
    const auto [bytes, device] = found->second;
    if (bytes > SMALL_BYTES || hollow()) madvise((void*)address, bytes, MADV_DONTNEED);
    allocated_of[device] -= bytes;
    allocated.erase(found);
    return SUCCESS;
}
API int cuMemGetInfo_v2(size_t* free, size_t* total) {
    ENTER;
    *total = memory_bytes(), *free = free_bytes(current);
    return SUCCESS;
}

// Pinned memory of the host, by its address.
struct Pinned {
    size_t bytes;
    bool registered; // others' memory
    Stream* stream;  // the last copy that uses it
    unsigned long long last;
};
static std::map<Address, Pinned> pinned;
static unsigned long long copies_registered = 0, copies_own = 0;

static Pinned* pinned_around(const void* memory, size_t bytes) {
    auto after = pinned.upper_bound((Address)memory);
    if (after == pinned.begin()) return nullptr;
    auto& [first, range] = *--after;
    return (Address)memory + bytes <= first + range.bytes ? &range : nullptr;
}

API int cuMemHostAlloc(void** memory, size_t bytes, unsigned) {
    ENTER;
    *memory = aligned_alloc(256, (bytes + 255) / 256 * 256);
    pinned[(Address)*memory] = {bytes, false, nullptr, 0};
    return SUCCESS;
}
API int cuMemFreeHost(void* memory) {
    COUNTED;
    pinned.erase((Address)memory);
    free(memory);
    return SUCCESS;
}
API int cuMemHostRegister_v2(void* memory, size_t bytes, unsigned flags) {
    ENTER;
    if (!bytes || flags != 1) return INVALID_VALUE; // portable
    if (bytes == 0x0BAD) return REFUSED;            // a refusal to order
    auto after = pinned.lower_bound((Address)memory + bytes);
    if (after != pinned.begin() && (--after)->first + after->second.bytes > (Address)memory) return ALREADY_REGISTERED;
    pinned[(Address)memory] = {bytes, true, nullptr, 0};
    return SUCCESS;
}
API int cuMemHostUnregister(void* memory) {
    ENTER;
    auto found = pinned.find((Address)memory);
    if (found == pinned.end() || !found->second.registered) return NOT_REGISTERED;
    const Pinned range = found->second;
    pinned.erase(found);
    if (range.stream && range.stream->done < range.last) {
        fprintf(stderr, "fake driver: memory is unpinned under a copy\n");
        return sticky = ILLEGAL_ADDRESS;
    }
    return SUCCESS;
}
// For tests: copies to or from memory of others, of the driver's own, and ranges that are registered now.
API int fake_count(unsigned long long counts[3]) {
    std::lock_guard<std::recursive_mutex> entered(lock);
    counts[0] = copies_registered, counts[1] = copies_own, counts[2] = 0;
    for (auto& [_, range] : pinned) counts[2] += range.registered;
    return SUCCESS;
}
API int cuMemHostGetDevicePointer_v2(Address* address, void* memory, unsigned) {
    ENTER;
    *address = (Address)memory;
    return SUCCESS;
}
static int copy(void* to, const void* from, size_t bytes, Stream* stream) {
    ENTER;
    return put(stream, [=] { memcpy(to, from, bytes); });
}

// Which devices may access which, what FAKE_CUDA_PEERS says of that ("none": no two of them; "lost": they may, but what is
// copied does not arrive, as behind some IOMMUs; a number: that copy fails), and bytes that crossed: from device to device,
// from the host to a device, and back.
static bool enabled[DEVICES_MAX][DEVICES_MAX];
static unsigned long long crossed[3], peer_copies;

API int fake_crossed(unsigned long long bytes[3]) {
    std::lock_guard<std::recursive_mutex> entered(lock);
    return memcpy(bytes, crossed, sizeof crossed), SUCCESS;
}
API int cuDeviceCanAccessPeer(int* can, int device, int peer) {
    COUNTED;
    *can = device != peer && strcmp(choice("FAKE_CUDA_PEERS", ""), "none");
    return SUCCESS;
}
API int cuCtxEnablePeerAccess(void* peer, unsigned flags) {
    ENTER;
    if (flags || device_of(peer) == current) return INVALID_VALUE;
    if (!strcmp(choice("FAKE_CUDA_PEERS", ""), "none")) return NO_PEER;
    bool& is = enabled[current][device_of(peer)];
    return is ? PEER_ENABLED : (is = true, SUCCESS);
}
// The real one goes through the host where access is not enabled. Here it must be, on the stream's device.
API int cuMemcpyPeerAsync(Address to, void* to_context, Address from, void* from_context, size_t n, Stream* s) {
    ENTER;
    const int target = device_of(to_context), source = device_of(from_context);
    if (device_with(to, n) != target || device_with(from, n) != source) return INVALID_VALUE;
    if (source != s->device || !enabled[source][target]) return INVALID_CONTEXT;
    crossed[0] += n;
    const char* how = choice("FAKE_CUDA_PEERS", "");
    if (!strcmp(how, "lost")) return put(s, [] {});
    if (++peer_copies == strtoull(how, nullptr, 10)) return put(s, [=] { faults[source] = ILLEGAL_ADDRESS; });
    return put(s, [=] { memcpy((void*)to, (void*)from, n); });
}
static int copy_host(void* to, const void* from, const void* host, size_t bytes, Stream* stream) {
    ENTER;
    Pinned* range = pinned_around(host, bytes);
    if (!range) return INVALID_VALUE;
    ++(range->registered ? copies_registered : copies_own);
    const int code = copy(to, from, bytes, stream);
    range->stream = stream, range->last = stream->issued;
    return code;
}
API int cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t n, Stream* s) {
    crossed[1] += n;
    return copy_host((void*)to, from, from, n, s);
}
API int cuMemcpyDtoHAsync_v2(void* to, Address from, size_t n, Stream* s) {
    if (hollow()) memset(to, 0, n);
    crossed[2] += n;
    return copy_host(to, (void*)from, to, n, s);
}
API int cuMemcpyDtoDAsync_v2(Address to, Address from, size_t n, Stream* s) {
    for (Address operand : {to, from}) {
        const int device = device_with(operand, n);
        if (device >= 0 && device != s->device) return INVALID_VALUE;
    }
    return copy((void*)to, (void*)from, n, s);
}
API int cuMemsetD32Async(Address to, unsigned word, size_t words, Stream* stream) {
    ENTER;
    return put(stream, [=] {
        if (word == 0x0BADADD7u) faults[stream->device] = ILLEGAL_ADDRESS; // a fault to order
        for (size_t i = 0; i < words; ++i) ((unsigned*)to)[i] = word;
    });
}

API int cuModuleLoadData(void** module, const void* image) {
    ENTER;
    *module = hollow() ? (void*)&lock : dlopen((const char*)image, RTLD_NOW | RTLD_LOCAL);
    if (!*module) fprintf(stderr, "%s\n", dlerror());
    return *module ? SUCCESS : INVALID_VALUE;
}
static std::map<std::pair<void*, std::string>, Function*> functions;
API int cuModuleUnload(void*) { COUNTED; return SUCCESS; }
API int cuModuleGetFunction(Function** function, void* module, const char* name) {
    ENTER;
    tell("looks up", name);
    if (hollow()) return *function = new Function{0, nullptr}, SUCCESS;
    auto count = (int (*)())dlsym(module, (std::string("count_") + name).c_str());
    auto emulate = (const char* (*)(const Launch*))dlsym(module, (std::string("emulate_") + name).c_str());
    if (!count || !emulate) return NOT_FOUND;
    Function*& known = functions[{module, name}];
    if (!known) known = new Function{count(), emulate};
    *function = known;
    return SUCCESS;
}
API int cuFuncSetAttribute(Function* function, int which, int value) {
    ENTER;
    if (which == 8) function->shared_bytes_max = value;
    return SUCCESS;
}
API int cuLaunchKernel(Function* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                       unsigned bz, unsigned shared_bytes, Stream* stream, void** params, void**) {
    ENTER;
    if (!gx || !gy || !gz || gy > 65535 || gz > 65535 || !bx || bx > 1024 || by != 1 || bz != 1) return INVALID_VALUE;
    if (shared_bytes > function->shared_bytes_max) return INVALID_VALUE;
    if (stream->device != current) return INVALID_HANDLE;
    std::vector<Address> values;
    for (int i = 0; i < function->count; ++i) values.push_back(*(Address*)params[i]);
    return put(stream, [=]() mutable {
        std::vector<void*> args;
        for (Address& value : values) args.push_back(&value);
        const Launch launch = {{gx, gy, gz}, bx, shared_bytes, args.data()};
        if (const char* error = function->emulate(&launch)) {
            fprintf(stderr, "fake driver: %s\n", error);
            faults[stream->device] = ILLEGAL_ADDRESS;
        }
    });
}
struct LaunchConfig {
    unsigned gx, gy, gz, bx, by, bz, shared_bytes;
    Stream* stream;
    void* attributes;
    unsigned count;
};
API int cuLaunchKernelEx(const LaunchConfig* config, Function* function, void** params, void** extra) {
    COUNTED;
    const int programmatic_stream_serialization = 6;
    if (config->count != 1 || *(int*)config->attributes != programmatic_stream_serialization) return INVALID_VALUE;
    // what begins a batch waits for all that was before
    if (!config->stream->begun) return INVALID_VALUE;
    return cuLaunchKernel(function, config->gx, config->gy, config->gz, config->bx, config->by, config->bz,
                          config->shared_bytes, config->stream, params, extra);
}

API int cuStreamBeginCapture_v2(Stream* stream, int) {
    ENTER;
    if (stream->capture) return INVALID_VALUE;
    stream->capture = new Graph;
    stream->begun = false;
    return SUCCESS;
}
API int cuStreamEndCapture(Stream* stream, Graph** graph) {
    ENTER;
    *graph = stream->capture;
    stream->capture = nullptr;
    return *graph ? SUCCESS : INVALID_VALUE;
}
// A graph takes memory of the device once it is there.
static const size_t STEP_BYTES = 4096;
API int cuGraphInstantiateWithFlags(Graph** exec, Graph* graph, unsigned long long) {
    ENTER;
    tell("records", "a graph");
    *exec = new Graph(*graph);
    return SUCCESS;
}
API int cuGraphUpload(Graph* exec, Stream* stream) {
    ENTER;
    exec->device = stream->device;
    if (!exec->uploaded) allocated_of[exec->device] += exec->steps.size() * STEP_BYTES;
    exec->uploaded = true;
    return SUCCESS;
}
API int cuGraphDestroy(Graph* graph) { COUNTED; delete graph; return SUCCESS; }
API int cuGraphExecDestroy(Graph* exec) {
    COUNTED;
    if (exec->uploaded) allocated_of[exec->device] -= exec->steps.size() * STEP_BYTES;
    delete exec;
    return SUCCESS;
}
API int cuGraphLaunch(Graph* exec, Stream* stream) {
    ENTER;
    return put(stream, [exec] { for (auto& step : exec->steps) step(); });
}

// NVRTC: the "machine code" is the path of a library.
struct Program { std::string source, name, library, log; };

API int nvrtcCreateProgram(Program** program, const char* source, const char* name, int, const char**, const char**) {
    COUNTED;
    *program = new Program{source, name, "", ""};
    return 0;
}
API int nvrtcCompileProgram(Program* program, int, const char**) {
    COUNTED;
    tell("compiles", program->name.c_str());
    if (hollow()) return program->library = "hollow", 0;
    std::string source = program->source;
    // each kernel's name stands between `KERNEL(..) ` and `(`, at the start of a line
    for (size_t at = 0; (at = program->source.find("\nKERNEL", at)) != std::string::npos; ++at) {
        const size_t name = program->source.find(") ", at) + 2;
        source += "EMULATE(" + program->source.substr(name, program->source.find('(', name) - name) + ")\n";
    }
    const std::string directory = getenv("FAKE_CUDA_DIRECTORY");
    char name[32];
    snprintf(name, sizeof name, "/%016zx", std::hash<std::string>()(source));
    const std::string path = directory + name;
    program->library = path + ".so";
    if (std::ifstream(program->library)) return 0;
    const std::string own = path + "." + std::to_string(getpid()); // other tests compile the same
    std::ofstream(own + ".cpp") << source;
    const std::string command = "g++ -std=c++17 -O1 -w -shared -fPIC -fvisibility=hidden -include " + directory +
                                "/shim.h " + own + ".cpp -o " + own + ".so 2> " + own + ".log && mv " + own +
                                ".so " + program->library;
    if (system(command.c_str()) == 0) return 0;
    std::ifstream log(own + ".log");
    program->log.assign(std::istreambuf_iterator<char>(log), {});
    return 6; // NVRTC_ERROR_COMPILATION
}
API int nvrtcDestroyProgram(Program** program) { delete *program; return 0; }
API int nvrtcGetProgramLogSize(Program* program, size_t* bytes) { *bytes = program->log.size() + 1; return 0; }
API int nvrtcGetProgramLog(Program* program, char* log) { strcpy(log, program->log.c_str()); return 0; }
API int nvrtcGetCUBINSize(Program* program, size_t* bytes) { *bytes = program->library.size() + 1; return 0; }
API int nvrtcGetCUBIN(Program* program, char* code) { strcpy(code, program->library.c_str()); return 0; }
API int nvrtcGetPTXSize(Program* program, size_t* bytes) { return nvrtcGetCUBINSize(program, bytes); }
API int nvrtcGetPTX(Program* program, char* code) { return nvrtcGetCUBIN(program, code); }
API int nvrtcVersion(int* major, int* minor) {
    *major = 12, *minor = atoi(choice("FAKE_NVRTC_MINOR", "8"));
    return 0;
}
API int nvrtcGetNumSupportedArchs(int* count) { *count = 2; return 0; }
API int nvrtcGetSupportedArchs(int* list) { list[0] = 80; list[1] = 90; return 0; }

#include "blas.cpp"
#include "nvml.cpp"

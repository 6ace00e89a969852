// A libnvidia-ml for tests: the clocks of the device, which a test chooses by the environment. Part of fake.cpp.

static unsigned chosen(const char* name, const char* otherwise) { return (unsigned)strtoul(choice(name, otherwise), nullptr, 0); }

API int nvmlInit_v2() { return 0; }
API int nvmlDeviceGetHandleByPciBusId_v2(const char* address, void** device) {
    *device = &lock;
    return strcmp(address, "0000:1a:00.0") ? 6 : 0; // not found
}
API int nvmlDeviceGetMaxClockInfo(void*, int, unsigned* mhz) { *mhz = 1980; return 0; }
API int nvmlDeviceGetDefaultApplicationsClock(void*, int, unsigned* mhz) { *mhz = 1755; return 0; }
API int nvmlDeviceGetApplicationsClock(void*, int, unsigned* mhz) { *mhz = chosen("FAKE_NVML_SET_MHZ", "1755"); return 0; }
API int nvmlDeviceGetClockInfo(void*, int, unsigned* mhz) { *mhz = chosen("FAKE_NVML_CLOCK_MHZ", "345"); return 0; }
API int nvmlDeviceGetCurrentClocksThrottleReasons(void*, unsigned long long* reasons) {
    *reasons = chosen("FAKE_NVML_REASONS", "1"); // idle
    return 0;
}

//! Owned driver objects, and conversion of the driver's errors.

use cudarc::driver::result::{self, DriverError, stream::StreamKind};
use cudarc::driver::sys::{self, CUresult};
use mixfleet_hal::cast::{to_i32, to_usize};
use mixfleet_hal::{Error, ErrorKind, Result};
use std::ffi::{CString, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Converts a driver error. After an error that becomes `DeviceLost`, every call fails because the context is
/// gone.
pub(crate) fn failure(place: &str, error: DriverError) -> Error {
    use CUresult::*;
    let kind = match error.0 {
        CUDA_ERROR_OUT_OF_MEMORY => ErrorKind::OutOfMemory,
        CUDA_ERROR_DEINITIALIZED
        | CUDA_ERROR_ECC_UNCORRECTABLE
        | CUDA_ERROR_NVLINK_UNCORRECTABLE
        | CUDA_ERROR_DEVICE_UNAVAILABLE
        | CUDA_ERROR_CONTEXT_IS_DESTROYED
        | CUDA_ERROR_ILLEGAL_ADDRESS
        | CUDA_ERROR_LAUNCH_TIMEOUT
        | CUDA_ERROR_ASSERT
        | CUDA_ERROR_HARDWARE_STACK_ERROR
        | CUDA_ERROR_ILLEGAL_INSTRUCTION
        | CUDA_ERROR_MISALIGNED_ADDRESS
        | CUDA_ERROR_INVALID_ADDRESS_SPACE
        | CUDA_ERROR_INVALID_PC
        | CUDA_ERROR_LAUNCH_FAILED
        | CUDA_ERROR_EXTERNAL_DEVICE
        | CUDA_ERROR_UNKNOWN => ErrorKind::DeviceLost,
        CUDA_ERROR_NOT_SUPPORTED | CUDA_ERROR_NO_BINARY_FOR_GPU | CUDA_ERROR_UNSUPPORTED_PTX_VERSION => {
            ErrorKind::Unsupported
        }
        _ => ErrorKind::Other,
    };
    let text = error.error_string().map(|text| text.to_string_lossy().into_owned()).unwrap_or_default();
    Error::new(kind, format!("cuda: {place}: {:?} ({text})", error.0))
}

/// Adds the location to a failed call.
pub(crate) trait At<T> {
    fn at(self, place: &str) -> Result<T>;
}

impl<T> At<T> for std::result::Result<T, DriverError> {
    fn at(self, place: &str) -> Result<T> {
        self.map_err(|error| failure(place, error))
    }
}

/// A device's primary context.
pub(crate) struct CudaContext {
    pub(crate) device: sys::CUdevice,
    raw: sys::CUcontext,
}

// SAFETY: a context may be used by any thread; each binds it before its calls.
unsafe impl Send for CudaContext {}
// SAFETY: as above.
unsafe impl Sync for CudaContext {}

impl CudaContext {
    pub(crate) fn retain(device: sys::CUdevice) -> Result<Arc<CudaContext>> {
        // SAFETY: the device came from the driver; the context is released once, in `drop`.
        let raw = unsafe { result::primary_ctx::retain(device) }.at("cuDevicePrimaryCtxRetain")?;
        let context = Arc::new(CudaContext { device, raw });
        context.bind()?;
        Ok(context)
    }

    /// Whether it is the context of the same device, which has one for all that open it.
    pub(crate) fn is(&self, other: &CudaContext) -> bool {
        self.raw == other.raw
    }

    /// Lets streams here write to the memory of `peer`; false where the driver says that the devices cannot.
    pub(crate) fn reach(&self, peer: &CudaContext) -> Result<bool> {
        if self.is(peer) {
            return Ok(true);
        }
        if !can_reach(self.device, peer.device)? {
            return Ok(false);
        }
        self.bind()?;
        // SAFETY: both contexts are retained; the calling thread's is the one that gets access.
        match unsafe { sys::cuCtxEnablePeerAccess(peer.raw, 0) } {
            CUresult::CUDA_SUCCESS | CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(true),
            code => Err(failure("cuCtxEnablePeerAccess", DriverError(code))),
        }
    }

    /// Makes it the calling thread's context, which every later call requires.
    pub(crate) fn bind(&self) -> Result<()> {
        // SAFETY: the context is retained until `self` is dropped.
        unsafe { result::ctx::set_current(self.raw) }.at("cuCtxSetCurrent")
    }
}

/// Whether the driver says that `device` can access memory of `peer`, another one.
pub(crate) fn can_reach(device: sys::CUdevice, peer: sys::CUdevice) -> Result<bool> {
    let mut can = 0;
    // SAFETY: both devices came from the driver; the call writes one number.
    unsafe { sys::cuDeviceCanAccessPeer(&mut can, device, peer) }.result().at("cuDeviceCanAccessPeer")?;
    Ok(can != 0)
}

impl Drop for CudaContext {
    fn drop(&mut self) {
        // SAFETY: retained once in `retain`; every object of the context holds an `Arc` of it and is gone.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

/// Defines an object of a context that is freed on drop.
macro_rules! owned {
    ($(#[$doc:meta])* $name:ident, $raw:ty, $free:path) => {
        $(#[$doc])*
        pub(crate) struct $name {
            pub(crate) context: Arc<CudaContext>,
            pub(crate) raw: $raw,
        }

        // SAFETY: the driver's handles may be used by any thread that bound their context.
        unsafe impl Send for $name {}
        // SAFETY: as above; the driver locks what calls share.
        unsafe impl Sync for $name {}

        impl Drop for $name {
            fn drop(&mut self) {
                if self.context.bind().is_ok() {
                    // SAFETY: created once by `new`, freed once here.
                    let _ = unsafe { $free(self.raw) };
                }
            }
        }
    };
}

owned!(
    /// An in-order stream of work.
    Stream,
    sys::CUstream,
    result::stream::destroy
);
owned!(
    /// A loaded program.
    Module,
    sys::CUmodule,
    result::module::unload
);
owned!(
    /// A graph that can be launched.
    GraphExec,
    sys::CUgraphExec,
    result::graph::exec_destroy
);
owned!(
    /// Memory of the device.
    DeviceMemory,
    sys::CUdeviceptr,
    result::free_sync
);
owned!(
    /// Pinned host memory allocated by the driver.
    HostPinned,
    *mut c_void,
    result::free_host
);

owned!(
    /// Host memory owned by others, pinned for as long as this lives.
    HostRegistered,
    *mut c_void,
    sys::cuMemHostUnregister
);

impl Stream {
    pub(crate) fn new(context: &Arc<CudaContext>) -> Result<Stream> {
        context.bind()?;
        let raw = result::stream::create(StreamKind::NonBlocking).at("cuStreamCreate")?;
        Ok(Stream { context: context.clone(), raw })
    }

    /// Has later work on the stream begin once `event`, of any device's stream, is reached. The driver takes
    /// the event as it is recorded now: it may be recorded again at once.
    pub(crate) fn follow(&self, event: &CudaEvent) -> Result<()> {
        if event.reached.load(Ordering::Relaxed) {
            return Ok(());
        }
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both are alive; they may be of two contexts.
        unsafe { result::stream::wait_event(self.raw, event.raw, flags) }.at("cuStreamWaitEvent")
    }

    /// Enqueues a kernel that may start while the one before it ends, for which it waits itself
    /// (programmatic dependent launch); `bytes` is its dynamic shared memory.
    ///
    /// # Safety
    /// As for a launch; every thread of the kernel waits before it touches memory or ends.
    pub(crate) unsafe fn launch_early(
        &self,
        function: &Function,
        [x, y, z]: [u32; 3],
        threads: u32,
        bytes: u32,
        args: &mut [*mut c_void],
    ) -> std::result::Result<(), DriverError> {
        let mut attribute = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: bytes,
            hStream: self.raw,
            attrs: &raw mut attribute,
            numAttrs: 1,
        };
        // SAFETY: the caller's promise; the configuration is read before the call returns.
        unsafe {
            sys::cuLaunchKernelEx(&raw const config, function.raw, args.as_mut_ptr(), std::ptr::null_mut())
        }
        .result()
    }

    /// Enqueues a copy of `bytes` bytes from here to the memory of `peer`, which this context reaches.
    ///
    /// # Safety
    /// Both ranges are allocated, and stay so until the copy is done.
    pub(crate) unsafe fn copy_to_peer(
        &self,
        from: u64,
        peer: &CudaContext,
        to: u64,
        bytes: u64,
    ) -> Result<()> {
        let own = self.context.raw;
        // SAFETY: the caller's promise; both contexts are retained.
        unsafe { result::memcpy_peer_async(peer.raw, to, own, from, to_usize(bytes), self.raw) }
            .at("a copy to another device")
    }

    /// Waits for all work on the stream.
    pub(crate) fn synchronize(&self) -> Result<()> {
        // SAFETY: the stream is alive.
        unsafe { result::stream::synchronize(self.raw) }.at("cuStreamSynchronize")
    }
}

/// Events that no one holds any more, for the next batches.
pub(crate) struct EventPool {
    context: Arc<CudaContext>,
    free: Mutex<Vec<sys::CUevent>>,
}

// SAFETY: the driver's handles may be used by any thread that bound their context.
unsafe impl Send for EventPool {}
// SAFETY: as above; the list is locked.
unsafe impl Sync for EventPool {}

impl EventPool {
    pub(crate) fn new(context: &Arc<CudaContext>) -> Arc<EventPool> {
        Arc::new(EventPool { context: context.clone(), free: Mutex::default() })
    }

    fn free(&self) -> MutexGuard<'_, Vec<sys::CUevent>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records an event after the work that `stream` holds now.
    pub(crate) fn record(self: &Arc<Self>, stream: &Stream) -> Result<CudaEvent> {
        let kept = self.free().pop();
        let raw = match kept {
            Some(raw) => raw,
            None => result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT).at("cuEventCreate")?,
        };
        let event = CudaEvent { raw, pool: self.clone(), reached: AtomicBool::new(false) };
        // SAFETY: both are alive and of one context.
        unsafe { result::event::record(event.raw, stream.raw) }.at("cuEventRecord")?;
        Ok(event)
    }
}

impl Drop for EventPool {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            for raw in std::mem::take(&mut *self.free()) {
                // SAFETY: created once in `record`; no `CudaEvent` holds it.
                let _ = unsafe { result::event::destroy(raw) };
            }
        }
    }
}

/// A point on a stream, with a timestamp; its pool has it back when it is dropped.
pub(crate) struct CudaEvent {
    raw: sys::CUevent,
    pool: Arc<EventPool>,
    /// Whether it is known to have been reached, so that the driver is not asked again.
    reached: AtomicBool,
}

// SAFETY: the driver's handles may be used by any thread that bound their context.
unsafe impl Send for CudaEvent {}
// SAFETY: as above; the driver locks what calls share.
unsafe impl Sync for CudaEvent {}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        self.pool.free().push(self.raw);
    }
}

impl CudaEvent {
    /// Whether the event has been reached; an error stems from the work before it.
    pub(crate) fn is_done(&self) -> Result<bool> {
        if self.reached.load(Ordering::Relaxed) {
            return Ok(true);
        }
        // SAFETY: the event is alive.
        match unsafe { result::event::query(self.raw) } {
            Ok(()) => {
                self.reached.store(true, Ordering::Relaxed);
                Ok(true)
            }
            Err(DriverError(CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(error) => Err(failure("a batch", error)),
        }
    }

    /// Waits until the event is reached.
    pub(crate) fn synchronize(&self) -> Result<()> {
        if self.reached.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.pool.context.bind()?;
        // SAFETY: the event is alive.
        unsafe { result::event::synchronize(self.raw) }.at("cuEventSynchronize")?;
        self.reached.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Returns the seconds from `start` to `self`, both reached, if the driver tells.
    pub(crate) fn since(&self, start: &CudaEvent) -> Option<f64> {
        let mut milliseconds = 0.0;
        // SAFETY: both are alive, passed, and record times; the call writes one number.
        unsafe { elapsed_time()?(&mut milliseconds, start.raw, self.raw) }.result().ok()?;
        Some(f64::from(milliseconds) * 1e-3)
    }
}

type ElapsedTime = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> CUresult;

/// Looks up cuEventElapsedTime once, by its name since 12.8 or by its older one: cudarc knows only the newer,
/// and panics without it.
fn elapsed_time() -> Option<ElapsedTime> {
    static FOUND: OnceLock<Option<ElapsedTime>> = OnceLock::new();
    *FOUND.get_or_init(|| {
        // SAFETY: an event exists, so the driver is loaded; both names have this type in cuda.h.
        let driver = unsafe { sys::culib() };
        let names = ["cuEventElapsedTime_v2\0", "cuEventElapsedTime\0"];
        // SAFETY: as above.
        names.iter().find_map(|name| unsafe { driver.get::<ElapsedTime>(name.as_bytes()) }.ok().map(|f| *f))
    })
}

impl Module {
    pub(crate) fn load(context: &Arc<CudaContext>, code: &[u8]) -> Result<Module> {
        context.bind()?;
        // SAFETY: `code` is a whole cubin, or PTX with its final zero.
        let raw = unsafe { result::module::load_data(code.as_ptr().cast()) }.at("cuModuleLoadData")?;
        Ok(Module { context: context.clone(), raw })
    }

    /// Returns a kernel of the module.
    pub(crate) fn function(self: &Arc<Self>, name: &'static str) -> Result<Function> {
        let name_text =
            CString::new(name).map_err(|e| Error::new(ErrorKind::Other, format!("cuda: {name}: {e}")))?;
        // SAFETY: the module is alive.
        let raw = unsafe { result::module::get_function(self.raw, name_text) }.at(name)?;
        Ok(Function { raw, shared_bytes: Mutex::new(0), _module: self.clone() })
    }
}

/// A kernel with the module that contains it.
pub(crate) struct Function {
    pub(crate) raw: sys::CUfunction,
    /// The dynamic shared memory that it was allowed so far.
    shared_bytes: Mutex<u32>,
    _module: Arc<Module>,
}

// SAFETY: a function may be launched by any thread that bound its context.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Function {
    /// Allows a block `bytes` of dynamic shared memory: together with its static shared memory, a kernel may
    /// exceed 48 KiB, which it must request.
    pub(crate) fn allow(&self, bytes: u32) -> Result<()> {
        let mut allowed = self.shared_bytes.lock().unwrap_or_else(PoisonError::into_inner);
        if bytes > *allowed {
            let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is that of a live module.
            unsafe { result::function::set_function_attribute(self.raw, attribute, to_i32(bytes)) }
                .at("cuFuncSetAttribute")?;
            *allowed = bytes;
        }
        Ok(())
    }
}

impl DeviceMemory {
    pub(crate) fn new(context: &Arc<CudaContext>, bytes: u64) -> Result<DeviceMemory> {
        context.bind()?;
        // SAFETY: the memory is freed once, in `drop`. The driver hands out zeroed pages to a process.
        let raw = unsafe { result::malloc_sync(to_usize(bytes.max(1))) };
        let raw = raw.map_err(|error| failure(&format!("{bytes} bytes of device memory"), error))?;
        Ok(DeviceMemory { context: context.clone(), raw })
    }
}

impl HostRegistered {
    /// Pins `bytes` bytes at `address`.
    ///
    /// # Safety
    /// They are mapped, and stay so until this is dropped.
    pub(crate) unsafe fn new(
        context: &Arc<CudaContext>,
        address: usize,
        bytes: u64,
    ) -> Result<HostRegistered> {
        context.bind()?;
        let raw = address as *mut c_void;
        // SAFETY: the caller's promise; the range is unpinned once, in `drop`.
        unsafe { sys::cuMemHostRegister_v2(raw, to_usize(bytes), sys::CU_MEMHOSTREGISTER_PORTABLE) }
            .result()
            .map_err(|error| failure(&format!("pinning {bytes} bytes of host memory"), error))?;
        Ok(HostRegistered { context: context.clone(), raw })
    }
}

impl HostPinned {
    pub(crate) fn new(context: &Arc<CudaContext>, bytes: u64) -> Result<HostPinned> {
        context.bind()?;
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the memory is freed once, in `drop`.
        let raw = unsafe { result::malloc_host(to_usize(bytes.max(1)), flags) };
        let raw = raw.map_err(|error| failure(&format!("{bytes} bytes of pinned host memory"), error))?;
        // SAFETY: the range was just allocated and is at least `bytes` long.
        unsafe { raw.cast::<u8>().write_bytes(0, to_usize(bytes)) };
        Ok(HostPinned { context: context.clone(), raw })
    }

    /// Returns the address for kernels.
    pub(crate) fn device_address(&self) -> Result<u64> {
        let mut address = 0;
        // SAFETY: the memory was allocated with DEVICEMAP; the call writes one address.
        unsafe { sys::cuMemHostGetDevicePointer_v2(&mut address, self.raw, 0) }
            .result()
            .at("cuMemHostGetDevicePointer")?;
        Ok(address)
    }
}

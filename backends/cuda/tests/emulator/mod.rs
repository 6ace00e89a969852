//! A device whose kernels are the CUDA kernels, compiled by g++ over `shim.h` and run on the CPU by the plans
//! that the real queue runs. It computes what a GPU would, launch geometry and index arithmetic included; it
//! says nothing of speed, memory order between blocks, or races that its order of threads hides.

#![allow(unsafe_code)] // the emulator calls compiled kernels

use libloading::Library;
use mixfleet_cuda::kernels::KernelProgram;
use mixfleet_cuda::plan::{
    self, BatchWrites, DeviceRange, KernelArg, KernelLaunch, PlanStep, PlanTarget, PlannedOp,
};
use mixfleet_hal::command::ClockKind;
use mixfleet_hal::memory::{Pinned, SharedMemory};
use mixfleet_hal::units::{Bytes, Seconds};
use mixfleet_hal::{
    Buffer, BufferUsage, Cmd, Device, DeviceInfo, DeviceKind, DeviceLimits, Elapsed, Error, ErrorKind, Graph,
    Health, HostMemory, OpSig, Queue, Result, Slice, Support, Ticket,
};
use std::any::Any;
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

const SHIM: &str = include_str!("shim.h");
/// As `cuMemAlloc` aligns.
const ALIGNMENT: usize = 256;
const SCRATCH_BYTES: u64 = 1 << 20;

/// What a kernel gets, as `shim.h` has it.
#[repr(C)]
struct RawLaunch {
    grid: [u32; 3],
    threads: u32,
    shared_bytes: u32,
    args: *mut *mut c_void,
}

type Emulate = unsafe extern "C" fn(*const RawLaunch) -> *const c_char;
type Copied = unsafe extern "C" fn() -> u64;

/// Host memory that stands for the device's.
#[derive(Debug)]
struct Memory {
    words: Mutex<Box<[Line]>>,
    bytes: u64,
}

#[derive(Clone, Copy, Debug)]
#[repr(C, align(256))]
struct Line([u8; ALIGNMENT]);

impl Memory {
    fn new(bytes: u64) -> Memory {
        let lines = (bytes as usize).div_ceil(ALIGNMENT).max(1);
        Memory { words: Mutex::new(vec![Line([0xFF; ALIGNMENT]); lines].into()), bytes }
    }

    fn address(&self) -> *mut u8 {
        self.words.lock().unwrap_or_else(PoisonError::into_inner).as_mut_ptr().cast()
    }

    fn place(slice: &Slice) -> Result<DeviceRange> {
        let memory = slice.buffer.as_any().downcast_ref::<Memory>();
        let memory = memory.ok_or_else(|| Error::invalid("the slice belongs to another device"))?;
        Ok(DeviceRange { address: memory.address() as u64 + slice.offset, bytes: slice.bytes })
    }
}

impl Buffer for Memory {
    fn size_bytes(&self) -> u64 {
        self.bytes
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// The compiled programs.
struct Programs {
    directory: PathBuf,
    loaded: HashMap<(KernelProgram, &'static str), Library>,
    /// Bytes that threads copied to shared memory behind their back.
    copied_bytes: u64,
}

impl Programs {
    fn library(&mut self, program: &KernelProgram, kernel: &'static str) -> Result<&Library> {
        let key = (*program, kernel);
        if !self.loaded.contains_key(&key) {
            let source = format!("{}\nEMULATE({kernel})\n", program.source(SHIM));
            let path = compile(&self.directory, &source)?;
            // SAFETY: the library was just compiled; it has no initialisers.
            let library =
                unsafe { Library::new(&path) }.map_err(|e| Error::new(ErrorKind::Other, e.to_string()))?;
            self.loaded.insert(key, library);
        }
        Ok(&self.loaded[&key])
    }

    fn run(&mut self, launch: &KernelLaunch) -> Result<()> {
        let library = self.library(&launch.program, launch.kernel)?;
        let mut values: Vec<[u8; 8]> = launch
            .args
            .iter()
            .map(|arg| match arg {
                KernelArg::Address(v) | KernelArg::U64(v) => v.to_ne_bytes(),
                KernelArg::U32(v) => u64::from(*v).to_ne_bytes(),
                KernelArg::F32(v) => u64::from(v.to_bits()).to_ne_bytes(),
                KernelArg::Settled(_) => panic!("{}: an argument that is not settled", launch.kernel),
            })
            .collect();
        let mut args: Vec<*mut c_void> = values.iter_mut().map(|value| value.as_mut_ptr().cast()).collect();
        let raw = RawLaunch {
            grid: launch.grid,
            threads: launch.threads,
            shared_bytes: launch.shared_bytes,
            args: args.as_mut_ptr(),
        };
        // a library is loaded once for all devices of the process, and has static state
        static ALONE: Mutex<()> = Mutex::new(());
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: `emulate` has this type (shim.h). The arguments are those of the kernel's plan, as on a
        // GPU; the operands they point to are alive, for the command holds them.
        let (error, copied_bytes) = unsafe {
            let failed = |e: libloading::Error| Error::new(ErrorKind::Other, e.to_string());
            let name = |what: &str| format!("{what}_{}", launch.kernel);
            let emulate = library.get::<Emulate>(name("emulate").as_bytes()).map_err(failed)?;
            let copied = library.get::<Copied>(name("copied").as_bytes()).map_err(failed)?;
            let before = copied();
            let error = emulate(&raw);
            let error = (!error.is_null()).then(|| CStr::from_ptr(error).to_string_lossy().into_owned());
            (error, copied() - before)
        };
        self.copied_bytes += copied_bytes;
        match error {
            None => Ok(()),
            Some(error) => Err(Error::new(ErrorKind::Other, format!("{}: {error}", launch.kernel))),
        }
    }
}

/// Compiles `source` to a library, unless an earlier run did. Misaligned vectors and indices outside their
/// arrays trap.
fn compile(directory: &Path, source: &str) -> Result<PathBuf> {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    source.hash(&mut hasher);
    let path = directory.join(format!("{:016x}.so", hasher.finish()));
    if path.exists() {
        return Ok(path);
    }
    let failed = |what: String| Error::new(ErrorKind::Other, what);
    // other processes and threads compile the same
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let part = directory.join(format!("{:016x}.{}.{number}.cpp", hasher.finish(), std::process::id()));
    std::fs::write(&part, source).map_err(|e| failed(format!("{}: {e}", part.display())))?;
    let unfinished = part.with_extension("so");
    let output = Command::new("g++")
        .args(["-std=c++17", "-O1", "-w", "-ffp-contract=off", "-shared", "-fPIC", "-fvisibility=hidden"])
        .args(["-fsanitize=alignment,bounds", "-fsanitize-undefined-trap-on-error", "-o"])
        .args([&unfinished, &part])
        .output()
        .map_err(|e| failed(format!("g++: {e}")))?;
    if !output.status.success() {
        return Err(failed(format!("{}:\n{}", part.display(), String::from_utf8_lossy(&output.stderr))));
    }
    std::fs::rename(&unfinished, &path).map_err(|e| failed(e.to_string()))?;
    let _ = std::fs::remove_file(&part);
    Ok(path)
}

/// The emulated device.
pub(crate) struct EmulatedDevice {
    info: DeviceInfo,
    target: PlanTarget,
    _scratch: Memory,
    programs: Arc<Mutex<Programs>>,
    /// Steps that its queues have planned.
    pub(crate) launched: Arc<AtomicUsize>,
}

impl EmulatedDevice {
    /// A device of `multiprocessors`, which decides between variants of kernels. `None` where there is no
    /// g++, or the shim does not know the processor.
    pub(crate) fn new(multiprocessors: u32) -> Option<EmulatedDevice> {
        EmulatedDevice::of(multiprocessors, false)
    }

    /// The same with Hopper's products of warpgroups.
    pub(crate) fn with_wgmma(multiprocessors: u32) -> Option<EmulatedDevice> {
        EmulatedDevice::of(multiprocessors, true)
    }

    fn of(multiprocessors: u32, wgmma: bool) -> Option<EmulatedDevice> {
        if !cfg!(all(target_arch = "x86_64", target_os = "linux"))
            || Command::new("g++").arg("-v").output().is_err()
        {
            return None;
        }
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulator");
        std::fs::create_dir_all(&directory).expect("the target directory is writable");
        let scratch = Memory::new(SCRATCH_BYTES);
        let target = PlanTarget {
            capability: 90,
            wgmma,
            multiprocessors,
            shared_bytes_max: 232_448,
            blas: false,
            scratch: DeviceRange { address: scratch.address() as u64, bytes: SCRATCH_BYTES },
        };
        let info = DeviceInfo {
            id: "emulated".to_owned(),
            backend: "emulated".to_owned(),
            name: "CUDA kernels on the CPU".to_owned(),
            kind: DeviceKind::Simulated,
            memory: Bytes(1e9),
            compute_units: multiprocessors,
            fingerprint: "emulated".to_owned(),
            notes: Vec::new(),
        };
        let programs = Programs { directory, loaded: HashMap::new(), copied_bytes: 0 };
        let (programs, launched) = (Arc::new(Mutex::new(programs)), Arc::default());
        Some(EmulatedDevice { info, target, _scratch: scratch, programs, launched })
    }
}

impl EmulatedDevice {
    /// Bytes that its kernels copied to shared memory by cp.async so far.
    pub(crate) fn copied_bytes(&self) -> u64 {
        self.programs.lock().unwrap_or_else(PoisonError::into_inner).copied_bytes
    }
}

impl Device for EmulatedDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn limits(&self) -> DeviceLimits {
        DeviceLimits {
            allocation_bytes_max: 1 << 30,
            alignment_bytes: plan::ALIGNMENT_BYTES,
            imports_host_memory: false,
            kv_page_tokens: plan::KV_PAGE_TOKENS,
            replay_pays: true,
            copies_beside: true,
        }
    }

    fn support(&self, sig: &OpSig) -> Support {
        plan::support(sig, &self.target)
    }

    fn alloc(&self, bytes: u64, _: BufferUsage) -> Result<Slice> {
        Ok(Slice::whole(Arc::new(Memory::new(bytes))))
    }

    fn import(&self, _: Arc<dyn HostMemory>) -> Result<Slice> {
        Err(Error::unsupported("no imports"))
    }

    fn reaches(&self, _: &Slice) -> bool {
        false
    }

    fn write(&self, to: &Slice, data: &[u8]) -> Result<()> {
        let place = Memory::place(to)?;
        // SAFETY: the slice lies inside its buffer, which is alive and not being read.
        unsafe {
            std::ptr::copy_nonoverlapping(data.as_ptr(), place.address as *mut u8, place.bytes as usize)
        };
        Ok(())
    }

    fn read(&self, from: &Slice, data: &mut [u8]) -> Result<()> {
        let place = Memory::place(from)?;
        // SAFETY: as in `write`.
        unsafe {
            std::ptr::copy_nonoverlapping(place.address as *const u8, data.as_mut_ptr(), place.bytes as usize)
        };
        Ok(())
    }

    fn pin(&self, _: Arc<dyn SharedMemory>) -> Result<Option<Pinned>> {
        Ok(None)
    }

    fn queue(&self) -> Result<Box<dyn Queue>> {
        let (programs, launched) = (self.programs.clone(), self.launched.clone());
        Ok(Box::new(EmulatedQueue { target: self.target, programs, launched, done: 0 }))
    }

    fn memory_free(&self) -> Option<Bytes> {
        None
    }

    fn health(&self) -> Health {
        Health::default()
    }
}

struct EmulatedQueue {
    target: PlanTarget,
    programs: Arc<Mutex<Programs>>,
    launched: Arc<AtomicUsize>,
    done: u64,
}

/// Steps with the commands that keep their operands alive.
struct Recorded(Vec<PlanStep>, #[allow(dead_code, reason = "keeps buffers alive")] Vec<Cmd>);

impl Graph for Recorded {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn memory_bytes(&self) -> u64 {
        0
    }
}

impl EmulatedQueue {
    fn plan(&self, cmds: &[Cmd]) -> Result<Recorded> {
        let place =
            |cmd: &Cmd| Ok((*cmd.sig(), cmd.args().iter().map(Memory::place).collect::<Result<_>>()?));
        let ops = cmds.iter().map(place).collect::<Result<Vec<PlannedOp>>>()?;
        let (mut steps, mut rest, mut written) = (Vec::new(), &ops[..], BatchWrites::default());
        while let Some((sig, places)) = rest.first() {
            let (count, mut more) = match plan::fused(rest, &self.target)? {
                Some(fused) => fused,
                None => (1, plan::plan(sig, places, &self.target)?),
            };
            written.settle(&mut more);
            steps.extend(more);
            written.add(&rest[..count]);
            rest = &rest[count..];
        }
        self.launched.fetch_add(steps.len(), Ordering::Relaxed);
        Ok(Recorded(steps, cmds.to_vec()))
    }

    fn run(&mut self, steps: &[PlanStep]) -> Result<Ticket> {
        let mut programs = self.programs.lock().unwrap_or_else(PoisonError::into_inner);
        for step in steps {
            match *step {
                PlanStep::Launch(ref launch) => programs.run(launch)?,
                // SAFETY: both ranges are operands that `Cmd` checked, and do not overlap.
                PlanStep::Copy(from, to, bytes) => unsafe {
                    std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes as usize);
                },
                // SAFETY: the range is an operand that `Cmd` checked.
                PlanStep::Fill(to, words, word) => unsafe {
                    std::slice::from_raw_parts_mut(to as *mut u32, words as usize).fill(word);
                },
                PlanStep::Matmul(_) => return Err(Error::unsupported("cuBLASLt is not emulated")),
            }
        }
        self.done += 1;
        Ok(Ticket(self.done - 1))
    }
}

impl Queue for EmulatedQueue {
    fn submit(&mut self, cmds: &[Cmd]) -> Result<Ticket> {
        let recorded = self.plan(cmds)?;
        self.run(&recorded.0)
    }

    fn wait(&mut self, ticket: Ticket, _: Duration) -> Result<Elapsed> {
        if ticket.0 >= self.done {
            return Err(Error::invalid(format!("{ticket:?} was not given out by this queue")));
        }
        Ok(Elapsed { time: Seconds::ZERO, clock: ClockKind::Host })
    }

    fn record(&mut self, cmds: &[Cmd]) -> Result<Arc<dyn Graph>> {
        Ok(Arc::new(self.plan(cmds)?))
    }

    fn replay(&mut self, graph: &Arc<dyn Graph>) -> Result<Ticket> {
        let recorded = graph.as_any().downcast_ref::<Recorded>();
        let recorded = recorded.ok_or_else(|| Error::invalid("the graph belongs to another device"))?;
        self.run(&recorded.0)
    }
}

//! An in-order queue on a stream: launches, matrix products, copies, and CUDA graphs.

use crate::device::CudaDeviceState;
use crate::driver::{At, CudaContext, CudaEvent, DeviceMemory, Function, GraphExec, Stream};
use crate::libraries::guarded;
use crate::memory::CudaMemory;
use crate::plan::WORKSPACE_BYTES;
use crate::plan::{self, BatchWrites, DeviceRange, KernelArg, KernelLaunch, Matmul, PlanStep, PlanTarget};
use cudarc::driver::{result, sys};
use mixfleet_hal::cast::to_usize;
use mixfleet_hal::command::ClockKind;
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{
    Cmd, Elapsed, Error, ErrorKind, Graph, KvShape, OpSig, Queue, QueuePoint, Result, Slice, Ticket,
};
use std::any::Any;
use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// Number of batches whose times are kept for a late `wait`.
const BATCHES_KEPT: usize = 4096;
/// Scratch for cuBLASLt's workspace or partial results of decode attention, which a stream never needs both
/// at once.
const SCRATCH_BYTES: u64 = 2 * WORKSPACE_BYTES;
/// How long a wait polls before it sleeps, and for how long: a decode step takes milliseconds, and waking a
/// thread about 50 us.
const AWAKE: Duration = Duration::from_millis(20);
const NAP: Duration = Duration::from_micros(50);

/// A step with its driver objects.
#[expect(clippy::large_enum_variant, reason = "almost every step is a launch")]
enum CudaStep {
    Kernel {
        function: Arc<Function>,
        launch: KernelLaunch,
    },
    Matmul(Matmul),
    Copy(u64, u64, u64),
    /// From here to memory of another device: source, destination, bytes.
    PeerCopy(u64, (Arc<CudaContext>, u64), u64),
    Fill(u64, u64, u32),
}

/// A resolved batch, with a graph if the driver could capture it.
struct CudaRecording {
    works: Vec<CudaStep>,
    buffers: Vec<Slice>,
    graph: Option<GraphExec>,
    /// Memory of the device that the graph takes.
    graph_bytes: u64,
    /// The queue whose scratch and stream it uses.
    queue: u64,
}

impl Graph for CudaRecording {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn memory_bytes(&self) -> u64 {
        self.graph_bytes
    }
}

/// The end of a queue's batches; none if it is behind them already.
struct BatchesEnd(Option<Arc<CudaEvent>>);

impl QueuePoint for BatchesEnd {
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// A submitted batch.
enum CudaBatch {
    /// In flight: the events around it (none if it had nothing to do), and the graph that it runs.
    Running(
        Option<(Arc<CudaEvent>, Arc<CudaEvent>)>,
        #[allow(dead_code, reason = "keeps it alive")] Option<Arc<dyn Graph>>,
    ),
    Done(Elapsed),
}

/// A queue of one device.
pub(crate) struct CudaQueue {
    shared: Arc<CudaDeviceState>,
    /// Number of this queue, unique over all devices: queues of different devices may use one memory.
    number: u64,
    stream: Stream,
    /// Memory for intermediate results, from the first operation on that needs it.
    scratch: Option<DeviceMemory>,
    target: PlanTarget,
    batches: VecDeque<CudaBatch>,
    /// Ticket of the first batch in `batches`.
    first: u64,
    /// The first failure, as the ticket and its error.
    failed: Option<(u64, Error)>,
}

impl CudaQueue {
    pub(crate) fn new(shared: Arc<CudaDeviceState>) -> Result<CudaQueue> {
        static QUEUES: AtomicU64 = AtomicU64::new(0);
        let number = QUEUES.fetch_add(1, Ordering::Relaxed);
        let stream = Stream::new(&shared.context)?;
        let target = shared.target;
        Ok(CudaQueue {
            shared,
            number,
            stream,
            scratch: None,
            target,
            batches: VecDeque::new(),
            first: 0,
            failed: None,
        })
    }

    /// Plans a batch, compiles its kernels and chooses its products' algorithms; nothing is launched if any
    /// of this fails.
    fn resolve(&mut self, cmds: &[Cmd]) -> Result<CudaRecording> {
        // a queue that only moves bytes and KV has none
        let needs_scratch = |cmd: &Cmd| {
            !matches!(
                cmd.sig(),
                OpSig::Copy { .. } | OpSig::Fill { .. } | OpSig::KvGather { .. } | OpSig::KvScatter { .. }
            )
        };
        if self.scratch.is_none() && cmds.iter().any(needs_scratch) {
            let scratch = DeviceMemory::new(&self.shared.context, SCRATCH_BYTES)?;
            self.target.scratch = DeviceRange { address: scratch.raw, bytes: SCRATCH_BYTES };
            self.scratch = Some(scratch);
        }
        let mut buffers: Vec<Slice> = Vec::new();
        let mut ops = Vec::with_capacity(cmds.len());
        let mut peers = Vec::with_capacity(cmds.len());
        for cmd in cmds {
            let mut places = Vec::with_capacity(cmd.args().len());
            let mut peer = None;
            for (number, slice) in cmd.args().iter().enumerate() {
                let memory = CudaMemory::of(slice)?;
                if !memory.is_in(&self.shared.context) {
                    let is_target = matches!(cmd.sig(), OpSig::Copy { .. }) && number == 1;
                    if !is_target || !self.shared.has_peer(memory.context()) {
                        return Err(Error::invalid("cuda: the slice belongs to another device"));
                    }
                    peer = Some(memory.context());
                }
                places.push(CudaMemory::place(slice)?);
            }
            ops.push((*cmd.sig(), places));
            peers.push(peer);
            buffers.extend(cmd.args().iter().cloned());
        }
        let mut works = Vec::with_capacity(cmds.len());
        let (mut at, mut written) = (0, BatchWrites::default());
        while let Some((sig, places)) = ops.get(at) {
            if let Some((count, mut steps)) = plan::fused(&ops[at..], &self.target)? {
                written.settle(&mut steps);
                for step in steps {
                    works.push(self.work(step)?);
                }
                written.add(&ops[at..at + count]);
                at += count;
                continue;
            }
            let mut steps = self.steps(sig, places)?;
            written.settle(&mut steps);
            for step in steps {
                works.push(match (step, peers[at]) {
                    // a device that was opened twice has one context
                    (PlanStep::Copy(from, to, bytes), Some(peer)) if !peer.is(&self.shared.context) => {
                        CudaStep::PeerCopy(from, (peer.clone(), to), bytes)
                    }
                    (step, _) => self.work(step)?,
                });
            }
            written.add(&ops[at..=at]);
            at += 1;
        }
        buffers.sort_by_key(|slice| Arc::as_ptr(&slice.buffer).cast::<u8>() as usize);
        buffers.dedup_by(|a, b| Arc::ptr_eq(&a.buffer, &b.buffer));
        Ok(CudaRecording { works, buffers, graph: None, graph_bytes: 0, queue: self.number })
    }

    /// Returns the plan, avoiding cuBLASLt where it turns out to have no algorithm.
    fn steps(&self, sig: &OpSig, places: &[DeviceRange]) -> Result<Vec<PlanStep>> {
        let steps = plan::plan(sig, places, &self.target)?;
        let missing = |step: &PlanStep| match (step, &self.shared.blas) {
            (PlanStep::Matmul(product), Some(blas)) => blas.prepare(product).is_err(),
            (PlanStep::Matmul(_), None) => true,
            _ => false,
        };
        let without = steps.iter().any(missing);
        let target = PlanTarget { blas: self.target.blas && !without, ..self.target };
        if let Some(reason) = plan::slow(sig, places, &target) {
            self.tell_slow(sig, reason);
        }
        if without { plan::plan(sig, places, &target) } else { Ok(steps) }
    }

    /// Logs once what of a model is slow, and why.
    fn tell_slow(&self, sig: &OpSig, reason: &str) {
        let what = match *sig {
            OpSig::Gemm { n, k, x, weight, out, .. } => {
                format!("products of {x} rows with [{n}, {k}] {weight} weights to {out}")
            }
            OpSig::AttnPrefill { x, heads, kv: KvShape { head_dim, dtype, .. }, .. } => {
                format!("prefill attention of {heads} {x} heads of {head_dim} over {dtype} KV")
            }
            _ => return,
        };
        let mut told = self.shared.told_slow.lock().unwrap_or_else(PoisonError::into_inner);
        if !told.contains(&what) {
            tracing::warn!("slow: {what}: {reason}");
            told.insert(what);
        }
    }

    fn work(&self, step: PlanStep) -> Result<CudaStep> {
        Ok(match step {
            PlanStep::Launch(launch) => CudaStep::Kernel { function: self.shared.function(&launch)?, launch },
            PlanStep::Matmul(product) => CudaStep::Matmul(product),
            PlanStep::Copy(from, to, bytes) => CudaStep::Copy(from, to, bytes),
            PlanStep::Fill(to, words, word) => CudaStep::Fill(to, words, word),
        })
    }

    /// Enqueues the steps of a batch. The first one begins when all earlier work of the stream is done, also
    /// for launches that begin early.
    fn enqueue_all(&self, works: &[CudaStep]) -> Result<()> {
        works.iter().enumerate().try_for_each(|(number, work)| self.enqueue(work, number > 0))
    }

    /// Enqueues one step on the stream; a kernel while the one before it ends, if `early`.
    fn enqueue(&self, work: &CudaStep, early: bool) -> Result<()> {
        match work {
            CudaStep::Kernel { function, launch } => self.launch(function, launch, early),
            CudaStep::Matmul(product) => match &self.shared.blas {
                Some(blas) => blas.run(product, self.stream.raw, self.target.scratch.address),
                None => Err(Error::new(ErrorKind::Other, "cuda: a product without cuBLASLt")),
            },
            CudaStep::Copy(from, to, bytes) => {
                // SAFETY: both ranges are operands that `Cmd` checked; their buffers outlive the batch.
                unsafe { result::memcpy_dtod_async(*to, *from, to_usize(*bytes), self.stream.raw) }.at("copy")
            }
            CudaStep::PeerCopy(from, (peer, to), bytes) => {
                // SAFETY: as for a copy here; the buffers of both devices know the batch as one that uses
                // them.
                unsafe { self.stream.copy_to_peer(*from, peer, *to, *bytes) }
            }
            CudaStep::Fill(to, words, word) => {
                // SAFETY: the range is an operand that `Cmd` checked; its buffer outlives the batch.
                unsafe { sys::cuMemsetD32Async(*to, *word, to_usize(*words), self.stream.raw) }
                    .result()
                    .at("fill")
            }
        }
    }

    fn launch(&self, function: &Function, launch: &KernelLaunch, early: bool) -> Result<()> {
        let mut values: Vec<u64> = launch
            .args
            .iter()
            .map(|arg| match *arg {
                KernelArg::Address(value) | KernelArg::U64(value) => value,
                KernelArg::U32(value) => value.into(),
                KernelArg::F32(value) => value.to_bits().into(),
                // not known, so that the kernel waits
                KernelArg::Settled(_) => 0,
            })
            .collect();
        // little endian: a 32-bit argument is the first half of its word
        let mut args: Vec<*mut c_void> = values.iter_mut().map(|value| (&raw mut *value).cast()).collect();
        let KernelLaunch { grid: [x, y, z], threads, shared_bytes, .. } = *launch;
        // SAFETY: the arguments match the kernel's signature (the plan and the kernels are written side by
        // side, and a test runs the same plans through the kernels' own types); `Cmd` checked that each
        // operand lies inside its buffer, kernels check every index that they load, and buffers outlive the
        // batch. Kernels begin with START of every operand, which a test checks, but for weights that nothing
        // of the batch writes before.
        unsafe {
            if early && self.shared.early {
                self.stream.launch_early(function, launch.grid, threads, shared_bytes, &mut args)
            } else {
                let threads = (threads, 1, 1);
                result::launch_kernel(
                    function.raw,
                    (x, y, z),
                    threads,
                    shared_bytes,
                    self.stream.raw,
                    &mut args,
                )
            }
        }
        .at(launch.kernel)
    }

    /// Captures the steps as a graph, and returns the memory that it takes; an error if the driver cannot.
    fn capture(&self, works: &[CudaStep]) -> Result<(GraphExec, u64)> {
        let free = || result::mem_get_info().map_or(0, |(free, _)| free as u64);
        let before = free();
        // relaxed, since cuBLASLt and the driver load kernels at their first launch, which stricter modes
        // refuse
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is alive, and this thread captures nothing else.
        unsafe { result::stream::begin_capture(self.stream.raw, mode) }.at("cuStreamBeginCapture")?;
        let launched = self.enqueue_all(works);
        // SAFETY: the capture was begun above; it is ended whatever happened in between.
        let graph = unsafe { result::stream::end_capture(self.stream.raw) }.at("cuStreamEndCapture");
        launched?;
        let graph = graph?;
        if graph.is_null() {
            return Err(Error::new(ErrorKind::Other, "cuda: the capture was invalidated"));
        }
        // SAFETY: the graph is whole; it is destroyed once, after its instantiation.
        let instance = unsafe {
            let flags = sys::CUgraphInstantiate_flags_enum(0);
            let instance = result::graph::instantiate(graph, flags).at("cuGraphInstantiate");
            let _ = result::graph::destroy(graph);
            GraphExec { context: self.shared.context.clone(), raw: instance? }
        };
        // resources are allocated here rather than at the first launch, so that a failure is reported
        // SAFETY: graph and stream are alive.
        unsafe { sys::cuGraphUpload(instance.raw, self.stream.raw) }.result().at("cuGraphUpload")?;
        Ok((instance, before.saturating_sub(free())))
    }

    /// The ticket of the next batch.
    fn next(&self) -> u64 {
        self.first + self.batches.len() as u64
    }

    fn run(&mut self, recorded: &CudaRecording, graph: Option<Arc<dyn Graph>>) -> Result<Ticket> {
        if let Some((_, error)) = &self.failed {
            return Err(error.clone());
        }
        let ticket = self.next();
        let ends = match self.start(recorded) {
            Ok(ends) => ends,
            Err(error) => {
                // earlier steps of the batch may run, so the queue's state is unknown
                self.failed = Some((ticket, error.clone()));
                return self.shared.note(Err(error));
            }
        };
        if let Some((_, end)) = &ends {
            for slice in &recorded.buffers {
                CudaMemory::of(slice)?.used_by(self.number, end);
            }
        }
        self.batches.push_back(CudaBatch::Running(ends, graph));
        self.forget();
        Ok(Ticket(ticket))
    }

    /// Enqueues a batch on the stream, between two events.
    fn start(&self, recorded: &CudaRecording) -> Result<Option<(Arc<CudaEvent>, Arc<CudaEvent>)>> {
        if recorded.works.is_empty() {
            return Ok(None);
        }
        let start = self.shared.events.record(&self.stream)?;
        if let Some(graph) = &recorded.graph {
            // SAFETY: the graph is alive and kept by the batch until it is done; what it refers to is kept by
            // `recorded`.
            let launched = unsafe { result::graph::launch(graph.raw, self.stream.raw) };
            launched.at("cuGraphLaunch")?;
        } else {
            self.enqueue_all(&recorded.works)?;
        }
        Ok(Some((Arc::new(start), Arc::new(self.shared.events.record(&self.stream)?))))
    }

    /// Forgets old batches that succeeded, waited for or not.
    fn forget(&mut self) {
        while self.batches.len() > BATCHES_KEPT {
            let ended = match &self.batches[0] {
                CudaBatch::Done(_) | CudaBatch::Running(None, _) => true,
                CudaBatch::Running(Some((_, end)), _) => end.is_done().unwrap_or(false),
            };
            if !ended {
                break;
            }
            self.batches.pop_front();
            self.first += 1;
        }
    }

    /// Waits for the end of `ticket`'s batch, or of the work before it.
    fn finish(&mut self, ticket: Ticket, end: &CudaEvent, timeout: Duration) -> Result<()> {
        let start = Instant::now();
        loop {
            match self.shared.note(end.is_done()) {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(error) => {
                    self.failed.get_or_insert((ticket.0, error.clone()));
                    return Err(error);
                }
            }
            let waited = start.elapsed();
            if waited >= timeout {
                let message = format!("cuda: {ticket:?} is not done after {timeout:?}");
                return Err(Error::new(ErrorKind::Timeout, message));
            }
            if waited < AWAKE {
                std::thread::yield_now();
            } else {
                std::thread::sleep(NAP);
            }
        }
    }
}

impl Queue for CudaQueue {
    fn submit(&mut self, cmds: &[Cmd]) -> Result<Ticket> {
        self.shared.enter()?;
        let recorded = self.resolve(cmds)?;
        self.run(&recorded, None)
    }

    fn end(&mut self) -> Result<Arc<dyn QueuePoint>> {
        if let Some((_, error)) = &self.failed {
            return Err(error.clone());
        }
        // an empty batch ends with the ones before it
        let last = self.batches.iter().rfind(|batch| !matches!(batch, CudaBatch::Running(None, _)));
        let end = match last {
            Some(CudaBatch::Running(Some((_, end)), _)) => Some(end.clone()),
            _ => None,
        };
        Ok(Arc::new(BatchesEnd(end)))
    }

    fn follow(&mut self, point: &dyn QueuePoint) -> Result<()> {
        self.shared.enter()?;
        let point = point.as_any().downcast_ref::<BatchesEnd>();
        let point = point.ok_or_else(|| Error::unsupported("cuda: a point of another backend"))?;
        let Some(event) = &point.0 else { return Ok(()) };
        let followed = self.shared.note(self.stream.follow(event));
        if let Err(error) = &followed {
            // later submissions would not wait
            self.failed.get_or_insert((self.next(), error.clone()));
        }
        followed
    }

    fn wait(&mut self, ticket: Ticket, timeout: Duration) -> Result<Elapsed> {
        if let Some((from, error)) = &self.failed
            && ticket.0 >= *from
        {
            return Err(error.clone());
        }
        self.shared.enter()?;
        let index = ticket.0.checked_sub(self.first).map(|i| to_usize(i));
        let Some(batch) = index.and_then(|i| self.batches.get(i)) else {
            let message = format!("cuda: {ticket:?} is not one of this queue's last {BATCHES_KEPT}");
            return Err(Error::invalid(message));
        };
        let (start, end) = match batch {
            CudaBatch::Done(elapsed) => return Ok(*elapsed),
            CudaBatch::Running(None, _) => {
                // an empty batch ends with the ones before it
                let before = (0..index.unwrap_or(0)).rev().find_map(|i| match &self.batches[i] {
                    CudaBatch::Running(Some((_, end)), _) => Some(end.clone()),
                    _ => None,
                });
                if let Some(end) = before {
                    self.finish(ticket, &end, timeout)?;
                }
                return Ok(Elapsed { time: Seconds::ZERO, clock: ClockKind::Host });
            }
            CudaBatch::Running(Some((start, end)), _) => (start.clone(), end.clone()),
        };
        let began = Instant::now();
        self.finish(ticket, &end, timeout)?;
        let elapsed = match end.since(&start) {
            Some(seconds) => Elapsed { time: Seconds(seconds), clock: ClockKind::Device },
            None => Elapsed { time: Seconds(began.elapsed().as_secs_f64()), clock: ClockKind::Host },
        };
        if let Some(batch) = index.and_then(|i| self.batches.get_mut(i)) {
            *batch = CudaBatch::Done(elapsed);
        }
        Ok(elapsed)
    }

    fn record(&mut self, cmds: &[Cmd]) -> Result<Arc<dyn Graph>> {
        self.shared.enter()?;
        let mut recorded = self.resolve(cmds)?;
        if recorded.works.len() > 1 {
            match guarded("capturing a batch", || self.capture(&recorded.works)) {
                Ok((graph, bytes)) => (recorded.graph, recorded.graph_bytes) = (Some(graph), bytes),
                // the resolved steps work as well, launch by launch
                Err(error) => tracing::warn!(%error, "a batch is replayed without a CUDA graph"),
            }
        }
        Ok(Arc::new(recorded))
    }

    fn replay(&mut self, graph: &Arc<dyn Graph>) -> Result<Ticket> {
        self.shared.enter()?;
        let recorded = graph.as_any().downcast_ref::<CudaRecording>();
        let recorded = recorded.filter(|recorded| recorded.queue == self.number);
        let recorded = recorded.ok_or_else(|| Error::invalid("cuda: the graph belongs to another queue"))?;
        self.run(recorded, Some(graph.clone()))
    }
}

impl Drop for CudaQueue {
    /// Waits for everything that uses the queue's scratch and graphs.
    fn drop(&mut self) {
        if self.shared.context.bind().is_ok() {
            let _ = self.stream.synchronize();
        }
    }
}

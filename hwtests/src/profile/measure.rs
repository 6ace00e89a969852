//! Measures one point: from a [`WorkItem`] to its samples.

use super::Problem;
use super::check::{Checks, spot};
use super::document::{DeviceReadings, Flag, LongRun, PointResult, PointStatus, Timer};
use super::ground::{Ground, noise};
use super::sampler::{NOISE_MAX, PointSamples, SampleBudget, TimeSource, sample};
use super::stats::{SampleStats, quantile};
use super::work::{LaunchCase, SustainedLoad, WorkItem, gemm};
use mixfleet_hal::cast::{to_u32, to_usize};
use mixfleet_hal::command::ClockKind;
use mixfleet_hal::profile::Traffic;
use mixfleet_hal::{BufferUsage, Cmd, DType, Device, OpSig, Queue, Scalar, Slice, Support};
use std::time::Duration;

/// Minimum duration of a sample, so that clock resolution and the batch's own cost do not show.
const SAMPLE_SECONDS: f64 = 2e-3;
/// Maximum number of runs per sample.
const RUNS_MAX: f64 = 256.0;
/// Minimum share of the measured time that remains after subtracting launch costs.
const OWN_SHARE_MIN: f64 = 0.1;
/// Timeout for one batch; some devices compile kernels on first use.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(120);
/// Value written where only the writing matters: 0.0115 in bf16 and f32.
const WORD: u32 = 0x3C3C_3C3C;
/// Number of samples that a long run aims for.
const LONG_SAMPLES: f64 = 100.0;
/// Minimum number of samples of a long run, in up to twice the time.
const LONG_SAMPLES_MIN: usize = 10;
/// Rows, hidden and inner size of the chain of dependent commands; a cache may hold its weights, so that
/// memory does not hide the cost of dependence.
const CHAIN: (u32, u32, u32) = (8, 256, 512);
/// Memory of the operands of the chain: three matrices of weights, and rows, in any dtype.
const CHAIN_BYTES: u64 = 4 * (4 * 256 * 512);
/// Runs shorter than this yield no energy, since sensors average over a good part of a second.
const ENERGY_SECONDS_MIN: f64 = 10.0;

/// The launch costs to subtract from other points.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct LaunchCost {
    /// Elapsed time of a batch beyond its commands.
    pub(crate) batch_s: f64,
    /// Elapsed time of a command that does next to nothing.
    pub(crate) command_s: f64,
}

/// A device being measured.
pub(crate) struct ProfileBench<'a> {
    pub(crate) device: &'a dyn Device,
    pub(crate) queue: Box<dyn Queue>,
    pub(crate) ground: Ground<'a>,
    pub(crate) checks: Checks,
    pub(crate) clock: &'a dyn TimeSource,
    pub(crate) launch: LaunchCost,
}

/// A measured time before it becomes a point.
pub(crate) struct MeasuredTime {
    samples: PointSamples,
    timer: Timer,
    runs: u32,
    flags: Vec<Flag>,
    long_run: Option<LongRun>,
}

impl MeasuredTime {
    fn new(samples: PointSamples, timer: Timer, runs: u32) -> Self {
        MeasuredTime { samples, timer, runs, flags: Vec::new(), long_run: None }
    }

    /// Returns the median seconds of one run.
    pub(crate) fn median(&self) -> f64 {
        self.samples.stats.median
    }
}

impl ProfileBench<'_> {
    /// Measures `work`; a long run lasts `long_seconds`.
    pub(crate) fn point(
        &mut self,
        work: &WorkItem,
        effort: SampleBudget,
        long_seconds: f64,
    ) -> Result<PointResult, Problem> {
        let mut point = empty(work);
        let measured = match work {
            WorkItem::Op(sig) => self.op(sig, effort)?,
            WorkItem::Memory(traffic, bytes) => self.memory(*traffic, *bytes, effort)?,
            WorkItem::HostToDevice(bytes) => self.transfer(*bytes, effort, true)?,
            WorkItem::DeviceToHost(bytes) => self.transfer(*bytes, effort, false)?,
            WorkItem::DeviceToDevice(bytes) => self.op(&OpSig::Copy { bytes: *bytes }, effort)?,
            WorkItem::Launch(launch) => self.launch(*launch, effort)?.0,
            WorkItem::Sustained(load) => {
                let (measured, sig) = self.sustained(*load, long_seconds)?;
                (point.flops, point.bytes) = (sig.flops(), sig.bytes());
                measured
            }
        };
        point.status = PointStatus::Ok;
        point.ramp = measured.samples.ramp;
        point.runs_per_sample = measured.runs;
        point.timer = Some(measured.timer);
        point.flags = measured.samples.flags;
        point.flags.extend(measured.flags);
        point.seconds = Some(measured.samples.stats);
        point.long_run = measured.long_run;
        Ok(point)
    }

    fn elapsed(&mut self, cmds: &[Cmd]) -> Result<(f64, Timer), Problem> {
        let ticket = self.queue.submit(cmds)?;
        let elapsed = self.queue.wait(ticket, TIMEOUT)?;
        let timer = if elapsed.clock == ClockKind::Device { Timer::Device } else { Timer::Host };
        Ok((elapsed.time.0, timer))
    }

    fn supported(&mut self, sig: &OpSig) -> Result<Vec<Flag>, Problem> {
        match self.device.support(sig) {
            Support::No => {
                Err(Problem::Unsupported(format!("the device has no {}", super::check::class(sig))))
            }
            Support::Native => Ok(Vec::new()),
            Support::Emulated => Ok(vec![Flag::Emulated]),
        }
    }

    fn op(&mut self, sig: &OpSig, effort: SampleBudget) -> Result<MeasuredTime, Problem> {
        let flags = self.supported(sig)?;
        self.checks.require(self.device, sig, TIMEOUT).map_err(Problem::Failed)?;
        let commands = self.ground.commands(sig)?;
        let (samples, timer, runs) = self.repeat(&commands, effort)?;
        spot(self.device, &commands[0])
            .map_err(|e| Problem::Failed(format!("the timed result is wrong: {e}")))?;
        Ok(MeasuredTime { flags, ..MeasuredTime::new(samples, timer, runs) })
    }

    /// Times `commands` in turn and returns the seconds of one command, excluding launch costs. The first
    /// command runs last.
    pub(crate) fn repeat(
        &mut self,
        commands: &[Cmd],
        effort: SampleBudget,
    ) -> Result<(PointSamples, Timer, u32), Problem> {
        self.repeat_least(commands, effort, OWN_SHARE_MIN)
    }

    /// The same with at least this share of the measured time left.
    fn repeat_least(
        &mut self,
        commands: &[Cmd],
        effort: SampleBudget,
        own_share_min: f64,
    ) -> Result<(PointSamples, Timer, u32), Problem> {
        // the first run may compile, allocate, or wake the device
        self.elapsed(&commands[..1])?;
        let (mut once, mut timer) = (f64::INFINITY, Timer::Host);
        for cmd in commands.iter().rev().take(3) {
            let (seconds, by) = self.elapsed(std::slice::from_ref(cmd))?;
            (once, timer) = (once.min(seconds), by);
        }
        let runs = to_usize((SAMPLE_SECONDS / once.max(1e-9)).ceil().clamp(1.0, RUNS_MAX));
        let batches: Vec<Vec<Cmd>> = (0..commands.len().div_ceil(runs))
            .map(|batch| commands.iter().cycle().skip(batch * runs).take(runs).cloned().collect())
            .collect();
        let (launch, clock) = (self.launch, self.clock);
        let mut at = 0;
        let samples = sample(clock, effort, || {
            let (seconds, _) = self.elapsed(&batches[at % batches.len()])?;
            at += 1;
            let each = seconds / runs as f64;
            let own = (seconds - launch.batch_s) / runs as f64 - launch.command_s;
            Ok::<f64, Problem>(own.max(own_share_min * each))
        })?;
        self.elapsed(&commands[..1])?;
        let samples = samples.ok_or_else(|| Problem::Failed("the device tells no finite time".to_owned()))?;
        Ok((samples, timer, to_u32(runs)))
    }

    /// Returns the single-row product that reads `bytes` of weights, in the first supported dtype. It
    /// represents a plain read, since decoding consists of it and every backend optimises it.
    fn read_sig(&self, bytes: u64) -> Option<OpSig> {
        let k: u32 = if bytes >= 4 << 20 { 4096 } else { 1024 };
        [DType::Bf16, DType::F16, DType::F32].into_iter().find_map(|dtype| {
            let n = bytes / (u64::from(k) * dtype.size_bytes());
            let sig = gemm(dtype, 1, u32::try_from(n).ok().filter(|n| *n > 0)?, k, false, false);
            (self.device.support(&sig) != Support::No).then_some(sig)
        })
    }

    /// Measures the bandwidth over one working set that is accessed repeatedly.
    fn memory(
        &mut self,
        traffic: Traffic,
        bytes: u64,
        effort: SampleBudget,
    ) -> Result<MeasuredTime, Problem> {
        let region = self.ground.region(bytes)?;
        let (sig, args) = match traffic {
            Traffic::Read => {
                let none =
                    || Problem::Unsupported("the device has no product of one row to read with".to_owned());
                let sig = self.read_sig(bytes).ok_or_else(none)?;
                let warm = self.ground.commands(&sig)?.remove(0);
                (sig, vec![warm.args()[0].clone(), region.clone(), warm.args()[2].clone()])
            }
            Traffic::Write => (OpSig::Fill { bytes, word: WORD }, vec![region.clone()]),
            Traffic::Copy => {
                let half = bytes / 2;
                (OpSig::Copy { bytes: half }, vec![region.range(0, half), region.range(half, half)])
            }
        };
        let flags = self.supported(&sig)?;
        self.checks.require(self.device, &sig, TIMEOUT).map_err(Problem::Failed)?;
        let command = Cmd::new(sig, &args)?;
        let (samples, timer, runs) = self.repeat(std::slice::from_ref(&command), effort)?;
        if traffic == Traffic::Write {
            self.ground.fill(&region)?;
        }
        Ok(MeasuredTime { flags, ..MeasuredTime::new(samples, timer, runs) })
    }

    /// Measures `Device::write` or `Device::read` on the host's clock.
    fn transfer(
        &mut self,
        bytes: u64,
        effort: SampleBudget,
        to_device: bool,
    ) -> Result<MeasuredTime, Problem> {
        self.ground.region(bytes)?;
        let slice = self.device.alloc(bytes, BufferUsage::Kv)?;
        let mut host = noise(to_usize(bytes));
        self.device.write(&slice, &host)?;
        let (device, clock) = (self.device, self.clock);
        let mut once = |runs: usize| {
            let start = clock.seconds();
            for _ in 0..runs {
                if to_device { device.write(&slice, &host)? } else { device.read(&slice, &mut host)? }
            }
            Ok::<f64, Problem>((clock.seconds() - start) / runs as f64)
        };
        let first = once(1)?;
        let runs = to_usize((SAMPLE_SECONDS / 10.0 / first.max(1e-9)).ceil().clamp(1.0, RUNS_MAX));
        let samples = sample(clock, effort, || once(runs))?;
        let samples = samples.ok_or_else(|| Problem::Failed("the clock stands still".to_owned()))?;
        Ok(MeasuredTime::new(samples, Timer::Host, to_u32(runs)))
    }

    /// Measures the host time from submission to the end of the wait, along with the device's own median time
    /// for the batch.
    pub(crate) fn launch(
        &mut self,
        launch: LaunchCase,
        effort: SampleBudget,
    ) -> Result<(MeasuredTime, f64), Problem> {
        let count = match launch {
            LaunchCase::Empty => 0,
            LaunchCase::Commands(n) | LaunchCase::Replay(n) | LaunchCase::Chain(n) => n as usize,
        };
        let cmds = match launch {
            LaunchCase::Chain(_) => self.chain()?.into_iter().cycle().take(count).collect(),
            _ => {
                let sig = OpSig::Fill { bytes: 4, word: WORD };
                self.supported(&sig)?;
                let slice = self.ground.region(4)?;
                vec![Cmd::new(sig, std::slice::from_ref(&slice))?; count]
            }
        };
        let graph = match launch {
            LaunchCase::Replay(_) => Some(self.queue.record(&cmds)?),
            _ => None,
        };
        let (clock, queue) = (self.clock, &mut self.queue);
        let mut own = Vec::new();
        let samples = sample(clock, effort, || {
            let start = clock.seconds();
            let ticket = match &graph {
                Some(graph) => queue.replay(graph)?,
                None => queue.submit(&cmds)?,
            };
            own.push(queue.wait(ticket, TIMEOUT)?.time.0);
            Ok::<f64, Problem>(clock.seconds() - start)
        })?;
        own.sort_by(f64::total_cmp);
        if let LaunchCase::Chain(_) = launch {
            self.ground.fill(&self.chain_ground()?)?;
        }
        let samples = samples.ok_or_else(|| Problem::Failed("the clock stands still".to_owned()))?;
        Ok((MeasuredTime::new(samples, Timer::Host, 1), quantile(&own, 0.5)))
    }

    /// Returns the second half of a layer (norm, gate, up, activation, accumulating product), whose commands
    /// need those before them.
    fn chain(&mut self) -> Result<Vec<Cmd>, Problem> {
        let ground = self.chain_ground()?;
        let (rows, hidden, inner) = CHAIN;
        let elements = u64::from(rows) * u64::from(inner);
        let sigs = |x: DType| {
            let norm =
                OpSig::RmsNorm { rows, cols: hidden, eps: Scalar(1e-6), x: DType::F32, weight: x, out: x };
            let widen = gemm(x, rows, inner, hidden, false, false);
            let narrow = gemm(x, rows, hidden, inner, true, false);
            [norm, widen, OpSig::SiluMul { elements, x }, narrow]
        };
        let has = |x: &DType| sigs(*x).iter().all(|sig| self.device.support(sig) != Support::No);
        let Some(x) = [DType::Bf16, DType::F16, DType::F32].into_iter().find(has) else {
            return Err(Problem::Unsupported("no dtype of this chain".to_owned()));
        };
        for sig in &sigs(x) {
            self.checks.require(self.device, sig, TIMEOUT).map_err(Problem::Failed)?;
        }
        let mut at = 0;
        let mut take = |elements: u64, dtype: DType| {
            let bytes = elements * dtype.size_bytes();
            at += bytes.next_multiple_of(256);
            ground.range(at - bytes.next_multiple_of(256), bytes)
        };
        let (r, h, i) = (u64::from(rows), u64::from(hidden), u64::from(inner));
        let (residual, normed) = (take(r * h, DType::F32), take(r * h, x));
        let (gate, up, product) = (take(r * i, x), take(r * i, x), take(r * i, x));
        let (scale, w_gate, w_up, w_out) = (take(h, x), take(h * i, x), take(h * i, x), take(h * i, x));
        let [norm, widen, silu, narrow] = sigs(x);
        Ok(vec![
            Cmd::new(norm, &[residual.clone(), scale, normed.clone()])?,
            Cmd::new(widen, &[normed.clone(), w_gate, gate.clone()])?,
            Cmd::new(widen, &[normed, w_up, up.clone()])?,
            Cmd::new(silu, &[gate, up, product.clone()])?,
            Cmd::new(narrow, &[product, w_out, residual])?,
        ])
    }

    /// Returns the memory that [`ProfileBench::chain`] writes to, which otherwise holds random numbers.
    fn chain_ground(&self) -> Result<Slice, Problem> {
        self.ground.region(CHAIN_BYTES)
    }

    /// Measures what a command of a layer costs beyond the same one alone. That is waiting for the one before
    /// it and fetching what that wrote; less than nothing where the device joins several or begins one before
    /// the last is done, down to all that a command's launch costs. On the device's clock.
    pub(crate) fn dependence(&mut self, effort: SampleBudget) -> Result<f64, Problem> {
        let cmds = self.chain()?;
        // where commands are joined, a launch for each may be more than they take
        let together = self.repeat_least(&cmds, effort, f64::NEG_INFINITY)?.0.stats.median;
        let mut alone = 0.0;
        for cmd in &cmds {
            alone += self.repeat(std::slice::from_ref(cmd), effort)?.0.stats.median / cmds.len() as f64;
        }
        self.ground.fill(&self.chain_ground()?)?;
        Ok((together - alone).max(-self.launch.command_s))
    }

    /// Runs one load for long.
    fn sustained(&mut self, load: SustainedLoad, seconds: f64) -> Result<(MeasuredTime, OpSig), Problem> {
        let mut why = Problem::Unsupported("no dtype of this load".to_owned());
        for sig in loads(load) {
            let commands = match self.supported(&sig).and_then(|_| self.ground.commands(&sig)) {
                Ok(commands) => commands,
                Err(problem) => {
                    why = problem;
                    continue;
                }
            };
            self.checks.require(self.device, &sig, TIMEOUT).map_err(Problem::Failed)?;
            return Ok((self.long_run(&commands, seconds)?, sig));
        }
        Err(why)
    }

    fn long_run(&mut self, commands: &[Cmd], seconds: f64) -> Result<MeasuredTime, Problem> {
        self.elapsed(&commands[..1])?;
        let (once, timer) = self.elapsed(&commands[..1])?;
        let runs = to_usize((seconds / LONG_SAMPLES / once.max(1e-9)).clamp(1.0, 4.0 * RUNS_MAX));
        let batch: Vec<Cmd> = commands.iter().cycle().take(runs).cloned().collect();
        let state = |device: &dyn Device| DeviceReadings::from(device.health());
        let (start, first) = (self.clock.seconds(), state(self.device));
        let (mut each, mut states) = (Vec::new(), vec![first]);
        let more = |spent: f64, samples: usize| {
            spent < seconds || samples < 3 || samples < LONG_SAMPLES_MIN && spent < 2.0 * seconds
        };
        while more(self.clock.seconds() - start, each.len()) {
            each.push(self.elapsed(&batch)?.0 / runs as f64);
            // about one reading per twentieth of the run
            if (self.clock.seconds() - start) * 20.0 > seconds * states.len() as f64 {
                states.push(state(self.device));
            }
        }
        let lasted = self.clock.seconds() - start;
        let energy = self.device.health().energy_j.zip(first.energy_j).map(|(end, start)| end - start);
        let median = |part: &[f64]| {
            let mut part = part.to_vec();
            part.sort_by(f64::total_cmp);
            quantile(&part, 0.5)
        };
        let n = each.len();
        let (burst_s, sustained_s) = (median(&each[..n.div_ceil(10)]), median(&each[n - n.div_ceil(3)..]));
        let total_runs = (n * runs) as f64;
        let long_run = LongRun {
            seconds: lasted,
            burst_s,
            sustained_s,
            ratio: if sustained_s > 0.0 { burst_s / sustained_s } else { 1.0 },
            joules_per_run: energy.filter(|_| lasted >= ENERGY_SECONDS_MIN).map(|joules| joules / total_runs),
            states,
        };
        let none = || Problem::Failed("the device tells no finite time".to_owned());
        let stats = SampleStats::new(each).ok_or_else(none)?;
        let flags = if stats.cv > NOISE_MAX { vec![Flag::Noisy] } else { Vec::new() };
        let samples = PointSamples { stats, ramp: 0, flags };
        Ok(MeasuredTime { long_run: Some(long_run), ..MeasuredTime::new(samples, timer, to_u32(runs)) })
    }
}

/// Returns the operations that a long run may consist of, best first.
pub(crate) fn loads(load: SustainedLoad) -> Vec<OpSig> {
    match load {
        SustainedLoad::Gemm => loads_of(2048, 4096, 4096, false),
        SustainedLoad::Stream => vec![OpSig::Copy { bytes: 64 << 20 }, OpSig::Copy { bytes: 2 << 20 }],
    }
}

/// Returns a product of (m, n, k) in the dtypes of common models.
pub(crate) fn loads_of(m: u32, n: u32, k: u32, accumulate: bool) -> Vec<OpSig> {
    [DType::Bf16, DType::F16, DType::F32].map(|dtype| gemm(dtype, m, n, k, accumulate, false)).to_vec()
}

/// Returns a point without a number.
pub(crate) fn empty(work: &WorkItem) -> PointResult {
    let (sig, flops, bytes) = match work {
        WorkItem::Op(sig) => (Some(*sig), sig.flops(), sig.bytes()),
        WorkItem::Memory(_, bytes) | WorkItem::HostToDevice(bytes) | WorkItem::DeviceToHost(bytes) => {
            (None, 0.0, *bytes as f64)
        }
        WorkItem::DeviceToDevice(bytes) => (Some(OpSig::Copy { bytes: *bytes }), 0.0, 2.0 * *bytes as f64),
        WorkItem::Launch(_) | WorkItem::Sustained(_) => (None, 0.0, 0.0),
    };
    PointResult {
        id: work.id(),
        group: work.group(),
        status: PointStatus::Skipped,
        reason: None,
        sig,
        flops,
        bytes,
        seconds: None,
        runs_per_sample: 0,
        ramp: 0,
        at_s: 0.0,
        timer: None,
        flags: Vec::new(),
        long_run: None,
    }
}

//! Measures all points of a level within its time budget.

use super::control::Control;
use super::document::{
    Conditions, DeviceIdentity, DeviceReadings, Economics, Fact, Fits, Flag, PointResult, PointStatus,
    ProfileDocument, ProfileSummary, Tool,
};
use super::ground::{Ground, cold_bytes};
use super::measure::{LaunchCost, ProfileBench, empty, loads};
use super::plan::{ProfileLevel, plan};
use super::sampler::{HostClock, SampleBudget, TimeSource};
use super::work::{LaunchCase, PointGroup, SustainedLoad, WorkItem};
use super::{Problem, budget, check::Checks, fit};
use mixfleet_hal::cast::to_u64;
use mixfleet_hal::profile::{DeviceProfile, Point};
use mixfleet_hal::units::{Bytes, BytesPerSecond, FlopPerSecond, GIB, MIB, Seconds};
use mixfleet_hal::{DType, Device, OpSig};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Interval between control readings; neighbours on a shared machine come and go within minutes.
const CONTROL_EVERY_S: f64 = 4.0;

/// What to measure, and how.
#[derive(Clone)]
pub struct ProfileOptions {
    /// The level of detail.
    pub level: ProfileLevel,
    /// Patterns of groups or points, where `*` matches any characters; empty means all of the level.
    pub only: Vec<String>,
    /// Operations of a model, which are measured too.
    pub model: Vec<OpSig>,
    /// Size of the memory over which streamed buffers rotate, larger than the last-level cache.
    pub cold_bytes: u64,
    /// Maximum memory to use; `None` means a share of the device's.
    pub memory_bytes_max: Option<u64>,
    /// Time budget in seconds; `None` means that of the level.
    pub budget_s: Option<f64>,
    /// Number of products and attention steps to measure, the most informative ones; `None` means all.
    pub points_max: Option<usize>,
    /// Set to stop after the current point; completed measurements are kept.
    pub cancelled: Arc<AtomicBool>,
    /// The clock of the host.
    pub clock: Arc<dyn TimeSource>,
    /// Start time for the document.
    pub measured_at: String,
    /// The command line, for the document.
    pub command: String,
    /// What the caller knows about the machine.
    pub facts: Vec<Fact>,
    /// Whether something else uses the machine or the device.
    pub other_load: bool,
    /// The hourly rent and its source.
    pub price: Option<(f64, String)>,
}

impl ProfileOptions {
    /// Selects all of `level`, with the host's clock.
    pub fn new(level: ProfileLevel) -> Self {
        ProfileOptions {
            level,
            only: Vec::new(),
            model: Vec::new(),
            cold_bytes: 512 * MIB,
            memory_bytes_max: None,
            budget_s: None,
            points_max: None,
            cancelled: Arc::default(),
            clock: Arc::new(HostClock::default()),
            measured_at: String::new(),
            command: String::new(),
            facts: Vec::new(),
            other_load: false,
            price: None,
        }
    }

    fn budget_s(&self) -> f64 {
        self.budget_s.unwrap_or(match self.level {
            ProfileLevel::Quick => 50.0,
            ProfileLevel::Default => 270.0,
            ProfileLevel::Full => 1750.0,
        })
    }

    /// Returns the duration of a long run in seconds.
    fn long_s(&self) -> f64 {
        match self.level {
            ProfileLevel::Quick => 2.0,
            ProfileLevel::Default => 15.0,
            ProfileLevel::Full => 120.0,
        }
    }

    /// Returns the sample budget of one point, time permitting.
    fn effort(&self, group: PointGroup) -> SampleBudget {
        let (samples_min, samples_max, seconds) = match self.level {
            ProfileLevel::Quick => (3, 10, 0.15),
            ProfileLevel::Default => (5, 20, 0.5),
            ProfileLevel::Full => (10, 50, 2.0),
        };
        let cheap =
            matches!(group, PointGroup::Launch | PointGroup::Small | PointGroup::Kv | PointGroup::Links);
        SampleBudget { samples_min, samples_max, seconds: if cheap { seconds / 2.0 } else { seconds } }
    }

    /// Returns the predicted duration beyond which a point is skipped.
    fn point_s_max(&self) -> f64 {
        match self.level {
            ProfileLevel::Quick => 2.0,
            ProfileLevel::Default => 6.0,
            ProfileLevel::Full => 60.0,
        }
    }

    fn memory_max(&self, device: &dyn Device) -> u64 {
        let memory = to_u64(device.info().memory.0);
        let (share, most) = match self.level {
            ProfileLevel::Quick => (8, GIB),
            ProfileLevel::Default => (8, 8 * GIB),
            ProfileLevel::Full => (4, 64 * GIB),
        };
        self.memory_bytes_max.unwrap_or((memory / share).min(most)).max(16 * MIB)
    }
}

/// Progress reports for the user.
#[derive(Clone, Copy, Debug)]
pub enum ProfileProgress<'a> {
    /// A point begins.
    Begin {
        /// Number of points before it.
        index: usize,
        /// Total number of points.
        total: usize,
        /// Name of the point.
        id: &'a str,
    },
    /// A point is complete.
    Done(&'a PointResult),
}

/// The dtype of the activations of a product.
fn product_dtype(sig: &OpSig) -> Option<DType> {
    match *sig {
        OpSig::Gemm { x, .. } | OpSig::QuantisedGemm { x, .. } => Some(x),
        _ => None,
    }
}

/// Measures `device`. No device error ends it early except a hang, after which the remaining points are
/// reported as errors. An interruption leaves a document that says so.
pub fn run(
    device: &dyn Device,
    options: &ProfileOptions,
    observe: &mut dyn FnMut(ProfileProgress<'_>),
) -> ProfileDocument {
    let works = plan(options.level, device.limits().kv_page_tokens, &options.model, &options.only);
    let dtype = options.model.iter().find_map(product_dtype).unwrap_or(DType::Bf16);
    let (works, left) = budget::chosen(works, dtype, options.points_max);
    let start = options.clock.seconds();
    let before = DeviceReadings::from(device.health());
    let mut fits = Fits::default();
    let (mut checks, mut controls) = (Vec::new(), Vec::new());
    let (points, complete) = match Runner::new(device, options, &works) {
        Ok(mut runner) => {
            let done = runner.all(&works, observe);
            runner.control();
            fits = runner.fits.clone();
            controls = std::mem::take(&mut runner.controls);
            checks = runner.bench.checks.into_vec();
            done
        }
        Err(problem) => (works.iter().map(|work| failed(work, problem.clone())).collect(), false),
    };
    let reason = "not measured within the budget of points";
    let left = left.iter().map(|work| failed(work, Problem::Skip(reason.to_owned())));
    let points = points.into_iter().chain(left).collect();
    let after = DeviceReadings::from(device.health());
    let mut document = ProfileDocument {
        schema: ProfileDocument::SCHEMA.to_owned(),
        tool: Tool {
            name: "mixfleet".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            command: options.command.clone(),
        },
        measured_at: options.measured_at.clone(),
        level: options.level,
        complete,
        seconds: options.clock.seconds() - start,
        device: DeviceIdentity::of(device),
        conditions: Conditions {
            flags: flags(&before, &after, options.other_load),
            before,
            after,
            facts: options.facts.clone(),
            cold_bytes: options.cold_bytes,
        },
        checks,
        points,
        controls,
        fits,
        summary: ProfileSummary::default(),
        economics: None,
        expected: Vec::new(),
    };
    fit::finish(&mut document);
    if options.points_max.is_some() {
        document.expected = budget::expected(&document);
    }
    let price = options.price.as_ref().filter(|(usd, _)| *usd > 0.0);
    document.economics = price.map(|(usd, source)| Economics::new(&document, *usd, source));
    document
}

/// Measures the named points on `device`, in the plan's order. An invalid name yields a skipped point, so
/// that nothing requested is missing.
pub fn measure(device: &dyn Device, ids: &[&str], options: &ProfileOptions) -> Vec<PointResult> {
    let only: Vec<String> = ids.iter().map(|id| (*id).to_owned()).collect();
    let options = ProfileOptions { only, ..options.clone() };
    let mut points = run(device, &options, &mut |_| {}).points;
    let unknown = ids.iter().filter(|id| WorkItem::parse(id, 1).is_none() && !id.contains('*'));
    let unknown =
        unknown.filter(|id| !PointGroup::ALL.iter().any(|g| g.name() == **id) && **id != "attention");
    points.extend(unknown.map(|id| PointResult {
        id: (*id).to_owned(),
        reason: Some("there is no point of that name".to_owned()),
        ..empty(&WorkItem::Launch(LaunchCase::Empty))
    }));
    points
}

fn flags(before: &DeviceReadings, after: &DeviceReadings, other_load: bool) -> Vec<Flag> {
    let both = before.clock_mhz.zip(after.clock_mhz);
    let throttled = both.is_some_and(|(before, after)| after < 0.9 * before);
    let errors =
        |state: &DeviceReadings| state.errors_corrected.unwrap_or(0) + state.errors_uncorrected.unwrap_or(0);
    let all = [
        (throttled, Flag::Throttled),
        (other_load, Flag::OtherLoad),
        (errors(after) > errors(before), Flag::MemoryErrors),
    ];
    all.into_iter().filter_map(|(set, flag)| set.then_some(flag)).collect()
}

fn failed(work: &WorkItem, problem: Problem) -> PointResult {
    let (status, reason) = match problem {
        Problem::Unsupported(reason) => (PointStatus::Unsupported, reason),
        Problem::Skip(reason) | Problem::Late(reason) => (PointStatus::Skipped, reason),
        Problem::Failed(reason) | Problem::Gone(reason) => (PointStatus::Error, reason),
    };
    PointResult { status, reason: Some(reason), ..empty(work) }
}

/// Returns the latest end of each group. The shares are those measured on a CPU, with extra for prefill,
/// whose points vary most; a long run takes its own time.
fn deadlines(works: &[WorkItem], now: f64, budget: f64, long_s: f64) -> Vec<(PointGroup, f64)> {
    let share = |group: PointGroup| match group {
        PointGroup::Launch => 1.0,
        PointGroup::Links | PointGroup::Kv | PointGroup::Experts => 4.0,
        PointGroup::Memory | PointGroup::Small => 8.0,
        PointGroup::Gemm => 40.0,
        PointGroup::Decode | PointGroup::Prefill => 17.5,
        PointGroup::Sustained => 0.0,
    };
    let present: Vec<PointGroup> =
        PointGroup::ALL.into_iter().filter(|group| works.iter().any(|work| work.group() == *group)).collect();
    let long_runs = works.iter().filter(|work| work.group() == PointGroup::Sustained).count() as f64;
    let short_s = (budget - long_runs * long_s).max(0.1 * budget);
    let total: f64 = present.iter().map(|group| share(*group)).sum::<f64>().max(1e-9);
    let mut sum = 0.0;
    let deadline = |group: PointGroup| {
        sum += share(group);
        // long runs get their time even if the others exceeded theirs
        let at = if group == PointGroup::Sustained {
            budget.max(0.0) + long_runs * long_s
        } else {
            sum / total * short_s
        };
        (group, now + at)
    };
    present.into_iter().map(deadline).collect()
}

/// Returns, for each way to keep the buffers of `work` cold, the size of the largest buffer and of all
/// together.
fn buffers(work: &WorkItem) -> Vec<(u64, u64)> {
    match work {
        WorkItem::Op(sig) => vec![cold_bytes(sig)],
        WorkItem::Memory(_, bytes) | WorkItem::HostToDevice(bytes) | WorkItem::DeviceToHost(bytes) => {
            vec![(*bytes, *bytes)]
        }
        WorkItem::DeviceToDevice(bytes) => vec![(*bytes, 2 * bytes)],
        WorkItem::Sustained(load) => loads(*load).iter().map(cold_bytes).collect(),
        WorkItem::Launch(_) => Vec::new(),
    }
}

struct Runner<'a> {
    bench: ProfileBench<'a>,
    options: &'a ProfileOptions,
    /// The end of each group's time, so that a slow group does not starve later ones; leftover time passes to
    /// the next.
    deadlines: Vec<(PointGroup, f64)>,
    /// Measurements so far, from which the duration of the next point is predicted.
    known: DeviceProfile,
    fits: Fits,
    /// Start time of the profile.
    start: f64,
    controls: Vec<Control>,
}

impl<'a> Runner<'a> {
    fn new(device: &'a dyn Device, options: &'a ProfileOptions, works: &[WorkItem]) -> Result<Self, Problem> {
        let start = options.clock.seconds();
        let bytes_max = options.memory_max(device);
        let cold = options.cold_bytes.min(bytes_max);
        let allocation_max = device.limits().allocation_bytes_max;
        let (mut largest, mut total) = (0, cold);
        for (operand, sum) in works.iter().flat_map(buffers) {
            if sum <= bytes_max && operand <= allocation_max {
                (largest, total) = (largest.max(operand), total.max(sum));
            }
        }
        let ground = Ground::new(device, total, largest, bytes_max)?;
        let (checks, clock) = (Checks::default(), &*options.clock);
        let launch = LaunchCost::default();
        let bench = ProfileBench { device, queue: device.queue()?, ground, checks, clock, launch };
        // slow enough for any device until its first points are known
        let known = DeviceProfile::roof(Vec::new(), BytesPerSecond(5e9), Bytes(device.info().memory.0));
        let (fits, controls) = (Fits::default(), Vec::new());
        let mut runner = Runner { bench, options, deadlines: Vec::new(), known, fits, start, controls };
        runner.launches()?;
        // the groups share the budget that remains after the preparations
        let now = options.clock.seconds();
        runner.deadlines = deadlines(works, now, options.budget_s() - (now - start), options.long_s());
        Ok(runner)
    }

    /// Measures the launch costs that are subtracted from all other points, whether they were requested or
    /// not.
    fn launches(&mut self) -> Result<(), Problem> {
        const MANY: u32 = 100;
        let effort = self.options.effort(PointGroup::Launch);
        let one = self.bench.launch(LaunchCase::Commands(1), effort);
        let many = self.bench.launch(LaunchCase::Commands(MANY), effort);
        let ((one, one_own), (many, many_own)) = match (one, many) {
            (Ok(one), Ok(many)) => (one, many),
            (Err(Problem::Gone(reason)), _) | (_, Err(Problem::Gone(reason))) => {
                return Err(Problem::Gone(reason));
            }
            // nothing can be subtracted without Fill
            _ => return Ok(()),
        };
        let more = f64::from(MANY - 1);
        let command_s = ((many_own - one_own) / more).max(0.0);
        let (one_s, many_s) = (one.median(), many.median());
        self.bench.launch = LaunchCost { batch_s: (one_own - command_s).max(0.0), command_s };
        self.fits.launch_s = Some((one_s - command_s).max(0.0));
        self.fits.launch_per_command_s = Some(command_s);
        self.fits.launch_per_command_host_s = Some(((many_s - one_s) / more).max(0.0));
        match self.bench.dependence(effort) {
            Ok(seconds) => self.fits.dependence_s = Some(seconds),
            Err(Problem::Gone(reason)) => return Err(Problem::Gone(reason)),
            // left out of predictions
            Err(_) => {}
        }
        Ok(())
    }

    fn all(
        &mut self,
        works: &[WorkItem],
        observe: &mut dyn FnMut(ProfileProgress<'_>),
    ) -> (Vec<PointResult>, bool) {
        let (mut points, mut gone, mut complete) = (Vec::with_capacity(works.len()), None::<String>, true);
        let mut late = Vec::new();
        for (index, work) in works.iter().enumerate() {
            observe(ProfileProgress::Begin { index, total: works.len(), id: &work.id() });
            let result = if let Some(reason) = &gone {
                complete = false;
                Err(Problem::Failed(format!("not tried: {reason}")))
            } else if self.options.cancelled.load(Ordering::Relaxed) {
                complete = false;
                Err(Problem::Skip("interrupted".to_owned()))
            } else {
                if self.since_control() > CONTROL_EVERY_S {
                    self.control();
                }
                let left = works[index..].iter().filter(|other| other.group() == work.group()).count();
                let left_s = self.left_s(work.group());
                self.one(work, left_s, left, self.options.point_s_max())
            };
            if matches!(result, Err(Problem::Late(_))) {
                late.push(index);
            }
            let point = result.unwrap_or_else(|problem| {
                if let Problem::Gone(reason) = &problem {
                    gone = Some(reason.clone());
                }
                if matches!(problem, Problem::Failed(_)) && gone.is_none() {
                    self.renew_queue();
                }
                failed(work, problem)
            });
            observe(ProfileProgress::Done(&point));
            points.push(point);
        }
        if gone.is_none() {
            complete &= self.catch_up(works, &late, &mut points, observe);
        }
        (points, complete)
    }

    /// Measures the points that were skipped for lack of time while the budget lasts; returns whether the
    /// device and the user permit going on.
    fn catch_up(
        &mut self,
        works: &[WorkItem],
        late: &[usize],
        points: &mut [PointResult],
        observe: &mut dyn FnMut(ProfileProgress<'_>),
    ) -> bool {
        for &index in late {
            if self.options.cancelled.load(Ordering::Relaxed) {
                return false;
            }
            if self.since_control() > CONTROL_EVERY_S {
                self.control();
            }
            let work = &works[index];
            let left_s = self.options.budget_s() - (self.options.clock.seconds() - self.start);
            observe(ProfileProgress::Begin { index, total: works.len(), id: &work.id() });
            match self.one(work, left_s, 1, f64::INFINITY) {
                Ok(point) => points[index] = point,
                // it keeps its first reason
                Err(Problem::Late(_)) => continue,
                Err(problem) => {
                    let gone = matches!(problem, Problem::Gone(_));
                    points[index] = failed(work, problem);
                    if gone {
                        return false;
                    }
                    self.renew_queue();
                }
            }
            observe(ProfileProgress::Done(&points[index]));
        }
        true
    }

    fn since_control(&self) -> f64 {
        let last = self.controls.last().map_or(f64::NEG_INFINITY, |control| control.at_s);
        self.options.clock.seconds() - self.start - last
    }

    /// A failure here also shows up in the next point, which reports it.
    fn control(&mut self) {
        let at_s = self.options.clock.seconds() - self.start;
        self.controls.extend(self.bench.control(at_s));
    }

    /// Replaces the queue, since one that failed stays failed.
    fn renew_queue(&mut self) {
        if let Ok(queue) = self.bench.device.queue() {
            self.bench.queue = queue;
        }
    }

    fn left_s(&self, group: PointGroup) -> f64 {
        let deadline = self.deadlines.iter().find(|(known, _)| *known == group).map_or(0.0, |(_, at)| *at);
        deadline - self.options.clock.seconds()
    }

    /// Measures `work` if that takes at most `most_s`, given the remaining time and points (including this
    /// one).
    fn one(
        &mut self,
        work: &WorkItem,
        left: f64,
        points_left: usize,
        most_s: f64,
    ) -> Result<PointResult, Problem> {
        let long = self.options.long_s();
        let mut effort = self.options.effort(work.group());
        // warm-up and samples, at least five runs
        let predicted = match work {
            WorkItem::Sustained(_) => long,
            _ => 5.0 * self.foretell(work),
        };
        // a point requested by name is measured however long it takes
        let named = self.options.only.iter().any(|name| *name == work.id());
        if predicted > most_s && !named && !matches!(work, WorkItem::Sustained(_)) {
            return Err(Problem::Late(format!("would take {predicted:.0} s")));
        }
        if predicted > left && !named {
            return Err(Problem::Late(format!(
                "would take {predicted:.1} s, {:.0} s are left",
                left.max(0.0)
            )));
        }
        // leave a share for later points
        let share = 2.0 * left / points_left as f64;
        effort.seconds = effort.seconds.min(share.max(0.02));
        let mut point = self.bench.point(work, effort, long)?;
        point.at_s = self.options.clock.seconds() - self.start;
        self.learn(work, &point);
        Ok(point)
    }

    /// Predicts the seconds of one run from the measurements so far.
    fn foretell(&self, work: &WorkItem) -> f64 {
        let bytes = match work {
            WorkItem::Op(sig) => {
                let arithmetic = sig.flops() / self.rate(fit::input_dtype(sig));
                return self.known.time(sig).0.max(if sig.flops() > sig.bytes() { arithmetic } else { 0.0 });
            }
            WorkItem::Memory(_, bytes) | WorkItem::HostToDevice(bytes) | WorkItem::DeviceToHost(bytes) => {
                *bytes
            }
            WorkItem::DeviceToDevice(bytes) => 2 * bytes,
            WorkItem::Launch(_) | WorkItem::Sustained(SustainedLoad::Gemm | SustainedLoad::Stream) => 0,
        };
        bytes as f64 / self.known.bandwidth.0
    }

    /// Returns a pessimistic rate for a dtype: a quarter of the best known of any dtype until its own is
    /// known.
    fn rate(&self, dtype: DType) -> f64 {
        let rates = self.known.compute.iter();
        match rates.clone().find(|(known, _)| *known == dtype) {
            Some((_, rate)) => rate.0,
            None => rates.map(|(_, rate)| rate.0 / 4.0).fold(1e10, f64::max),
        }
    }

    fn learn(&mut self, work: &WorkItem, point: &PointResult) {
        let Some(seconds) = point.seconds.as_ref().map(|s| s.median).filter(|s| *s > 0.0) else { return };
        if let WorkItem::Op(sig) = work {
            // a norm, or a product of few rows, says nothing about its dtype's arithmetic
            if let OpSig::Gemm { x: dtype, .. } = *sig
                && sig.flops() > fit::ARITHMETIC * sig.bytes()
            {
                let rate = FlopPerSecond(sig.flops() / seconds);
                match self.known.compute.iter_mut().find(|(known, _)| *known == dtype) {
                    Some((_, best)) => *best = if best.0 < rate.0 { rate } else { *best },
                    None => self.known.compute.push((dtype, rate)),
                }
            }
            self.known.points.push(Point { sig: *sig, time: Seconds(seconds) });
        }
        if point.bytes >= (4 * MIB) as f64 && point.flops <= 2.0 * point.bytes {
            self.known.bandwidth.0 = self.known.bandwidth.0.max(point.bytes / seconds);
        }
    }
}

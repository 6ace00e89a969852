//! Measuring the time of prefill and decode on a device, with the model's own layers.
//!
//! Steps are timed at a grid of sizes: prompts up to a whole chunk, beyond the ridge of the device's
//! roofline, after contexts of several lengths, and decodes of several batches and contexts. Of equal layers
//! one is timed and counts as often as there are; embedding and LM head are timed apart. Short contexts come
//! first, and what [`CalibrationBudget`] has no time for is left out. The result is stored per device and
//! model, so that the next start needs none.

use super::members::OtherMembers;
use crate::env::Env;
use crate::model::divided::{MemberRun, MicroBatch};
use crate::model::draws::DrawInput;
use crate::model::graph::{Forward, StepInput};
use crate::model::leaving::KvStays;
use crate::request::Sampling;
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{Cmd, Device, ErrorKind, OpSig, Queue, Result};
use mixfleet_scheduler::batch::PageDevices;
use mixfleet_scheduler::cost::{Pieces, StepCalibration, StepPoint};
use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

/// Name and version of the stored document.
pub const SCHEMA: &str = "mixfleet.calibration/2";

/// Runs of a list by the time that one takes at most; a longer one runs twice. The shortest counts, since
/// other work of the machine only adds time: the first may compile kernels for seconds.
const RUNS: (Seconds, u32) = (Seconds(0.01), 4);
/// A list with a first run longer than this runs once.
const LONG: Seconds = Seconds(30.0);
/// How long is measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CalibrationBudget {
    /// Time of the measured steps after which no more prompts are measured, and then as long for decodes.
    pub measured: Seconds,
    /// The same with what compiling and other work of the machine took.
    pub elapsed: Seconds,
}

impl CalibrationBudget {
    /// Of what serves for long.
    pub const WHOLE: CalibrationBudget = CalibrationBudget { measured: Seconds(1.5), elapsed: Seconds(3.0) };
    /// Of what ends with an answer, which should not take longer for it.
    pub const BRIEF: CalibrationBudget = CalibrationBudget { measured: Seconds(0.05), elapsed: Seconds(0.1) };
}

/// Prompt tokens of the points, of which those up to a whole chunk are measured, and the chunk itself.
const TOKENS: [u32; 17] =
    [16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192];
/// Context tokens before the prompts.
const CONTEXTS: [u32; 3] = [0, 1024, 8192];
/// Sequences of the decode points, and the most that run here. Where a tile of 64 rows is full, times jump.
const BATCHES: [u32; 19] = [1, 2, 4, 8, 16, 32, 48, 64, 65, 80, 96, 112, 128, 129, 160, 192, 193, 224, 256];
/// Context tokens of each of these.
const DECODE_CONTEXTS: [u32; 9] = [1, 64, 128, 256, 512, 1024, 4096, 16_384, 65_536];
const TIMEOUT: Duration = Duration::from_secs(60);

/// Measures `forward` on `device`. It overwrites the KV pages, so it must run before serving.
///
/// # Errors
/// Errors of the device.
pub fn measure(
    device: &dyn Device,
    forward: &Forward,
    env: &dyn Env,
    budget: CalibrationBudget,
) -> Result<StepCalibration> {
    let mut bench = Bench { device, forward, queue: device.queue()?, ends: HashMap::new() };
    Points { forward, devices: &PageDevices::ONE, env, budget }.measured(|parts| bench.step(parts))
}

/// Measures whole steps, exchanges included, of devices that divide a model: of `device`, the first one, with
/// its share, and of `others`, whose pages are divided so. A step that stages run is one micro-batch, which
/// they run one after the other. It overwrites the KV pages, so it must run before serving.
///
/// # Errors
/// Errors of the devices.
pub(super) fn measure_divided(
    device: &dyn Device,
    forward: &Forward,
    (others, pages): (&mut OtherMembers, &PageDevices),
    env: &dyn Env,
    budget: CalibrationBudget,
) -> Result<StepCalibration> {
    let mut queue = device.queue()?;
    Points { forward, devices: pages, env, budget }.measured(|parts| {
        let (layers, runs) = least(|| {
            let (began, first) = (env.now(), MemberRun { device, queue: &mut *queue, forward });
            let batches =
                MicroBatch::cut(parts, Pieces::ONE, (forward.shape().block_tokens, block_pages(forward)));
            others.run(first, &batches, &mut KvStays, TIMEOUT)?;
            Ok(env.now() - began)
        })?;
        Ok(StepTime { layers, head: Seconds::ZERO, measuring: layers * f64::from(runs) })
    })
}

/// Pages of a block.
fn block_pages(forward: &Forward) -> u32 {
    forward.config().pages.parts.count()
}

/// The shortest time of several runs, and how many they were.
fn least(mut run: impl FnMut() -> Result<Seconds>) -> Result<(Seconds, u32)> {
    // the first run warms caches, but may still be the shortest
    let mut least = run()?;
    if least.0 >= LONG.0 {
        return Ok((least, 1));
    }
    least = least.min(run()?);
    let (longest, most) = RUNS;
    let runs = if least.0 <= longest.0 { most } else { 2 };
    for _ in 2..runs {
        least = least.min(run()?);
    }
    Ok((least, runs))
}

/// The time of a step.
#[derive(Clone, Copy)]
struct StepTime {
    layers: Seconds,
    /// Embedding, LM head and sampling.
    head: Seconds,
    /// What measuring it took, without what only the first runs take.
    measuring: Seconds,
}

/// The sizes at which steps are measured.
struct Points<'a> {
    forward: &'a Forward,
    devices: &'a PageDevices,
    env: &'a dyn Env,
    budget: CalibrationBudget,
}

impl Points<'_> {
    /// The times that `time` measures of steps.
    fn measured(
        &self,
        mut time: impl FnMut(&[StepInput<'_>]) -> Result<StepTime>,
    ) -> Result<StepCalibration> {
        let shape = self.forward.shape();
        // a sequence fits onto each device, or onto all together
        let rooms = (0..self.devices.count).map(|device| self.devices.room(device, shape.blocks));
        let each = rooms.min().unwrap_or(0);
        let all = each * self.devices.count;
        let blocks = if self.devices.together { each } else { all };
        let room = blocks.saturating_mul(shape.block_tokens).min(self.forward.config().context_max);
        let chunk = shape.tokens_max.min(room / 2).max(2);

        let tokens = knots(&TOKENS, 1, chunk);
        let contexts = knots(&CONTEXTS, 0, room.saturating_sub(chunk).min(CONTEXTS[2]));
        let prefill = self.points([&tokens, &contexts], tokens[0], |tokens, context| {
            Ok(Some(self.step(&mut time, 1, context, tokens)?))
        })?;

        let batches = knots(&BATCHES, 1, shape.sequences_max.max(1));
        let contexts = knots(&DECODE_CONTEXTS, 1, room.min(DECODE_CONTEXTS[8]));
        let room_of_all = u64::from(all) * u64::from(shape.block_tokens);
        let mut heads = BTreeMap::new();
        let most = batches[batches.len() - 1];
        let decode = self.points([&batches, &contexts], most, |batch, context| {
            if u64::from(batch) * u64::from(context) > room_of_all && batch > 1 {
                return Ok(None);
            }
            let step = self.step(&mut time, batch, context - 1, 1)?;
            heads.entry(batch).or_insert(step.head.0);
            Ok(Some(step))
        })?;
        let head = heads.into_iter().collect();
        Ok(StepCalibration { prefill, decode, head, chunk_tokens: shape.tokens_max })
    }

    /// Times a step of `batch` sequences with `tokens` new tokens each after `start` others, in pages of
    /// their own as far as there are as many.
    fn step(
        &self,
        time: &mut impl FnMut(&[StepInput<'_>]) -> Result<StepTime>,
        batch: u32,
        start: u32,
        tokens: u32,
    ) -> Result<StepTime> {
        let (shape, devices) = (self.forward.shape(), self.devices);
        let blocks = (start + tokens).div_ceil(shape.block_tokens);
        // sequences are on a device each, in turn, or on all
        let apart = if devices.together { devices.count } else { 1 };
        let pages_of = |sequence: u32| -> Vec<u32> {
            let (device, place) = (sequence % apart, sequence / apart);
            let room =
                if devices.together { devices.room(device, shape.blocks) } else { devices.all(shape.blocks) };
            let first = place.wrapping_mul(blocks) % (room.saturating_sub(blocks) + 1);
            let parts = block_pages(self.forward);
            (first * parts..(first + blocks) * parts).map(|at| at * apart + device).collect()
        };
        let pages: Vec<Vec<u32>> = (0..batch).map(pages_of).collect();
        let ids = vec![0; tokens as usize];
        // as most requests draw
        let parameters = Sampling::default().parameters(0, false);
        let draw = Some(DrawInput { parameters, ..DrawInput::GREEDY });
        let parts: Vec<_> =
            pages.iter().map(|pages| StepInput { start, tokens: &ids, pages, draw }).collect();
        time(&parts)
    }

    /// The times of pairs of two axes, those of the first knots of the second axis first, until the budget is
    /// spent. The smallest size of each context is always among them, and gives the growth with context; so
    /// is `needed` with the first context.
    fn points(
        &self,
        [first, second]: [&[u32]; 2],
        needed: u32,
        mut step: impl FnMut(u32, u32) -> Result<Option<StepTime>>,
    ) -> Result<Vec<StepPoint>> {
        let until = self.env.now() + self.budget.elapsed;
        let (mut points, mut spent) = (Vec::new(), Seconds::ZERO);
        for &context in second {
            for &size in first {
                let has_time = spent.0 < self.budget.measured.0 && self.env.now().0 < until.0;
                let is_needed = size == first[0] || (size == needed && context == second[0]);
                if (is_needed || has_time)
                    && let Some(StepTime { layers, head, measuring }) = step(size, context)?
                {
                    spent += measuring;
                    points.push(StepPoint { size, context, seconds: (layers + head).0 });
                }
            }
        }
        Ok(points)
    }
}

/// The values of `all` from `least` to `most`, and `most`.
fn knots(all: &[u32], least: u32, most: u32) -> Vec<u32> {
    let mut knots: Vec<u32> = all.iter().copied().filter(|knot| (least..most).contains(knot)).collect();
    knots.push(most.max(least));
    knots
}

fn operations(list: &[Cmd]) -> Vec<OpSig> {
    list.iter().map(|cmd| *cmd.sig()).collect()
}

struct Bench<'a> {
    device: &'a dyn Device,
    forward: &'a Forward,
    queue: Box<dyn Queue>,
    /// Times of embedding and LM head by their operations, which depend on the rows alone.
    ends: HashMap<Vec<OpSig>, Seconds>,
}

impl Bench<'_> {
    /// Time of a step, of whose equal layers one is run.
    fn step(&mut self, parts: &[StepInput<'_>]) -> Result<StepTime> {
        let pass = self.forward.begin(self.device, parts)?;
        let mut ends = self.forward.embed(&pass)?;
        ends.extend(self.forward.head(&pass)?);
        let mut kinds: Vec<(Vec<OpSig>, Vec<Cmd>, f64)> = Vec::new();
        for at in 0..self.forward.config().layers as usize {
            let layer = self.forward.layer(at, &pass)?;
            let sigs = operations(&layer);
            match kinds.iter_mut().find(|(known, ..)| *known == sigs) {
                Some((.., count)) => *count += 1.0,
                None => kinds.push((sigs, layer, 1.0)),
            }
        }
        let recorded = pass.key().is_some();
        let (mut layers, mut measuring) = (Seconds::ZERO, Seconds::ZERO);
        for (_, layer, count) in &kinds {
            let (least, runs) = self.least(layer, recorded)?;
            layers += least * *count;
            measuring += least * f64::from(runs);
        }
        let operations = operations(&ends);
        let head = match self.ends.get(&operations) {
            Some(&known) => known,
            None => {
                let (least, runs) = self.least(&ends, recorded)?;
                measuring += least * f64::from(runs);
                least
            }
        };
        self.ends.insert(operations, head);
        Ok(StepTime { layers, head, measuring })
    }

    /// The shortest time of a list, recorded if serving replays it.
    fn least(&mut self, list: &[Cmd], recorded: bool) -> Result<(Seconds, u32)> {
        let graph = match recorded.then(|| self.queue.record(list)) {
            Some(Err(error)) if error.kind != ErrorKind::Unsupported => return Err(error),
            Some(Ok(graph)) => Some(graph),
            _ => None,
        };
        least(|| {
            let ticket = match &graph {
                Some(graph) => self.queue.replay(graph)?,
                None => self.queue.submit(list)?,
            };
            Ok(self.queue.wait(ticket, TIMEOUT)?.time)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn knots_end_with_the_most() {
        assert_eq!(knots(&TOKENS, 1, 100), [16, 32, 64, 96, 100]);
        assert_eq!(knots(&TOKENS, 1, 2), [2]);
        assert_eq!(knots(&CONTEXTS, 0, 0), [0]);
        assert_eq!(knots(&CONTEXTS, 0, 8192), [0, 1024, 8192]);
        assert_eq!(knots(&BATCHES, 1, 1), [1]);
    }
}

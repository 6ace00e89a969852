//! Measuring the time of prefill and decode on a device, with the model's own first layer.
//!
//! One layer is timed at a few sizes and multiplied by the number of layers; embedding and LM head are timed
//! with it. Three prefill and three decode points determine the three coefficients of each. This takes a
//! second or two; the result is stored per device and model, so that the next start needs none.

use super::members::OtherMembers;
use crate::env::Env;
use crate::model::divided::{MemberRun, MicroBatch};
use crate::model::draws::DrawInput;
use crate::model::graph::{Forward, StepInput};
use crate::model::leaving::KvStays;
use crate::request::Sampling;
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{Cmd, Device, ErrorKind, Queue, Result};
use mixfleet_scheduler::batch::PageDevices;
use mixfleet_scheduler::cost::{Coefficients, DecodeCoefficients, Pieces, PrefillCoefficients};
use std::time::Duration;

/// Name and version of the stored document.
pub const SCHEMA: &str = "mixfleet.calibration/1";

/// Measurements of each point; the shortest counts, since other work of the machine only adds time.
const REPEATS: usize = 3;
/// Prompt tokens of the small point.
const TOKENS_SMALL: u32 = 16;
/// Prompt tokens of the large points.
const TOKENS_LARGE: u32 = 128;
/// Context tokens of the points that measure attention.
const CONTEXT: u32 = 2048;
/// Sequences of the large decode point.
const BATCH: u32 = 8;
const TIMEOUT: Duration = Duration::from_secs(60);

/// Measures `forward` on `device`. It overwrites the KV pages, so it must run before serving.
///
/// # Errors
/// Errors of the device.
pub fn measure(device: &dyn Device, forward: &Forward) -> Result<Coefficients> {
    let mut bench = Bench { device, forward, queue: device.queue()? };
    fit(forward, &PageDevices::ONE, |parts| bench.seconds(parts))
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
) -> Result<Coefficients> {
    let mut queue = device.queue()?;
    fit(forward, pages, |parts| {
        let mut least = f64::INFINITY;
        for _ in 0..=REPEATS {
            let (began, first) = (env.now(), MemberRun { device, queue: &mut *queue, forward });
            let batches =
                MicroBatch::cut(parts, Pieces::ONE, (forward.shape().block_tokens, block_pages(forward)));
            others.run(first, &batches, &mut KvStays, TIMEOUT)?;
            least = least.min((env.now() - began).0);
        }
        Ok(least)
    })
}

/// Pages of a block.
fn block_pages(forward: &Forward) -> u32 {
    forward.config().pages.parts.count()
}

/// Fits coefficients to the times that `seconds` measures of steps.
fn fit(
    forward: &Forward,
    devices: &PageDevices,
    mut seconds: impl FnMut(&[StepInput<'_>]) -> Result<f64>,
) -> Result<Coefficients> {
    let shape = forward.shape();
    // sequences are on a device each, in turn, or on all
    let apart = if devices.together { devices.count } else { 1 };
    let mut step = |batch: u32, start: u32, tokens: u32| {
        let blocks = (start + tokens).div_ceil(shape.block_tokens);
        let pages_on = |device: u32| (0..blocks * block_pages(forward)).map(move |at| at * apart + device);
        let pages: Vec<Vec<u32>> = (0..apart).map(|device| pages_on(device).collect()).collect();
        let ids = vec![0; tokens as usize];
        // as most requests draw
        let parameters = Sampling::default().parameters(0, false);
        let draw = Some(DrawInput { parameters, ..DrawInput::GREEDY });
        let pages = pages.iter().cycle().take(batch as usize);
        let parts: Vec<_> = pages.map(|pages| StepInput { start, tokens: &ids, pages, draw }).collect();
        seconds(&parts)
    };
    // a sequence fits onto each device, or onto all together
    let least = (0..devices.count).map(|device| devices.room(device, shape.blocks)).min().unwrap_or(0);
    let blocks = if devices.together { least } else { least * devices.count };
    let room = (blocks * shape.block_tokens).min(forward.config().context_max);
    let large = TOKENS_LARGE.min(shape.tokens_max).min(room / 2).max(2);
    let small = TOKENS_SMALL.min(large / 2).max(1);
    let context = CONTEXT.min(room - large);
    let batch = BATCH.min(shape.sequences_max);
    let prefill = [(0, small), (0, large), (context, large)];
    let decode = [(1, 1), (batch, 1), (1, context + 1)];
    let mut prefill_s = [0.0; 3];
    for (seconds, (start, tokens)) in prefill_s.iter_mut().zip(prefill) {
        *seconds = step(1, start, tokens)?;
    }
    let mut decode_s = [0.0; 3];
    for (seconds, (batch, context)) in decode_s.iter_mut().zip(decode) {
        *seconds = step(batch, context - 1, 1)?;
    }
    Ok(Coefficients { prefill_s: fit_prefill(prefill, prefill_s), decode_s: fit_decode(decode, decode_s) })
}

struct Bench<'a> {
    device: &'a dyn Device,
    forward: &'a Forward,
    queue: Box<dyn Queue>,
}

impl Bench<'_> {
    /// Time of a whole step.
    fn seconds(&mut self, parts: &[StepInput<'_>]) -> Result<f64> {
        let pass = self.forward.begin(self.device, parts)?;
        let mut ends = self.forward.embed(&pass)?;
        ends.extend(self.forward.head(&pass)?);
        let layer = self.forward.layer(0, &pass)?;
        let layers = f64::from(self.forward.config().layers);
        let recorded = pass.key().is_some();
        Ok(self.least(&ends, recorded)? + layers * self.least(&layer, recorded)?)
    }

    /// The shortest time of a list, recorded if serving replays it.
    fn least(&mut self, list: &[Cmd], recorded: bool) -> Result<f64> {
        let graph = match recorded.then(|| self.queue.record(list)) {
            Some(Err(error)) if error.kind != ErrorKind::Unsupported => return Err(error),
            Some(Ok(graph)) => Some(graph),
            _ => None,
        };
        let mut least = Seconds(f64::INFINITY);
        for _ in 0..=REPEATS {
            // The first run warms caches, but may still be the shortest.
            let ticket = match &graph {
                Some(graph) => self.queue.replay(graph)?,
                None => self.queue.submit(list)?,
            };
            least = least.min(self.queue.wait(ticket, TIMEOUT)?.time);
        }
        Ok(least.0)
    }
}

/// Fits overhead + per_token n + per_token_squared ((p + n)² - p²) to the points (p, n).
fn fit_prefill(points: [(u32, u32); 3], seconds: [f64; 3]) -> PrefillCoefficients {
    let [small, large, deep] = points.map(|(p, n)| (f64::from(p), f64::from(n)));
    let squares = |(p, n): (f64, f64)| n * (2.0 * p + n);
    let more = squares(deep) - squares(large);
    let per_token_squared = if more > 0.0 { ((seconds[2] - seconds[1]) / more).max(0.0) } else { 0.0 };
    let linear = |at: usize, point| seconds[at] - per_token_squared * squares(point);
    let tokens = large.1 - small.1;
    let per_token =
        if tokens > 0.0 { ((linear(1, large) - linear(0, small)) / tokens).max(0.0) } else { 0.0 };
    let overhead = (linear(0, small) - per_token * small.1).max(0.0);
    PrefillCoefficients { overhead, per_token, per_token_squared }
}

/// Fits base + per_sequence b + per_kv_token k to the points (batch, context of each).
fn fit_decode(points: [(u32, u32); 3], seconds: [f64; 3]) -> DecodeCoefficients {
    let [one, many, deep] = points.map(|(b, c)| (f64::from(b), f64::from(b) * f64::from(c)));
    let keys = deep.1 - one.1;
    let per_kv_token = if keys > 0.0 { ((seconds[2] - seconds[0]) / keys).max(0.0) } else { 0.0 };
    let sequences = many.0 - one.0;
    let grown = seconds[1] - seconds[0] - per_kv_token * (many.1 - one.1);
    let per_sequence = if sequences > 0.0 { (grown / sequences).max(0.0) } else { 0.0 };
    let base = (seconds[0] - per_sequence * one.0 - per_kv_token * one.1).max(0.0);
    DecodeCoefficients { base, per_sequence, per_kv_token }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fit_goes_through_its_points() {
        let (a, b, c) = (0.01, 2e-4, 3e-8);
        let points = [(0, 16), (0, 128), (2048, 128)];
        let seconds = points.map(|(p, n): (u32, u32)| {
            let (p, n) = (f64::from(p), f64::from(n));
            a + b * n + c * ((p + n) * (p + n) - p * p)
        });
        let fit = fit_prefill(points, seconds);
        assert!((fit.overhead / a - 1.0).abs() < 1e-9 && (fit.per_token / b - 1.0).abs() < 1e-9);
        assert!((fit.per_token_squared / c - 1.0).abs() < 1e-9);

        let points = [(1, 1), (8, 1), (1, 2049)];
        let seconds = points.map(|(n, k): (u32, u32)| 0.02 + 1e-3 * f64::from(n) + 5e-8 * f64::from(n * k));
        let fit = fit_decode(points, seconds);
        assert!((fit.base / 0.02 - 1.0).abs() < 1e-9 && (fit.per_sequence / 1e-3 - 1.0).abs() < 1e-9);
        assert!((fit.per_kv_token / 5e-8 - 1.0).abs() < 1e-9);
    }

    #[test]
    fn noise_never_gives_a_negative_coefficient() {
        let fit = fit_prefill([(0, 16), (0, 128), (2048, 128)], [0.5, 0.2, 0.1]);
        assert!(fit.overhead >= 0.0 && fit.per_token >= 0.0 && fit.per_token_squared >= 0.0);
    }
}

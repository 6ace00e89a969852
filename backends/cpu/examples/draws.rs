//! What drawing tokens costs, beside reading the logits: `cargo run --release -p mixfleet-cpu --example draws
//! [cpu@0 [rows [cols]]]`. Logits are normal with a deviation of 3. Every figure is the best of several runs,
//! from which a batch that only restores the operands is taken away.

#![allow(clippy::print_stdout, clippy::cast_possible_truncation)]

use mixfleet_cpu::CpuBackend;
use mixfleet_hal::random::Stream;
use mixfleet_hal::sample::{LOG2_E, PARAMETER_WORDS, Parameters, fraction};
use mixfleet_hal::{Backend, BufferUsage, Cmd, Device, OpSig, Queue, Slice};
use std::sync::Arc;
use std::time::Duration;

const RUNS: usize = 40;
/// Tokens of a row that penalties lower.
const PENALISED: u32 = 300;

struct Bench {
    device: Arc<dyn Device>,
    queue: Box<dyn Queue>,
    rows: u32,
    cols: u32,
}

type Outcome<T> = mixfleet_hal::Result<T>;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let device = CpuBackend.open(&args.next().unwrap_or_else(|| "cpu".into()))?;
    let mut number = |default| args.next().map_or(Ok(default), |n| n.parse());
    let (rows, cols) = (number(64)?, number(32_000)?);
    println!("{}: {rows} rows of {cols}", device.info().fingerprint);
    let queue = device.queue()?;
    let mut bench = Bench { device, queue, rows, cols };
    let hot = Parameters { scale: LOG2_E, ..Parameters::GREEDY };
    let nucleus = Parameters { top_p: fraction(0.95), ..hot };
    bench.measure("greedy", Parameters::GREEDY, 0, 0)?;
    bench.measure("temperature 1", hot, 0, 0)?;
    bench.measure("top-k 40", Parameters { top_k: 40, ..hot }, 0, 0)?;
    bench.measure("min-p 0.05", Parameters { min_p: 0.05, ..hot }, 0, 0)?;
    bench.measure("top-p 0.95", nucleus, 0, 0)?;
    bench.measure("top-p 0.95, penalties", nucleus, PENALISED, 0)?;
    bench.measure("top-p 0.95 at temperature 10", Parameters { scale: LOG2_E / 10.0, ..nucleus }, 0, 0)?;
    bench.measure(
        "top-p 0.95, penalties, 5 log-probabilities",
        Parameters { logprobs: 1, ..nucleus },
        PENALISED,
        5,
    )?;
    Ok(())
}

impl Bench {
    fn put(&self, words: &[u32]) -> Outcome<Slice> {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let slice = self.device.alloc(bytes.len() as u64, BufferUsage::Activations)?;
        self.device.write(&slice, &bytes)?;
        Ok(slice)
    }

    /// Seconds of the fastest of several runs.
    fn best(&mut self, batch: &[Cmd]) -> Outcome<f64> {
        let mut best = f64::INFINITY;
        for _ in 0..RUNS {
            let ticket = self.queue.submit(batch)?;
            best = best.min(self.queue.wait(ticket, Duration::from_secs(100))?.time.0);
        }
        Ok(best)
    }

    fn measure(&mut self, what: &str, parameters: Parameters, penalised: u32, tops: u32) -> Outcome<()> {
        let Bench { rows, cols, .. } = *self;
        let mut stream = Stream::new(1);
        let logits: Vec<u32> =
            (0..rows * cols).map(|_| ((3.0 * stream.next_normal()) as f32).to_bits()).collect();
        let mut each = Vec::new();
        for _ in 0..rows {
            let Parameters { scale, top_k, top_p, min_p, logprobs, .. } = parameters;
            let uniform = (stream.next_u64() >> 32) as u32;
            each.extend([scale.to_bits(), top_k, top_p, min_p.to_bits()]);
            each.extend([1.1f32.to_bits(), (1.0 / 1.1f32).to_bits(), uniform, logprobs]);
        }
        assert_eq!(each.len(), (rows * PARAMETER_WORDS) as usize);
        let history = rows * penalised;
        let entries: Vec<u32> =
            (0..history).flat_map(|i| [i % penalised * (cols / penalised), 0.5f32.to_bits()]).collect();
        let kept = [self.put(&logits)?, self.put(&entries)?];
        let used = [self.put(&logits)?, self.put(&entries)?];
        let mut batch = Vec::new();
        for (from, to) in kept.iter().zip(&used).filter(|(from, _)| from.bytes > 0) {
            batch.push(Cmd::new(OpSig::Copy { bytes: from.bytes }, &[from.clone(), to.clone()])?);
        }
        let restoring = self.best(&batch)?;
        let [logits, entries] = used;
        let mut args = vec![logits, self.put(&each)?];
        if history > 0 {
            args.extend([self.put(&(0..=rows).map(|row| row * penalised).collect::<Vec<_>>())?, entries]);
        }
        args.push(self.put(&vec![0; rows as usize * 4])?);
        if tops > 0 {
            args.push(self.put(&vec![0; (rows * tops) as usize * 2])?);
        }
        batch.push(Cmd::new(OpSig::Sample { rows, cols, history, tops }, &args)?);
        let seconds = self.best(&batch)? - restoring;
        let threads = f64::from(self.device.info().compute_units);
        println!(
            "{what}: {:.0} us, by thread {:.1} us a row, {:.2} ns a logit; a copy of the logits {:.0} us",
            seconds * 1e6,
            seconds * threads / f64::from(rows) * 1e6,
            seconds * threads / f64::from(rows) / f64::from(cols) * 1e9,
            restoring * 1e6
        );
        Ok(())
    }
}

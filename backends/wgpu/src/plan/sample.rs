//! Draws of tokens: rows are cut, and the history is bound as a whole.

use super::{Planner, ROW_GROUP, TensorView};
use crate::kernels::{Kernel, ShaderFile};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::sample::{DRAWN_WORDS, PARAMETER_WORDS};
use mixfleet_hal::{Error, OpSig, Result};

impl Planner {
    /// Plans a draw.
    pub(super) fn sample(&mut self, sig: &OpSig, operands: &[TensorView]) -> Result<()> {
        let OpSig::Sample { rows, cols, history, tops } = *sig else { return Ok(()) };
        let (logits, parameters) = (&operands[0], &operands[1]);
        let (entries, results) = match (history, operands) {
            (0, [_, _, results @ ..]) => (None, results),
            (_, [_, _, starts, entries, results @ ..]) => (Some((starts, entries)), results),
            _ => return Err(Error::invalid("sample: wrong number of operands")),
        };
        if let Some((_, entries)) = entries {
            self.runs_of(sig, 1, entries.window.bytes, 1)?;
        }
        let row_bytes = u64::from(cols.max(2 * tops).max(PARAMETER_WORDS)) * 4;
        for (first, count) in self.runs(sig, rows.into(), row_bytes)? {
            let part = |operand: &TensorView, width: u32| {
                operand.part(first * u64::from(width), count * u64::from(width))
            };
            let (logits, parameters) = (part(logits, cols), part(parameters, PARAMETER_WORDS));
            let out = part(&results[0], DRAWN_WORDS);
            // absent operands must be bound anyway
            let top = results.get(1).map_or_else(|| out.clone(), |top| part(top, 2 * tops));
            let starts =
                entries.map_or_else(|| parameters.clone(), |(starts, _)| starts.part(first, count + 1));
            let entries = entries.map_or(&out, |(_, entries)| entries);
            let kernel = Kernel::new(ShaderFile::Sample, "sample", ROW_GROUP);
            let shape = [to_u32(count), cols, history, tops, 0];
            self.dispatch(&kernel, &[&parameters, &starts], &[&logits, entries, &out, &top], &shape, count);
        }
        Ok(())
    }
}

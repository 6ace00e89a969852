//! Drawing the tokens of a step: on the device where it can, else here.

use super::shaping::Shaping;
use super::worker::{Active, Worker};
use crate::model::draws::DrawInput;
use crate::model::graph::{Forward, Pass};
use crate::request::Logprobs;
use crate::sampling::{self, History, SamplingError};
use bytemuck::Zeroable;
use mixfleet_hal::cast::to_f32;
use mixfleet_hal::sample::{Drawn, NO_TOKEN, Parameters};
use mixfleet_hal::{Device, Error, ErrorKind, Result};
use mixfleet_scheduler::batch::{RequestId, Step, StepSequence};

/// A request with its token, or the reason why none could be drawn.
pub(super) type Draw = (RequestId, std::result::Result<DrawnToken, String>);

/// A token, with its log-probabilities if requested.
type DrawnToken = (u32, Option<Logprobs>);

/// A row of a step's logits on the host: what the device drew from it, with the likeliest tokens, or the row
/// itself if the device cannot draw.
pub(super) enum LogitsRow {
    Drawn(Drawn, Vec<[u32; 2]>),
    Logits(Vec<f32>),
}

/// Reads the rows of a step that is done: a few bytes a row, if the device drew.
///
/// # Errors
/// Those of the device.
pub(super) fn read_rows(device: &dyn Device, forward: &Forward, pass: &Pass) -> Result<Vec<LogitsRow>> {
    let (count, vocab) = (pass.rows() as usize, forward.config().vocab as usize);
    let results = forward.results(pass);
    let Some(outputs) = forward.drawn(pass) else {
        let mut values = vec![0f32; count * vocab];
        device.read(&results[0], bytemuck::cast_slice_mut(&mut values))?;
        return Ok(values.chunks_exact(vocab).map(|row| LogitsRow::Logits(row.to_vec())).collect());
    };
    let mut rows = vec![Drawn::zeroed(); count];
    device.read(&results[0], bytemuck::cast_slice_mut(&mut rows))?;
    let tops = outputs.top().map_or(0, |(_, tops)| tops as usize);
    let mut listed = vec![[0u32; 2]; count * tops];
    if let Some(top) = results.get(1) {
        device.read(top, bytemuck::cast_slice_mut(&mut listed))?;
    }
    let tops_of = |row: usize| listed[row * tops..(row + 1) * tops].to_vec();
    Ok(rows.into_iter().enumerate().map(|(row, drawn)| LogitsRow::Drawn(drawn, tops_of(row))).collect())
}

impl Worker {
    /// Tells what shapes the logits of a step's sequences which tokens were drawn since it was needed last.
    pub(super) fn follow_drawn(&mut self, step: &Step) {
        for sequence in step.sequences.iter().filter(|s| s.sample) {
            let Some(active) = self.active.get_mut(&sequence.request) else { continue };
            let prompt_tokens = active.wanted.prompt_ids.len();
            if let (Some(shaping), Some(text)) = (&mut active.shaping, self.machine.text(sequence.request)) {
                shaping.follow(&text.ids()[prompt_tokens..]);
            }
        }
    }

    /// Returns a token for each sequence with `sample`, in order, from the step's rows.
    pub(super) fn draw(&self, step: &Step, rows: Vec<LogitsRow>) -> Result<Vec<Draw>> {
        let sampled = step.sequences.iter().filter(|s| s.sample);
        let draws = sampled.zip(rows).map(|(sequence, row)| {
            let failed = self.shaping(sequence.request).and_then(Shaping::failed);
            let token = match (failed, row) {
                (Some(cause), _) => Err(cause.to_owned()),
                (None, LogitsRow::Drawn(drawn, tops)) => self.drawn_there(sequence, drawn, &tops)?,
                (None, LogitsRow::Logits(logits)) => self.draw_here(sequence, &logits),
            };
            Ok((sequence.request, token))
        });
        draws.collect()
    }

    fn shaping(&self, request: RequestId) -> Option<&Shaping> {
        self.active.get(&request)?.shaping.as_ref()
    }

    /// The token that the device drew.
    fn drawn_there(
        &self,
        sequence: &StepSequence,
        drawn: Drawn,
        tops: &[[u32; 2]],
    ) -> Result<std::result::Result<DrawnToken, String>> {
        let token = match checked(drawn, self.steps.forward.config().vocab)? {
            Ok(id) => id,
            Err(error) => return Ok(Err(error.to_string())),
        };
        let wanted = self.active.get(&sequence.request).and_then(|active| active.wanted.logprobs);
        let logprobs = wanted.map(|wanted| {
            let best = tops.iter().take(wanted as usize).filter(|[id, _]| *id != NO_TOKEN);
            let logprob = |below_best: f32| to_f32(drawn.logprob(below_best));
            let top = best.map(|[id, below_best]| (*id, logprob(f32::from_bits(*below_best)))).collect();
            Logprobs { chosen: logprob(drawn.below_best), top }
        });
        Ok(Ok((token, logprobs)))
    }

    /// Draws from logits that were read from the device.
    fn draw_here(&self, s: &StepSequence, logits: &[f32]) -> std::result::Result<DrawnToken, String> {
        let Some(active) = self.active.get(&s.request) else { return Ok((0, None)) };
        let wanted = &active.wanted;
        let ids = self.ids(s.request);
        let index = (s.start + s.tokens) as usize - wanted.prompt_ids.len();
        if let Some(&forced) = wanted.forced_ids.get(index) {
            let logprobs = sampling::logprobs_of(logits, forced, wanted.logprobs.unwrap_or(0));
            return logprobs.map(|logprobs| (forced, Some(logprobs))).map_err(|error| error.to_string());
        }
        let (prompt, output) = ids.split_at(wanted.given_tokens());
        let history = History { prompt, output };
        let forbidden = active.shaping.as_ref().map_or(&[][..], Shaping::forbidden);
        let drawn = sampling::sample(logits, &wanted.sampling, history, forbidden, wanted.logprobs);
        drawn.map(|d| (d.id, d.logprobs)).map_err(|error| error.to_string())
    }
}

/// A token that the device drew, or why the logits give none.
///
/// # Errors
/// `Corrupt` for what no device draws from any logits.
fn checked(drawn: Drawn, vocabulary: u32) -> Result<std::result::Result<u32, SamplingError>> {
    Ok(match drawn.id {
        NO_TOKEN if drawn.below_best == f32::NEG_INFINITY => Err(SamplingError::Empty),
        id if id >= vocabulary => {
            let detail = format!("the device drew token {id} of a vocabulary of {vocabulary}");
            return Err(Error::new(ErrorKind::Corrupt, detail));
        }
        id if drawn.below_best.is_nan() => Err(SamplingError::NotFinite(id as usize)),
        id => Ok(id),
    })
}

/// How a request's token at this position is drawn. That of a cancelled request is drawn anyhow, and
/// discarded.
pub(super) fn draw_input(active: Option<&Active>, position: u32) -> DrawInput<'_> {
    let Some(active) = active else { return DrawInput::GREEDY };
    let (wanted, position) = (&active.wanted, position as usize);
    // while tokens are forced, the one entry of the history decides
    let index = position.checked_sub(wanted.given_tokens());
    let logprobs = wanted.logprobs.is_some();
    let parameters = match index {
        Some(index) => wanted.sampling.parameters(index as u64, logprobs),
        None => Parameters { logprobs: logprobs.into(), ..Parameters::GREEDY },
    };
    DrawInput {
        parameters,
        history: active
            .shaping
            .as_ref()
            .map_or(&[], |shaping| shaping.entries(position.saturating_sub(wanted.prompt_ids.len()))),
        tops: wanted.logprobs.unwrap_or(0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_device_draws_is_told_from_logits_that_give_no_token() {
        let drawn = |id, below_best| checked(Drawn { id, below_best, sum: [0; 2] }, 100);
        assert_eq!(drawn(99, -0.5), Ok(Ok(99)));
        assert_eq!(drawn(7, f32::NAN), Ok(Err(SamplingError::NotFinite(7))));
        assert_eq!(drawn(NO_TOKEN, f32::NEG_INFINITY), Ok(Err(SamplingError::Empty)));
        // memory of ones, or of zeros behind the id, is no row without a token
        for (id, below_best) in [(NO_TOKEN, f32::from_bits(u32::MAX)), (NO_TOKEN, 0.0), (100, -0.5)] {
            assert_eq!(drawn(id, below_best).unwrap_err().kind, ErrorKind::Corrupt, "{id} {below_best}");
        }
    }
}

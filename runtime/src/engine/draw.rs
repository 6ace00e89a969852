//! Drawing the tokens of a step: on the device where it can, else here.

use super::worker::Worker;
use crate::model::draws::{DrawInput, DrawOutputs};
use crate::model::graph::Pass;
use crate::request::Logprobs;
use crate::sampling::{self, History, Penalties, SamplingError};
use bytemuck::Zeroable;
use mixfleet_hal::cast::to_f32;
use mixfleet_hal::sample::{Drawn, NO_TOKEN};
use mixfleet_hal::{Error, ErrorKind, Result};
use mixfleet_scheduler::batch::{RequestId, Step, StepSequence};

/// A request with its token, or the reason why none could be drawn.
pub(super) type Draw = (RequestId, std::result::Result<DrawnToken, String>);

/// A token, with its log-probabilities if requested.
type DrawnToken = (u32, Option<Logprobs>);

impl Worker {
    /// Tells the penalties of a step's sequences which tokens were drawn since they were needed last.
    pub(super) fn follow_penalties(&mut self, step: &Step) {
        for sequence in step.sequences.iter().filter(|s| s.sample) {
            let Some(active) = self.active.get_mut(&sequence.request) else { continue };
            let prompt_tokens = active.wanted.prompt_ids.len();
            if let (Some(penalties), Some(text)) =
                (&mut active.penalties, self.machine.text(sequence.request))
            {
                penalties.follow(&text.ids()[prompt_tokens..]);
            }
        }
    }

    /// How the next token of a request is drawn. That of a cancelled request is drawn anyhow, and discarded.
    pub(super) fn draw_input(&self, request: RequestId) -> DrawInput<'_> {
        let Some(active) = self.active.get(&request) else { return DrawInput::GREEDY };
        let wanted = &active.wanted;
        let index = self.ids(request).len() - wanted.prompt_ids.len();
        DrawInput {
            parameters: wanted.sampling.parameters(index as u64, wanted.logprobs.is_some()),
            history: active.penalties.as_ref().map_or(&[], Penalties::entries),
            tops: wanted.logprobs.unwrap_or(0),
        }
    }

    /// Returns a token for each sequence with `sample`, in order.
    pub(super) fn draw(&self, step: &Step, pass: &Pass) -> Result<Vec<Draw>> {
        let sampled: Vec<_> = step.sequences.iter().filter(|s| s.sample).collect();
        match self.forward.drawn(pass) {
            Some(drawn) => self.drawn_there(&sampled, drawn),
            None => self.draw_here(&sampled, pass),
        }
    }

    /// Reads what the device drew: a few bytes a token.
    fn drawn_there(&self, sampled: &[&StepSequence], outputs: &DrawOutputs) -> Result<Vec<Draw>> {
        let mut rows = vec![Drawn::zeroed(); sampled.len()];
        let bytes = size_of_val(&rows[..]) as u64;
        self.device.read(&outputs.drawn().range(0, bytes), bytemuck::cast_slice_mut(&mut rows))?;
        let (mut listed, mut tops) = (Vec::new(), 0);
        if let Some((top, of_each)) = outputs.top() {
            tops = of_each as usize;
            listed = vec![[0u32; 2]; sampled.len() * tops];
            let bytes = size_of_val(&listed[..]) as u64;
            self.device.read(&top.range(0, bytes), bytemuck::cast_slice_mut(&mut listed))?;
        }
        let draws = sampled.iter().zip(rows).enumerate().map(|(row, (sequence, drawn))| {
            let token = match self.checked(drawn)? {
                Ok(id) => id,
                Err(error) => return Ok((sequence.request, Err(error.to_string()))),
            };
            let wanted = self.active.get(&sequence.request).and_then(|active| active.wanted.logprobs);
            let logprobs = wanted.map(|wanted| {
                let best = listed.iter().skip(row * tops).take(tops.min(wanted as usize));
                let best = best.filter(|[id, _]| *id != NO_TOKEN);
                let logprob = |below_best: f32| to_f32(drawn.logprob(below_best));
                let top = best.map(|[id, below_best]| (*id, logprob(f32::from_bits(*below_best)))).collect();
                Logprobs { chosen: logprob(drawn.below_best), top }
            });
            Ok((sequence.request, Ok((token, logprobs))))
        });
        draws.collect()
    }

    /// A token that the device drew, or why its row cannot be trusted.
    ///
    /// # Errors
    /// `Corrupt` if the token does not exist.
    fn checked(&self, drawn: Drawn) -> Result<std::result::Result<u32, SamplingError>> {
        let vocabulary = self.forward.config().vocab;
        Ok(match drawn.id {
            NO_TOKEN => Err(SamplingError::Empty),
            id if id >= vocabulary => {
                let detail = format!("the device drew token {id} of a vocabulary of {vocabulary}");
                return Err(Error::new(ErrorKind::Corrupt, detail));
            }
            id if drawn.below_best.is_nan() => Err(SamplingError::NotFinite(id as usize)),
            id => Ok(id),
        })
    }

    /// Draws from logits that are read from the device.
    fn draw_here(&self, sampled: &[&StepSequence], pass: &Pass) -> Result<Vec<Draw>> {
        let vocab = self.forward.config().vocab as usize;
        let mut values = vec![0f32; sampled.len() * vocab];
        let logits = self.forward.logits(pass);
        self.device.read(&logits, bytemuck::cast_slice_mut(&mut values))?;
        let rows = sampled.iter().zip(values.chunks_exact(vocab));
        let draws = rows.map(|(s, logits)| {
            let Some(active) = self.active.get(&s.request) else { return (s.request, Ok((0, None))) };
            let wanted = &active.wanted;
            let (prompt, output) = self.ids(s.request).split_at(wanted.prompt_ids.len());
            let history = History { prompt, output };
            let drawn = sampling::sample(logits, &wanted.sampling, history, wanted.logprobs);
            (s.request, drawn.map(|d| (d.id, d.logprobs)).map_err(|error| error.to_string()))
        });
        Ok(draws.collect())
    }
}

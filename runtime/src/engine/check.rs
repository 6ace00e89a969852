//! Validation of orders before anything acts on them.
//!
//! Routers and peers are other processes, one of which may be broken or hostile: an invalid order is refused.

use super::messages::{HandOff, Job, Source};
use super::worker::Worker;
use mixfleet_hal::{DType, Error, Result};
use mixfleet_scheduler::fleet::InstanceId;

/// Maximum staging memory of one receiver, and of its slots: the sender allocates as much.
const LANDING_BYTES_MAX: u64 = 1 << 30;
const SLOTS_MAX: u32 = 1 << 12;

/// Maximum descriptors of one landing.
const REGIONS_MAX: usize = 16;

/// Maximum end tokens of an answer, and log-probabilities of a token.
const EOS_IDS_MAX: usize = 1 << 10;
const LOGPROBS_MAX: u32 = 1 << 10;

impl Worker {
    /// Checks that this instance can carry out a job, of which `tokens` must fit here.
    ///
    /// # Errors
    /// `Invalid` with the reason.
    pub(super) fn check_job(&self, job: &Job, tokens: u64) -> Result<()> {
        let config = self.forward.config();
        let wanted = &job.wanted;
        let (prompt, generated) = (wanted.prompt_ids.len() as u64, job.generated.len() as u64);
        if prompt == 0 {
            return Err(Error::invalid("the prompt has no tokens"));
        }
        let ids = wanted.prompt_ids.iter().chain(&job.generated);
        if let Some(id) = ids.copied().find(|&id| id >= config.vocab) {
            return Err(Error::invalid(format!(
                "token {id} has no row in the model's embedding, which has {}",
                config.vocab
            )));
        }
        if generated >= u64::from(wanted.max_tokens) {
            return Err(Error::invalid("the answer is complete: there is no token to generate"));
        }
        let (whole, context) = (job.length_max(), u64::from(config.context_max));
        if whole > context {
            return Err(Error::invalid(format!(
                "{whole} tokens of prompt and answer; the context is {context}"
            )));
        }
        let room = self.capacity_tokens();
        if tokens > room {
            return Err(Error::invalid(format!("{tokens} tokens find no room in KV memory for {room}")));
        }
        if !job.urgency.due.0.is_finite() {
            return Err(Error::invalid("the time at which the request is due is no number"));
        }
        if job.urgency.tbt_slo.is_some_and(|slo| slo.0.is_nan()) {
            return Err(Error::invalid("the objective for the time between tokens is no number"));
        }
        if !wanted.sampling.is_finite() {
            return Err(Error::invalid("a parameter of sampling is no number"));
        }
        if wanted.eos_ids.len() > EOS_IDS_MAX || wanted.logprobs.is_some_and(|top| top > LOGPROBS_MAX) {
            return Err(Error::invalid("more end tokens or log-probabilities than any answer has use for"));
        }
        Ok(())
    }

    /// Checks that KV can be sent to such a receiver.
    ///
    /// # Errors
    /// `Invalid` with the reason.
    pub(super) fn check_hand_off(&self, job: &Job, to: &HandOff) -> Result<()> {
        let landing = &to.landing;
        if to.to == self.id {
            return Err(Error::invalid("KV is to be sent to where it is"));
        }
        if landing.regions.is_empty() || landing.regions.len() > REGIONS_MAX {
            return Err(Error::invalid(format!("{} names no memory to write to", to.to)));
        }
        if !self.can_exchange(to.wire) {
            return Err(Error::invalid(format!("KV does not travel as {}", to.wire)));
        }
        let (slots, slot_bytes) = (landing.slots, landing.slot_bytes);
        let all_bytes = slot_bytes.checked_mul(slots.into()).filter(|&all| all <= LANDING_BYTES_MAX);
        let token_bytes = self.pages.shape.wire_token_bytes(to.wire);
        if slots == 0 || slots > SLOTS_MAX || slot_bytes < token_bytes || all_bytes.is_none() {
            return Err(Error::invalid(format!("{slots} staging slots of {slot_bytes} bytes are of no use")));
        }
        if to.from as usize > job.length() || to.attempt != job.attempt {
            return Err(Error::invalid("the hand-off belongs to another sequence"));
        }
        Ok(())
    }

    /// Checks that a part of a prompt can come from `holder`.
    ///
    /// # Errors
    /// `Invalid` with the reason.
    pub(super) fn check_source(&self, holder: InstanceId) -> Result<()> {
        if holder == self.id {
            return Err(Error::invalid("KV is to come from where it is wanted"));
        }
        Ok(())
    }

    /// Whether pieces of this dtype can be gathered and scattered here.
    fn can_exchange(&self, wire: DType) -> bool {
        DType::FLOATS.contains(&wire)
    }

    /// Tokens that fit into the KV memory.
    fn capacity_tokens(&self) -> u64 {
        let shape = self.forward.shape();
        u64::from(shape.blocks) * u64::from(shape.block_tokens)
    }

    /// Checks a job with its hand-off and its pull.
    ///
    /// # Errors
    /// `Invalid` with the reason.
    pub(super) fn check_add(
        &self,
        job: &Job,
        hand_off: Option<&HandOff>,
        pull: Option<Source>,
    ) -> Result<()> {
        let here = if hand_off.is_some() { job.length() as u64 } else { job.length_max() };
        self.check_job(job, here)?;
        if let Some(to) = hand_off {
            self.check_hand_off(job, to)?;
        }
        pull.map_or(Ok(()), |source| self.check_source(source.holder))
    }
}

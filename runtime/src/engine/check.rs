//! Validation of orders before anything acts on them.
//!
//! Routers and peers are other processes, which may be broken or hostile: an invalid order is refused.

use super::messages::{HandOff, Job, Lacking};
use super::worker::Worker;
use crate::grammar::GRAMMAR_BYTES_MAX;
use mixfleet_hal::{DType, Error, Result};
use mixfleet_scheduler::batch::Urgency;
use mixfleet_scheduler::fleet::InstanceId;
use mixfleet_scheduler::transfer::PrefixSource;

/// Maximum staging memory of one receiver, and of its slots: the sender allocates as much.
const LANDING_BYTES_MAX: u64 = 1 << 30;
const SLOTS_MAX: u32 = 1 << 12;

/// Maximum descriptors of one landing.
const REGIONS_MAX: usize = 16;

/// Maximum end tokens of an answer, and log-probabilities of a token.
const EOS_IDS_MAX: usize = 1 << 10;
const LOGPROBS_MAX: u32 = 1 << 10;
const BAD_WORDS_MAX: usize = 1 << 10;
const BAD_WORD_TOKENS_MAX: usize = 1 << 10;

/// Why a KV node takes no request.
const NOTHING_COMPUTED: &str = "nothing is computed here: this is a KV node";

/// Refuses an order if a condition does not hold, with the reason.
macro_rules! require {
    ($holds:expr, $($reason:tt)*) => {
        if !$holds {
            return Err(Error::invalid(format!($($reason)*)));
        }
    };
}

impl Worker {
    /// Checks that this instance can carry out a job, for which `tokens` must fit here.
    ///
    /// # Errors
    /// `Invalid` with the reason.
    pub(super) fn check_job(&self, job: &Job, tokens: u64) -> Result<()> {
        let config = self.steps.forward.config();
        let wanted = &job.wanted;
        let (prompt, generated) = (wanted.prompt_ids.len() as u64, job.generated.len() as u64);
        require!(prompt > 0, "the prompt has no tokens");
        let masked = wanted.minimum.iter().flat_map(|minimum| minimum.masked_ids.iter());
        let vocabulary = wanted.vocabulary.iter();
        let words = || vocabulary.clone().flat_map(|vocabulary| vocabulary.bad_words.iter());
        let allowed = vocabulary.clone().flat_map(|vocabulary| vocabulary.allowed_ids.iter());
        let masked = masked.chain(allowed).chain(words().flat_map(|word| word.iter()));
        let given = wanted.prompt_ids.iter().chain(&*wanted.forced_ids).chain(masked);
        let (vocab, ids) = (config.vocab, given.chain(&job.generated));
        let highest = ids.copied().max().unwrap_or(0);
        require!(highest < vocab, "token {highest} has no row in the model's embedding, which has {vocab}");
        let max_tokens = u64::from(wanted.max_tokens);
        require!(generated < max_tokens, "the answer is complete: there is no token to generate");
        let forced = wanted.forced_ids.len() as u64;
        require!(forced <= max_tokens, "{forced} tokens are forced of an answer of {max_tokens}");
        let (whole, context) = (job.length_max(), u64::from(config.context_max));
        require!(whole <= context, "{whole} tokens of prompt and answer; the context is {context}");
        let room = self.limits.kv_tokens();
        require!(tokens <= room, "{tokens} tokens find no room in KV memory for {room}");
        let Urgency { due, tbt_slo, .. } = job.urgency;
        require!(due.0.is_finite(), "the time at which the request is due is not a number");
        let tbt_is_number = tbt_slo.is_none_or(|slo| !slo.0.is_nan());
        require!(tbt_is_number, "the objective for the time between tokens is not a number");
        require!(wanted.sampling.is_finite(), "a parameter of sampling is not a number");
        let (ends, logprobs) = (wanted.eos_ids.len(), wanted.logprobs.unwrap_or(0));
        let masked = wanted.minimum.as_ref().map_or(0, |minimum| minimum.masked_ids.len());
        let is_useful = ends.max(masked) <= EOS_IDS_MAX && logprobs <= LOGPROBS_MAX;
        require!(is_useful, "more end tokens or log-probabilities than supported");
        let words_fit = words().count() <= BAD_WORDS_MAX
            && words().all(|word| (1..=BAD_WORD_TOKENS_MAX).contains(&word.len()));
        require!(words_fit, "more words that the answer may not have than supported");
        let grammar_bytes = wanted.grammar.as_ref().map_or(0, |grammar| grammar.text().len());
        require!(
            grammar_bytes <= GRAMMAR_BYTES_MAX,
            "a grammar of {grammar_bytes} bytes is longer than any answer"
        );
        Ok(())
    }

    /// Checks that KV can be sent to such a receiver.
    ///
    /// # Errors
    /// `Invalid` with the reason.
    pub(super) fn check_hand_off(&self, job: &Job, to: &HandOff) -> Result<()> {
        let landing = &to.landing;
        require!(to.to != self.id, "KV is to be sent to where it is");
        let regions = landing.regions.len();
        require!((1..=REGIONS_MAX).contains(&regions), "{} names no memory to write to", to.to);
        require!(DType::KV.contains(&to.wire), "KV is not transferred as {}", to.wire);
        let (slots, slot_bytes) = (landing.slots, landing.slot_bytes);
        let all_bytes = slot_bytes.checked_mul(slots.into()).filter(|&all| all <= LANDING_BYTES_MAX);
        let token_bytes = self.kv.layer_bytes(1, to.wire);
        let is_of_use = (1..=SLOTS_MAX).contains(&slots) && slot_bytes >= token_bytes && all_bytes.is_some();
        require!(is_of_use, "{slots} staging slots of {slot_bytes} bytes are of no use");
        let Lacking { from, read_from } = &to.lacking;
        let of_layers = [0, self.kv.layers as usize].contains(&read_from.len());
        let is_of_job = *from as usize <= job.length() && of_layers && to.attempt == job.attempt;
        require!(is_of_job, "the hand-off belongs to another sequence");
        Ok(())
    }

    /// Checks that a part of a prompt can come from `holder`.
    ///
    /// # Errors
    /// `Invalid` with the reason.
    pub(super) fn check_source(&self, holder: InstanceId) -> Result<()> {
        require!(holder != self.id, "KV is to come from where it is wanted");
        Ok(())
    }

    /// Checks that requests are computed here.
    ///
    /// # Errors
    /// `Invalid` with the reason.
    pub(super) fn check_computes(&self) -> Result<()> {
        require!(self.steps.forward.computes(), "{NOTHING_COMPUTED}");
        Ok(())
    }

    /// Checks a job with its hand-off and its pull.
    ///
    /// # Errors
    /// `Invalid` with the reason.
    pub(super) fn check_add(
        &self,
        job: &Job,
        hand_off: Option<&HandOff>,
        pull: Option<PrefixSource>,
    ) -> Result<()> {
        self.check_computes()?;
        let here = if hand_off.is_some() { job.length() as u64 } else { job.length_max() };
        self.check_job(job, here)?;
        if let Some(to) = hand_off {
            self.check_hand_off(job, to)?;
        }
        pull.map_or(Ok(()), |source| self.check_source(source.holder))
    }
}

//! Counts and times one request for metrics and log.

use super::auth::Tenant;
use super::shapes::Endpoint;
use super::usage::{Account, Spent};
use crate::env::SharedEnv;
use crate::metrics::{ClassLabels, Metrics, RequestLabels, RequestOutcome};
use crate::placements::Placements;
use crate::request::{Failure, FailureKind, FinishReason, ServiceTier};
use crate::trace::{RequestTrace, SpanFact};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::outside::EngineUsage;
use mixfleet_hal::units::Seconds;
use std::sync::Arc;

/// Counts and times of a request so far. If it is dropped before an outcome is known, the client has left.
pub(crate) struct Tally {
    metrics: Metrics,
    env: SharedEnv,
    placements: Arc<Placements>,
    endpoint: Endpoint,
    class: ClassLabels,
    account: Arc<Account>,
    id: String,
    arrived_s: f64,
    /// The time of the last token of each choice.
    last_token_s: Vec<Option<f64>>,
    first_token_s: Option<f64>,
    prompt_tokens: u64,
    /// Assumed length of a prompt that an engine computes and reports with its answer.
    assumed_prompt_tokens: Option<u32>,
    cached_tokens: u64,
    tokens: u64,
    outcome: RequestOutcome,
    trace: Option<RequestTrace>,
    /// The reason for a failure, of a request that is traced.
    failed: Option<String>,
}

impl Tally {
    /// Starts the counts of a request that arrived at `arrived_s` of the environment's clock.
    pub(crate) fn new(
        (metrics, env, placements): (Metrics, SharedEnv, Arc<Placements>),
        (endpoint, tier, tenant): (Endpoint, ServiceTier, &Tenant),
        id: String,
        arrived_s: f64,
        trace: Option<RequestTrace>,
    ) -> Self {
        let outcome = RequestOutcome::Cancelled;
        Tally {
            metrics,
            env,
            placements,
            endpoint,
            class: ClassLabels::of(tier as u32),
            account: tenant.account.clone(),
            id,
            arrived_s,
            last_token_s: Vec::new(),
            first_token_s: None,
            prompt_tokens: 0,
            assumed_prompt_tokens: None,
            cached_tokens: 0,
            tokens: 0,
            outcome,
            trace,
            failed: None,
        }
    }

    /// Records that the engine accepted the request.
    pub(crate) fn accepted(&mut self, prompt_tokens: impl Iterator<Item = u32>, choices: usize) {
        self.last_token_s = vec![None; choices];
        prompt_tokens.for_each(|tokens| self.prompt(tokens));
    }

    /// Records that an engine computes a prompt of about `tokens` tokens and reports the exact length with
    /// its answer. A client that leaves before that pays for `tokens`.
    pub(crate) fn prompt_begins(&mut self, tokens: u32) {
        self.assumed_prompt_tokens = Some(tokens);
    }

    /// Records tokens of a choice that were generated and not read, and cached tokens of the prompt, for an
    /// answer that its client left.
    pub(crate) fn left(&mut self, unread: u32, cached: Option<u32>) {
        self.tokens += u64::from(unread);
        self.cached_tokens += u64::from(cached.unwrap_or(0));
        self.metrics.generation_tokens.get_or_create(&self.class).inc_by(unread.into());
    }

    fn prompt(&mut self, tokens: u32) {
        self.assumed_prompt_tokens = None;
        self.prompt_tokens += u64::from(tokens);
        self.metrics.prompt_tokens.get_or_create(&self.class).inc_by(tokens.into());
        self.metrics.request_prompt_tokens.observe(tokens.into());
    }

    /// Records that the engine rejected the request.
    pub(crate) fn rejected(&mut self) {
        self.outcome = RequestOutcome::Rejected;
    }

    /// Records a token of a choice.
    pub(crate) fn token(&mut self, choice: usize) {
        let now_s = self.env.now().0;
        match self.last_token_s[choice].replace(now_s) {
            None => self.metrics.time_to_first_token_s.observe(now_s - self.arrived_s),
            Some(last_s) => self.metrics.inter_token_latency_s.observe(now_s - last_s),
        }
        self.first_token_s.get_or_insert(now_s);
        self.tokens += 1;
        self.metrics.generation_tokens.get_or_create(&self.class).inc();
    }

    /// Records that a choice is complete.
    pub(crate) fn choice_done(&mut self, generated: u32, cached: Option<u32>) {
        self.cached_tokens += u64::from(cached.unwrap_or(0));
        self.metrics.request_generation_tokens.observe(generated.into());
        self.metrics.cached_tokens.inc_by(cached.unwrap_or(0).into());
    }

    /// Records why complete choices ended.
    pub(crate) fn finished(&mut self, reason: FinishReason, choices: u32) {
        self.metrics.succeeded(reason, choices);
    }

    /// Records the lengths of a whole answer, whose tokens this process did not see one by one.
    pub(crate) fn told(&mut self, usage: EngineUsage) {
        let EngineUsage { prompt_tokens, completion_tokens, cached_tokens } = usage;
        self.prompt(prompt_tokens);
        let unseen = u64::from(completion_tokens).saturating_sub(self.tokens);
        self.tokens += unseen;
        self.metrics.generation_tokens.get_or_create(&self.class).inc_by(unseen);
        self.choice_done(to_u32(self.tokens), cached_tokens);
    }

    /// Records that all choices are complete.
    pub(crate) fn succeeded(&mut self) {
        self.outcome = RequestOutcome::Success;
    }

    /// Records that the engine did not complete the request.
    pub(crate) fn failed(&mut self, failure: &Failure) {
        if failure.kind == FailureKind::TurnedAway {
            return self.rejected();
        }
        self.failed_because(&failure.message);
    }

    /// Records why the engine could not complete the request.
    pub(crate) fn failed_because(&mut self, reason: &str) {
        self.outcome = RequestOutcome::Failed;
        self.failed = self.trace.map(|_| reason.to_owned());
        tracing::warn!(id = %self.id, reason, "request failed");
    }
}

impl Drop for Tally {
    fn drop(&mut self) {
        let took_s = self.env.now().0 - self.arrived_s;
        let left = self.outcome == RequestOutcome::Cancelled;
        if let Some(tokens) = self.assumed_prompt_tokens.filter(|_| left) {
            self.prompt(tokens);
        }
        if self.outcome == RequestOutcome::Success {
            self.metrics.e2e_request_latency_s.observe(took_s);
        }
        let labels = RequestLabels { endpoint: self.endpoint.name(), outcome: self.outcome };
        self.metrics.requests.get_or_create(&labels).inc();
        let usd = self.placements.usd(&self.id);
        self.account.add(&Spent {
            requests: 1,
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.cached_tokens,
            completion_tokens: self.tokens,
            usd: usd.unwrap_or(0.0),
        });
        let ended = (labels.endpoint, Seconds(self.arrived_s));
        let facts = || {
            let text = |text: &str| SpanFact::Text(text.to_owned());
            let mut facts = vec![
                ("mixfleet.request.id", text(&self.id)),
                ("mixfleet.outcome", text(self.outcome.name())),
                ("mixfleet.class", text(self.class.class)),
                ("gen_ai.usage.input_tokens", SpanFact::Count(self.prompt_tokens)),
                ("gen_ai.usage.output_tokens", SpanFact::Count(self.tokens)),
            ];
            facts.extend(usd.map(|usd| ("mixfleet.usd", SpanFact::Real(usd))));
            facts
        };
        self.metrics.traces.end(&*self.env, self.trace, ended, self.failed.take(), facts);
        tracing::info!(
            id = %self.id,
            endpoint = labels.endpoint,
            outcome = self.outcome.name(),
            class = self.class.class,
            prompt_tokens = self.prompt_tokens,
            cached_tokens = self.cached_tokens,
            tokens = self.tokens,
            ttft_s = self.first_token_s.map(|first_s| first_s - self.arrived_s),
            took_s,
            usd,
            "request ended"
        );
    }
}

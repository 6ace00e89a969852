//! Monitors an engine: whether it answers, its models, and its load.

use super::breaker::Breaker;
use super::cached::KV_DTYPE;
use super::calibrate::calibrate;
use super::{BLOCK_TOKENS, CONTEXT, EngineSpec, Gateway, OTHERS_MAX, SEQUENCES};
use crate::env::SharedEnv;
use crate::metrics::{DeviceLabels, Metrics, ServingState, StateHolder};
use mixfleet_hal::cast::{to_i64, to_u32};
use mixfleet_hal::outside::{EngineFault, EngineFaultKind, EngineState};
use mixfleet_scheduler::cost::{Coefficients, CostModel};
use mixfleet_scheduler::fleet::{Event, Instance, InstanceId, Role};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Interval between probes of an engine that is up, and of one that is not.
const PROBE_EVERY: Duration = Duration::from_secs(2);
const PROBE_AGAIN: Duration = Duration::from_secs(1);
/// Time in which all engines may be measured before the first that is up serves alone.
const FIRST_LOOKS: Duration = Duration::from_secs(5);
/// Interval between two looks for a first engine.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Prompt tokens of a step, as engines have them by default.
const STEP_TOKENS: u32 = 2048;

/// The model's name for clients, once an engine answers.
pub(super) async fn first_name(
    env: &SharedEnv,
    given: Option<String>,
    specs: &[EngineSpec],
    metrics: &Metrics,
) -> String {
    let mut said = vec![String::new(); specs.len()];
    loop {
        let probes = specs.iter().map(|spec| spec.engine.probe());
        for (at, probe) in futures_util::future::join_all(probes).await.into_iter().enumerate() {
            let listed = match probe {
                Ok(EngineState { models, .. }) => models.into_iter().next().map(|model| model.name),
                Err(fault) => {
                    let words = fault.to_string();
                    if fault.kind != EngineFaultKind::Vacant {
                        let holder = (StateHolder::Engine, specs[at].engine.name());
                        metrics.enter_state(env.now(), holder, not_serving(fault.kind), &words);
                    }
                    if said[at] != words && fault.kind != EngineFaultKind::Vacant {
                        tracing::warn!(
                            engine = specs[at].engine.name(),
                            fault = words,
                            "an engine does not answer yet"
                        );
                        said[at] = words;
                    }
                    continue;
                }
            };
            if let Some(name) = given.clone().or_else(|| specs[at].model.clone()).or(listed) {
                return name;
            }
        }
        env.sleep(LOOK_EVERY).await;
    }
}

/// Begins to monitor all engines. Engines that answer now are up when it returns, but for those that take
/// long to be measured while another one is up.
pub(super) async fn first_looks(gateway: &Arc<Gateway>) {
    let (tell, mut looked) = tokio::sync::mpsc::unbounded_channel();
    for at in 0..gateway.members.len() {
        let (strong, tell) = (gateway.clone(), tell.clone());
        gateway.env.spawn(Box::pin(async move {
            strong.look_at(at).await;
            // the receiver is gone if this took long
            let _ = tell.send(());
            drop(tell);
            let gateway = Arc::downgrade(&strong);
            drop(strong);
            keep(gateway, at).await;
        }));
    }
    drop(tell);
    let is_up = || gateway.members.iter().any(|member| *member.up.borrow());
    let mut deadline = gateway.env.sleep(FIRST_LOOKS);
    loop {
        tokio::select! {
            biased;
            more = looked.recv() => if more.is_none() { return },
            () = &mut deadline => break,
        }
    }
    while !is_up() && looked.recv().await.is_some() {}
}

/// Probes an engine until the gateway is gone.
async fn keep(gateway: Weak<Gateway>, at: usize) {
    loop {
        let Some(strong) = gateway.upgrade() else { return };
        let is_up = *strong.members[at].up.borrow();
        let wait = strong.env.sleep(if is_up { PROBE_EVERY } else { PROBE_AGAIN });
        let look = strong.members[at].look.clone();
        drop(strong);
        tokio::select! {
            () = wait => {}
            () = look.notified() => {}
        }
        let Some(strong) = gateway.upgrade() else { return };
        strong.look_at(at).await;
    }
}

/// The state of an engine that gives this fault to a probe.
fn not_serving(kind: EngineFaultKind) -> ServingState {
    if kind == EngineFaultKind::Busy { ServingState::Loading } else { ServingState::Down }
}

/// Layout and dtype of an engine's KV, as far as it tells what they depend on.
fn kv_form(told: &EngineState) -> String {
    let version = told.version.as_deref().unwrap_or("?");
    let dtype = told.kv_dtype.as_deref().unwrap_or("?");
    let block_tokens = told.block_tokens.map_or("?".into(), |tokens| tokens.to_string());
    format!("{version} {block_tokens} {dtype}")
}

impl Gateway {
    /// Probes an engine once.
    pub(super) async fn look_at(&self, at: usize) {
        match self.engine(at).probe().await {
            Ok(state) => self.answered(at, &state).await,
            Err(fault) => self.engine_down(at, &fault),
        }
    }

    /// The measured times of an engine whose part and shape are not declared.
    async fn measured(&self, engine: &str, at: usize, context: u32) -> Result<Coefficients, EngineFault> {
        tracing::info!(engine, "measuring: its part and shape are not declared");
        let measured = calibrate(&*self.env, self.engine(at), &self.name, context)
            .await
            .map_err(|fault| EngineFault::new(fault.kind, format!("it cannot be measured: {fault}")))?;
        let rounded = |value: f64| (value * 1e6).round() / 1e6;
        tracing::info!(
            engine,
            prefill_tokens_per_s = (1.0 / measured.prefill_s.per_token).round(),
            prefill_overhead_s = rounded(measured.prefill_s.overhead),
            decode_step_s = rounded(measured.decode_s.base),
            "measured"
        );
        Ok(measured)
    }

    async fn answered(&self, at: usize, state: &EngineState) {
        let (spec, engine) = (&self.members[at].spec, self.engine(at).name());
        let wanted = spec.model.as_deref().unwrap_or(&self.name);
        let Some(model) = state.models.iter().find(|model| model.name == wanted) else {
            let listed: Vec<&str> = state.models.iter().map(|model| model.name.as_str()).collect();
            let detail = format!("it serves {}, and not {wanted}", listed.join(", "));
            return self.engine_down(at, &EngineFault::new(EngineFaultKind::Malformed, detail));
        };
        let context = model.context.unwrap_or(CONTEXT).max(2);
        if !*self.members[at].up.borrow() {
            let cost = match &spec.cost {
                Some(cost) => cost.clone(),
                None => match self.measured(engine, at, context).await {
                    Ok(measured) => CostModel::Coefficients(measured),
                    Err(fault) => return self.engine_down(at, &fault),
                },
            };
            if spec.role != Role::Auto && !state.hands_off {
                let role = spec.role;
                tracing::warn!(engine, ?role, "it does not show that it hands KV over, as its role needs");
            }
            for missing in &state.missing {
                tracing::warn!(engine, missing, "an engine reports incomplete data");
            }
            self.engine_up(at, state, context, cost);
            let version = state.version.as_deref();
            tracing::info!(engine, version, model = wanted, context, "engine up");
        }
        self.update(at, state);
    }

    fn engine_up(&self, at: usize, told: &EngineState, context: u32, cost: CostModel) {
        let spec = &self.members[at].spec;
        let sequences = told.sequences_max.unwrap_or(SEQUENCES);
        let block_tokens = told.block_tokens.unwrap_or(BLOCK_TOKENS);
        let instance = Instance {
            id: InstanceId(to_u32(at)),
            device: self.engine(at).name().into(),
            role: spec.role,
            pool: 0,
            cost: Arc::new(cost),
            price: spec.price,
            kv_capacity_tokens: told.kv_tokens.unwrap_or(u64::from(context) * u64::from(sequences)),
            // one with a role is taken at its operator's word
            nic: (told.hands_off || spec.takes_kv || spec.role != Role::Auto).then_some(spec.nic),
            kv_block_tokens: block_tokens,
            kv_dtype: KV_DTYPE,
            prefill_tokens_beside_decode_max: None,
            step_tokens_max: STEP_TOKENS,
            kv_copies: mixfleet_scheduler::cost::KvCopyCost::default(),
            kv_parts: mixfleet_scheduler::batch::PageParts::ONE,
        };
        self.metrics.loaded(&instance);
        let now = self.env.now();
        let mut state = self.lock();
        let seat = &mut state.seats[at];
        (seat.instance, seat.context, seat.rests) = (Some(instance.clone()), context, false);
        (seat.is_leaving, seat.is_vacant, seat.said) = (told.leaving, false, String::new());
        (seat.others, seat.others_seen) = (0, 0);
        seat.breaker.restarted(now);
        seat.hand_offs = Breaker::default();
        seat.cache.set_block_tokens(block_tokens);
        seat.kv_form = kv_form(told);
        if let Some(canaries) = state.canaries.as_mut() {
            canaries.restarted(InstanceId(to_u32(at)));
        }
        state.front.step(Event::InstanceUp(instance));
        state.tell_cache(at);
        self.count_instances(&state);
        drop(state);
        self.members[at].up.send_replace(true);
    }

    /// Takes what a probe of an engine that is up tells.
    fn update(&self, at: usize, told: &EngineState) {
        let now = self.env.now();
        let mut state = self.lock();
        let seat = &mut state.seats[at];
        seat.hand_offs.try_again(now);
        seat.is_leaving = told.leaving;
        if std::mem::replace(&mut seat.rests, told.leaving) != told.leaving {
            self.count_instances(&state);
        }
        let seat = &mut state.seats[at];
        let all = told.running.zip(told.waiting).map(|(running, waiting)| running.saturating_add(waiting));
        let seen = all.map_or(0, |all| all.saturating_sub(seat.own)).min(OTHERS_MAX);
        // A single probe may have seen requests in the middle of their end or arrival.
        let others = seen.min(std::mem::replace(&mut seat.others_seen, seen));
        let (own, decoding) = (seat.own, seat.decoding);
        state.tell_others(at, others);
        drop(state);
        let labels = DeviceLabels { device: self.engine(at).name().to_owned() };
        let running = told.running.unwrap_or(decoding);
        let waiting = told.waiting.unwrap_or(own.saturating_sub(decoding));
        self.metrics.requests_running.get_or_create(&labels).set(to_i64(running));
        self.metrics.requests_waiting.get_or_create(&labels).set(to_i64(waiting));
        if let Some(usage) = told.kv_usage {
            self.metrics.kv_cache_usage.get_or_create(&labels).set(usage);
        }
    }

    /// Handles an engine that does not serve: its requests continue elsewhere.
    fn engine_down(&self, at: usize, fault: &EngineFault) {
        let engine = self.engine(at).name();
        let mut state = self.lock();
        let seat = &mut state.seats[at];
        let words = fault.to_string();
        let is_said = std::mem::replace(&mut seat.said, words.clone()) == words;
        seat.is_vacant = fault.kind == EngineFaultKind::Vacant;
        seat.is_loading = not_serving(fault.kind) == ServingState::Loading;
        if seat.instance.take().is_none() {
            self.count_instances(&state);
            drop(state);
            if !is_said && fault.kind != EngineFaultKind::Vacant {
                tracing::warn!(engine, %fault, "an engine does not serve");
            }
            return;
        }
        state.front.step(Event::InstanceDown { instance: InstanceId(to_u32(at)) });
        self.count_instances(&state);
        drop(state);
        tracing::error!(engine, %fault, "engine lost; its requests continue elsewhere");
        self.metrics.unload(engine);
        self.members[at].up.send_replace(false);
    }
}

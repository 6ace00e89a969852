//! Canaries of engines whose KV is a hash of the prompt, and is damaged in transfer.

use super::tests::{parts, seeded, spec, told, wanted};
use super::*;
use crate::env::{Env, SeededEnv};
use crate::events::Replay;
use mixfleet_hal::outside::{
    CanaryTerms, DrawnToken, EngineAnswer, EngineCall, EngineFuture, EngineHandOff, EngineKvFeed,
    EngineShare, EngineState, RankedToken, WholeAnswer,
};
use mixfleet_hal::random::{Stream, mix};
use mixfleet_scheduler::canary::CanaryPhase;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};

const BLOCKS: u64 = 8;
const LAYERS: u64 = 4;
const VOCABULARY: u64 = 32;

/// What happens to KV in transfer.
#[derive(Clone, Copy, Debug, PartialEq)]
enum KvFault {
    Clean,
    /// A value of one block is another one.
    Flip,
    /// The last blocks do not arrive.
    Truncate,
    /// Some blocks are those of the request before.
    Stale,
    /// All blocks are another prompt's.
    OtherPrompt,
    /// Two layers have each other's.
    SwapLayers,
}

const FAULTS: [KvFault; 5] =
    [KvFault::Flip, KvFault::Truncate, KvFault::Stale, KvFault::OtherPrompt, KvFault::SwapLayers];

/// KV of a prompt: a hash for each block and layer.
type Kv = Vec<u64>;

fn kv_of(prompt: &[u8]) -> Kv {
    let all = prompt.iter().fold(7, |hash, byte| mix(hash ^ u64::from(*byte)));
    (0..BLOCKS * LAYERS).map(|at| mix(all ^ mix(at))).collect()
}

fn at(block: u64, layer: u64) -> usize {
    (block * LAYERS + layer) as usize
}

fn damaged(fault: KvFault, kv: &Kv, before: &Kv) -> Kv {
    let mut kv = kv.clone();
    let blocks =
        |which: std::ops::Range<u64>| which.flat_map(|block| (0..LAYERS).map(move |layer| at(block, layer)));
    match fault {
        KvFault::Clean => {}
        KvFault::Flip => blocks(2..3).for_each(|value| kv[value] ^= 1 << 62),
        KvFault::Truncate => blocks(6..8).for_each(|value| kv[value] = 0),
        KvFault::Stale => blocks(3..5).for_each(|value| kv[value] = before[value]),
        KvFault::OtherPrompt => kv = before.clone(),
        KvFault::SwapLayers => (0..BLOCKS).for_each(|block| kv.swap(at(block, 0), at(block, 1))),
    }
    kv
}

/// Logits of the first token: each block and layer adds a random vector, so that a damaged one moves them by
/// its share.
fn logits(kv: &Kv, noise: &mut Stream, drift: f64) -> Vec<f64> {
    let scale = 3.0 / (kv.len() as f64).sqrt();
    let normal =
        |value: usize, token: u64| Stream::new(mix(kv[value] ^ mix(value as u64)) ^ token).next_normal();
    (0..VOCABULARY)
        .map(|token| {
            let sum: f64 = (0..kv.len()).map(|value| normal(value, token)).sum();
            scale * sum + drift * noise.next_normal()
        })
        .collect()
}

fn ranked(logits: &[f64]) -> Vec<RankedToken> {
    let sum: f64 = logits.iter().map(|logit| logit.exp()).sum();
    let mut all: Vec<RankedToken> = logits
        .iter()
        .enumerate()
        .map(|one| RankedToken { token: one.0.to_string(), logprob: one.1 - sum.ln() })
        .collect();
    all.sort_by(|one, other| other.logprob.total_cmp(&one.logprob));
    all.truncate(5);
    all
}

/// KV that waits to be pulled, of all engines.
#[derive(Default)]
struct Transfers {
    kept: HashMap<String, Kv>,
    before: Kv,
    count: usize,
}

struct KvEngine {
    name: String,
    env: Arc<SeededEnv>,
    role: Role,
    transfers: Arc<Mutex<Transfers>>,
    /// The fault in KV that this engine pulls, and the affected share.
    fault: Mutex<(KvFault, f64)>,
    /// Its prefix cache, by salt and prompt: damaged KV stays damaged in it.
    cache: Mutex<HashMap<(String, Vec<u8>), Kv>>,
    drift: f64,
    /// Whether it takes priorities, and whether it tells log-probabilities.
    has_priorities: bool,
    is_silent: Mutex<bool>,
    dtype: Mutex<&'static str>,
    canaries: AtomicUsize,
    canaries_now: AtomicUsize,
    canaries_most: AtomicUsize,
    is_up: Mutex<bool>,
}

/// A body: a client's is its prompt, a canary's has a salt before it.
fn split(body: &[u8]) -> (String, Vec<u8>, bool) {
    let text = String::from_utf8(body.to_vec()).unwrap();
    match text.split_once('|') {
        Some((salt, prompt)) => {
            let (salt, low) = salt.split_once('#').unwrap();
            (salt.to_owned(), prompt.as_bytes().to_vec(), low == "low")
        }
        None => (String::new(), body.to_vec(), false),
    }
}

/// What an engine says to a prompt with this KV, without drift.
fn said(kv: &Kv) -> String {
    ranked(&logits(kv, &mut Stream::new(0), 0.0))[0].token.clone()
}

impl KvEngine {
    fn answer(&self, call: &EngineCall) -> Result<EngineAnswer, EngineFault> {
        let (salt, prompt, low) = split(&call.body);
        if low && !self.has_priorities {
            return Ok(EngineAnswer::Refused { status: 400, body: b"{}".to_vec() });
        }
        let usage = EngineUsage { prompt_tokens: 128, completion_tokens: 1, cached_tokens: None };
        let key = (salt.clone(), prompt.clone());
        let cached = self.cache.lock().unwrap().get(&key).cloned();
        let kv = match &call.share {
            EngineShare::Whole => cached.unwrap_or_else(|| kv_of(&prompt)),
            EngineShare::Prompt => {
                let mut transfers = self.transfers.lock().unwrap();
                transfers.count += 1;
                let id = format!("{{\"at\":{}}}", transfers.count);
                transfers.kept.insert(id.clone(), cached.unwrap_or_else(|| kv_of(&prompt)));
                return Ok(EngineAnswer::HandedOff {
                    hand_off: EngineHandOff(id.into()),
                    usage: Some(usage),
                });
            }
            EngineShare::Answer(hand_off) => {
                let mut transfers = self.transfers.lock().unwrap();
                let kv = transfers.kept.remove(&*hand_off.0).expect("it is pulled once");
                let before =
                    if transfers.before.is_empty() { kv_of(b"other") } else { transfers.before.clone() };
                transfers.before = kv.clone();
                let (fault, share) = *self.fault.lock().unwrap();
                let is_hit = (self.env.random() as f64) < share * u64::MAX as f64;
                if is_hit { damaged(fault, &kv, &before) } else { kv }
            }
        };
        self.cache.lock().unwrap().insert(key, kv.clone());
        let mut noise = Stream::new(self.env.random());
        let body = match salt.is_empty() {
            true => said(&kv),
            false => {
                self.canaries.fetch_add(1, Ordering::Relaxed);
                let listed = ranked(&logits(&kv, &mut noise, self.drift));
                let row = |one: &RankedToken| format!("{} {}", one.token, one.logprob);
                listed.iter().map(row).collect::<Vec<_>>().join("\n")
            }
        };
        let (body, usage) = (body.into_bytes(), Some(usage));
        Ok(EngineAnswer::Whole(WholeAnswer { body, usage, choices: 1, at_limit: 1 }))
    }
}

impl OutsideEngine for KvEngine {
    fn name(&self) -> &str {
        &self.name
    }

    fn probe(&self) -> EngineFuture<'_, Result<EngineState, EngineFault>> {
        Box::pin(async {
            if !*self.is_up.lock().unwrap() {
                return Err(EngineFault::new(EngineFaultKind::Unreachable, "gone"));
            }
            let kv_dtype = Some((*self.dtype.lock().unwrap()).to_owned());
            Ok(EngineState { kv_dtype, hands_off: true, ..told() })
        })
    }

    fn follow_kv(&self) -> EngineFuture<'_, Result<Box<dyn EngineKvFeed>, EngineFault>> {
        Box::pin(async { Err(EngineFault::new(EngineFaultKind::Failed, "it does not tell")) })
    }

    fn prompt_tokens<'a>(
        &'a self,
        _: &'a EngineCall,
    ) -> EngineFuture<'a, Result<Option<Vec<u32>>, EngineFault>> {
        Box::pin(async { Ok(None) })
    }

    fn ask<'a>(&'a self, call: &'a EngineCall) -> EngineFuture<'a, Result<EngineAnswer, EngineFault>> {
        Box::pin(async move {
            let is_canary = !split(&call.body).0.is_empty();
            if is_canary {
                let now = self.canaries_now.fetch_add(1, Ordering::Relaxed) + 1;
                self.canaries_most.fetch_max(now, Ordering::Relaxed);
            }
            self.env.sleep(Duration::from_secs_f64(if is_canary { 0.5 } else { 0.05 })).await;
            self.canaries_now.fetch_sub(usize::from(is_canary), Ordering::Relaxed);
            self.answer(call)
        })
    }

    fn canary_body(
        &self,
        _: EngineEndpoint,
        body: &[u8],
        terms: &CanaryTerms,
    ) -> Result<Vec<u8>, EngineFault> {
        let low = if terms.is_low_priority { "low" } else { "even" };
        Ok([format!("{}#{low}|", terms.salt).as_bytes(), body].concat())
    }

    fn drawn_tokens(&self, _: EngineEndpoint, document: &[u8]) -> Result<Vec<DrawnToken>, EngineFault> {
        if *self.is_silent.lock().unwrap() {
            return Err(EngineFault::new(EngineFaultKind::Malformed, "it does not tell"));
        }
        let text = String::from_utf8(document.to_vec()).unwrap();
        let one = |line: &str| {
            let (token, logprob) = line.split_once(' ').unwrap();
            RankedToken { token: token.into(), logprob: logprob.parse().unwrap() }
        };
        let ranked: Vec<RankedToken> = text.lines().map(one).collect();
        Ok(vec![DrawnToken { token: ranked[0].token.clone(), ranked }])
    }
}

/// A gateway of engines with these roles, and the drift of each one's logits.
async fn logged_gateway(
    env: &Arc<SeededEnv>,
    roles: &[Role],
    drift: f64,
    config: CanaryConfig,
    events: Option<EventLog>,
) -> (Arc<Gateway>, Vec<Arc<KvEngine>>) {
    let transfers = Arc::new(Mutex::new(Transfers::default()));
    let engine = |one: (usize, &Role)| {
        Arc::new(KvEngine {
            name: format!("e{}", one.0),
            env: env.clone(),
            role: *one.1,
            transfers: transfers.clone(),
            fault: Mutex::new((KvFault::Clean, 1.0)),
            cache: Mutex::default(),
            drift,
            has_priorities: one.0 == 0,
            is_silent: Mutex::default(),
            dtype: Mutex::new("auto"),
            canaries: AtomicUsize::new(0),
            canaries_now: AtomicUsize::new(0),
            canaries_most: AtomicUsize::new(0),
            is_up: Mutex::new(true),
        })
    };
    let engines: Vec<Arc<KvEngine>> = roles.iter().enumerate().map(engine).collect();
    let specs = engines.iter().map(|engine| spec(engine.clone(), engine.role));
    (GatewayParts { events, ..parts(env, Some(config)) }.start(specs.collect()).await, engines)
}

async fn kv_gateway(
    env: &Arc<SeededEnv>,
    roles: &[Role],
    drift: f64,
    config: CanaryConfig,
) -> (Arc<Gateway>, Vec<Arc<KvEngine>>) {
    logged_gateway(env, roles, drift, config, None).await
}

/// Sends a request, and waits until no canary is in flight. True if the answer is that of undamaged KV.
async fn is_right(gateway: &Arc<Gateway>, number: usize) -> bool {
    let prompt = format!("prompt {number}").into_bytes();
    let expected = said(&kv_of(&prompt));
    let request = RelayRequest { body: Arc::new(prompt), ..wanted(&number.to_string(), false) };
    let answer = relay(gateway, request).await;
    gateway.env.sleep(Duration::from_secs(4)).await;
    match answer {
        Ok(RelayOpening::Whole(answer)) => answer.body == expected.into_bytes(),
        _ => panic!("no answer"),
    }
}

fn phase(gateway: &Gateway, from: usize, to: usize) -> CanaryPhase {
    let pair = canary::pair_of(from, to);
    let state = gateway.lock();
    state.canaries.as_ref().unwrap().phase(pair, &state.kv_form(pair))
}

/// Every request that comes is a canary, if its pair has no other one.
fn every() -> CanaryConfig {
    CanaryConfig { share: 1.0, early_share: 1.0, ..CanaryConfig::default() }
}

fn metric(gateway: &Gateway, line: &str) -> f64 {
    let text = gateway.metrics.encode();
    let found = text.lines().find_map(|other| other.strip_prefix(line)?.trim().parse().ok());
    found.unwrap_or(0.0)
}

#[test]
fn a_new_pair_shares_requests_once_it_is_proven() {
    seeded(async |env| {
        let (gateway, engines) =
            kv_gateway(&env, &[Role::Prefill, Role::Decode], 0.01, CanaryConfig::default()).await;
        for number in 0..40 {
            let handed_off = metric(&gateway, "mixfleet_hand_offs_total{from=\"e0\",to=\"e1\"}");
            assert!(is_right(&gateway, number).await);
            if number < 33 {
                assert_eq!(handed_off, 0.0, "no answer begins with KV that is not proven");
                let told = gateway.placements.explain(&number.to_string(), |_| true).unwrap();
                assert!(told["undivided"].as_str().unwrap().contains("not proven"), "{told}");
                assert_eq!(told["canary"][0]["phase"], "unproven");
            }
        }
        assert_eq!(phase(&gateway, 0, 1), CanaryPhase::Proven);
        let told = gateway.placements.explain("39", |_| true).unwrap();
        assert!(told["undivided"].is_null() && told["canary"][0]["compared"].as_u64() >= Some(32), "{told}");
        assert_eq!(metric(&gateway, "mixfleet_hand_offs_total{from=\"e0\",to=\"e1\"}"), 7.0);
        assert_eq!(metric(&gateway, "mixfleet_canary_shares{from=\"e0\",to=\"e1\"}"), 1.0);
        assert!(metric(&gateway, "mixfleet_canary_tokens_total{device=\"e1\"}") >= 32.0 * 2.0 * 129.0);
        assert!(metric(&gateway, "mixfleet_canary_time_seconds_total{device=\"e0\"}") >= 31.9);
        // one refused a priority, and gets none since
        let asked = engines[1].canaries.load(Ordering::Relaxed);
        assert!((64..=70).contains(&asked), "{asked}");
        assert_eq!(gateway.lock().front.machine().requests(), 0);
    });
}

#[test]
fn each_fault_of_a_new_pair_is_found_and_no_client_sees_it() {
    for fault in FAULTS {
        seeded(async move |env| {
            let (gateway, engines) =
                kv_gateway(&env, &[Role::Prefill, Role::Decode], 0.01, CanaryConfig::default()).await;
            *engines[1].fault.lock().unwrap() = (fault, 1.0);
            let mut found = None;
            for number in 0..100 {
                assert!(is_right(&gateway, number).await, "{fault:?}: a client's answer is wrong");
                if matches!(phase(&gateway, 0, 1), CanaryPhase::Quarantined { .. }) {
                    found = Some(number);
                    break;
                }
            }
            assert!(found.is_some(), "{fault:?} is not found in 100 requests");
            let line = "mixfleet_canary_quarantines_total{from=\"e0\",to=\"e1\",cause=\"corrupt\"}";
            assert_eq!(metric(&gateway, line), 1.0);
            assert!(is_right(&gateway, 200).await);
            let told = gateway.placements.explain("200", |_| true).unwrap();
            assert!(told["undivided"].as_str().unwrap().contains("quarantined"), "{told}");
            assert_eq!(told["canary"][0]["phase"], "quarantined");
        });
    }
}

#[test]
fn each_fault_of_a_proven_pair_is_found_in_100_canaries() {
    for (fault, share) in FAULTS.into_iter().map(|fault| (fault, 1.0)).chain([(KvFault::OtherPrompt, 0.3)]) {
        seeded(async move |env| {
            let (gateway, engines) = kv_gateway(&env, &[Role::Prefill, Role::Decode], 0.01, every()).await;
            for number in 0..33 {
                assert!(is_right(&gateway, number).await);
            }
            assert_eq!(phase(&gateway, 0, 1), CanaryPhase::Proven);
            *engines[1].fault.lock().unwrap() = (fault, share);
            let mut wrong = 0;
            let found = {
                let mut found = None;
                for number in 33..133 {
                    wrong += usize::from(!is_right(&gateway, number).await);
                    if matches!(phase(&gateway, 0, 1), CanaryPhase::Quarantined { .. }) {
                        found = Some(number - 32);
                        break;
                    }
                }
                found
            };
            assert!(found.is_some(), "{fault:?} is not found in 100 canaries");
            assert!(wrong <= 10, "{fault:?}: {wrong} wrong answers before it was found");
            // it is mended: after the pause canaries prove it again
            *engines[1].fault.lock().unwrap() = (KvFault::Clean, 1.0);
            env.sleep(Duration::from_secs(61)).await;
            for number in 200..240 {
                assert!(is_right(&gateway, number).await);
            }
            assert_eq!(phase(&gateway, 0, 1), CanaryPhase::Proven, "{fault:?}");
        });
    }
}

#[test]
fn a_bad_pair_is_left_out_and_good_ones_share_requests() {
    seeded(async |env| {
        let roles = [Role::Prefill, Role::Decode, Role::Decode];
        let (gateway, engines) = kv_gateway(&env, &roles, 0.01, every()).await;
        *engines[1].fault.lock().unwrap() = (KvFault::OtherPrompt, 1.0);
        for number in 0..150 {
            assert!(is_right(&gateway, number).await, "request {number}");
        }
        assert!(phase(&gateway, 0, 1).barred().is_some());
        assert_eq!(phase(&gateway, 0, 2), CanaryPhase::Proven);
        assert!(metric(&gateway, "mixfleet_hand_offs_total{from=\"e0\",to=\"e2\"}") > 20.0);
        assert_eq!(metric(&gateway, "mixfleet_hand_offs_total{from=\"e0\",to=\"e1\"}"), 0.0);
        assert_eq!(gateway.lock().front.machine().requests(), 0);
        assert!(gateway.lock().seats.iter().all(|seat| seat.own == 0));
    });
}

/// A log in memory.
#[derive(Clone, Default)]
struct Kept(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Kept {
    fn write(&mut self, data: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(data)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn the_log_says_what_engines_are_and_replays_to_the_same_decisions() {
    seeded(async |env| {
        let kept = Kept::default();
        let shared: SharedEnv = env.clone();
        let (log, writer) = EventLog::start(&shared, Box::new(kept.clone()));
        let roles = [Role::Prefill, Role::Decode, Role::Decode];
        let (gateway, engines) = logged_gateway(&env, &roles, 0.01, every(), Some(log)).await;
        *engines[1].fault.lock().unwrap() = (KvFault::OtherPrompt, 1.0);
        for number in 0..60 {
            // a decode engine is gone for a while, so that one engine does all of it
            let is_up = !(20..40).contains(&number);
            *engines[2].is_up.lock().unwrap() = is_up;
            assert!(is_right(&gateway, number).await, "request {number}");
        }
        writer.close().await.unwrap();
        let text = String::from_utf8(kept.0.lock().unwrap().clone()).unwrap();
        let replay = Replay::of(text.as_bytes(), None).unwrap();
        assert_eq!((replay.differing, replay.whole), (0, true), "{:?}", replay.first);
        let lines = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        let events: Vec<serde_json::Value> = lines.map(|line| line["event"].clone()).collect();
        let ups: Vec<_> = events.iter().filter(|event| event["event"] == "instance_up").collect();
        assert_eq!(ups.len(), 4, "one comes twice");
        for up in ups {
            let at = usize::try_from(up["id"].as_u64().unwrap()).unwrap();
            assert_eq!(up["role"], roles[at].name());
        }
        let has_limits = |limit: &str| events.iter().any(|event| event.get(limit).is_some());
        assert!(has_limits("division"), "some requests are not divided");
    });
}

#[test]
fn a_canary_holds_no_answer_up_and_few_run_at_once() {
    seeded(async |env| {
        let (gateway, engines) = kv_gateway(&env, &[Role::Prefill, Role::Decode], 0.01, every()).await;
        let answers = (0..50).map(|number| {
            let gateway = gateway.clone();
            async move {
                let request = RelayRequest {
                    body: Arc::new(format!("prompt {number}").into_bytes()),
                    ..wanted(&number.to_string(), false)
                };
                let began = gateway.env.now();
                assert!(matches!(relay(&gateway, request).await, Ok(RelayOpening::Whole(_))));
                (gateway.env.now() - began).0
            }
        });
        let times = futures_util::future::join_all(answers).await;
        assert!(times.iter().all(|time| *time < 0.2), "{times:?}");
        env.sleep(Duration::from_secs(5)).await;
        assert!(engines.iter().all(|engine| engine.canaries_most.load(Ordering::Relaxed) <= 2));
    });
}

#[test]
fn what_cannot_be_compared_proves_nothing() {
    seeded(async |env| {
        let (gateway, engines) = kv_gateway(&env, &[Role::Prefill, Role::Decode], 0.01, every()).await;
        engines.iter().for_each(|engine| *engine.is_silent.lock().unwrap() = true);
        for number in 0..50 {
            assert!(is_right(&gateway, number).await);
        }
        assert_eq!(phase(&gateway, 0, 1), CanaryPhase::Unproven);
        let line = "mixfleet_canaries_total{from=\"e0\",to=\"e1\",result=\"inconclusive\"}";
        assert_eq!(metric(&gateway, line), 49.0, "the first one has none before it");
    });
}

#[test]
fn an_engine_with_kv_of_another_dtype_is_proven_anew() {
    seeded(async |env| {
        let (gateway, engines) = kv_gateway(&env, &[Role::Prefill, Role::Decode], 0.01, every()).await;
        for number in 0..34 {
            assert!(is_right(&gateway, number).await);
        }
        let again = async |dtype: &'static str| {
            *engines[1].is_up.lock().unwrap() = false;
            env.sleep(Duration::from_secs(5)).await;
            *engines[1].dtype.lock().unwrap() = dtype;
            *engines[1].is_up.lock().unwrap() = true;
            env.sleep(Duration::from_secs(5)).await;
        };
        again("auto").await;
        assert_eq!(phase(&gateway, 0, 1), CanaryPhase::Proven, "a restart alone changes no KV");
        again("fp8").await;
        assert_eq!(phase(&gateway, 0, 1), CanaryPhase::Unproven);
    });
}

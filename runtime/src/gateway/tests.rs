//! A gateway in the seeded environment, with engines that do as a script says.

use super::*;
use crate::env::{Env, SeededEnv};
use mixfleet_hal::outside::{
    EngineAnswer, EngineBlock, EngineCall, EngineChunk, EngineFuture, EngineHandOff, EngineKvChange,
    EngineKvFeed, EngineModel, EngineShare, EngineState, EngineStream, WholeAnswer,
};
use mixfleet_scheduler::cost::{Coefficients, DecodeCoefficients, PrefillCoefficients};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What an engine does with requests.
#[derive(Clone, Debug)]
pub(super) enum Habit {
    /// It answers with this many tokens, each after this time.
    Answers(usize, f64),
    /// This many tokens come together, and then nothing.
    StallsAfter(usize),
    /// It gives this fault.
    Faults(EngineFaultKind),
}

/// What an engine does with its share of a request that it shares with another one.
#[derive(Clone, Debug)]
pub(super) enum ShareHabit {
    /// A prompt takes this long; handed-over KV is accepted.
    Well(f64),
    /// No answer.
    Hangs,
    /// It gives this fault.
    Faults(EngineFaultKind),
    /// It refuses it as a client's fault.
    Refuses,
}

pub(super) struct Scripted {
    name: String,
    env: Arc<SeededEnv>,
    pub(super) habit: Mutex<Habit>,
    pub(super) sharing: Mutex<ShareHabit>,
    pub(super) role: Mutex<Role>,
    /// The parts that it was sent.
    pub(super) shares: Mutex<Vec<EngineShare>>,
    /// Prompts that it computes now.
    pub(super) prompts: AtomicUsize,
    pub(super) state: Mutex<Result<EngineState, EngineFault>>,
    asked: AtomicUsize,
    begun: Mutex<Vec<Option<String>>>,
    /// What it will tell of its cache, if it does.
    feed: Mutex<Option<tokio::sync::mpsc::UnboundedReceiver<EngineKvChange>>>,
    /// The ids of every prompt, and how long it takes to say them.
    ids: Mutex<(Vec<u32>, f64)>,
}

struct ScriptedFeed(tokio::sync::mpsc::UnboundedReceiver<EngineKvChange>);

impl EngineKvFeed for ScriptedFeed {
    fn next(&mut self) -> EngineFuture<'_, Vec<EngineKvChange>> {
        Box::pin(async {
            match self.0.recv().await {
                Some(change) => vec![change],
                None => std::future::pending().await,
            }
        })
    }
}

impl OutsideEngine for Scripted {
    fn name(&self) -> &str {
        &self.name
    }

    fn probe(&self) -> EngineFuture<'_, Result<EngineState, EngineFault>> {
        Box::pin(async { self.state.lock().unwrap().clone() })
    }

    fn follow_kv(&self) -> EngineFuture<'_, Result<Box<dyn EngineKvFeed>, EngineFault>> {
        Box::pin(async {
            let feed = self.feed.lock().unwrap().take();
            let feed = feed.ok_or_else(|| EngineFault::new(EngineFaultKind::Failed, "it does not tell"))?;
            Ok(Box::new(ScriptedFeed(feed)) as Box<dyn EngineKvFeed>)
        })
    }

    fn prompt_tokens<'a>(
        &'a self,
        _: &'a EngineCall,
    ) -> EngineFuture<'a, Result<Option<Vec<u32>>, EngineFault>> {
        Box::pin(async {
            let (ids, wait) = self.ids.lock().unwrap().clone();
            self.env.sleep(Duration::from_secs_f64(wait)).await;
            Ok(Some(ids))
        })
    }

    fn ask<'a>(&'a self, call: &'a EngineCall) -> EngineFuture<'a, Result<EngineAnswer, EngineFault>> {
        Box::pin(async move {
            self.asked.fetch_add(1, Ordering::Relaxed);
            self.begun.lock().unwrap().push(call.begun.as_ref().map(|begun| begun.text.clone()));
            self.shares.lock().unwrap().push(call.share.clone());
            if call.share != EngineShare::Whole {
                let sharing = self.sharing.lock().unwrap().clone();
                match (sharing, &call.share) {
                    (ShareHabit::Well(time), EngineShare::Prompt) => {
                        let _at_work = AtWork::begin(&self.prompts);
                        self.env.sleep(Duration::from_secs_f64(time)).await;
                        let hand_off = EngineHandOff(format!("{{\"of\":\"{}\"}}", self.name).into());
                        return Ok(EngineAnswer::HandedOff { hand_off, usage: None });
                    }
                    (ShareHabit::Well(_), _) => {}
                    (ShareHabit::Hangs, _) => std::future::pending().await,
                    (ShareHabit::Faults(kind), _) => {
                        return Err(EngineFault::new(kind, "as the script says"));
                    }
                    (ShareHabit::Refuses, _) => {
                        return Ok(EngineAnswer::Refused { status: 400, body: b"{}".to_vec() });
                    }
                }
            }
            let habit = self.habit.lock().unwrap().clone();
            let (tokens, pace, stalls) = match habit {
                Habit::Faults(kind) => return Err(EngineFault::new(kind, "as the script says")),
                Habit::Answers(tokens, pace) => (tokens, pace, false),
                Habit::StallsAfter(tokens) => (tokens, 0.0, true),
            };
            let usage =
                EngineUsage { prompt_tokens: 10, completion_tokens: to_u32(tokens), cached_tokens: Some(0) };
            if !call.stream {
                self.env.sleep(Duration::from_secs_f64(pace * tokens as f64)).await;
                return Ok(EngineAnswer::Whole(WholeAnswer {
                    body: b"{}".to_vec(),
                    usage: Some(usage),
                    choices: 1,
                    at_limit: 1,
                }));
            }
            let chunk = |text: &str| EngineChunk {
                data: Some(text.into()),
                text: text.into(),
                ..EngineChunk::default()
            };
            let mut chunks: VecDeque<EngineChunk> = (0..tokens).map(|_| chunk("x")).collect();
            if !stalls {
                chunks.push_back(EngineChunk { ends_choice: true, usage: Some(usage), ..chunk("") });
            }
            Ok(EngineAnswer::Stream(Box::new(ScriptedStream { env: self.env.clone(), chunks, pace, stalls })))
        })
    }
}

/// Counts requests in progress until it is dropped.
struct AtWork<'a>(&'a AtomicUsize);

impl<'a> AtWork<'a> {
    fn begin(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        AtWork(count)
    }
}

impl Drop for AtWork<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

struct ScriptedStream {
    env: Arc<SeededEnv>,
    chunks: VecDeque<EngineChunk>,
    pace: f64,
    stalls: bool,
}

impl EngineStream for ScriptedStream {
    fn next(&mut self) -> EngineFuture<'_, Option<Result<EngineChunk, EngineFault>>> {
        Box::pin(async move {
            if self.stalls && self.chunks.is_empty() {
                std::future::pending::<()>().await;
            }
            self.env.sleep(Duration::from_secs_f64(self.pace)).await;
            self.chunks.pop_front().map(Ok)
        })
    }
}

pub(super) fn told() -> EngineState {
    let models = vec![EngineModel { name: "m".into(), context: Some(1000) }];
    EngineState {
        models,
        running: Some(0),
        waiting: Some(0),
        sequences_max: Some(8),
        ..EngineState::default()
    }
}

/// A gateway with engines of these habits, all alike in cost.
pub(super) async fn gateway(env: &Arc<SeededEnv>, habits: &[Habit]) -> (Arc<Gateway>, Vec<Arc<Scripted>>) {
    gateway_with(env, habits, |_, _| {}).await
}

/// The same, after `change` was made to each engine.
pub(super) async fn gateway_with(
    env: &Arc<SeededEnv>,
    habits: &[Habit],
    mut change: impl FnMut(usize, &Scripted),
) -> (Arc<Gateway>, Vec<Arc<Scripted>>) {
    let engine = |(at, habit): (usize, &Habit)| {
        Arc::new(Scripted {
            name: format!("e{at}"),
            env: env.clone(),
            habit: Mutex::new(habit.clone()),
            sharing: Mutex::new(ShareHabit::Well(0.0)),
            role: Mutex::default(),
            shares: Mutex::default(),
            prompts: AtomicUsize::new(0),
            state: Mutex::new(Ok(told())),
            asked: AtomicUsize::new(0),
            begun: Mutex::default(),
            feed: Mutex::default(),
            ids: Mutex::default(),
        })
    };
    let engines: Vec<Arc<Scripted>> = habits.iter().enumerate().map(engine).collect();
    engines.iter().enumerate().for_each(|(at, engine)| change(at, engine));
    let specs = engines.iter().map(|engine| spec(engine.clone(), *engine.role.lock().unwrap()));
    (parts(env, None).start(specs.collect()).await, engines)
}

/// An engine with all properties known.
pub(super) fn spec(engine: Arc<dyn OutsideEngine>, role: Role) -> EngineSpec {
    let cost = CostModel::Coefficients(Coefficients {
        prefill_s: PrefillCoefficients { overhead: 0.01, per_token: 0.001, per_token_squared: 0.0 },
        decode_s: DecodeCoefficients { base: 0.01, per_sequence: 0.001, per_kv_token: 0.0 },
    });
    EngineSpec {
        engine,
        model: None,
        price: None,
        cost: Some(cost),
        role,
        takes_kv: false,
        nic: LinkCost { seconds_per_byte: 1e-9, ..LinkCost::default() },
        kv_bytes_per_token: Some(1000),
    }
}

/// What a gateway needs besides its engines.
pub(super) fn parts(env: &Arc<SeededEnv>, canaries: Option<CanaryConfig>) -> GatewayParts {
    GatewayParts {
        env: env.clone(),
        name: None,
        limits: EngineConfig::default(),
        events: None,
        placements: Arc::new(Placements::new(8)),
        metrics: Metrics::new(),
        canaries,
    }
}

pub(super) fn wanted(id: &str, stream: bool) -> RelayRequest {
    RelayRequest {
        id: id.into(),
        endpoint: EngineEndpoint::Chat,
        body: Arc::new(b"{}".to_vec()),
        stream,
        prompt_bytes: 40,
        prompt_ids: None,
        chains: Vec::new(),
        choices: 1,
        max_tokens: Some(100),
        granted_tokens: None,
        party: PartyId::NONE,
        hints: Hints::default(),
        digest: OnceLock::new(),
    }
}

/// Number of requests to each engine.
pub(super) fn asked(engines: &[Arc<Scripted>]) -> Vec<usize> {
    engines.iter().map(|engine| engine.asked.load(Ordering::Relaxed)).collect()
}

/// The text of a streamed answer, and the fault that ends it.
pub(super) async fn streamed(gateway: &Arc<Gateway>, id: &str) -> (String, Option<EngineFault>) {
    let (mut passage, first) = match relay(gateway, wanted(id, true)).await {
        Ok(RelayOpening::Stream(passage, first)) => (passage, first),
        Ok(_) => panic!("not a stream"),
        Err(RelayError::Failed(fault)) => return (String::new(), Some(fault)),
        Err(error) => panic!("{error:?}"),
    };
    let mut text = first.text;
    loop {
        match passage.next().await {
            Some(Ok(chunk)) => text += &chunk.text,
            Some(Err(fault)) => return (text, Some(fault)),
            None => return (text, None),
        }
    }
}

pub(super) fn seeded<T: Send + 'static, F: Future<Output = T> + Send + 'static>(
    main: impl FnOnce(Arc<SeededEnv>) -> F,
) -> T {
    let env = Arc::new(SeededEnv::new(1));
    env.run(main(env.clone()))
}

#[test]
fn an_engine_that_falls_silent_is_given_up_and_another_goes_on() {
    seeded(async |env| {
        let (gateway, engines) = gateway(&env, &[Habit::StallsAfter(3), Habit::Answers(4, 0.01)]).await;
        let began = env.now();
        let (text, fault) = streamed(&gateway, "a").await;
        assert_eq!((text.as_str(), fault), ("xxxxxxx", None));
        assert!((env.now() - began).0 > 59.0, "it was waited for");
        assert_eq!(*engines[1].begun.lock().unwrap(), [Some("xxx".to_owned())]);
        assert_eq!(gateway.lock().seats.iter().map(|seat| seat.own + seat.decoding).sum::<u32>(), 0);
        assert_eq!(gateway.lock().front.machine().requests(), 0);
    });
}

#[test]
fn an_engine_that_is_lost_in_the_middle_is_replaced_before_it_is_silent_for_long() {
    seeded(async |env| {
        let (gateway, engines) = gateway(&env, &[Habit::StallsAfter(1), Habit::Answers(2, 0.01)]).await;
        *engines[0].state.lock().unwrap() = Err(EngineFault::new(EngineFaultKind::Unreachable, "gone"));
        let (text, fault) = streamed(&gateway, "a").await;
        assert_eq!((text.as_str(), fault), ("xxx", None));
        assert!(env.now().0 < 10.0, "{:?}", env.now());
        assert_eq!(gateway.metrics.instances.get(), 1);
        *engines[0].state.lock().unwrap() = Ok(told());
        env.sleep(Duration::from_secs(3)).await;
        assert_eq!(gateway.metrics.instances.get(), 2);
    });
}

#[test]
fn what_fails_everywhere_is_tried_on_each_engine_and_what_breaks_them_on_two() {
    for (kind, tries) in [(EngineFaultKind::Failed, 5), (EngineFaultKind::Cut, 2)] {
        seeded(async move |env| {
            let (gateway, engines) = gateway(&env, &vec![Habit::Faults(kind); 5]).await;
            match relay(&gateway, wanted("a", true)).await {
                Err(RelayError::Failed(fault)) => assert_eq!(fault.kind, kind),
                Err(RelayError::Quarantined(_)) => assert_eq!(kind, EngineFaultKind::Cut),
                _ => panic!("it is answered"),
            }
            let asked = asked(&engines);
            assert_eq!((asked.iter().sum::<usize>(), asked.iter().max()), (tries, Some(&1)), "{asked:?}");
            // They failed one request, and others may do better there.
            env.sleep(Duration::from_secs(3)).await;
            assert!(gateway.lock().front.machine().instances().all(|instance| instance.role == Role::Auto));
        });
    }
}

#[test]
fn work_of_others_at_an_engine_sends_requests_elsewhere() {
    seeded(async |env| {
        let (gateway, engines) = gateway(&env, &[Habit::Answers(2, 0.01), Habit::Answers(2, 0.01)]).await;
        assert_eq!(streamed(&gateway, "a").await.1, None);
        assert_eq!(engines[0].asked.load(Ordering::Relaxed), 1, "of equals the first one");
        *engines[0].state.lock().unwrap() = Ok(EngineState { running: Some(40), ..told() });
        env.sleep(Duration::from_secs(5)).await;
        assert_eq!(gateway.lock().seats[0].others, 40);
        assert_eq!(streamed(&gateway, "b").await.1, None);
        assert_eq!(engines[1].asked.load(Ordering::Relaxed), 1);
        *engines[0].state.lock().unwrap() = Ok(told());
        env.sleep(Duration::from_secs(5)).await;
        assert_eq!(gateway.lock().seats[0].others, 0);
        assert_eq!(streamed(&gateway, "c").await.1, None);
        assert_eq!(engines[0].asked.load(Ordering::Relaxed), 2);
    });
}

#[test]
fn an_engine_that_is_to_leave_ends_its_answers_and_gets_no_more() {
    seeded(async |env| {
        let (gateway, engines) = gateway(&env, &[Habit::Answers(40, 0.5), Habit::Answers(2, 0.01)]).await;
        let (begun, ()) = futures_util::future::join(streamed(&gateway, "a"), async {
            env.sleep(Duration::from_secs(1)).await;
            *engines[0].state.lock().unwrap() = Ok(EngineState { leaving: true, ..told() });
            env.sleep(Duration::from_secs(5)).await;
            assert_eq!(streamed(&gateway, "b").await.1, None);
        })
        .await;
        assert_eq!(begun.1, None, "its answer is complete");
        let asked = || [0, 1].map(|at: usize| engines[at].asked.load(Ordering::Relaxed));
        assert_eq!(asked(), [1, 1]);
        *engines[0].state.lock().unwrap() = Ok(told());
        env.sleep(Duration::from_secs(5)).await;
        assert_eq!(streamed(&gateway, "c").await.1, None);
        assert_eq!(asked(), [2, 1], "it is back");
    });
}

#[test]
fn lengths_are_learned_and_an_engine_slower_than_predicted_is_corrected() {
    seeded(async |env| {
        let (gateway, _) = gateway(&env, &[Habit::Answers(50, 0.03)]).await;
        for _ in 0..8 {
            assert_eq!(streamed(&gateway, "a").await.1, None);
        }
        let ratio = gateway.lock().tokens_per_byte;
        assert!(
            (ratio - TOKENS_PER_BYTE).abs() < 1e-9,
            "10 tokens in 40 bytes match the assumption: {ratio}"
        );
        let corrections = gateway.lock().front.machine().learned(InstanceId(0)).unwrap();
        assert!(
            corrections.step[0] > 1.5,
            "a step takes 30 ms and was predicted to take 11: {corrections:?}"
        );
    });
}

#[test]
fn a_whole_answer_is_given_and_a_client_that_leaves_frees_its_place() {
    seeded(async |env| {
        let (gateway, _) = gateway(&env, &[Habit::Answers(5, 1.0)]).await;
        let Ok(RelayOpening::Whole(answer)) = relay(&gateway, wanted("a", false)).await else {
            panic!("not whole")
        };
        assert_eq!(answer.usage.unwrap().completion_tokens, 5);
        let left = tokio::select! {
            biased;
            _ = relay(&gateway, wanted("b", false)) => false,
            () = env.sleep(Duration::from_secs(2)) => true,
        };
        assert!(left && gateway.lock().front.machine().requests() == 0);
        assert_eq!(gateway.lock().seats[0].own, 0);
    });
}

/// Tells that the engine has the blocks of these tokens.
fn has(feed: &tokio::sync::mpsc::UnboundedSender<EngineKvChange>, tokens: &[u32]) {
    let blocks = (0..tokens.len() as u64 / 16).map(EngineBlock).collect();
    let (tokens, block_tokens) = (tokens.to_vec(), 16);
    feed.send(EngineKvChange::Stored { part: 0, parent: None, blocks, tokens, block_tokens }).unwrap();
}

/// The predicted cached tokens of each engine for the next request, and its placement.
async fn predicted(gateway: &Arc<Gateway>, id: &str) -> (Vec<u64>, usize) {
    assert_eq!(streamed(gateway, id).await.1, None);
    let explanation = gateway.placements.explain(id, |_| true).unwrap();
    let candidates = explanation["candidates"].as_array().unwrap();
    let cached = candidates.iter().map(|one| one["terms"]["cached_tokens"].as_u64().unwrap()).collect();
    let chosen = candidates.iter().position(|one| one["outcome"]["outcome"] == "chosen").unwrap();
    (cached, chosen)
}

#[test]
fn a_request_goes_where_its_prefix_is_cached() {
    seeded(async |env| {
        let habits = vec![Habit::Answers(2, 0.01); 2];
        let (feed, told_by) = tokio::sync::mpsc::unbounded_channel();
        let mut told_by = Some(told_by);
        let (gateway, engines) = gateway_with(&env, &habits, |at, engine| {
            *engine.ids.lock().unwrap() = ((0..100).collect(), 0.0);
            if at == 1 {
                *engine.feed.lock().unwrap() = told_by.take();
            }
        })
        .await;
        assert_eq!(predicted(&gateway, "before").await, (vec![0, 0], 0));
        let tokens: Vec<u32> = (0..80).collect();
        has(&feed, &tokens);
        env.sleep(Duration::from_millis(1)).await;
        // an unfollowed cache counts as empty
        assert_eq!(predicted(&gateway, "there").await, (vec![0, 80], 1));
        let views = serde_json::to_value(gateway.caches()).unwrap();
        assert_eq!((&views[1]["keys"], views[1]["blocks"].as_array().unwrap().len()), (&5.into(), 5));

        // an engine that comes back has what it tells then, and nothing before
        feed.send(EngineKvChange::Removed { part: 0, blocks: vec![EngineBlock(3)] }).unwrap();
        env.sleep(Duration::from_millis(1)).await;
        assert_eq!(predicted(&gateway, "gap").await, (vec![0, 48], 1));
        // a slow tokenizer holds no request up
        *engines[1].ids.lock().unwrap() = ((0..100).collect(), 100.0);
        let began = env.now();
        assert_eq!(predicted(&gateway, "slow").await.0, [0, 0]);
        assert!((env.now() - began).0 < 0.5, "{:?}", env.now() - began);
        let began = env.now();
        assert_eq!(predicted(&gateway, "slow again").await.0, [0, 0]);
        assert!((env.now() - began).0 < 0.1, "it is not asked again so soon");
        *engines[1].ids.lock().unwrap() = ((0..100).collect(), 0.0);
        env.sleep(Duration::from_secs(2)).await;
        assert_eq!(predicted(&gateway, "again").await, (vec![0, 48], 1));

        *engines[1].state.lock().unwrap() = Err(EngineFault::new(EngineFaultKind::Unreachable, "gone"));
        env.sleep(Duration::from_secs(5)).await;
        let (feed, told_by) = tokio::sync::mpsc::unbounded_channel();
        *engines[1].feed.lock().unwrap() = Some(told_by);
        *engines[1].state.lock().unwrap() = Ok(told());
        env.sleep(Duration::from_secs(5)).await;
        assert_eq!(predicted(&gateway, "back").await.0, [0, 0]);
        has(&feed, &tokens);
        env.sleep(Duration::from_millis(1)).await;
        assert_eq!(predicted(&gateway, "back again").await, (vec![0, 80], 1));
        let lost = EngineKvChange::Lost { part: 0, cause: "as the script says".into() };
        feed.send(lost).unwrap();
        env.sleep(Duration::from_millis(1)).await;
        assert_eq!(predicted(&gateway, "lost").await.0, [0, 0]);
    });
}

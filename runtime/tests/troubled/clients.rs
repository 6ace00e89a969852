//! Clients of the fleet, and checks of their answers.

use super::groups::GroupDivision;
use super::parts::poison;
use super::{Talk, World};
use mixfleet_runtime::env::Env;
use mixfleet_runtime::grammar::Grammar;
use mixfleet_runtime::request::{Failure, FailureKind, GenerateRequest, Hints, Rejection, Sampling, Update};
use mixfleet_scheduler::fleet::PartyId;
use std::sync::Arc;
use std::time::Duration;

/// Number of retries before a client gives up.
const TRIES: u32 = 300;
/// Time between two tries, at first and at most.
const COME_AGAIN: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(1)];
/// Length of the answer to a request that should fail.
const TOKENS_MAX: u32 = 4;

/// Error of a log-probability that parts compute in f32. What KV changes them by is far more.
const LOGPROB_ERROR_MAX: f32 = 1e-3;

/// A request as its client sees it.
struct Asked<'a> {
    id: String,
    /// Index of the fleet's kind.
    kind: usize,
    prompt: &'a [u32],
    tokens_max: u32,
    /// The expected log-probabilities, if any are.
    logprobs: Option<&'a [f32]>,
    /// The expected tokens; none if any will do.
    expected: Option<&'a [u32]>,
    /// The count of the tries that a router accepts.
    counts_as: &'static str,
}

impl World {
    /// Starts after a random time, and continues after each answer.
    pub(super) async fn client(self, name: String, kind: usize, talk: Talk) {
        self.env.sleep(self.span(self.workload.come_within_s)).await;
        for (turn, case) in talk.iter().enumerate() {
            let asked = Asked {
                id: format!("{name}-{turn}"),
                kind,
                prompt: &case.prompt,
                tokens_max: case.expected.len() as u32,
                logprobs: case.logprobs.as_deref(),
                expected: Some(&case.expected),
                counts_as: "asked",
            };
            if !self.ask(asked).await {
                return;
            }
        }
    }

    /// Sends a request that stops every part that computes it.
    pub(super) async fn poisoner(self, at: usize) {
        self.env.sleep(self.span(self.workload.come_within_s)).await;
        let prompt = poison(self.kinds[0].checkpoint.config.vocab).repeat(4);
        let (id, counts_as) = (format!("poison-{at}"), "poison asked");
        self.ask(failing(id, &prompt, counts_as)).await;
    }

    /// Sends a token that has no row in the embedding.
    pub(super) async fn stranger_to_the_vocabulary(self, at: usize) {
        self.env.sleep(self.span(self.workload.come_within_s)).await;
        let vocabulary = self.kinds[0].checkpoint.config.vocab;
        let (id, counts_as) = (format!("unknown-{at}"), "ids unknown");
        let prompt = [1, vocabulary + at as u32, 2];
        let answered = self.ask(failing(id, &prompt, counts_as)).await;
        assert!(!answered, "{:?}: an answer to a token that is none", self.env);
    }

    /// Sends this router a request of its own kind, which must be answered.
    pub(super) async fn ask_router(&self, router: u64, at: u64) {
        let handle = self.state().routers[&router].handle.clone();
        let prompt: Vec<u32> = (0..30).map(|token| (token + at as u32 * 30) % 250).collect();
        let mut updates = handle.submit(request(format!("request-{at}"), &prompt, 2, None)).await.unwrap();
        while let Some(update) = updates.recv().await {
            assert!(!matches!(update, Update::Failed(_)), "{:?}: {update:?}", self.env);
        }
    }

    /// The grammar of one request in five: it allows any token, since parts that answer with hashes follow
    /// none, and must be compiled all the same.
    fn grammar(&self, id: &str, kind: usize) -> Option<Grammar> {
        let number = digits(id);
        let last = self.kinds[kind].checkpoint.config.vocab - 1;
        let first = number % last;
        let all = format!("start: (<[0-{first}]> | <[{}-{last}]>)*", first + 1);
        number.is_multiple_of(5).then(|| Grammar::Lark(all.into()))
    }

    /// How the devices of this instance have the model, if they are several.
    fn division_of(&self, device: &str) -> Option<GroupDivision> {
        let state = self.state();
        state.workers.values().find(|worker| worker.device == device).and_then(|worker| worker.division)
    }

    /// Sends a request to any router, and to another one if that is gone, until there is an answer. False for
    /// an error.
    #[expect(clippy::too_many_lines, reason = "one arm for each end of a request")]
    async fn ask(&self, asked: Asked<'_>) -> bool {
        let Asked { id, kind, prompt, tokens_max, logprobs, expected, counts_as } = asked;
        let (mut last, mut again) = (String::new(), COME_AGAIN[0]);
        for turn in 0..TRIES {
            if turn > 0 {
                self.count("asked again", 1);
                self.env.sleep(again).await;
                again = again.mul_f64(1.1).min(COME_AGAIN[1]);
            }
            let nth = self.env.random() as usize;
            let handle = {
                let state = self.state();
                let its = || state.routers.values().filter(|router| router.kind == kind);
                its().nth(nth % its().count().max(1)).map(|router| router.handle.clone())
            };
            let Some(handle) = handle else { continue };
            let grammar = expected.and_then(|_| self.grammar(&id, kind));
            let by_grammar = grammar.is_some();
            let request = GenerateRequest {
                grammar,
                ..request(format!("{id}-{turn}"), prompt, tokens_max, logprobs.map(|_| 1))
            };
            let mut updates = match handle.submit(request).await {
                Ok(updates) => updates,
                Err(Rejection::TooLarge(why)) => panic!("{:?}: {why}", self.env),
                // These rejections tell the client to retry.
                Err(Rejection::Overloaded { .. }) => {
                    self.count("requests too many", 1);
                    continue;
                }
                Err(Rejection::Unavailable(why)) => {
                    last = why;
                    self.count("refused", 1);
                    continue;
                }
                // Instances were lost with an earlier request for the same.
                Err(Rejection::Quarantined(_)) => {
                    let is_good = expected.is_some();
                    self.count(
                        if is_good { "errors: two instances lost" } else { "errors as they should be" },
                        1,
                    );
                    return false;
                }
            };
            last = "its router ended".into();
            self.count(counts_as, 1);
            drop(handle);
            let (mut tokens, mut by) = (Vec::new(), None);
            while let Some(update) = updates.recv().await {
                match update {
                    Update::Placed { decode, .. } => by = self.division_of(&decode),
                    Update::Started { .. } => {}
                    Update::Token { id: token, logprobs: told } => {
                        if let Some(wanted) = logprobs.and_then(|logprobs| logprobs.get(tokens.len())) {
                            let (told, at) = (told.map_or(f32::NAN, |told| told.chosen), tokens.len());
                            let is_right = (told - wanted).abs() < LOGPROB_ERROR_MAX;
                            assert!(
                                is_right,
                                "{:?}: {id}: {told}, not {wanted} at {at}, by {by:?}",
                                self.env
                            );
                        }
                        tokens.push(token);
                        let right = expected.is_none_or(|expected| expected.starts_with(&tokens));
                        assert!(right, "{:?}: {id}: wrong tokens", self.env);
                    }
                    Update::Finished { .. } => {
                        assert!(updates.recv().await.is_none(), "{:?}: {id} ended twice", self.env);
                        if let Some(expected) = expected {
                            assert_eq!(tokens, expected, "{:?}: {id}", self.env);
                            self.count("right", 1);
                            self.count("right by a grammar", by_grammar.into());
                            if self.kinds[kind].config(&self.workload).pages.parts.lets_go() {
                                self.count("right in parts of the layers", 1);
                            }
                            by.into_iter()
                                .for_each(|division: GroupDivision| self.count(division.answers(), 1));
                            self.count("ns until all answers", (self.env.now().0 * 1e9) as u64);
                        }
                        return true;
                    }
                    Update::Failed(failure) => {
                        assert!(updates.recv().await.is_none(), "{:?}: {id} ended twice", self.env);
                        self.count(
                            if expected.is_some() { named(&failure) } else { "errors as they should be" },
                            1,
                        );
                        return false;
                    }
                }
            }
            // The router is gone: clients ask another one.
        }
        let state = self.state();
        let workers: Vec<_> = state.workers.values().map(|worker| (worker.kind, worker.role)).collect();
        panic!(
            "{:?}: {id} found no router that answers, last {last:?}: workers {workers:?}, {:?}",
            self.env, state.census
        );
    }
}

/// A request that should fail.
fn failing<'a>(id: String, prompt: &'a [u32], counts_as: &'static str) -> Asked<'a> {
    Asked { id, kind: 0, prompt, tokens_max: TOKENS_MAX, logprobs: None, expected: None, counts_as }
}

/// The party of a client: three of four are one that floods the fleet, and each fourth is another one.
fn party(id: &str) -> PartyId {
    let client = id.rsplit_once('-').map_or(id, |(client, _)| client);
    PartyId(if digits(client).is_multiple_of(4) { 2 } else { 1 })
}

/// A number of a name.
fn digits(name: &str) -> u32 {
    name.bytes().fold(0, |sum, byte| sum + u32::from(byte))
}

fn request(id: String, prompt: &[u32], tokens_max: u32, logprobs: Option<u32>) -> GenerateRequest {
    GenerateRequest {
        party: party(&id),
        id,
        forced_ids: Arc::new([]),
        minimum: None,
        vocabulary: None,
        prompt_ids: prompt.into(),
        max_tokens: tokens_max,
        eos_ids: Arc::new([]),
        sampling: Sampling { temperature: 0.0, ..Sampling::default() },
        logprobs,
        grammar: None,
        cache_salt: None,
        hints: Hints::default(),
    }
}

/// The count of an error.
fn named(failure: &Failure) -> &'static str {
    match failure.kind {
        _ if failure.message.contains("instances were lost") => "errors: two instances lost",
        FailureKind::Request => "errors: the request's own",
        FailureKind::Exhausted => "errors: something used up",
        FailureKind::TurnedAway => "errors: turned away after the prompt",
        FailureKind::Engine => "errors: the engine's",
    }
}

//! Orders whose answers follow a grammar that is still to be compiled.
//!
//! An instance never compiles: it would keep all of its other answers waiting. An order that needs a grammar
//! is parked until a thread beside the instance has compiled it, and is carried out then as if it had just
//! come.

use super::messages::{Job, Order};
use crate::env::SharedEnv;
use crate::grammar::{GrammarRun, Grammars, owner};
use crate::request::RouterId;
use mixfleet_scheduler::batch::RequestId;
use std::collections::HashMap;
use std::sync::Arc;
use tokio::sync::mpsc;

/// The beginning of an answer that follows a grammar, or why there is none.
pub(super) type BegunGrammar = Result<GrammarRun, String>;

/// A grammar that has been compiled for a parked order, or could not be.
pub(super) struct CompiledFor {
    request: RequestId,
    attempt: u32,
    begun: BegunGrammar,
}

/// The grammars of an instance, and the orders that wait for one.
pub(super) struct GrammarWait {
    /// None if the instance does not know the tokens' texts.
    grammars: Option<Arc<Grammars>>,
    parked: HashMap<RequestId, Order>,
    sender: mpsc::UnboundedSender<CompiledFor>,
    compiled: mpsc::UnboundedReceiver<CompiledFor>,
}

impl GrammarWait {
    pub(super) fn new(grammars: Option<Arc<Grammars>>) -> Self {
        let (sender, compiled) = mpsc::unbounded_channel();
        GrammarWait { grammars, parked: HashMap::new(), sender, compiled }
    }

    /// Returns an order that can be carried out now, with its grammar; none if it is parked.
    pub(super) fn admit(&mut self, order: Order, env: &SharedEnv) -> Option<(Order, Option<BegunGrammar>)> {
        let Some(job) = drawing_job(&order) else { return Some((order, None)) };
        let Some(grammar) = &job.wanted.grammar else { return Some((order, None)) };
        let Some(grammars) = &self.grammars else {
            let cause = "this instance has no tokenizer, so that its answers follow no grammar";
            return Some((order, Some(Err(cause.into()))));
        };
        let (end_ids, party) = (&job.wanted.eos_ids, owner(job.wanted.party));
        if let Some(begun) = grammars.begin_known(grammar, end_ids, &party) {
            return Some((order, Some(begun)));
        }
        let (request, attempt) = (job.request, job.attempt);
        let parked = self.parked.get(&request).and_then(drawing_job);
        if parked.is_some_and(|parked| parked.attempt >= attempt) {
            tracing::warn!(request, "a job that is here already is ignored");
            return None;
        }
        let beside = grammars.clone().begin_beside(grammar.clone(), end_ids.clone(), party, env.clone());
        let sender = self.sender.clone();
        env.spawn(Box::pin(async move {
            // sending fails only once the instance is gone
            let _ = sender.send(CompiledFor { request, attempt, begun: beside.await });
        }));
        self.parked.insert(request, order);
        None
    }

    /// Waits for a grammar to be compiled.
    pub(super) async fn compiled(&mut self) -> Option<CompiledFor> {
        self.compiled.recv().await
    }

    /// A grammar that has been compiled since, if there is one.
    pub(super) fn try_compiled(&mut self) -> Option<CompiledFor> {
        self.compiled.try_recv().ok()
    }

    /// The order that waited for a grammar; none if it has been cancelled or replaced.
    pub(super) fn unpark(&mut self, compiled: CompiledFor) -> Option<(Order, BegunGrammar)> {
        let CompiledFor { request, attempt, begun } = compiled;
        let parked = self.parked.get(&request).and_then(drawing_job)?;
        if parked.attempt != attempt {
            return None;
        }
        Some((self.parked.remove(&request)?, begun))
    }

    /// Drops the order of a request, if one is parked.
    pub(super) fn cancel(&mut self, request: RequestId) {
        self.parked.remove(&request);
    }

    /// Drops the parked orders of a router.
    pub(super) fn abandon(&mut self, router: RouterId) {
        self.parked.retain(|&request, _| RouterId::of(request) != router);
    }
}

/// The job of an order after which tokens are drawn.
fn drawing_job(order: &Order) -> Option<&Job> {
    match order {
        Order::Add { job, .. } | Order::Reserve { job, .. } => Some(job),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::{SeededEnv, yield_now};
    use crate::grammar::Grammar;
    use crate::model::builtin;
    use crate::request::{GenerateRequest, Hints, Sampling};
    use mixfleet_hal::DType;
    use mixfleet_hal::units::Seconds;
    use mixfleet_scheduler::batch::Urgency;
    use mixfleet_scheduler::fleet::PartyId;
    use mixfleet_scheduler::kv::{Namespace, PrefixHasher};

    const REGEX: &str = "[ab]+";

    fn order(request: RequestId, attempt: u32, grammar: Option<&str>) -> Order {
        let namespace = Namespace {
            model_digest: "model".into(),
            tokenizer_digest: "tokenizer".into(),
            kv_dtype: DType::F32,
            cache_salt: None,
        };
        let wanted = GenerateRequest {
            id: String::new(),
            forced_ids: Arc::default(),
            minimum: None,
            vocabulary: None,
            prompt_ids: [1, 2].into(),
            max_tokens: 2,
            eos_ids: [1].into(),
            sampling: Sampling::default(),
            logprobs: None,
            grammar: grammar.map(|text| Grammar::Regex(text.into())),
            cache_salt: None,
            party: PartyId::NONE,
            hints: Hints::default(),
        };
        let job = Job {
            request,
            urgency: Urgency::due_at(Seconds(1.0)),
            ready: Seconds(1.0),
            attempt,
            wanted: Arc::new(wanted),
            generated: Vec::new(),
            hasher: PrefixHasher::new(&[1, 2], &namespace),
        };
        Order::Add { job, hand_off: None, pull: None }
    }

    fn seeded<F: Future<Output = ()> + Send + 'static>(
        test: impl FnOnce(SharedEnv, GrammarWait) -> F + Send + 'static,
    ) {
        let tokenizer = builtin::tokenizer().unwrap();
        let vocab = u32::try_from(tokenizer.vocab()).unwrap();
        let env = SeededEnv::new(1);
        let shared: SharedEnv = Arc::new(env.clone());
        env.run(async move {
            let grammars = Arc::new(Grammars::new(tokenizer, vocab, None));
            test(shared, GrammarWait::new(Some(grammars))).await;
        });
    }

    #[test]
    fn only_an_order_whose_grammar_is_new_waits() {
        seeded(async |env, mut wait| {
            assert!(matches!(wait.admit(order(1, 1, None), &env), Some((_, None))));
            assert!(wait.admit(order(2, 1, Some(REGEX)), &env).is_none(), "it is parked");
            assert!(matches!(wait.admit(order(3, 1, None), &env), Some((_, None))), "others go on");
            let compiled = wait.compiled().await.unwrap();
            let (unparked, begun) = wait.unpark(compiled).unwrap();
            assert_eq!(drawing_job(&unparked).map(|job| job.request), Some(2));
            assert!(begun.is_ok());
            assert!(matches!(wait.admit(order(4, 1, Some(REGEX)), &env), Some((_, Some(Ok(_))))));
            // so does one that is known to be wrong
            assert!(wait.admit(order(5, 1, Some("(a")), &env).is_none());
            let compiled = wait.compiled().await.unwrap();
            assert!(matches!(wait.unpark(compiled), Some((_, Err(_)))));
            assert!(matches!(wait.admit(order(6, 1, Some("(a")), &env), Some((_, Some(Err(_))))));
        });
    }

    #[test]
    fn a_parked_order_can_be_cancelled_or_replaced() {
        seeded(async |env, mut wait| {
            assert!(wait.admit(order(1, 1, Some("a")), &env).is_none());
            wait.cancel(1);
            let compiled = wait.compiled().await.unwrap();
            assert!(wait.unpark(compiled).is_none(), "it has been cancelled");
            assert!(wait.admit(order(2, 1, Some("b")), &env).is_none());
            assert!(wait.admit(order(2, 2, Some("c")), &env).is_none(), "a newer placement replaces it");
            assert!(wait.admit(order(2, 1, Some("d")), &env).is_none(), "an older one does not");
            yield_now().await;
            let mut unparked = Vec::new();
            for _ in 0..2 {
                let compiled = wait.compiled().await.unwrap();
                unparked.extend(wait.unpark(compiled).map(|(order, _)| order));
            }
            let attempts: Vec<_> = unparked.iter().filter_map(drawing_job).map(|job| job.attempt).collect();
            assert_eq!(attempts, [2]);
            assert!(wait.admit(order(3, 1, Some("e")), &env).is_none());
            wait.abandon(RouterId::of(3));
            let compiled = wait.compiled().await.unwrap();
            assert!(wait.unpark(compiled).is_none(), "its router is gone");
        });
    }
}

//! Answers that follow a grammar: the tokens that may come next, by llguidance.
//!
//! A grammar is text from a client, and the library does not bound the time, memory and stack that compiling
//! takes. So a grammar passes three gates before it is compiled in a serving process: cheap bounds on its
//! text (`grammar/bounds.rs`), a trial in a child process (`grammar/trial.rs`), and a budget of memory that
//! parties share. Instances never compile: they take a compiled grammar, or wait for it without blocking.

mod bounds;
mod library;
mod trial;

pub use bounds::GRAMMAR_BYTES_MAX;
pub use trial::{GrammarError, TrialEnd, Trials, run_trial};

use crate::budget::{BudgetError, ByteBudget, HeldBytes, Party};
use crate::env::SharedEnv;
use crate::model::Tokenizer;
use futures_util::future::BoxFuture;
pub(crate) use library::without_annotations;
use library::{Compiled, GrammarCompiler, special};
use mixfleet_scheduler::fleet::PartyId;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use tokio::sync::{Semaphore, oneshot};
use trial::TrialQuestion;

/// Memory of all compiled grammars, half of it for one party.
const COMPILED_BYTES_MAX: usize = 64 << 20;
/// Number of grammars that stay compiled, and of refusals that are remembered.
const KNOWN_MAX: usize = 256;
/// Tokens after which the growth of a grammar's lexer is looked at again.
const GROWTH_TOKENS: usize = 16;
/// Attempts at a trial, while some other process kills its child.
const TRIES: u32 = 3;
/// Pauses of an instance before it compiles a grammar again that it could not compile for now: its request
/// was accepted.
const AGAIN_AFTER_MS: [u64; 8] = [100, 200, 400, 800, 1600, 1600, 1600, 1600];
/// Grammars that are compiled at a time for clients, and as many for instances.
pub(crate) const COMPILING_MAX: usize = 2;

/// What an answer must be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Grammar {
    /// A JSON document that is valid by a JSON schema, which is given as JSON.
    JsonSchema(Arc<str>),
    /// A text that a regular expression matches as a whole.
    Regex(Arc<str>),
    /// A text of a grammar in llguidance's variant of Lark.
    Lark(Arc<str>),
    /// Any text, or one that is of a grammar in Lark's form from where a mark begins, with which it begins.
    Begun {
        /// The mark.
        mark: Arc<str>,
        /// The grammar.
        lark: Arc<str>,
    },
}

impl Grammar {
    /// One of some texts.
    pub fn one_of<'a>(texts: impl IntoIterator<Item = &'a str>) -> Self {
        let escaped: Vec<String> = texts.into_iter().map(escape).collect();
        Grammar::Regex(format!("({})", escaped.join("|")).into())
    }

    /// Whether an answer may do without it.
    pub fn is_optional(&self) -> bool {
        matches!(self, Grammar::Begun { .. })
    }

    /// Its text.
    pub fn text(&self) -> &Arc<str> {
        match self {
            Grammar::JsonSchema(text) | Grammar::Regex(text) | Grammar::Lark(text) => text,
            Grammar::Begun { lark, .. } => lark,
        }
    }
}

/// A text as a regular expression that matches nothing else.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        // `\<` and `\>` are word boundaries
        if character.is_ascii_punctuation() && !matches!(character, '<' | '>') {
            escaped.push('\\');
        }
        escaped.push(character);
    }
    escaped
}

/// The holder of a party's grammars, by its number, which instances know as well.
pub(crate) fn owner(party: PartyId) -> Party {
    Party::Tenant(format!("{:016x}", party.0))
}

/// The party whose memory a grammar takes, and its waiting requests.
#[derive(Clone, Copy)]
pub struct GrammarClient<'a> {
    /// Compiled grammars are shared within a party only, so that none can spoil another's.
    pub party: &'a Party,
    /// Whether the result is no longer awaited.
    pub stopped: &'a dyn Fn() -> bool,
}

/// A compiled grammar, and the memory that it is charged with while anything uses it.
#[derive(Clone)]
struct Charged {
    compiled: Compiled,
    held: Arc<Mutex<HeldBytes>>,
}

/// A grammar whose end is known.
struct Known {
    party: Party,
    grammar: Grammar,
    outcome: Result<Charged, String>,
}

/// Compiles grammars for the tokens of a model.
pub struct Grammars {
    tokenizer: Tokenizer,
    vocab: u32,
    trials: Option<Box<dyn Trials>>,
    /// What all grammars share, made when the first one comes.
    library: OnceLock<Result<GrammarCompiler, String>>,
    memory: ByteBudget,
    /// The latest use first.
    known: Mutex<VecDeque<Known>>,
    /// Permits to compile for instances.
    turns: Arc<Semaphore>,
}

impl Grammars {
    /// Grammars over the first `vocab` tokens of a tokenizer. Without `trials` they are compiled untried,
    /// which is for tests.
    pub fn new(tokenizer: Tokenizer, vocab: u32, trials: Option<Box<dyn Trials>>) -> Self {
        Grammars {
            tokenizer,
            vocab,
            trials,
            library: OnceLock::new(),
            memory: ByteBudget::new(COMPILED_BYTES_MAX),
            known: Mutex::default(),
            turns: Arc::new(Semaphore::new(COMPILING_MAX)),
        }
    }

    /// The beginning of an answer that follows a grammar and ends with one of `end_ids`. It blocks while the
    /// grammar is compiled: call it on threads that neither serve connections nor drive a device.
    ///
    /// # Errors
    /// The fault of the grammar, or why it is not compiled now.
    pub fn begin(
        &self,
        grammar: &Grammar,
        end_ids: &Arc<[u32]>,
        client: GrammarClient<'_>,
    ) -> Result<GrammarRun, GrammarError> {
        if let Some(known) = self.begin_known(grammar, end_ids, client.party) {
            return known.map_err(GrammarError::Refused);
        }
        let compiled = self.compile(grammar, client);
        match &compiled {
            Ok(charged) => self.remember(grammar, client.party, Ok(charged.clone())),
            Err(GrammarError::Refused(cause)) => self.remember(grammar, client.party, Err(cause.clone())),
            Err(GrammarError::Busy(_)) => {}
        }
        compiled.map(|charged| self.run(charged, grammar, end_ids))
    }

    /// Like [`begin`](Self::begin), but only if the result is known already: it never blocks for long.
    pub fn begin_known(
        &self,
        grammar: &Grammar,
        end_ids: &Arc<[u32]>,
        party: &Party,
    ) -> Option<Result<GrammarRun, String>> {
        let mut known = self.lock();
        let at = known.iter().position(|known| known.grammar == *grammar && known.party == *party)?;
        let entry = known.remove(at)?;
        let outcome = entry.outcome.clone();
        known.push_front(entry);
        Some(outcome.map(|charged| self.run(charged, grammar, end_ids)))
    }

    /// Like [`begin`](Self::begin), for an instance: on one of a few separate threads. A grammar that cannot
    /// be compiled now is tried again.
    pub fn begin_beside(
        self: Arc<Self>,
        grammar: Grammar,
        end_ids: Arc<[u32]>,
        party: Party,
        env: SharedEnv,
    ) -> BoxFuture<'static, Result<GrammarRun, String>> {
        Box::pin(async move {
            let mut pauses = AGAIN_AFTER_MS.into_iter().map(Duration::from_millis);
            loop {
                let begun = self.clone().begin_on_thread(&grammar, &end_ids, &party, &env).await;
                match (begun, pauses.next()) {
                    (Err(GrammarError::Busy(_)), Some(pause)) => env.sleep(pause).await,
                    (begun, _) => return begun.map_err(|error| error.to_string()),
                }
            }
        })
    }

    /// Like [`begin`](Self::begin), on one of a few separate threads.
    async fn begin_on_thread(
        self: Arc<Self>,
        grammar: &Grammar,
        end_ids: &Arc<[u32]>,
        party: &Party,
        env: &SharedEnv,
    ) -> Result<GrammarRun, GrammarError> {
        let (grammar, end_ids, party) = (grammar.clone(), end_ids.clone(), party.clone());
        let turn = self.turns.clone().acquire_owned().await;
        let (sender, receiver) = oneshot::channel();
        let compile = async move {
            let client = GrammarClient { party: &party, stopped: &|| sender.is_closed() };
            let run = self.begin(&grammar, &end_ids, client);
            drop(turn);
            let _ = sender.send(run);
        };
        env.spawn_worker("grammar", Box::pin(compile))
            .map_err(|error| GrammarError::Busy(format!("no thread is left to compile it: {error}")))?;
        receiver.await.unwrap_or_else(|_| Err(GrammarError::Busy("it could not be compiled".into())))
    }

    fn run(&self, charged: Charged, grammar: &Grammar, end_ids: &Arc<[u32]>) -> GrammarRun {
        let Charged { compiled, held } = charged;
        let lead = match grammar {
            Grammar::Begun { mark, .. } => Some(GrammarLead {
                mark: mark.clone(),
                tokenizer: self.tokenizer.clone(),
                scanned: 0,
                begun_at: None,
                is_lost: false,
            }),
            _ => None,
        };
        let (vocab, end_ids) = (self.vocab, end_ids.clone());
        GrammarRun { compiled, held, vocab, end_ids, lead, followed: 0, looked_at: 0 }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn remember(&self, grammar: &Grammar, party: &Party, outcome: Result<Charged, String>) {
        let mut known = self.lock();
        known.push_front(Known { party: party.clone(), grammar: grammar.clone(), outcome });
        known.truncate(KNOWN_MAX);
    }

    fn compile(&self, grammar: &Grammar, client: GrammarClient<'_>) -> Result<Charged, GrammarError> {
        bounds::check(grammar).map_err(GrammarError::Refused)?;
        let bytes = match &self.trials {
            Some(trials) => {
                let question = serde_json::to_vec(&self.question(grammar));
                let question = question.map_err(|error| GrammarError::Busy(error.to_string()))?;
                let ends = (0..TRIES).map(|_| trials.run(&question, client.stopped));
                trial::judge(last_try(ends))?
            }
            None => 0,
        };
        let held = self.hold(bytes, client.party)?;
        let library = self.library.get_or_init(|| GrammarCompiler::new(self.words())).as_ref();
        let library = library.map_err(|error| GrammarError::Refused(error.clone()))?;
        let (compiled, mask) = library.compile(grammar).map_err(GrammarError::Refused)?;
        // an answer that no token can begin is reported now, and not after the prompt was computed
        if mask.is_zero() {
            return Err(GrammarError::Refused("no answer can follow it".into()));
        }
        Ok(Charged { compiled, held: Arc::new(Mutex::new(held)) })
    }

    /// Charges a party with memory. What it has compiled and does not use makes room, the oldest first.
    fn hold(&self, bytes: usize, party: &Party) -> Result<HeldBytes, GrammarError> {
        let mut held = self.memory.holder(party.clone());
        loop {
            let spent = match held.grow(bytes) {
                Ok(()) => return Ok(held),
                Err(spent) => spent,
            };
            let mut known = self.lock();
            let makes_room = |known: &Known| {
                let is_idle =
                    known.outcome.as_ref().is_ok_and(|charged| Arc::strong_count(&charged.held) == 1);
                is_idle && (spent == BudgetError::Budget || known.party == *party)
            };
            match known.iter().rposition(makes_room) {
                Some(at) => drop(known.remove(at)),
                None => {
                    let whose = match spent {
                        BudgetError::Budget => "the answers in progress",
                        BudgetError::Share => "the answers in progress of this key or address",
                    };
                    let cause = format!("{whose} use all memory for grammars");
                    return Err(GrammarError::Busy(cause));
                }
            }
        }
    }

    fn question(&self, grammar: &Grammar) -> TrialQuestion {
        let specials = (0..self.vocab).filter(|id| self.tokenizer.is_special(*id));
        TrialQuestion {
            grammar: grammar.clone(),
            vocab: self.vocab,
            specials: specials.map(|id| (id, self.tokenizer.token_bytes(id))).collect(),
        }
    }

    fn words(&self) -> Vec<Vec<u8>> {
        let word = |id: u32| match self.tokenizer.is_special(id) {
            true => special(&self.tokenizer.token_bytes(id)),
            false => self.tokenizer.token_bytes(id),
        };
        (0..self.vocab).map(word).collect()
    }
}

/// The first of these ends at which no other process killed the child, or else the last one.
fn last_try(mut ends: impl Iterator<Item = TrialEnd>) -> TrialEnd {
    let killed = |end: &TrialEnd| *end == TrialEnd::Killed;
    ends.find(|end| !killed(end)).unwrap_or(TrialEnd::Killed)
}

/// Where an answer is in its grammar.
pub struct GrammarRun {
    compiled: Compiled,
    held: Arc<Mutex<HeldBytes>>,
    vocab: u32,
    end_ids: Arc<[u32]>,
    /// What comes before the grammar, if something may.
    lead: Option<GrammarLead>,
    /// Number of tokens of the answer that were followed.
    followed: usize,
    /// Number of tokens at which the lexer's memory was looked at.
    looked_at: usize,
}

impl GrammarRun {
    /// Follows the tokens of `output`, the whole answer so far, that are new since the last time.
    ///
    /// # Errors
    /// When a token is not of the grammar, or the parser gives up.
    pub fn follow(&mut self, output: &[u32]) -> Result<(), String> {
        let from = match &mut self.lead {
            None => 0,
            Some(lead) => match lead.begin(output) {
                Some(at) => at,
                None => return Ok(()),
            },
        };
        let followed = self.compiled.follow(output.get(self.followed.max(from)..).unwrap_or_default());
        if let (Err(_), Some(lead)) = (&followed, &mut self.lead) {
            // the tokens of the mark went on otherwise: the answer is free
            lead.is_lost = true;
            return Ok(());
        }
        followed?;
        self.followed = output.len();
        if self.followed >= self.looked_at + GROWTH_TOKENS {
            self.looked_at = self.followed;
            self.charge_growth()?;
        }
        Ok(())
    }

    /// Charges the party with what the lexer has grown by.
    fn charge_growth(&self) -> Result<(), String> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let grown = self.compiled.lexer_bytes().saturating_sub(held.bytes());
        held.grow(grown).map_err(|_| "its states need more memory than grammars may use".to_owned())
    }

    /// The tokens that must not come next, in order.
    ///
    /// # Errors
    /// When the parser gives up.
    pub fn forbidden(&mut self) -> Result<Vec<u32>, String> {
        if self.lead.as_ref().is_some_and(|lead| lead.is_lost || lead.begun_at.is_none()) {
            return Ok(Vec::new());
        }
        let mut mask = self.compiled.mask()?;
        if mask.is_allowed(self.vocab) {
            let known = self.end_ids.iter().filter(|id| **id < self.vocab);
            known.for_each(|id| mask.allow_token(*id));
        }
        Ok((0..self.vocab).filter(|id| !mask.is_allowed(*id)).collect())
    }
}

/// Looks for the mark with which a grammar begins.
struct GrammarLead {
    mark: Arc<str>,
    tokenizer: Tokenizer,
    /// Number of tokens that were looked at.
    scanned: usize,
    /// The token with which the mark begins.
    begun_at: Option<usize>,
    /// Whether the answer did not go on as the grammar does.
    is_lost: bool,
}

impl GrammarLead {
    /// Where the grammar begins in `output`, the whole answer so far: at a token that begins the mark.
    fn begin(&mut self, output: &[u32]) -> Option<usize> {
        if self.is_lost {
            return None;
        }
        if self.begun_at.is_none() {
            let from = self.scanned.saturating_sub(self.mark.len());
            self.begun_at = (from..output.len()).find(|start| self.stands_at(&output[*start..]));
            self.scanned = output.len();
        }
        self.begun_at
    }

    fn stands_at(&self, tokens: &[u32]) -> bool {
        let mut rest = self.mark.as_bytes();
        for id in tokens {
            let word = self.tokenizer.token_bytes(*id);
            let common = rest.len().min(word.len());
            if word[..common] != rest[..common] {
                return false;
            }
            rest = &rest[common..];
            if rest.is_empty() {
                return true;
            }
        }
        false
    }
}

#[cfg(test)]
#[path = "grammar_tests.rs"]
mod tests;

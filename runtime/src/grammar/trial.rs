//! Trials: a grammar is compiled in a process that may be killed, before it is compiled in one that serves.
//!
//! A grammar can end a process (deep recursion) or take any time and memory while the library compiles it,
//! and nothing can stop that from inside the process. So a child compiles it first, over the special tokens
//! and single bytes of the vocabulary, under limits that it watches itself; the parent also has a deadline. A
//! grammar that passes is compiled again by the same code on a thread with at least as much stack.

use super::library::{GrammarCompiler, special};
use super::{Grammar, bounds};
use mixfleet_hal::cast::to_usize;
use serde::{Deserialize, Serialize};
use std::io::Read;
use std::time::{Duration, Instant};

/// Processor time that a grammar may take to compile.
const CPU_S_MAX: f64 = 0.25;
/// Memory that a grammar may take while it is compiled, stack included.
pub(super) const BYTES_MAX: u64 = 24 << 20;
/// Stack of the thread that compiles in a trial: a quarter of what threads have that compile to serve.
const STACK_BYTES: usize = crate::env::WORKER_STACK_BYTES / 4;
/// Interval at which a trial looks at what it has taken.
const WATCH_INTERVAL: Duration = Duration::from_millis(2);
/// Exit code of a trial that took too much time.
const EXIT_TIME: u8 = 40;
/// Exit code of a trial that took too much memory.
const EXIT_MEMORY: u8 = 41;

/// The end of a child process that ran a trial.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TrialEnd {
    /// It ended by itself, with this exit code and output.
    Exited(u8, Vec<u8>),
    /// It crashed: a signal ended it that says what it did itself, such as SIGSEGV or SIGABRT.
    Crashed,
    /// Another signal ended it, which some other process sent.
    Killed,
    /// Its deadline passed.
    Deadline,
    /// The request that it was for has been cancelled.
    Cancelled,
    /// It could not be run, for this reason.
    NotRun(String),
}

impl TrialEnd {
    /// The end of a trial of a grammar that takes `bytes`, for tests of the callers.
    pub fn passed(bytes: u64) -> Self {
        let verdict = serde_json::to_vec(&Verdict::Compiles { bytes }).expect("it is plain data");
        TrialEnd::Exited(0, verdict)
    }
}

/// Runs trials, each in a process of its own that answers by [`run_trial`].
pub trait Trials: Send + Sync {
    /// Sends a child `question`, and waits for its end. It is killed when a deadline of about a second has
    /// passed, or when `stopped` says that the result is no longer awaited.
    fn run(&self, question: &[u8], stopped: &dyn Fn() -> bool) -> TrialEnd;
}

/// A grammar to be tried, and what of the vocabulary it may refer to.
#[derive(Serialize, Deserialize)]
pub(super) struct TrialQuestion {
    pub(super) grammar: Grammar,
    pub(super) vocab: u32,
    /// The ids of special tokens and their bytes.
    pub(super) specials: Vec<(u32, Vec<u8>)>,
}

/// The result of a trial.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum Verdict {
    /// It compiles, and takes this much memory.
    Compiles { bytes: u64 },
    /// The library or a bound refuses it.
    Refused(String),
}

impl TrialQuestion {
    /// The tokens of the trial's vocabulary: special ones, and single bytes at the first ids beside them.
    fn words(&self) -> Vec<Vec<u8>> {
        let mut words = vec![Vec::new(); self.vocab as usize];
        for (id, bytes) in &self.specials {
            if let Some(word) = words.get_mut(*id as usize) {
                *word = special(bytes);
            }
        }
        let free = words.iter_mut().filter(|word| word.is_empty());
        free.zip(0..=u8::MAX).for_each(|(word, byte)| word.push(byte));
        words
    }

    fn verdict(&self) -> Verdict {
        let compiles = || {
            bounds::check(&self.grammar)?;
            let library = GrammarCompiler::new(self.words())?;
            let before = memory_bytes();
            let (compiled, _) = library.compile(&self.grammar)?;
            // where the system does not tell, the library's own count is all there is
            let bytes = match (before, memory_bytes()) {
                (Some(before), Some(after)) => after.saturating_sub(before),
                _ => 4 * compiled.lexer_bytes() as u64,
            };
            Ok(Verdict::Compiles { bytes: bytes.max(compiled.lexer_bytes() as u64) })
        };
        compiles().unwrap_or_else(Verdict::Refused)
    }
}

/// Runs one trial in this process, which exists for nothing else: reads a question, and returns the exit code
/// with the text to print. A trial that takes too much ends the process.
pub fn run_trial(mut input: impl Read) -> (u8, Vec<u8>) {
    let mut text = Vec::new();
    if let Err(error) = input.read_to_end(&mut text) {
        return (2, error.to_string().into_bytes());
    }
    match std::thread::Builder::new().name("watch".into()).spawn(watch) {
        Ok(_) => answer(&text),
        Err(error) => (3, format!("no thread to watch the trial: {error}").into_bytes()),
    }
}

/// The exit code and output of the trial of a question.
fn answer(text: &[u8]) -> (u8, Vec<u8>) {
    let question: TrialQuestion = match serde_json::from_slice(text) {
        Ok(question) => question,
        Err(error) => return (2, error.to_string().into_bytes()),
    };
    let trial = std::thread::Builder::new().name("trial".into()).stack_size(STACK_BYTES);
    match trial.spawn(move || question.verdict()).map(std::thread::JoinHandle::join) {
        Ok(Ok(verdict)) => (0, serde_json::to_vec(&verdict).unwrap_or_default()),
        Ok(Err(_)) => (3, b"the trial panicked".to_vec()),
        Err(error) => (3, format!("no thread for the trial: {error}").into_bytes()),
    }
}

/// Ends the process when it has taken more than a grammar may.
fn watch() {
    let (began, cpu_began_s, bytes_began) = (Instant::now(), cpu_s(), memory_bytes());
    loop {
        std::thread::sleep(WATCH_INTERVAL);
        let taken_s = match (cpu_began_s, cpu_s()) {
            (Some(before), Some(now)) => now - before,
            _ => began.elapsed().as_secs_f64(),
        };
        if taken_s > CPU_S_MAX {
            std::process::exit(EXIT_TIME.into());
        }
        if let (Some(before), Some(now)) = (bytes_began, memory_bytes())
            && now.saturating_sub(before) > BYTES_MAX
        {
            std::process::exit(EXIT_MEMORY.into());
        }
    }
}

/// Resident memory of this process, where the system tells (Linux).
fn memory_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

/// Processor time of this process, where the system tells (Linux, in hundredths of a second).
fn cpu_s() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/self/stat").ok()?;
    let mut fields = text.rsplit(')').next()?.split_ascii_whitespace().skip(11);
    let (user, system): (u64, u64) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    Some((user + system) as f64 / 100.0)
}

/// Why a grammar is not compiled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GrammarError {
    /// It is wrong, or takes too much: it will be refused again.
    Refused(String),
    /// It may be taken later.
    Busy(String),
}

impl std::fmt::Display for GrammarError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (GrammarError::Refused(cause) | GrammarError::Busy(cause)) = self;
        f.write_str(cause)
    }
}

/// The memory that a grammar takes, by its trial.
///
/// # Errors
/// Why it must not be compiled.
pub(super) fn judge(end: TrialEnd) -> Result<usize, GrammarError> {
    let refused = |cause: &str| Err(GrammarError::Refused(cause.into()));
    let busy = |cause: String| Err(GrammarError::Busy(cause));
    match end {
        TrialEnd::Exited(0, output) => match serde_json::from_slice(&output) {
            Ok(Verdict::Compiles { bytes }) => Ok(to_usize(bytes)),
            Ok(Verdict::Refused(cause)) => Err(GrammarError::Refused(cause)),
            Err(error) => busy(format!("the trial of the grammar gave no verdict: {error}")),
        },
        TrialEnd::Exited(EXIT_TIME, _) => {
            refused(&format!("it takes more than {:.0} ms to compile: make it smaller", CPU_S_MAX * 1e3))
        }
        TrialEnd::Exited(EXIT_MEMORY, _) => {
            refused(&format!("it takes more than {} MiB to compile: make it smaller", BYTES_MAX >> 20))
        }
        TrialEnd::Crashed => refused("it nests too deeply to be compiled, or takes too much memory"),
        TrialEnd::Killed => busy("another process killed the trial of the grammar each time".into()),
        TrialEnd::Exited(code, output) => {
            let said = String::from_utf8_lossy(&output).chars().take(200).collect::<String>();
            busy(format!("the trial of the grammar failed (exit code {code}): {said}"))
        }
        TrialEnd::Deadline => busy("the server is too busy to compile the grammar in time".into()),
        TrialEnd::Cancelled => busy("the client has left".into()),
        TrialEnd::NotRun(cause) => busy(format!("no process can be started to try the grammar: {cause}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trial(question: &TrialQuestion) -> (u8, Vec<u8>) {
        answer(&serde_json::to_vec(question).unwrap())
    }

    #[test]
    fn a_trial_says_what_a_grammar_takes_or_why_not() {
        let specials = vec![(3, b"<|call|>".to_vec())];
        let question = |text: &str| TrialQuestion {
            grammar: Grammar::Lark(text.into()),
            vocab: 1000,
            specials: specials.clone(),
        };
        let (code, output) = trial(&question("start: <|call|> \"a\"+"));
        let verdict: Verdict = serde_json::from_slice(&output).unwrap();
        assert!(code == 0 && matches!(verdict, Verdict::Compiles { bytes } if bytes > 0), "{verdict:?}");
        let end = TrialEnd::Exited(code, output);
        assert!(judge(end).is_ok());
        let (code, output) = trial(&question("start: nowhere"));
        let said = judge(TrialEnd::Exited(code, output)).unwrap_err();
        assert!(matches!(&said, GrammarError::Refused(cause) if cause.contains("nowhere")), "{said:?}");
        assert_eq!(answer(b"{").0, 2);
    }

    #[test]
    fn only_what_is_wrong_with_the_grammar_is_a_refusal() {
        let refused = [
            TrialEnd::Crashed,
            TrialEnd::Exited(EXIT_TIME, Vec::new()),
            TrialEnd::Exited(EXIT_MEMORY, Vec::new()),
        ];
        for end in refused {
            assert!(matches!(judge(end.clone()), Err(GrammarError::Refused(_))), "{end:?}");
        }
        let busy = [
            TrialEnd::Killed,
            TrialEnd::Deadline,
            TrialEnd::Cancelled,
            TrialEnd::NotRun("x".into()),
            TrialEnd::Exited(0, b"?".to_vec()),
            TrialEnd::Exited(101, Vec::new()),
        ];
        for end in busy {
            assert!(matches!(judge(end.clone()), Err(GrammarError::Busy(_))), "{end:?}");
        }
    }
}

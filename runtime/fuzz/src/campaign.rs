//! Runs a target on its corpus and on mutations of it.

use crate::Target;
use crate::mutate::Mutator;
use mixfleet_hal::random;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Timeout of one input; no parser needs a thousandth of it.
const HANGS_AFTER: Duration = Duration::from_secs(120);

/// Stack of the thread: libraries compiled without optimisation take ten times the stack of a release, where
/// threads have 2 MiB.
const STACK_BYTES: usize = 20 << 20;

/// The directory of a target's corpus.
pub fn corpus_directory(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target)
}

/// The inputs of a target with their names, sorted by name.
///
/// # Errors
/// When they cannot be read.
pub fn corpus(target: &str) -> std::io::Result<Vec<(String, Vec<u8>)>> {
    let mut inputs = Vec::new();
    for entry in std::fs::read_dir(corpus_directory(target))? {
        let entry = entry?;
        inputs.push((entry.file_name().to_string_lossy().into_owned(), std::fs::read(entry.path())?));
    }
    inputs.sort();
    Ok(inputs)
}

/// Runs `target` on its corpus, then on `cases` mutations derived from `seed`. Returns the number of inputs
/// that the parser accepted.
///
/// # Panics
/// On the first input for which a property does not hold, which is kept as a file; and if no input of the
/// corpus is accepted, since its mutations would be useless.
pub fn run(target: &Target, corpus: Vec<(String, Vec<u8>)>, cases: u64, seed: u64) -> u64 {
    let trying = std::thread::Builder::new().name(target.name.into()).stack_size(STACK_BYTES);
    std::thread::scope(|scope| {
        let tried = trying.spawn_scoped(scope, || all(target, corpus, cases, seed)).expect("a thread");
        tried.join().unwrap_or_else(|panic| resume_unwind(panic))
    })
}

fn all(target: &Target, corpus: Vec<(String, Vec<u8>)>, cases: u64, seed: u64) -> u64 {
    let watch = Watch::begin(target.name);
    let mut taken = 0;
    for (name, input) in &corpus {
        taken += u64::from(watch.tried(input, target.check, &format!("'{name}' of its corpus")));
    }
    assert!(taken > 0, "{} takes nothing of its corpus", target.name);
    let inputs: Vec<Vec<u8>> = corpus.into_iter().map(|(_, input)| input).collect();
    let mutator = Mutator::new(&inputs);
    for case in 0..cases {
        let input = mutator.input(random::bits(seed, case));
        taken += u64::from(watch.tried(&input, target.check, &format!("case {case} of seed {seed}")));
    }
    taken
}

/// The input that is being run, and its start time.
type Trying = Arc<Mutex<Option<(Instant, Vec<u8>)>>>;

/// Detects inputs that do not terminate, and keeps failing inputs.
struct Watch {
    target: &'static str,
    trying: Trying,
}

impl Watch {
    fn begin(target: &'static str) -> Self {
        let _ = std::fs::create_dir_all(directory());
        let trying = Trying::default();
        let seen = Arc::downgrade(&trying);
        std::thread::spawn(move || {
            while let Some(trying) = seen.upgrade() {
                let hung = match &*trying.lock().unwrap_or_else(PoisonError::into_inner) {
                    Some((since, input)) if since.elapsed() > HANGS_AFTER => Some(input.clone()),
                    _ => None,
                };
                if let Some(input) = hung {
                    let kept = keep(target, &input);
                    let _ = writeln!(std::io::stderr(), "{target} does not end with {kept}");
                    std::process::abort();
                }
                drop(trying);
                std::thread::sleep(Duration::from_secs(1));
            }
        });
        Watch { target, trying }
    }

    fn set(&self, trying: Option<(Instant, Vec<u8>)>) {
        *self.trying.lock().unwrap_or_else(PoisonError::into_inner) = trying;
    }

    fn tried(&self, input: &[u8], check: fn(&[u8]) -> bool, origin: &str) -> bool {
        self.set(Some((Instant::now(), input.to_vec())));
        // Left behind if the whole process ends, as on a stack overflow.
        let trying = directory().join(format!("{}-trying", self.target));
        let _ = std::fs::write(&trying, input);
        let taken = catch_unwind(AssertUnwindSafe(|| check(input)));
        self.set(None);
        let _ = std::fs::remove_file(&trying);
        taken.unwrap_or_else(|_| {
            let (target, kept) = (self.target, keep(self.target, input));
            panic!(
                "{target} does not hold of {origin}: {kept}; mend the cause and add the input to its corpus"
            )
        })
    }
}

/// The directory of failing inputs.
fn directory() -> PathBuf {
    let own = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target");
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(own, PathBuf::from).join("fuzz")
}

/// Writes an input there. Returns its path and its first bytes.
fn keep(target: &str, input: &[u8]) -> String {
    const SHOWN_BYTES: usize = 64;
    let hash = input.iter().fold(0, |hash, byte| random::mix(hash ^ u64::from(*byte)));
    let file = directory().join(format!("{target}-{hash:016x}"));
    let written = std::fs::write(&file, input);
    let place = written.map_or_else(|error| error.to_string(), |()| file.display().to_string());
    let shown: String = input.iter().take(SHOWN_BYTES).map(|byte| format!("{byte:02x}")).collect();
    let more = if input.len() > SHOWN_BYTES { "..." } else { "" };
    format!("{} bytes in {place}, in hexadecimal {shown}{more}", input.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dislikes_braces(bytes: &[u8]) -> bool {
        assert!(!bytes.contains(&b'{'), "a brace");
        !bytes.is_empty()
    }

    #[test]
    fn an_input_of_which_something_does_not_hold_is_found_and_kept() {
        let target = Target { name: "dislikes_braces", check: dislikes_braces, cases: 0 };
        let corpus = || vec![("plain".to_string(), b"a word".to_vec())];
        assert!(run(&target, corpus(), 10, 1) > 5);
        let found = catch_unwind(|| run(&target, corpus(), 2000, 1)).unwrap_err();
        let found = found.downcast_ref::<String>().unwrap();
        let file = found.split(" bytes in ").nth(1).unwrap().split(", in hexadecimal").next().unwrap();
        assert!(std::fs::read(file).unwrap().contains(&b'{'), "{found}");
        std::fs::remove_file(file).unwrap();
    }
}

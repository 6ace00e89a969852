//! Trials of grammars: this program is started again as a child, which may be killed.

use mixfleet_runtime::grammar::{TrialEnd, Trials, run_trial};
use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// The hidden command that runs a trial. It is no subcommand, so that a trial parses no command line.
const COMMAND: &str = "grammar-trial";
/// Time after which an unfinished trial is killed. A trial also has a shorter limit on processor time; this
/// one matters if the machine is too busy to run it.
const DEADLINE: Duration = Duration::from_millis(800);
/// Interval at which a trial's client is looked at.
const CLIENT_INTERVAL: Duration = Duration::from_millis(10);
/// Maximum address space of a trial, should it take memory faster than it can watch itself.
#[cfg(target_os = "linux")]
const ADDRESS_BYTES_MAX: u64 = 4 << 30;

/// Runs each trial as a child of this process.
pub(crate) struct ChildTrials;

impl Trials for ChildTrials {
    fn run(&self, question: &[u8], stopped: &dyn Fn() -> bool) -> TrialEnd {
        let began = Instant::now();
        match start() {
            Ok(child) => follow(child, question.to_vec(), began + DEADLINE, stopped),
            Err(error) => TrialEnd::NotRun(error.to_string()),
        }
    }
}

fn start() -> std::io::Result<Child> {
    // the program stays the same one here, even if its file is replaced
    let itself = match cfg!(target_os = "linux") {
        true => PathBuf::from("/proc/self/exe"),
        false => std::env::current_exe()?,
    };
    let mut command = Command::new(itself);
    command.arg(COMMAND).env_clear();
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()
}

/// Hands a child its question and waits for its end, or kills it.
fn follow(mut child: Child, question: Vec<u8>, deadline: Instant, stopped: &dyn Fn() -> bool) -> TrialEnd {
    let (Some(mut input), Some(mut output)) = (child.stdin.take(), child.stdout.take()) else {
        return killed(child, TrialEnd::NotRun("it has no input or output".into()));
    };
    let (sender, receiver) = channel();
    let talk = move || {
        // a child that ends before it has read everything says why by how it ends
        let _ = input.write_all(&question);
        drop(input);
        let mut said = Vec::new();
        let _ = output.read_to_end(&mut said);
        let _ = sender.send(said);
    };
    if let Err(error) = std::thread::Builder::new().name("trial".into()).spawn(talk) {
        return killed(child, TrialEnd::NotRun(error.to_string()));
    }
    loop {
        match receiver.recv_timeout(CLIENT_INTERVAL) {
            Ok(said) => return ended(child, said),
            Err(RecvTimeoutError::Disconnected) => return ended(child, Vec::new()),
            Err(RecvTimeoutError::Timeout) if stopped() => return killed(child, TrialEnd::Cancelled),
            Err(RecvTimeoutError::Timeout) if Instant::now() > deadline => {
                return killed(child, TrialEnd::Deadline);
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}

/// The end of a child that has closed its output.
fn ended(mut child: Child, said: Vec<u8>) -> TrialEnd {
    match child.wait() {
        Ok(status) => end_of(status, said),
        Err(error) => TrialEnd::NotRun(error.to_string()),
    }
}

fn end_of(status: ExitStatus, said: Vec<u8>) -> TrialEnd {
    match status.code() {
        Some(code) => TrialEnd::Exited(u8::try_from(code).unwrap_or(u8::MAX), said),
        None if has_crashed(&status) => TrialEnd::Crashed,
        None => TrialEnd::Killed,
    }
}

/// Whether the process crashed: the signal that ended it says what it did itself.
fn has_crashed(status: &ExitStatus) -> bool {
    use rustix::process::Signal;
    let own = [Signal::SEGV, Signal::BUS, Signal::ABORT, Signal::ILL, Signal::FPE, Signal::TRAP, Signal::SYS];
    status.signal().is_some_and(|number| own.iter().any(|signal| signal.as_raw() == number))
}

fn killed(mut child: Child, end: TrialEnd) -> TrialEnd {
    // both fail only for a child that has ended already
    let _ = child.kill();
    let _ = child.wait();
    end
}

/// The end of this process, if it was started for a trial.
pub(crate) fn asked() -> Option<ExitCode> {
    if std::env::args_os().nth(1)? != COMMAND {
        return None;
    }
    limit_itself();
    let (code, said) = run_trial(std::io::stdin().lock());
    let _ = std::io::stdout().write_all(&said);
    Some(ExitCode::from(code))
}

#[cfg(target_os = "linux")]
fn limit_itself() {
    use rustix::process::{Resource, Rlimit, setrlimit};
    let limit = |bytes| Rlimit { current: Some(bytes), maximum: Some(bytes) };
    // it fails only where limits are lower already
    let _ = setrlimit(Resource::As, limit(ADDRESS_BYTES_MAX));
    let _ = setrlimit(Resource::Core, limit(0));
}

#[cfg(not(target_os = "linux"))]
fn limit_itself() {}

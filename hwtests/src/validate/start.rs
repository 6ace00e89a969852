//! Starts children and listens to them, as processes or, for tests, within this one.

use super::child;
use super::protocol::{Assignment, ChildMessage};
use mixfleet_hal::Device;
use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Opens the device that a selector names, or returns why it cannot.
pub type Open = dyn Fn(&str) -> Result<Arc<dyn Device>, String>;

/// A message from a child, or its end.
#[derive(Clone, Debug, PartialEq)]
pub enum Heard {
    /// A message of the protocol.
    Line(Box<ChildMessage>),
    /// Nothing, until the timeout.
    Silence,
    /// The child is gone; the text says how, and what it last wrote to standard error.
    Gone(String),
    /// Nothing more, since the run is to end.
    Cancelled,
}

/// Starts children.
pub trait Start {
    /// Starts a child on `assignment`.
    ///
    /// # Errors
    /// If no child can be started at all.
    fn start(&self, assignment: &Assignment) -> std::io::Result<Box<dyn ChildProcess>>;
}

/// A running child, which is killed on drop.
pub trait ChildProcess {
    /// Waits for the next message, for at most `patience`.
    fn next(&mut self, patience: Duration) -> Heard;
}

/// Starts children as processes. The command must read an [`Assignment`] from standard input and write
/// messages to standard output ([`child::serve`]).
pub struct Processes {
    /// Creates the command for each child.
    pub command: Box<dyn Fn() -> Command + Send>,
    /// Whether the run is to end at once.
    pub cancelled: Arc<AtomicBool>,
}

/// Time between two looks whether the run is to end.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Bytes of a child's standard error kept from its beginning and from its end, since a panic prints its cause
/// before its stack.
const STDERR_KEPT: usize = 1000;

/// The standard error of a child.
#[derive(Default)]
struct StderrLines {
    first: String,
    last: String,
}

impl StderrLines {
    fn add(&mut self, text: &str) {
        let room = STDERR_KEPT.saturating_sub(self.first.len());
        let cut = (0..=room.min(text.len())).rev().find(|&i| text.is_char_boundary(i)).unwrap_or(0);
        let cut = if self.last.is_empty() { cut } else { 0 };
        self.first.push_str(&text[..cut]);
        self.last.push_str(&text[cut..]);
        let excess = self.last.len().saturating_sub(STDERR_KEPT);
        let excess = (excess..self.last.len()).find(|&i| self.last.is_char_boundary(i)).unwrap_or(0);
        self.last.drain(..excess);
    }

    fn text(&self) -> String {
        let gap = if self.last.len() >= STDERR_KEPT { " [...] " } else { "" };
        format!("{}{gap}{}", self.first, self.last).trim().to_owned()
    }
}

struct SpawnedChild {
    child: Child,
    cancelled: Arc<AtomicBool>,
    lines: Receiver<String>,
    stderr: Arc<Mutex<StderrLines>>,
    listeners: Vec<JoinHandle<()>>,
}

impl Start for Processes {
    fn start(&self, assignment: &Assignment) -> std::io::Result<Box<dyn ChildProcess>> {
        let mut command = (self.command)();
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // an interrupt from the terminal is for the parent, which ends its children
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let mut child = command.spawn()?;
        let (send, lines) = channel();
        let mut listeners = Vec::new();
        if let Some(out) = child.stdout.take() {
            listeners.push(std::thread::spawn(move || {
                // a line that is not UTF-8 is not part of the protocol
                for line in BufReader::new(out).lines().map_while(Result::ok) {
                    if send.send(line).is_err() {
                        break;
                    }
                }
            }));
        }
        let stderr = Arc::<Mutex<StderrLines>>::default();
        if let Some(from) = child.stderr.take() {
            let kept = stderr.clone();
            listeners.push(std::thread::spawn(move || keep(from, &kept)));
        }
        if let Some(mut input) = child.stdin.take() {
            // a child that dies before it has read is reported as gone
            let _ = writeln!(input, "{}", serde_json::to_string(assignment)?);
        }
        let cancelled = self.cancelled.clone();
        Ok(Box::new(SpawnedChild { child, cancelled, lines, stderr, listeners }))
    }
}

fn keep(mut from: impl Read, said: &Mutex<StderrLines>) {
    let mut buffer = [0; 1024];
    while let Ok(bytes) = from.read(&mut buffer)
        && bytes > 0
    {
        let text = String::from_utf8_lossy(&buffer[..bytes]);
        said.lock().unwrap_or_else(PoisonError::into_inner).add(&text);
    }
}

impl ChildProcess for SpawnedChild {
    fn next(&mut self, patience: Duration) -> Heard {
        let until = Instant::now() + patience;
        loop {
            if self.cancelled.load(Ordering::Relaxed) {
                return Heard::Cancelled;
            }
            let left = until.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left.min(LOOK_EVERY)) {
                Ok(text) => {
                    // a driver may print to standard output
                    if let Ok(line) = serde_json::from_str(&text) {
                        return Heard::Line(Box::new(line));
                    }
                }
                Err(RecvTimeoutError::Timeout) if left <= LOOK_EVERY => return Heard::Silence,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        let end = match self.child.wait() {
            Ok(status) => in_words(status),
            Err(error) => format!("its end could not be learnt: {error}"),
        };
        self.listeners.drain(..).for_each(|listener| drop(listener.join()));
        let said = self.stderr.lock().unwrap_or_else(PoisonError::into_inner).text();
        Heard::Gone(if said.is_empty() { end } else { format!("{end}; it said: {said}") })
    }
}

impl Drop for SpawnedChild {
    fn drop(&mut self) {
        // both fail only for a child that is gone already
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(unix)]
fn in_words(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    match (status.signal(), status.code()) {
        (Some(signal), _) => format!("killed by signal {signal}{}", name_of(signal)),
        (None, Some(code)) => format!("exit status {code}"),
        (None, None) => status.to_string(),
    }
}

#[cfg(not(unix))]
fn in_words(status: ExitStatus) -> String {
    status.to_string()
}

#[cfg(unix)]
fn name_of(signal: i32) -> &'static str {
    match signal {
        4 => " (SIGILL)",
        6 => " (SIGABRT)",
        7 => " (SIGBUS)",
        8 => " (SIGFPE)",
        9 => " (SIGKILL)",
        11 => " (SIGSEGV)",
        _ => "",
    }
}

/// Runs children in this process, one after the other, each with a device from `open`; for tests, and for
/// devices that are known to be safe.
pub struct StartInProcess {
    /// Opens the device that a selector names.
    pub open: Box<Open>,
}

struct Finished(VecDeque<ChildMessage>, String);

impl Start for StartInProcess {
    fn start(&self, assignment: &Assignment) -> std::io::Result<Box<dyn ChildProcess>> {
        let mut lines = VecDeque::new();
        let run = std::panic::AssertUnwindSafe(|| match (self.open)(&assignment.device) {
            Ok(device) => {
                child::run(&device, assignment, &child::nothing_beyond, &mut |line| lines.push_back(line));
            }
            Err(reason) => lines.push_back(ChildMessage::CannotOpen(reason)),
        });
        let end = match std::panic::catch_unwind(run) {
            Ok(()) => "done".to_owned(),
            Err(_) => "it panicked".to_owned(),
        };
        Ok(Box::new(Finished(lines, end)))
    }
}

impl ChildProcess for Finished {
    fn next(&mut self, _: Duration) -> Heard {
        self.0.pop_front().map_or_else(|| Heard::Gone(self.1.clone()), |line| Heard::Line(Box::new(line)))
    }
}

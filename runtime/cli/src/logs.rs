//! The log of commands that serve: a bounded queue of lines, and a thread that writes them to standard error.
//!
//! Logging never waits and never fails, even if standard error is closed, on a full disk, or an unread pipe.
//! Lines without room and lines that could not be written are dropped and counted.

use anyhow::{Context, Result};
use prometheus_client::metrics::counter::Counter;
use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;
use std::panic::PanicHookInfo;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use tracing_subscriber::fmt::MakeWriter;

/// Bytes of lines that may wait.
const QUEUE_BYTES_MAX: usize = 1 << 20;
/// Bytes that a waiting line takes beside its text.
const LINE_OVERHEAD_BYTES: usize = 64;
/// Pause before writing again to standard error that its owner has made non-blocking and that is full.
const FULL_PAUSE: Duration = Duration::from_millis(10);
/// Time that the last lines of a process have to be written.
const LAST_LINES: Duration = Duration::from_secs(1);
/// Time that the message of a panic has to be written, since the process may abort next.
const PANIC_LINES: Duration = Duration::from_millis(100);

/// The queue of this process, once [`open`] has been called.
static QUEUE: OnceLock<LogQueue> = OnceLock::new();

/// Sends messages of [`say`] and of panics through the queue from now on.
///
/// # Errors
/// When there is no standard error, or no thread left.
pub(crate) fn open() -> Result<()> {
    open_queue().map(drop)
}

fn open_queue() -> Result<LogQueue> {
    let stderr = io::stderr().as_fd().try_clone_to_owned().context("standard error is closed")?;
    let queue = LogQueue::start(File::from(stderr)).context("no thread for the log")?;
    std::panic::set_hook(Box::new(log_panic));
    Ok(QUEUE.get_or_init(|| queue).clone())
}

/// Sends this process's log through the queue too.
///
/// # Errors
/// As [`open`].
pub(crate) fn start(json: bool) -> Result<()> {
    let queue = open_queue()?;
    let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into());
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(queue);
    if json {
        builder.json().init();
    } else {
        builder.with_target(false).with_ansi(io::stderr().is_terminal()).init();
    }
    Ok(())
}

/// Counts dropped lines in this metric too, including those dropped so far.
pub(crate) fn count_dropped_in(counter: &Counter) {
    if let Some(queue) = QUEUE.get() {
        queue.count_dropped_in(counter);
    }
}

/// Waits until the log is written, for at most a second.
pub(crate) fn flush() {
    if let Some(queue) = QUEUE.get() {
        queue.flush(LAST_LINES);
    }
}

/// Ends the process once its log is written, or after a second.
pub(crate) fn exit(code: i32) -> ! {
    flush();
    std::process::exit(code)
}

/// Writes a message to standard error, if that is possible: through the queue where there is one.
pub(crate) fn say(message: &str) {
    match QUEUE.get() {
        Some(queue) => queue.push(format!("{message}\n").into_bytes()),
        // there is no way left to report that it cannot be written
        None => drop(writeln!(io::stderr(), "{message}")),
    }
}

/// Logs a panic. The usual hook writes to standard error by itself, and would wait for its reader.
fn log_panic(info: &PanicHookInfo<'_>) {
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("<unnamed>");
    let at = info.location().map_or_else(|| "an unknown place".to_owned(), ToString::to_string);
    let text = info.payload().downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| info.payload().downcast_ref::<&str>().copied());
    let what = text.unwrap_or("a value that is no text");
    let trace = std::backtrace::Backtrace::capture();
    let message = format!("thread '{name}' panicked at {at}: {what}");
    if tracing::enabled!(tracing::Level::ERROR) {
        match trace.status() {
            std::backtrace::BacktraceStatus::Captured => tracing::error!(backtrace = %trace, "{message}"),
            _ => tracing::error!("{message}"),
        }
    } else {
        say(&message);
    }
    if let Some(queue) = QUEUE.get() {
        queue.flush(PANIC_LINES);
    }
}

/// A bounded queue of lines with a thread that writes them. Clones share one queue.
#[derive(Clone)]
struct LogQueue {
    shared: Arc<SharedLines>,
}

struct SharedLines {
    waiting: Mutex<WaitingLines>,
    changed: Condvar,
}

#[derive(Default)]
struct WaitingLines {
    lines: VecDeque<Vec<u8>>,
    /// Bytes of the waiting lines and of the one that is being written.
    bytes: usize,
    is_writing: bool,
    dropped: u64,
    /// Dropped lines that the log has reported.
    reported: u64,
    counter: Option<Counter>,
}

impl WaitingLines {
    fn drop_line(&mut self) {
        self.dropped += 1;
        if let Some(counter) = &self.counter {
            counter.inc();
        }
    }

    fn is_written(&self) -> bool {
        self.lines.is_empty() && !self.is_writing
    }
}

impl LogQueue {
    /// A queue whose lines are written to `output`.
    fn start(output: impl Write + Send + 'static) -> io::Result<Self> {
        let shared = SharedLines { waiting: Mutex::default(), changed: Condvar::new() };
        let queue = LogQueue { shared: Arc::new(shared) };
        let writer = queue.clone();
        std::thread::Builder::new().name("log".into()).spawn(move || writer.write_lines(output))?;
        Ok(queue)
    }

    /// Adds a line, or drops it if there is no room.
    fn push(&self, line: Vec<u8>) {
        let mut waiting = self.lock();
        let bytes = line.len() + LINE_OVERHEAD_BYTES;
        if waiting.bytes + bytes > QUEUE_BYTES_MAX {
            waiting.drop_line();
            return;
        }
        waiting.bytes += bytes;
        waiting.lines.push_back(line);
        self.shared.changed.notify_all();
    }

    /// Waits until all lines are written or dropped, for at most `timeout`. Returns whether they are.
    fn flush(&self, timeout: Duration) -> bool {
        let waited =
            self.shared.changed.wait_timeout_while(self.lock(), timeout, |waiting| !waiting.is_written());
        waited.unwrap_or_else(PoisonError::into_inner).0.is_written()
    }

    fn count_dropped_in(&self, counter: &Counter) {
        let mut waiting = self.lock();
        counter.inc_by(waiting.dropped);
        waiting.counter = Some(counter.clone());
    }

    /// Writes lines as they come, for as long as the process runs.
    fn write_lines(&self, mut output: impl Write) {
        loop {
            let line = self.next_line();
            let written = write_all(&mut output, &line);
            let unreported = self.end_line(line.len(), written.is_ok());
            if let Some(lines) = unreported {
                tracing::warn!(lines, "standard error took no log for a time: lines were dropped");
            }
        }
    }

    /// Takes the next line, once there is one.
    fn next_line(&self) -> Vec<u8> {
        let waiting = self.shared.changed.wait_while(self.lock(), |waiting| waiting.lines.is_empty());
        let mut waiting = waiting.unwrap_or_else(PoisonError::into_inner);
        waiting.is_writing = true;
        waiting.lines.pop_front().unwrap_or_default()
    }

    /// Records the end of a line of this many bytes. Returns how many lines were dropped since the last
    /// report, once it can be reported.
    fn end_line(&self, bytes: usize, is_written: bool) -> Option<u64> {
        let mut waiting = self.lock();
        waiting.is_writing = false;
        waiting.bytes -= bytes + LINE_OVERHEAD_BYTES;
        if !is_written {
            waiting.drop_line();
        }
        self.shared.changed.notify_all();
        let unreported = waiting.dropped - waiting.reported;
        if !is_written || !waiting.lines.is_empty() || unreported == 0 {
            return None;
        }
        waiting.reported = waiting.dropped;
        Some(unreported)
    }

    fn lock(&self) -> MutexGuard<'_, WaitingLines> {
        self.shared.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Writes all of a line; where the output is non-blocking, it waits for room as a blocking one does.
fn write_all(output: &mut impl Write, mut line: &[u8]) -> io::Result<()> {
    while !line.is_empty() {
        match output.write(line) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => line = &line[written..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::thread::sleep(FULL_PAUSE),
            Err(error) => return Err(error),
        }
    }
    output.flush()
}

impl<'a> MakeWriter<'a> for LogQueue {
    type Writer = LogLine<'a>;

    fn make_writer(&'a self) -> LogLine<'a> {
        LogLine(self)
    }
}

/// Takes a line, which is always written by one call.
struct LogLine<'a>(&'a LogQueue);

impl Write for LogLine<'_> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.push(line.to_vec());
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, Sender, channel};

    /// Only ends a test that fails.
    const LONG: Duration = Duration::from_secs(60);

    /// An output that passes lines on, waits for permission before each, and fails on request.
    struct Gate {
        leave: Receiver<io::Result<()>>,
        written: Sender<String>,
    }

    impl Write for Gate {
        fn write(&mut self, line: &[u8]) -> io::Result<usize> {
            self.leave.recv().unwrap_or_else(|_| Err(io::ErrorKind::BrokenPipe.into()))?;
            let _ = self.written.send(String::from_utf8_lossy(line).into_owned());
            Ok(line.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn gated() -> (LogQueue, Sender<io::Result<()>>, Receiver<String>) {
        let (leave, gate) = channel();
        let (written, lines) = channel();
        (LogQueue::start(Gate { leave: gate, written }).unwrap(), leave, lines)
    }

    #[test]
    fn lines_without_room_are_dropped_and_counted() {
        let (queue, _leave, _lines) = gated();
        let line = vec![b'x'; QUEUE_BYTES_MAX / 4 - LINE_OVERHEAD_BYTES];
        (0..7).for_each(|_| queue.push(line.clone()));
        let counter = Counter::default();
        queue.count_dropped_in(&counter);
        assert_eq!(counter.get(), 3);
        queue.push(line);
        assert_eq!((counter.get(), queue.lock().bytes), (4, QUEUE_BYTES_MAX));
    }

    #[test]
    fn lines_that_cannot_be_written_are_counted_and_the_next_ones_come() {
        let (queue, leave, lines) = gated();
        let counter = Counter::default();
        queue.count_dropped_in(&counter);
        queue.push(b"lost".to_vec());
        leave.send(Err(io::ErrorKind::StorageFull.into())).unwrap();
        queue.push(b"kept".to_vec());
        leave.send(Ok(())).unwrap();
        assert_eq!(lines.recv_timeout(LONG).unwrap(), "kept");
        assert!(queue.flush(LONG));
        assert_eq!((counter.get(), queue.lock().bytes), (1, 0));
    }

    #[test]
    fn flushing_ends_though_the_output_hangs() {
        let (queue, leave, _lines) = gated();
        queue.push(b"waits".to_vec());
        assert!(!queue.flush(Duration::from_millis(1)));
        leave.send(Ok(())).unwrap();
        assert!(queue.flush(LONG));
    }

    #[test]
    fn a_full_non_blocking_output_is_waited_for() {
        let (queue, leave, lines) = gated();
        queue.push(b"line".to_vec());
        leave.send(Err(io::ErrorKind::WouldBlock.into())).unwrap();
        leave.send(Ok(())).unwrap();
        assert_eq!(lines.recv_timeout(LONG).unwrap(), "line");
        assert!(queue.flush(LONG));
        assert_eq!(queue.lock().dropped, 0);
    }

    #[test]
    fn drops_are_reported_once_when_the_output_has_caught_up() {
        let (queue, _leave, _lines) = gated();
        let report = |is_written| {
            queue.lock().bytes += LINE_OVERHEAD_BYTES;
            queue.end_line(0, is_written)
        };
        assert_eq!((report(true), report(false), report(false)), (None, None, None));
        assert_eq!((report(true), report(true)), (Some(2), None));
    }
}

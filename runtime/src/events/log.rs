//! Writing the log, beside the serving.

use super::{End, finite, json};
use crate::env::SharedEnv;
use serde::Serialize;
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::{mpsc, oneshot};

/// Bytes that may wait for the disk: seconds of a busy fleet, and a bound on the memory that a dead disk
/// takes.
const QUEUED_BYTES_MAX: usize = 64 << 20;

enum Message {
    Line(Vec<u8>),
    /// Nothing more comes, since something went wrong.
    Failed(String),
}

/// Takes lines and never waits: what the disk is too slow for ends the log, not the serving.
pub struct EventLog {
    /// None once the log has ended.
    writer: Option<mpsc::UnboundedSender<Message>>,
    queued_bytes: Arc<AtomicUsize>,
    queued_bytes_max: usize,
}

/// The log's other end, which is to be closed so that the last lines are on the disk.
pub struct Writer {
    close: oneshot::Sender<()>,
    closed: oneshot::Receiver<io::Result<()>>,
}

impl EventLog {
    /// A log that goes to `sink`, written by a worker of `env`.
    pub fn start(env: &SharedEnv, sink: Box<dyn Write + Send>) -> (EventLog, Writer) {
        EventLog::bounded(env, sink, QUEUED_BYTES_MAX)
    }

    fn bounded(env: &SharedEnv, sink: Box<dyn Write + Send>, queued_bytes_max: usize) -> (EventLog, Writer) {
        let (writer, messages) = mpsc::unbounded_channel();
        let (close, closing) = oneshot::channel();
        let (done, closed) = oneshot::channel();
        let queued_bytes = Arc::new(AtomicUsize::new(0));
        let log = EventLog { writer: Some(writer), queued_bytes: queued_bytes.clone(), queued_bytes_max };
        let file = File { sink, messages, queued_bytes };
        let writing = async move {
            let result = file.write(closing).await;
            if let Err(error) = &result {
                tracing::error!(%error, "the event log cannot be written and ends; serving goes on");
            }
            let _ = done.send(result);
        };
        if let Err(error) = env.spawn_worker("event log", Box::pin(writing)) {
            tracing::error!(%error, "no thread writes the event log; serving goes on");
        }
        (log, Writer { close, closed })
    }

    pub(super) fn write(&mut self, value: &impl Serialize) {
        let Some(writer) = &self.writer else { return };
        let message = self.line(value).unwrap_or_else(|cause| {
            tracing::error!(cause, "the event log ends here; serving goes on");
            Message::Failed(cause)
        });
        let failed = matches!(message, Message::Failed(_));
        // A writer that is gone has said why.
        if writer.send(message).is_err() || failed {
            self.writer = None;
        }
    }

    /// # Errors
    /// Why the log ends before this line.
    fn line(&self, value: &impl Serialize) -> Result<Message, String> {
        finite::check(value).map_err(|error| error.to_string())?;
        let mut line = json(value);
        line.push(b'\n');
        let (before, most) =
            (self.queued_bytes.fetch_add(line.len(), Ordering::Relaxed), self.queued_bytes_max);
        if before + line.len() > most {
            return Err(format!("its disk is slower than the events: {most} bytes wait for it"));
        }
        Ok(Message::Line(line))
    }
}

impl Writer {
    /// Ends the log after the events written so far.
    ///
    /// # Errors
    /// The disk's.
    pub async fn close(self) -> io::Result<()> {
        let _ = self.close.send(());
        self.closed.await.unwrap_or_else(|_| Err(io::Error::other("the writer is gone")))
    }
}

struct File {
    sink: Box<dyn Write + Send>,
    messages: mpsc::UnboundedReceiver<Message>,
    queued_bytes: Arc<AtomicUsize>,
}

impl File {
    async fn write(mut self, closing: oneshot::Receiver<()>) -> io::Result<()> {
        // If the caller does not close it, it ends with the process.
        let closing = async {
            if closing.await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        let mut closing = std::pin::pin!(closing);
        let mut open = true;
        let mut failure = None;
        while failure.is_none() {
            let message = match self.messages.try_recv() {
                Ok(message) => message,
                Err(_) if !open => break,
                Err(_) => {
                    // A reader of the log sees all events so far.
                    self.sink.flush()?;
                    tokio::select! {
                        biased;
                        message = self.messages.recv() => match message {
                            Some(message) => message,
                            None => break,
                        },
                        () = &mut closing => {
                            open = false;
                            continue;
                        }
                    }
                }
            };
            match message {
                Message::Line(line) => {
                    self.sink.write_all(&line)?;
                    self.queued_bytes.fetch_sub(line.len(), Ordering::Relaxed);
                }
                Message::Failed(cause) => failure = Some(cause),
            }
        }
        let mut last = json(&End { end: failure.map(Into::into) });
        last.push(b'\n');
        self.sink.write_all(&last)?;
        self.sink.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::SeededEnv;
    use std::sync::Mutex;

    /// A disk with room for this many bytes.
    struct Disk {
        kept: Arc<Mutex<Vec<u8>>>,
        room: usize,
    }

    impl Write for Disk {
        fn write(&mut self, data: &[u8]) -> io::Result<usize> {
            let mut kept = self.kept.lock().unwrap();
            if kept.len() + data.len() > self.room {
                return Err(io::ErrorKind::StorageFull.into());
            }
            kept.extend_from_slice(data);
            Ok(data.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// The content of a disk with `room` bytes of room after `values`, and the result of closing it.
    fn written(room: usize, queued_bytes_max: usize, values: &[f64]) -> (String, io::Result<()>) {
        let env = SeededEnv::new(1);
        let kept = Arc::new(Mutex::new(Vec::new()));
        let sink = Box::new(Disk { kept: kept.clone(), room });
        let shared: SharedEnv = Arc::new(env.clone());
        let (mut log, writer) = EventLog::bounded(&shared, sink, queued_bytes_max);
        // no other task runs in between: all of it waits for the disk
        values.iter().for_each(|value| log.write(value));
        let result = env.run(async move { writer.close().await });
        let text = String::from_utf8(kept.lock().unwrap().clone()).unwrap();
        (text, result)
    }

    #[test]
    fn a_closed_log_has_every_line_and_says_that_it_is_whole() {
        let (text, result) = written(1000, 1000, &[1.0, 0.1]);
        assert_eq!(text, "1.0\n0.1\n{\"end\":null}\n");
        assert!(result.is_ok());
    }

    #[test]
    fn a_slow_disk_ends_the_log_with_the_reason() {
        let (text, result) = written(1000, 8, &[1.0, 2.0, 3.0, 4.0]);
        assert!(text.starts_with("1.0\n2.0\n{\"end\":\"its disk is slower"), "{text}");
        assert!(result.is_ok());
    }

    #[test]
    fn a_full_disk_is_an_error() {
        let (text, result) = written(5, 1000, &[1.0, 2.0]);
        assert_eq!(text, "1.0\n");
        assert_eq!(result.unwrap_err().kind(), io::ErrorKind::StorageFull);
    }

    #[test]
    fn what_is_no_number_is_never_written_as_null() {
        let (text, _) = written(1000, 1000, &[1.0, f64::NAN, 2.0]);
        assert!(text.starts_with("1.0\n{\"end\":\"a value is NaN"), "{text}");
        assert!(!text.contains("2.0"), "{text}");
    }
}

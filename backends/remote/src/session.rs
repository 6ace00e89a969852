//! A connection to a process that lends a device, as its user sees it.
//!
//! One waiting thread receives for all: it reads and files messages, and wakes the others.

use crate::code::{Taker, put};
use crate::fetched::{BufferRange, Expected, Fetched};
use crate::frame::{FrameReader, MessageBody, put_frame};
use crate::hello::{self, DeviceAccess};
use crate::protocol::{
    CALL_TIMEOUT, DATA_BYTES_MAX, FRAME_BYTES_MAX, HELLO_BYTES_MAX, HELLO_TIMEOUT, PIECE_BYTES, SILENCE, ask,
    tell,
};
use mixfleet_hal::cast::to_usize;
use mixfleet_hal::command::ClockKind;
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{DeviceInfo, DeviceLimits, Elapsed, Error, ErrorKind, Result};
use mixfleet_wire::{Duplex, LinkAddress};
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Data that is sent together with the next message, because a copy is cheaper than a system call.
const TOGETHER_BYTES: usize = 16 << 10;

/// Bytes that wait for others at most.
const PENDING_BYTES_MAX: usize = 64 << 10;

/// A wait without a deadline.
const WAIT_MAX: Duration = Duration::from_secs(1 << 30);

/// Batches of a queue whose times are kept.
const TIMES_KEPT: usize = 1 << 16;

pub(crate) struct RemoteSession {
    link: Duplex,
    /// Pending bytes, sent with the next message that cannot wait.
    pending: Mutex<Vec<u8>>,
    reader: Mutex<FrameReader>,
    inbox: Mutex<SessionInbox>,
    changed: Condvar,
}

/// The answer to a call, which begins at a byte of a message.
pub(crate) struct CallReply {
    body: MessageBody,
    from: usize,
}

impl CallReply {
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.body[self.from..]
    }
}

#[derive(Default)]
struct SessionInbox {
    /// Whether a thread receives.
    is_watched: bool,
    calls: u64,
    replies: BTreeMap<u64, Result<CallReply>>,
    queues: BTreeMap<u64, QueueLog>,
    fetched: Fetched,
    failure: Option<Error>,
}

/// State of a queue.
#[derive(Default)]
struct QueueLog {
    done: u64,
    times: VecDeque<Elapsed>,
    /// The first batch that failed, and why.
    failure: Option<(u64, Error)>,
    /// The results of batches that are not done, oldest first.
    expected: VecDeque<Vec<Expected>>,
}

fn lost(error: &io::Error) -> Error {
    Error::new(ErrorKind::DeviceLost, format!("the connection to the device's process ended: {error}"))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl RemoteSession {
    /// Connects to a process that lends a device; returns the session and the device's description.
    ///
    /// # Errors
    /// If no process answers there, or the process is not of this fleet.
    pub(crate) fn open(
        name: &str,
        address: &LinkAddress,
        access: &DeviceAccess,
    ) -> Result<(Arc<Self>, DeviceInfo, DeviceLimits)> {
        let deadline = Instant::now() + HELLO_TIMEOUT;
        let failed = |error: Error| error.context(name);
        let link = Duplex::call(address, &access.security, SILENCE, deadline).map_err(failed)?;
        let mut reader = FrameReader::new(HELLO_BYTES_MAX);
        let (info, limits) = hello::call(&link, &mut reader, access, deadline).map_err(failed)?;
        Ok((Arc::new(RemoteSession::over(link, reader)), info, limits))
    }

    /// The session over a connection whose ends have authenticated each other.
    pub(crate) fn over(link: Duplex, mut reader: FrameReader) -> Self {
        reader.allow(FRAME_BYTES_MAX);
        RemoteSession {
            link,
            pending: Mutex::default(),
            reader: Mutex::new(reader),
            inbox: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Adds a queue that the other process is thought to have.
    pub(crate) fn assume_queue(&self, queue: u64) {
        lock(&self.inbox).queues.insert(queue, QueueLog::default());
    }

    /// Why the connection is of no use any more, if it is not.
    pub(crate) fn failure(&self) -> Option<Error> {
        lock(&self.inbox).failure.clone()
    }

    /// Ends the connection.
    pub(crate) fn fail(&self, error: Error) -> Error {
        let mut inbox = lock(&self.inbox);
        let error = inbox.failure.get_or_insert(error).clone();
        drop(inbox);
        self.link.close();
        self.changed.notify_all();
        error
    }

    /// Sends a message, at once or together with later ones.
    ///
    /// # Errors
    /// The errors of `fill`, and `DeviceLost` once the connection has ended.
    pub(crate) fn send(
        &self,
        now: bool,
        kind: u8,
        fill: impl FnOnce(&mut Vec<u8>) -> Result<()>,
    ) -> Result<()> {
        let mut pending = lock(&self.pending);
        if let Some(error) = self.failure() {
            return Err(error);
        }
        put_frame(&mut pending, kind, 0, fill)?;
        if now || pending.len() > PENDING_BYTES_MAX {
            return self.flush(&mut pending, &[]);
        }
        Ok(())
    }

    /// Sends data for a buffer from `offset` on, one message per piece: a small piece is copied and sent with
    /// the next message, a large one is sent immediately and without a copy.
    ///
    /// # Errors
    /// `DeviceLost` once the connection has ended.
    pub(crate) fn write(&self, buffer: u64, offset: u64, data: &[u8]) -> Result<()> {
        let starts = (offset..).step_by(DATA_BYTES_MAX);
        starts.zip(data.chunks(DATA_BYTES_MAX)).try_for_each(|(at, data)| self.write_some(buffer, at, data))
    }

    fn write_some(&self, buffer: u64, offset: u64, data: &[u8]) -> Result<()> {
        let mut pending = lock(&self.pending);
        if let Some(error) = self.failure() {
            return Err(error);
        }
        let mut pieces = Vec::with_capacity(data.len().div_ceil(PIECE_BYTES));
        for (at, piece) in (offset..).step_by(PIECE_BYTES).zip(data.chunks(PIECE_BYTES)) {
            put_frame(&mut pending, ask::WRITE, piece.len(), |out| {
                [buffer, at].into_iter().for_each(|value| put(out, value));
                Ok(())
            })?;
            pieces.push((pending.len(), piece));
        }
        if data.len() > TOGETHER_BYTES {
            return self.flush(&mut pending, &pieces);
        }
        pending.extend_from_slice(data);
        if pending.len() > PENDING_BYTES_MAX { self.flush(&mut pending, &[]) } else { Ok(()) }
    }

    /// Sends pending bytes and pieces of data, each after this many of the pending bytes.
    fn flush(&self, pending: &mut Vec<u8>, pieces: &[(usize, &[u8])]) -> Result<()> {
        let (mut parts, mut from) = (Vec::with_capacity(2 * pieces.len() + 1), 0);
        for (to, piece) in pieces {
            parts.extend([&pending[from..*to], piece]);
            from = *to;
        }
        parts.push(&pending[from..]);
        let sent = self.link.send(&parts, CALL_TIMEOUT, &mut || self.drain());
        pending.clear();
        sent.map_err(|error| self.fail(lost(&error)))
    }

    /// Sends a message that is answered, and waits for the answer.
    ///
    /// # Errors
    /// The answer, if it is one, and `DeviceLost` once the connection has ended or nothing came in time.
    pub(crate) fn call(
        &self,
        kind: u8,
        timeout: Duration,
        fill: impl FnOnce(&mut Vec<u8>) -> Result<()>,
    ) -> Result<CallReply> {
        let call = {
            let mut inbox = lock(&self.inbox);
            inbox.calls += 1;
            inbox.calls
        };
        self.send(true, kind, |out| {
            put(out, call);
            fill(out)
        })?;
        match self.until(Instant::now() + timeout, |inbox| inbox.replies.remove(&call)) {
            Some(Ok(reply)) => reply,
            Some(Err(error)) => Err(error),
            None => {
                let detail = format!("the device's process does not answer within {timeout:?}");
                Err(self.fail(Error::new(ErrorKind::DeviceLost, detail)))
            }
        }
    }

    /// Gives the memory of an answer back.
    pub(crate) fn recycle(&self, body: MessageBody) {
        lock(&self.reader).recycle(body);
    }

    /// The same for an answer.
    pub(crate) fn recycle_reply(&self, reply: CallReply) {
        self.recycle(reply.body);
    }

    /// Receives until `ready` has something; none at `deadline`.
    fn until<T>(
        &self,
        deadline: Instant,
        mut ready: impl FnMut(&mut SessionInbox) -> Option<T>,
    ) -> Option<Result<T>> {
        let mut inbox = lock(&self.inbox);
        loop {
            if let Some(found) = ready(&mut inbox) {
                return Some(Ok(found));
            }
            if let Some(error) = &inbox.failure {
                return Some(Err(error.clone()));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if inbox.is_watched {
                if left.is_zero() {
                    return None;
                }
                let waited = self.changed.wait_timeout(inbox, left);
                inbox = waited.unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            inbox.is_watched = true;
            drop(inbox);
            // without time left, messages that have arrived still count
            let came = self.receive(Some(deadline));
            inbox = lock(&self.inbox);
            if left.is_zero() && !came && inbox.failure.is_none() {
                return None;
            }
        }
    }

    /// Receives a message, files it and wakes waiting threads; returns whether there was one. For the
    /// watching thread.
    fn receive(&self, deadline: Option<Instant>) -> bool {
        let mut reader = lock(&self.reader);
        let came = reader.next(&self.link, deadline).map(|came| came.map(|arrived| reader.kept(arrived)));
        drop(reader);
        let mut inbox = lock(&self.inbox);
        inbox.is_watched = false;
        let filed = match came {
            Ok(Some(body)) => inbox.file(body).map(|()| true),
            Ok(None) => Ok(false),
            Err(error) => Err(lost(&error)),
        };
        let came = filed.unwrap_or_else(|error| {
            inbox.failure.get_or_insert(error);
            false
        });
        drop(inbox);
        self.changed.notify_all();
        came
    }

    /// Receives the messages that have arrived, unless another thread does; returns whether it received any.
    fn drain(&self) -> io::Result<bool> {
        let mut inbox = lock(&self.inbox);
        if std::mem::replace(&mut inbox.is_watched, true) {
            return Ok(false);
        }
        drop(inbox);
        self.receive(Some(Instant::now()));
        match lock(&self.inbox).failure {
            Some(_) => Err(io::ErrorKind::ConnectionAborted.into()),
            None => Ok(true),
        }
    }

    /// Adds a queue.
    pub(crate) fn open_queue(&self, queue: u64, timeout: Duration) -> Result<()> {
        self.assume_queue(queue);
        let opened = self.call(ask::OPEN_QUEUE, timeout, |out| {
            put(out, queue);
            Ok(())
        });
        if opened.is_err() {
            lock(&self.inbox).queues.remove(&queue);
        }
        opened.map(drop)
    }

    /// Removes a queue.
    pub(crate) fn close_queue(&self, queue: u64) {
        lock(&self.inbox).queues.remove(&queue);
        let _ = self.send(false, ask::CLOSE_QUEUE, |out| {
            put(out, queue);
            Ok(())
        });
    }

    /// A batch of a queue is sent, which writes to `written` and ends with `results`.
    pub(crate) fn expect(&self, queue: u64, written: &[BufferRange], results: Vec<BufferRange>) {
        let mut inbox = lock(&self.inbox);
        inbox.overwrite(written);
        let expected = results.into_iter().map(|place| Expected { place, is_stale: false }).collect();
        if let Some(log) = inbox.queues.get_mut(&queue) {
            log.expected.push_back(expected);
        }
    }

    /// Something is written without a batch.
    pub(crate) fn overwrite(&self, written: BufferRange) {
        lock(&self.inbox).overwrite(&[written]);
    }

    /// Copies a result that came with its batch, if it did and nothing has written there since.
    pub(crate) fn take_fetched(&self, place: &BufferRange, data: &mut [u8]) -> bool {
        let taken = lock(&self.inbox).fetched.take(place, data);
        let is_here = taken.is_some();
        if let Some(Some(body)) = taken {
            self.recycle(body);
        }
        is_here
    }

    /// Waits until a batch is done.
    ///
    /// # Errors
    /// Why it failed, `Timeout`, and `DeviceLost` once the connection has ended.
    pub(crate) fn wait(&self, queue: u64, ticket: u64, timeout: Duration) -> Result<Elapsed> {
        let deadline = Instant::now() + timeout.min(WAIT_MAX);
        let ended = self.until(deadline, |inbox| {
            let log = inbox.queues.get(&queue)?;
            (log.done >= ticket).then(|| log.outcome(ticket))
        });
        match ended {
            Some(outcome) => outcome?,
            None => {
                let detail = format!("batch {ticket} is not done after {timeout:?}");
                Err(Error::new(ErrorKind::Timeout, detail))
            }
        }
    }
}

impl Drop for RemoteSession {
    fn drop(&mut self) {
        self.link.close();
    }
}

impl QueueLog {
    fn outcome(&self, ticket: u64) -> Result<Elapsed> {
        if let Some((failed, error)) = &self.failure
            && ticket >= *failed
        {
            return Err(error.clone());
        }
        let index = self.times.len().checked_sub(to_usize(self.done - ticket) + 1);
        let elapsed = index.and_then(|index| self.times.get(index)).copied();
        elapsed.ok_or_else(|| Error::invalid(format!("the time of batch {ticket} is no longer known")))
    }
}

impl SessionInbox {
    fn overwrite(&mut self, written: &[BufferRange]) {
        for place in written {
            self.fetched.forget(place);
            let expected = self.queues.values_mut().flat_map(|log| log.expected.iter_mut().flatten());
            expected.filter(|result| result.place.overlaps(place)).for_each(|result| result.is_stale = true);
        }
    }

    fn file(&mut self, body: MessageBody) -> Result<()> {
        let mut taker = Taker(&body);
        match taker.byte()? {
            tell::REPLY => {
                let call = taker.number()?;
                let reply = match taker.byte()? {
                    0 => {
                        let from = body.len() - taker.0.len();
                        Ok(CallReply { body, from })
                    }
                    _ => Err(taker.error()?),
                };
                self.replies.insert(call, reply);
                Ok(())
            }
            tell::DONE => {
                let log = self.queues.get_mut(&taker.number()?);
                let outcome = match taker.byte()? {
                    0 => Ok((f64::from_le_bytes(taker.array()?), taker.byte()?)),
                    _ => Err(taker.error()?),
                };
                // a queue that is closed has no use for it
                let Some(log) = log else { return Ok(()) };
                let expected = log.expected.pop_front();
                let expected = expected.ok_or_else(|| Error::invalid("more batches ended than began"))?;
                log.done += 1;
                let (time, clock) = match outcome {
                    Ok((time, 0)) => (time, ClockKind::Device),
                    Ok((time, _)) => (time, ClockKind::Host),
                    Err(error) => {
                        log.failure.get_or_insert((log.done, error));
                        (0.0, ClockKind::Host)
                    }
                };
                if log.times.len() == TIMES_KEPT {
                    log.times.pop_front();
                }
                log.times.push_back(Elapsed { time: Seconds(time), clock });
                let from = body.len() - taker.0.len();
                if log.failure.is_none() && !self.fetched.file(&expected, body, from) {
                    return Err(Error::new(
                        ErrorKind::Corrupt,
                        "a batch ended with other results than asked for",
                    ));
                }
                Ok(())
            }
            tell::FAILED => Err(taker.error()?),
            other => Err(Error::invalid(format!("it sent a message of the unknown kind {other}"))),
        }
    }
}

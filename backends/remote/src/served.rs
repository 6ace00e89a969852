//! Serves one user of a lent device.
//!
//! One thread does everything in the order in which the user sent it. It waits for batches in slices, between
//! which it looks for messages, so that a batch's end leaves as soon as it is there.

use crate::code::{Taker, inside, length, put, put_error, take_cmds, take_sig, take_slice};
use crate::frame::{FrameReader, put_frame};
use crate::protocol::{CALL_TIMEOUT, DATA_BYTES_MAX, PIECE_BYTES, ask, tell};
use mixfleet_hal::cast::to_usize;
use mixfleet_hal::command::ClockKind;
use mixfleet_hal::{Device, Elapsed, Error, ErrorKind, Graph, Queue, Result, Slice, Support, Ticket};
use mixfleet_wire::Duplex;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a wait for a batch may keep messages waiting.
const SLICE: Duration = Duration::from_millis(1);

/// Maximum number of buffers, queues and commands of a user.
const BUFFERS_MAX: usize = 1 << 16;
const QUEUES_MAX: usize = 64;
const GRAPHS_MAX: usize = 4096;
const RESULTS_MAX: usize = 64;
/// Batches of a user that are not done, beyond which its messages wait.
const BATCHES_MAX: usize = 1024;

/// A user and what it has.
pub(crate) struct Served<'a> {
    device: &'a dyn Device,
    link: &'a Duplex,
    // queues before graphs and buffers, which their batches use
    queues: BTreeMap<u64, ServedQueue>,
    buffers: BTreeMap<u64, Slice>,
    head: Vec<u8>,
    /// Buffer for one read from the device.
    data: Vec<u8>,
}

struct ServedQueue {
    // before their queue
    graphs: BTreeMap<u64, Arc<dyn Graph>>,
    queue: Box<dyn Queue>,
    /// Batches whose completion has not been reported to the user, oldest first.
    batches: VecDeque<ServedBatch>,
    /// Why all later batches fail.
    failure: Option<Error>,
}

struct ServedBatch {
    begun: Result<Ticket>,
    results: Vec<Slice>,
}

fn lost(error: io::Error) -> Error {
    Error::new(ErrorKind::Closed, error.to_string())
}

impl<'a> Served<'a> {
    pub(crate) fn new(device: &'a dyn Device, link: &'a Duplex) -> Self {
        let (queues, buffers, head) = Default::default();
        Served { device, link, queues, buffers, head, data: vec![0; PIECE_BYTES] }
    }

    /// Serves until the user has gone.
    ///
    /// # Errors
    /// If the user violates the protocol, or takes no answers.
    pub(crate) fn run(mut self, mut reader: FrameReader) -> Result<()> {
        loop {
            let batches: usize = self.queues.values().map(|queue| queue.batches.len()).sum();
            if batches < BATCHES_MAX {
                let deadline = (batches > 0).then(Instant::now);
                match reader.next(self.link, deadline) {
                    Ok(Some(arrived)) => {
                        self.handle(reader.bytes(&arrived))?;
                        reader.recycle_arrived(arrived);
                        continue;
                    }
                    Ok(None) => {}
                    Err(error) if error.kind() == io::ErrorKind::InvalidData => return Err(lost(error)),
                    Err(_) => return Ok(()),
                }
            }
            self.settle()?;
        }
    }

    fn send(&mut self, kind: u8, fill: impl FnOnce(&mut Vec<u8>)) -> Result<()> {
        self.begin(kind, 0, fill)?;
        self.send_parts(0)
    }

    /// Begins a message of this length.
    fn begin(&mut self, kind: u8, more: usize, fill: impl FnOnce(&mut Vec<u8>)) -> Result<()> {
        self.head.clear();
        put_frame(&mut self.head, kind, more, |out| {
            fill(out);
            Ok(())
        })
    }

    /// Sends the begun message, and this many bytes of `self.data`.
    fn send_parts(&mut self, filled: usize) -> Result<()> {
        let parts = [&self.head[..], &self.data[..filled]];
        let sent = self.link.send(&parts, CALL_TIMEOUT, &mut || Ok(false));
        self.head.clear();
        sent.map_err(lost)
    }

    /// Sends a message that ends with the content of `slices`; one part is sent while the next one is read.
    /// If the device fails before any part was sent, nothing is sent, and its error is returned inside.
    ///
    /// # Errors
    /// Those of the connection, and of the device once a part has been sent.
    fn send_read(
        &mut self,
        kind: u8,
        slices: &[Slice],
        fill: impl FnOnce(&mut Vec<u8>),
    ) -> Result<Result<()>> {
        let bytes = slices.iter().map(|slice| to_usize(slice.bytes)).sum();
        self.begin(kind, bytes, fill)?;
        let (mut filled, mut is_sent) = (0, false);
        for slice in slices {
            let mut at = 0;
            while at < slice.bytes {
                let part = slice.range(at, (slice.bytes - at).min((PIECE_BYTES - filled) as u64));
                let end = filled + to_usize(part.bytes);
                match self.device.read(&part, &mut self.data[filled..end]) {
                    Err(error) if is_sent => return Err(error),
                    Err(error) => return Ok(Err(error)),
                    Ok(()) => {}
                }
                (at, filled) = (at + part.bytes, end);
                if filled == PIECE_BYTES {
                    self.send_parts(filled)?;
                    (filled, is_sent) = (0, true);
                }
            }
        }
        if filled > 0 || !is_sent {
            self.send_parts(filled)?;
        }
        Ok(Ok(()))
    }

    /// Answers a call.
    fn reply(&mut self, call: u64, answer: Result<Vec<u8>>) -> Result<()> {
        self.send(tell::REPLY, |out| {
            put(out, call);
            match answer {
                Ok(answer) => {
                    out.push(0);
                    out.extend(answer);
                }
                Err(error) => {
                    out.push(1);
                    put_error(out, &error);
                }
            }
        })
    }

    fn handle(&mut self, message: &[u8]) -> Result<()> {
        let mut taker = Taker(message);
        match taker.byte()? {
            ask::WRITE => {
                let (number, offset) = (taker.number()?, taker.number()?);
                length(taker.0.len() as u64, DATA_BYTES_MAX)?;
                let to = inside(buffer(&self.buffers, number)?, offset, taker.0.len() as u64)?;
                match self.device.write(&to, taker.0) {
                    Ok(()) => Ok(()),
                    Err(error) => self.send(tell::FAILED, |out| put_error(out, &error)),
                }
            }
            ask::SUBMIT => {
                let number = taker.number()?;
                let count = taker.count(RESULTS_MAX)?;
                let whole = |number| buffer(&self.buffers, number).cloned();
                let results = (0..count).map(|_| take_slice(&mut taker, DATA_BYTES_MAX, whole));
                let results = results.collect::<Result<Vec<_>>>()?;
                length(results.iter().map(|slice| slice.bytes).sum(), DATA_BYTES_MAX)?;
                let cmds = take_cmds(&mut taker, whole)?;
                taker.end()?;
                let queue = queue(&mut self.queues, number)?;
                queue.begin(results, |queue| queue.submit(&cmds));
                Ok(())
            }
            ask::REPLAY => {
                let (number, graph) = (taker.number()?, taker.number()?);
                taker.end()?;
                let queue = queue(&mut self.queues, number)?;
                let unknown = || Error::invalid("there is no such recorded batch");
                let graph = queue.graphs.get(&graph).cloned().ok_or_else(unknown)?;
                queue.begin(Vec::new(), |queue| queue.replay(&graph));
                Ok(())
            }
            ask::READ => {
                let call = taker.number()?;
                let slice =
                    take_slice(&mut taker, DATA_BYTES_MAX, |number| buffer(&self.buffers, number).cloned())?;
                taker.end()?;
                let read = self.send_read(tell::REPLY, &[slice], |out| {
                    put(out, call);
                    out.push(0);
                })?;
                read.or_else(|error| self.reply(call, Err(error)))
            }
            ask::FREE => {
                let number = taker.number()?;
                taker.end()?;
                self.buffers.remove(&number);
                Ok(())
            }
            ask::CLOSE_QUEUE => {
                let number = taker.number()?;
                taker.end()?;
                self.queues.remove(&number);
                Ok(())
            }
            ask::FORGET => {
                let (number, graph) = (taker.number()?, taker.number()?);
                taker.end()?;
                // its queue may have been closed before
                if let Some(queue) = self.queues.get_mut(&number) {
                    queue.graphs.remove(&graph);
                }
                Ok(())
            }
            kind => {
                let call = taker.number()?;
                let answer = self.answer(kind, &mut taker)?;
                self.reply(call, answer)
            }
        }
    }

    /// The answer to a call.
    ///
    /// # Errors
    /// For a violation of the protocol.
    fn answer(&mut self, kind: u8, taker: &mut Taker<'_>) -> Result<Result<Vec<u8>>> {
        let mut answer = Vec::new();
        let outcome = match kind {
            ask::ALLOC => {
                let (number, bytes, usage) = (taker.number()?, taker.number()?, taker.usage()?);
                if self.buffers.len() >= BUFFERS_MAX || self.buffers.contains_key(&number) {
                    return Err(Error::invalid("a buffer too many, or of a number that is in use"));
                }
                self.device.alloc(bytes, usage).map(|slice| {
                    self.buffers.insert(number, slice);
                })
            }
            ask::OPEN_QUEUE => {
                let number = taker.number()?;
                if self.queues.len() >= QUEUES_MAX || self.queues.contains_key(&number) {
                    return Err(Error::invalid("a queue too many, or of a number that is in use"));
                }
                self.device.queue().map(|queue| {
                    let (graphs, batches) = Default::default();
                    self.queues.insert(number, ServedQueue { queue, graphs, batches, failure: None });
                })
            }
            ask::RECORD => {
                let (number, graph) = (taker.number()?, taker.number()?);
                let cmds = take_cmds(taker, |number| buffer(&self.buffers, number).cloned())?;
                let queue = queue(&mut self.queues, number)?;
                if queue.graphs.len() >= GRAPHS_MAX || queue.graphs.contains_key(&graph) {
                    return Err(Error::invalid("a recorded batch too many, or of a number that is in use"));
                }
                queue.queue.record(&cmds).map(|recorded| {
                    put(&mut answer, recorded.memory_bytes());
                    queue.graphs.insert(graph, recorded);
                })
            }
            ask::SUPPORT => {
                let support = self.device.support(&take_sig(taker)?);
                answer.push(match support {
                    Support::Native => 2,
                    Support::Emulated => 1,
                    Support::No => 0,
                });
                Ok(())
            }
            ask::MEMORY_FREE => {
                // a free memory below zero counts as zero
                let free = self.device.memory_free().map_or(-1.0, |bytes| bytes.0);
                answer.extend(free.to_le_bytes());
                Ok(())
            }
            ask::HEALTH => {
                answer.extend(serde_json::to_vec(&self.device.health()).unwrap_or_default());
                Ok(())
            }
            other => return Err(Error::invalid(format!("a message of the unknown kind {other}"))),
        };
        taker.end()?;
        Ok(outcome.map(|()| answer))
    }

    /// Waits briefly for the oldest batch of each queue, and reports completed ones to the user.
    fn settle(&mut self) -> Result<()> {
        let numbers: Vec<u64> = self.queues.keys().copied().collect();
        for number in numbers {
            while let Some((ended, results)) = self.queues.get_mut(&number).and_then(ServedQueue::ended) {
                let told = match ended {
                    Err(error) => Err(error),
                    Ok(Elapsed { time, clock }) => self.send_read(tell::DONE, &results, |out| {
                        put(out, number);
                        out.push(0);
                        out.extend(time.0.to_le_bytes());
                        out.push(u8::from(clock == ClockKind::Host));
                    })?,
                };
                let Err(error) = told else { continue };
                self.send(tell::DONE, |out| {
                    put(out, number);
                    out.push(1);
                    put_error(out, &error);
                })?;
                if let Some(queue) = self.queues.get_mut(&number) {
                    queue.failure.get_or_insert(error);
                }
            }
        }
        Ok(())
    }
}

fn buffer(buffers: &BTreeMap<u64, Slice>, number: u64) -> Result<&Slice> {
    buffers.get(&number).ok_or_else(|| Error::invalid(format!("there is no buffer {number}")))
}

fn queue(queues: &mut BTreeMap<u64, ServedQueue>, number: u64) -> Result<&mut ServedQueue> {
    queues.get_mut(&number).ok_or_else(|| Error::invalid(format!("there is no queue {number}")))
}

impl ServedQueue {
    fn begin(&mut self, results: Vec<Slice>, begin: impl FnOnce(&mut dyn Queue) -> Result<Ticket>) {
        let begun = match &self.failure {
            Some(error) => Err(error.clone()),
            None => begin(&mut *self.queue),
        };
        if let Err(error) = &begun {
            self.failure.get_or_insert(error.clone());
        }
        self.batches.push_back(ServedBatch { begun, results });
    }

    /// The oldest batch's end and results, if it ends within a slice of time.
    fn ended(&mut self) -> Option<(Result<Elapsed>, Vec<Slice>)> {
        let ended = match &self.batches.front()?.begun {
            Err(error) => Err(error.clone()),
            Ok(ticket) => match self.queue.wait(*ticket, SLICE) {
                Err(error) if error.kind == ErrorKind::Timeout => return None,
                ended => ended,
            },
        };
        let results = self.batches.pop_front()?.results;
        Some((ended, results))
    }
}

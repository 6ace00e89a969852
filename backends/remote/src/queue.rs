//! A queue of a device of another process.

use crate::code::{put, put_cmds, put_slice};
use crate::device::{RemoteDeviceState, number_of};
use crate::fetched::BufferRange;
use crate::protocol::{CALL_TIMEOUT, DATA_BYTES_MAX, ask};
use crate::session::RemoteSession;
use mixfleet_hal::{Cmd, Elapsed, Error, Graph, OperandAccess, Queue, Result, Slice, Ticket};
use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

pub(crate) struct RemoteQueue {
    shared: Arc<RemoteDeviceState>,
    session: Arc<RemoteSession>,
    number: u64,
    submitted: u64,
}

impl RemoteQueue {
    pub(crate) fn new(shared: Arc<RemoteDeviceState>, session: Arc<RemoteSession>, number: u64) -> Self {
        RemoteQueue { shared, session, number, submitted: 0 }
    }

    fn send(&mut self, cmds: &[Cmd], results: &[Slice]) -> Result<Ticket> {
        let number = |slice: &Slice| number_of(&self.shared, slice);
        let written = written(cmds, number)?;
        let mut places = Vec::with_capacity(results.len());
        for slice in results {
            let place = BufferRange { buffer: number(slice)?, offset: slice.offset, bytes: slice.bytes };
            places.push(place);
        }
        // results too long for a message are read on demand
        if places.iter().map(|place| place.bytes).sum::<u64>() > DATA_BYTES_MAX as u64 {
            places.clear();
        }
        let asked = &results[..places.len()];
        let (queue, session) = (self.number, &self.session);
        let mut places = Some(places);
        session.send(true, ask::SUBMIT, |out| {
            put(out, queue);
            put(out, asked.len() as u64);
            for slice in asked {
                put_slice(out, number(slice)?, slice);
            }
            put_cmds(out, cmds, number)?;
            // before it is sent, so that its end finds it
            session.expect(queue, &written, places.take().unwrap_or_default());
            Ok(())
        })?;
        self.submitted += 1;
        Ok(Ticket(self.submitted))
    }
}

/// What commands write.
fn written(cmds: &[Cmd], number: impl Fn(&Slice) -> Result<u64>) -> Result<Vec<BufferRange>> {
    let mut written = Vec::new();
    for cmd in cmds {
        for (operand, arg) in cmd.sig().operands().iter().zip(cmd.args()) {
            if operand.access != OperandAccess::Read {
                written.push(BufferRange { buffer: number(arg)?, offset: arg.offset, bytes: arg.bytes });
            }
        }
    }
    Ok(written)
}

impl Queue for RemoteQueue {
    fn submit(&mut self, cmds: &[Cmd]) -> Result<Ticket> {
        self.send(cmds, &[])
    }

    fn submit_for(&mut self, cmds: &[Cmd], results: &[Slice]) -> Result<Ticket> {
        self.send(cmds, results)
    }

    fn wait(&mut self, ticket: Ticket, timeout: Duration) -> Result<Elapsed> {
        if ticket.0 == 0 || ticket.0 > self.submitted {
            return Err(Error::invalid(format!("ticket {} was not issued by this queue", ticket.0)));
        }
        self.session.wait(self.number, ticket.0, timeout)
    }

    fn record(&mut self, cmds: &[Cmd]) -> Result<Arc<dyn Graph>> {
        static GRAPHS: AtomicU64 = AtomicU64::new(1);
        let number = |slice: &Slice| number_of(&self.shared, slice);
        let graph = GRAPHS.fetch_add(1, Ordering::Relaxed);
        let written = written(cmds, number)?;
        let reply = self.session.call(ask::RECORD, CALL_TIMEOUT, |out| {
            put(out, self.number);
            put(out, graph);
            put_cmds(out, cmds, number)
        })?;
        let memory_bytes = crate::code::Taker(reply.bytes()).number()?;
        self.session.recycle_reply(reply);
        let (session, queue) = (self.session.clone(), self.number);
        Ok(Arc::new(RemoteGraph { session, queue, number: graph, written, memory_bytes }))
    }

    fn replay(&mut self, graph: &Arc<dyn Graph>) -> Result<Ticket> {
        let graph = graph.as_any().downcast_ref::<RemoteGraph>();
        let own = graph.filter(|g| g.queue == self.number && Arc::ptr_eq(&g.session, &self.session));
        let own = own.ok_or_else(|| Error::invalid("the graph was recorded on another queue"))?;
        self.session.send(true, ask::REPLAY, |out| {
            put(out, self.number);
            put(out, own.number);
            self.session.expect(self.number, &own.written, Vec::new());
            Ok(())
        })?;
        self.submitted += 1;
        Ok(Ticket(self.submitted))
    }
}

impl Drop for RemoteQueue {
    fn drop(&mut self) {
        self.session.close_queue(self.number);
    }
}

/// A batch that the other process has recorded.
struct RemoteGraph {
    session: Arc<RemoteSession>,
    queue: u64,
    number: u64,
    written: Vec<BufferRange>,
    memory_bytes: u64,
}

impl Graph for RemoteGraph {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn memory_bytes(&self) -> u64 {
        self.memory_bytes
    }
}

impl Drop for RemoteGraph {
    fn drop(&mut self) {
        let _ = self.session.send(false, ask::FORGET, |out| {
            put(out, self.queue);
            put(out, self.number);
            Ok(())
        });
    }
}

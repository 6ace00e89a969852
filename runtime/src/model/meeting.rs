//! Sums among the members of an instance by the threads that run their batches.
//!
//! A step has two sums a layer. If the submitting thread computes them, it waits for all members each time,
//! and they wait for it; here they wait only for each other.

use mixfleet_hal::cast::to_usize;
use mixfleet_hal::{BatchMemory, Error, ErrorKind, Meeting, Result, Slice};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError, RwLock};

/// Polls before a waiting member sleeps: about 50 us, longer than the time between members of equal work.
const LOOKS: u32 = 1500;
/// Number of buffers in turn: a member that reads one sum cannot yet have written the one after the next.
const TURNS: usize = 2;

/// Sums of f32 elements that all members have, in the order of members.
pub struct SumMeeting {
    /// Slices of the members' elements.
    slices: Vec<Slice>,
    /// Copies per member, for sums in turn.
    parts: Vec<[RwLock<Vec<u8>>; TURNS]>,
    /// Number of sums that each member has reached.
    turns: Vec<AtomicUsize>,
    gate: Gate,
}

impl SumMeeting {
    /// Creates a meeting of members with elements in these slices.
    ///
    /// # Errors
    /// `Invalid` if their lengths differ.
    pub fn new(slices: Vec<Slice>) -> Result<Self> {
        if slices.iter().any(|slice| slice.bytes != slices[0].bytes) {
            return Err(Error::invalid("members with unlike numbers of elements cannot be summed"));
        }
        let members = slices.len();
        let part = || RwLock::new(vec![0; to_usize(slices[0].bytes)]);
        let parts = (0..members).map(|_| [part(), part()]).collect();
        let turns = (0..members).map(|_| AtomicUsize::new(0)).collect();
        Ok(SumMeeting { parts, turns, gate: Gate::new(members), slices })
    }
}

impl Meeting for SumMeeting {
    fn meet(&self, member: usize, memory: &dyn BatchMemory) -> Result<()> {
        let (Some(own), Some(turn)) = (self.slices.get(member), self.turns.get(member)) else {
            return Err(Error::invalid(format!("member {member} is not part of this meeting")));
        };
        let turn = turn.fetch_add(1, Ordering::Relaxed) % TURNS;
        let part = |of: usize| &self.parts[of][turn];
        memory.read(own, &mut part(member).write().unwrap_or_else(PoisonError::into_inner))?;
        self.gate.pass()?;
        let mut sums = part(0).read().unwrap_or_else(PoisonError::into_inner).clone();
        for of in 1..self.slices.len() {
            let other = part(of).read().unwrap_or_else(PoisonError::into_inner);
            let (sums, _) = sums.as_chunks_mut::<4>();
            for (sum, part) in sums.iter_mut().zip(other.as_chunks::<4>().0) {
                *sum = (f32::from_ne_bytes(*sum) + f32::from_ne_bytes(*part)).to_ne_bytes();
            }
        }
        memory.write(own, &sums)
    }

    fn end(&self) {
        self.gate.end();
    }
}

/// Releases members once all have arrived.
struct Gate {
    members: usize,
    came: AtomicUsize,
    /// Number of completed rounds.
    times: AtomicU64,
    is_ended: AtomicBool,
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    opened: Condvar,
}

impl Gate {
    fn new(members: usize) -> Self {
        Gate {
            members,
            came: AtomicUsize::new(0),
            times: AtomicU64::new(0),
            is_ended: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            lock: Mutex::new(()),
            opened: Condvar::new(),
        }
    }

    fn pass(&self) -> Result<()> {
        let seen = self.times.load(Ordering::SeqCst);
        if self.is_ended.load(Ordering::SeqCst) {
            // a member that waited has left, and must not be counted
        } else if self.came.fetch_add(1, Ordering::AcqRel) + 1 == self.members {
            self.came.store(0, Ordering::Relaxed);
            self.times.fetch_add(1, Ordering::SeqCst);
            self.wake();
        } else {
            self.wait_past(seen);
        }
        match self.times.load(Ordering::SeqCst) == seen {
            true => {
                Err(Error::new(ErrorKind::Closed, "another member of the instance failed, or was given up"))
            }
            false => Ok(()),
        }
    }

    /// Waits until all have arrived once more, or one has failed.
    fn wait_past(&self, seen: u64) {
        let waits = || self.times.load(Ordering::SeqCst) == seen && !self.is_ended.load(Ordering::SeqCst);
        for _ in 0..LOOKS {
            if !waits() {
                return;
            }
            std::hint::spin_loop();
        }
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        // either the member that opens sees a sleeper, or the sleeper sees that it is open
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        while waits() {
            guard = self.opened.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    fn wake(&self) {
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
            self.opened.notify_all();
        }
    }

    fn end(&self) {
        self.is_ended.store(true, Ordering::SeqCst);
        self.wake();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mixfleet_cpu::CpuBackend;
    use mixfleet_hal::{Backend, BufferUsage, Cmd, DType, Device, MeetingSeat, OpSig};
    use std::sync::Arc;
    use std::time::Duration;

    const COUNT: u64 = 1000;
    const LONG: Duration = Duration::from_secs(60);

    fn device() -> Arc<dyn Device> {
        CpuBackend.open("cpu@0").unwrap()
    }

    fn floats(device: &dyn Device, slice: &Slice) -> Vec<f32> {
        let mut bytes = vec![0; to_usize(slice.bytes)];
        device.read(slice, &mut bytes).unwrap();
        bytes.as_chunks::<4>().0.iter().map(|x| f32::from_ne_bytes(*x)).collect()
    }

    /// Devices with `COUNT` elements each, different on each device.
    fn members(count: usize) -> Vec<(Arc<dyn Device>, Slice)> {
        let member = |at: usize| {
            let device = device();
            let slice = device.alloc(COUNT * 4, BufferUsage::Activations).unwrap();
            let own: Vec<u8> =
                (0..COUNT).flat_map(|i| (0.1 * i as f32 + 1e7 * at as f32).to_ne_bytes()).collect();
            device.write(&slice, &own).unwrap();
            (device, slice)
        };
        (0..count).map(member).collect()
    }

    #[test]
    fn members_have_the_sums_in_their_order_each_time_they_meet() {
        for count in 1..4 {
            let members = members(count);
            let slices: Vec<Slice> = members.iter().map(|(_, slice)| slice.clone()).collect();
            let mut expected: Vec<Vec<f32>> = members.iter().map(|(d, slice)| floats(&**d, slice)).collect();
            let meeting = Arc::new(SumMeeting::new(slices).unwrap());
            let mut queues: Vec<_> = members.iter().map(|(device, _)| device.queue().unwrap()).collect();
            let mut tickets = Vec::new();
            for _ in 0..20 {
                let sum = |at: usize| expected.iter().map(|own| own[at]).reduce(|a, b| a + b).unwrap();
                let sums: Vec<f32> = (0..COUNT as usize).map(sum).collect();
                expected.iter_mut().for_each(|own| own.clone_from(&sums));
                // all are submitted before any is waited for, member by member
                tickets.clear();
                for (member, queue) in queues.iter_mut().enumerate() {
                    let seat = MeetingSeat { meeting: meeting.clone(), member };
                    tickets.push(queue.submit_then_meet(&[], seat).unwrap());
                }
            }
            for (queue, ticket) in queues.iter_mut().zip(&tickets) {
                queue.wait(*ticket, LONG).unwrap();
            }
            for ((device, slice), expected) in members.iter().zip(&expected) {
                assert_eq!(&floats(&**device, slice), expected, "of {count}");
            }
        }
    }

    /// Any member may fail, before or after the others arrive.
    #[test]
    fn a_member_that_fails_ends_the_meeting_and_who_is_given_up_is_let_go() {
        for (fails, first) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let members = members(2);
            let slices: Vec<Slice> = members.iter().map(|(_, slice)| slice.clone()).collect();
            let meeting = Arc::new(SumMeeting::new(slices).unwrap());
            let mut queues: Vec<_> = members.iter().map(|(device, _)| device.queue().unwrap()).collect();
            let mut tickets = [None; 2];
            for member in [first, 1 - first] {
                // ids beyond the table
                let (device, slice) = &members[member];
                let ids = device.alloc(4, BufferUsage::Staging).unwrap();
                let id: u32 = if member == fails { 9 } else { 0 };
                device.write(&ids, &id.to_ne_bytes()).unwrap();
                let (table, out) = (DType::F32, DType::F32);
                let sig = OpSig::Embed { tokens: 1, vocab: 4, hidden: 8, table, out };
                let args = [ids, slice.range(0, 128), slice.range(128, 32)];
                let cmd = Cmd::new(sig, &args).unwrap();
                let seat = MeetingSeat { meeting: meeting.clone(), member };
                tickets[member] = Some(queues[member].submit_then_meet(&[cmd], seat).unwrap());
                std::thread::sleep(Duration::from_millis(5));
            }
            for (member, (queue, ticket)) in queues.iter_mut().zip(tickets).enumerate() {
                let error = queue.wait(ticket.unwrap(), LONG).unwrap_err();
                assert_eq!(error.kind == ErrorKind::Closed, member != fails, "{member}: {error}");
            }
        }
        // no other member arrives
        let members = members(2);
        let slices: Vec<Slice> = members.iter().map(|(_, slice)| slice.clone()).collect();
        let meeting = Arc::new(SumMeeting::new(slices).unwrap());
        let mut queue = members[0].0.queue().unwrap();
        let ticket =
            queue.submit_then_meet(&[], MeetingSeat { meeting: meeting.clone(), member: 0 }).unwrap();
        assert_eq!(queue.wait(ticket, Duration::from_millis(20)).unwrap_err().kind, ErrorKind::Timeout);
        meeting.end();
        assert_eq!(queue.wait(ticket, LONG).unwrap_err().kind, ErrorKind::Closed);
        // nor does it release members that arrive after its end, as the other one did
        let mut late = members[1].0.queue().unwrap();
        let ticket = late.submit_then_meet(&[], MeetingSeat { meeting, member: 1 }).unwrap();
        assert_eq!(late.wait(ticket, LONG).unwrap_err().kind, ErrorKind::Closed);
    }

    #[test]
    fn unlike_lengths_and_strangers_are_refused() {
        let members = members(2);
        let short = members[1].1.range(0, 8);
        assert!(SumMeeting::new(vec![members[0].1.clone(), short]).is_err());
        let meeting = Arc::new(SumMeeting::new(vec![members[0].1.clone()]).unwrap());
        let mut queue = members[0].0.queue().unwrap();
        let ticket = queue.submit_then_meet(&[], MeetingSeat { meeting, member: 1 }).unwrap();
        assert_eq!(queue.wait(ticket, LONG).unwrap_err().kind, ErrorKind::Invalid);
    }
}

//! Exchanges among members whose devices reach each other's memory: copies from device to device, and sums on
//! the devices. The host submits them behind the members' computation, without waiting.
//!
//! Each member pushes its part to the others by its own queue, so behind the commands that compute it and
//! before those that overwrite it. Queues of two devices are unordered, so that a reader of pushed data must
//! [follow](Queue::follow) the senders. Three rules keep this correct:
//!
//! - A queue follows the end of batches that were submitted earlier, by the same thread. So no two queues
//!   wait for each other, and none waits for work that is never submitted because a member failed.
//! - A push must not overwrite data that the receiver still adds, so there are two buffers in turn. A sender
//!   that pushes for the third time has followed the end of the receiver's second push, which was submitted
//!   behind the receiver's first sum.
//! - A failure is reported by its own queue, and other queues go on with the data present. The step waits for
//!   the last batch of each member before any result is read.

use super::graph::Forward;
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::{
    BufferUsage, Cmd, Collective, DType, Device, Error, OpSig, Queue, QueuePoint, Result, Slice, Ticket,
};
use std::sync::Arc;
use std::time::Duration;

/// Maximum bytes that a member pushes before the others add them: each member needs a buffer for every other
/// member, and submitting a piece takes the host as long as a link takes for some megabytes.
const PIECE_BYTES: u64 = 8 << 20;
/// Number of buffers that are pushed to in turn.
const TURNS: usize = 2;
/// Timeout of a trial copy.
const TRY_TIMEOUT: Duration = Duration::from_secs(10);

/// Carriers of the exchanges among the members of an instance.
pub struct Carriers<'a> {
    /// The host.
    pub host: &'a mut dyn Collective,
    /// The devices, where they reach each other.
    pub peers: &'a mut PeerCopies,
}

/// Exchanges by the devices of an instance, for each of its stages; none by default.
#[derive(Default)]
pub struct PeerCopies {
    stages: Vec<StageCopies>,
}

/// Exchanges by the devices of a stage.
struct StageCopies {
    /// The sums of the stage's members, if there are several.
    sums: Option<PeerSums>,
    /// Whether the stage's first member can push to all of the next stage.
    hands_on: bool,
}

impl PeerCopies {
    /// Tries which devices reach each other, and allocates memory for sums on them. Exchanges that are
    /// impossible between devices go through the host, and the log gives the reason.
    pub fn open(stages: &[Vec<(&dyn Device, &Forward)>]) -> Self {
        Self::in_pieces(stages, PIECE_BYTES)
    }

    /// Like `open`, with at most `piece_bytes` bytes that a member pushes before the others add them; results
    /// do not depend on it.
    pub fn in_pieces(stages: &[Vec<(&dyn Device, &Forward)>], piece_bytes: u64) -> Self {
        let of_stage = |(at, members): (usize, &Vec<(&dyn Device, &Forward)>)| {
            let sums = (members.len() > 1).then(|| PeerSums::open(members, piece_bytes));
            let sums = sums.and_then(|sums| told("sums", &names(members), sums));
            let hands_on = stages.get(at + 1).is_some_and(|next| {
                let to = format!("{} to {}", members[0].0.info().id, names(next));
                told("the residual stream", &to, try_hand_on(members[0], next)).is_some()
            });
            StageCopies { sums, hands_on }
        };
        PeerCopies { stages: stages.iter().enumerate().map(of_stage).collect() }
    }

    /// The sums of each stage that takes them between its devices.
    pub(super) fn sums(&mut self) -> impl Iterator<Item = Option<&mut PeerSums>> {
        let known = self.stages.iter_mut().map(|stage| stage.sums.as_mut());
        known.chain(std::iter::repeat_with(|| None))
    }

    /// Whether a stage passes the residual stream on between devices.
    pub(super) fn hands_on(&self, stage: usize) -> bool {
        self.stages.get(stage).is_some_and(|stage| stage.hands_on)
    }
}

fn names(members: &[(&dyn Device, &Forward)]) -> String {
    members.iter().map(|(device, _)| &*device.info().id).collect::<Vec<_>>().join(",")
}

/// Logs the route of an exchange.
fn told<T>(what: &str, devices: &str, found: Result<T>) -> Option<T> {
    match found {
        Ok(found) => {
            tracing::info!(devices, "{what} of one instance: by copies between devices");
            Some(found)
        }
        Err(why) => {
            tracing::info!(devices, why = %why.detail, "{what} of one instance: through host memory");
            None
        }
    }
}

/// Memory of a device to which others push.
fn place(device: &dyn Device, bytes: u64) -> Result<Slice> {
    device.alloc(bytes.max(4), BufferUsage::Activations)
}

/// Checks that a device reaches another one's memory.
fn check_reach(from: &dyn Device, to: &dyn Device, memory: &Slice) -> Result<()> {
    let (from_id, to_id) = (&from.info().id, &to.info().id);
    match from.reaches(memory) {
        true => Ok(()),
        false => Err(Error::unsupported(format!("{from_id} does not reach the memory of {to_id}"))),
    }
}

/// Pushes numbers from `source` to `target`, from which the target's queue copies them to `further`, and
/// checks that they arrived. On some machines the driver promises copies between devices that an IOMMU then
/// drops or damages without an error (NVIDIA/open-gpu-kernel-modules, issue 1257). Slices are equally long.
fn try_copy(
    (from, source): (&dyn Device, &Slice),
    (to, target, further): (&dyn Device, &Slice, &Slice),
    number: u32,
) -> Result<()> {
    let words = to_u32(source.bytes / 4);
    let of_word =
        |word: u32| (word ^ number.wrapping_mul(0x9e37_79b9)).wrapping_mul(0x85eb_ca6b).to_ne_bytes();
    let sent: Vec<u8> = (0..words).flat_map(of_word).collect();
    let slices = [source, target, further].map(|slice| slice.range(0, sent.len() as u64));
    let [source, target, further] = &slices;
    from.write(source, &sent)?;
    let mut queues = [from.queue()?, to.queue()?];
    let pushed = queues[0].submit(&[copy(source, target)?])?;
    let end = queues[0].end()?;
    queues[1].follow(&*end)?;
    let came = queues[1].submit(&[copy(target, further)?])?;
    queues[1].wait(came, TRY_TIMEOUT)?;
    queues[0].wait(pushed, TRY_TIMEOUT)?;
    let mut got = vec![0; sent.len()];
    to.read(further, &mut got)?;
    if got == sent {
        return Ok(());
    }
    let (from, to) = (&from.info().id, &to.info().id);
    Err(Error::unsupported(format!(
        "the copy from {from} to {to} did not arrive, though the driver promised it"
    )))
}

/// Tries whether a device can push to all of a stage.
fn try_hand_on(from: (&dyn Device, &Forward), next: &[(&dyn Device, &Forward)]) -> Result<()> {
    let bytes = PIECE_BYTES.min(from.1.residual_memory().bytes);
    let source = place(from.0, bytes)?;
    for (number, (device, _)) in (1..).zip(next) {
        let (target, further) = (place(*device, bytes)?, place(*device, bytes)?);
        check_reach(from.0, *device, &target)?;
        try_copy((from.0, &source), (*device, &target, &further), number)?;
    }
    Ok(())
}

fn copy(from: &Slice, to: &Slice) -> Result<Cmd> {
    Cmd::new(OpSig::Copy { bytes: from.bytes }, &[from.clone(), to.clone()])
}

/// A member's memory for sums.
struct Landing {
    /// For each turn, a buffer for the elements of each member, including its own.
    parts: [Vec<Slice>; TURNS],
    /// Partial sums.
    partial: Slice,
}

/// Sums over the members of a stage.
pub(super) struct PeerSums {
    landings: Vec<Landing>,
    piece_bytes: u64,
    /// Ranges of the sum that have been submitted.
    pieces: usize,
}

impl PeerSums {
    /// Allocates what these members need, and tries each pair of them in both directions.
    ///
    /// # Errors
    /// Errors of the devices, and `Unsupported` if one does not reach another.
    fn open(members: &[(&dyn Device, &Forward)], piece_bytes: u64) -> Result<Self> {
        let count = members.len();
        let longest = members.iter().map(|(_, forward)| forward.residual_memory().bytes).max().unwrap_or(0);
        let piece_bytes = piece_bytes.min(longest);
        let landing = |&(device, _): &(&dyn Device, &Forward)| {
            let distance = piece_bytes.next_multiple_of(device.limits().alignment_bytes.max(1));
            let all = place(device, (TURNS * count + 1) as u64 * distance)?;
            let at = |number: usize| all.range(number as u64 * distance, piece_bytes);
            let parts = [0, 1].map(|turn| (0..count).map(|of| at(turn * count + of)).collect());
            Ok(Landing { parts, partial: at(TURNS * count) })
        };
        let pairs = || {
            let all = (0..count).flat_map(|from| (0..count).map(move |to| (from, to)));
            all.filter(|(from, to)| from != to)
        };
        // tried before any allocation
        for (from, to) in pairs() {
            check_reach(members[from].0, members[to].0, members[to].1.residual_memory())?;
        }
        let landings = members.iter().map(landing).collect::<Result<Vec<_>>>()?;
        for (from, to) in pairs() {
            let source = (members[from].0, &landings[from].partial);
            let [first, second] = &landings[to].parts;
            try_copy(source, (members[to].0, &first[from], &second[from]), to_u32(from * count + to) + 1)?;
        }
        Ok(PeerSums { landings, piece_bytes, pieces: 0 })
    }

    /// Submits `lists` to the members' queues, and behind them the exchange of the f32 elements that each has
    /// in its slice. Returns the tickets of the last batches, and the commands that replace the elements by
    /// their sums over the members, added in the order of members: the next list must begin with these
    /// commands.
    ///
    /// # Errors
    /// Errors of the devices, and `Invalid` for slices of different lengths.
    pub(super) fn submit(
        &mut self,
        queues: &mut [&mut dyn Queue],
        mut lists: Vec<Vec<Cmd>>,
        slices: &[Slice],
    ) -> Result<(Vec<Ticket>, Vec<Vec<Cmd>>)> {
        let bytes = slices.first().map_or(0, |slice| slice.bytes);
        let counts = [queues.len(), lists.len(), slices.len()];
        if slices.iter().any(|slice| slice.bytes != bytes) || counts != [self.landings.len(); 3] {
            return Err(Error::invalid("members with unlike numbers of elements cannot be summed"));
        }
        let (mut tickets, mut from) = (Vec::new(), 0);
        while from < bytes {
            let piece_bytes = self.piece_bytes.min(bytes - from);
            let own: Vec<Slice> = slices.iter().map(|slice| slice.range(from, piece_bytes)).collect();
            for (member, list) in lists.iter_mut().enumerate() {
                self.push(member, &own[member], list)?;
            }
            tickets = submit_all(queues, &lists)?;
            meet(queues)?;
            lists = (0..own.len()).map(|member| self.add(member, &own[member])).collect::<Result<_>>()?;
            self.pieces += 1;
            from += piece_bytes;
        }
        Ok((tickets, lists))
    }

    fn parts(&self, member: usize) -> &[Slice] {
        &self.landings[member].parts[self.pieces % TURNS]
    }

    /// Adds the commands by which a member pushes its part to all.
    fn push(&self, member: usize, own: &Slice, list: &mut Vec<Cmd>) -> Result<()> {
        for other in 0..self.landings.len() {
            list.push(copy(own, &self.parts(other)[member].range(0, own.bytes))?);
        }
        Ok(())
    }

    /// The commands by which a member adds the parts of all, in the order of members.
    fn add(&self, member: usize, own: &Slice) -> Result<Vec<Cmd>> {
        let parts = self.parts(member).iter().map(|part| part.range(0, own.bytes));
        let parts: Vec<Slice> = parts.collect();
        let partial = self.landings[member].partial.range(0, own.bytes);
        let sig = OpSig::Add { elements: own.bytes / 4, x: DType::F32 };
        let mut sum = parts[0].clone();
        let mut list = Vec::new();
        for (number, part) in parts.iter().enumerate().skip(1) {
            // the first buffer is free once it has been added
            let to = match number {
                _ if number + 1 == parts.len() => own,
                _ if number.is_multiple_of(2) => &parts[0],
                _ => &partial,
            };
            list.push(Cmd::new(sig, &[sum, part.clone(), to.clone()])?);
            sum = to.clone();
        }
        Ok(list)
    }
}

/// Submits a list to each member.
pub(super) fn submit_all(queues: &mut [&mut dyn Queue], lists: &[Vec<Cmd>]) -> Result<Vec<Ticket>> {
    queues.iter_mut().zip(lists).map(|(queue, list)| queue.submit(list)).collect()
}

/// Makes each queue continue when all have done the work submitted so far.
fn meet(queues: &mut [&mut dyn Queue]) -> Result<()> {
    let ends = queues.iter_mut().map(|queue| queue.end()).collect::<Result<Vec<_>>>()?;
    for (at, queue) in queues.iter_mut().enumerate() {
        let mut others = ends.iter().enumerate().filter(|(other, _)| *other != at);
        others.try_for_each(|(_, end)| queue.follow(&**end))?;
    }
    Ok(())
}

/// A matrix whose columns are divided among the members of a stage, each part contiguous, and the first one
/// at the start of the matrix.
pub(super) struct Columns<'a> {
    /// The matrix, on the first member.
    pub(super) whole: Slice,
    /// Its rows.
    pub(super) rows: u32,
    /// Each member's part.
    pub(super) parts: &'a [Slice],
}

impl Columns<'_> {
    /// Submits `lists` to the members' queues, behind them the gathering of the matrix, and behind that
    /// `then` to the first one. Returns the tickets of the last batches.
    ///
    /// # Errors
    /// Errors of the devices.
    pub(super) fn join(
        &self,
        queues: &mut [&mut dyn Queue],
        mut lists: Vec<Vec<Cmd>>,
        then: &[Cmd],
    ) -> Result<Vec<Ticket>> {
        let (rows, pitch) = (u64::from(self.rows), self.whole.bytes / u64::from(self.rows.max(1)));
        lists[0].extend(self.spread_first(rows, pitch)?);
        let mut tickets = submit_all(queues, &lists)?;
        // the buffers that others push to may overlap rows that the first member has not moved yet
        let spread = queues[0].end()?;
        let mut start = self.parts[0].bytes / rows.max(1);
        for (at, part) in self.parts.iter().enumerate().skip(1) {
            let width = part.bytes / rows.max(1);
            let rows = (0..rows).map(|row| {
                copy(&part.range(row * width, width), &self.whole.range(row * pitch + start, width))
            });
            let list = if width > 0 { rows.collect::<Result<Vec<_>>>()? } else { Vec::new() };
            queues[at].follow(&*spread)?;
            tickets[at] = queues[at].submit(&list)?;
            let pushed = queues[at].end()?;
            queues[0].follow(&*pushed)?;
            start += width;
        }
        tickets[0] = queues[0].submit(then)?;
        Ok(tickets)
    }

    /// Moves the first member's rows to their positions in the matrix, last rows first, since earlier ones
    /// are still in the way. A row that overlaps its target is moved in pieces, its end first.
    fn spread_first(&self, rows: u64, pitch: u64) -> Result<Vec<Cmd>> {
        let width = self.parts[0].bytes / rows.max(1);
        let mut list = Vec::new();
        for row in (1..rows).rev() {
            let (from, to) = (row * width, row * pitch);
            let mut left = if from < to { width } else { 0 };
            while left > 0 {
                let bytes = left.min(to - from);
                left -= bytes;
                list.push(copy(&self.whole.range(from + left, bytes), &self.whole.range(to + left, bytes))?);
            }
        }
        Ok(list)
    }
}

/// Submits to the queue of a stage's first member copies of its residual stream to all members of the next
/// stage, whose queues then follow it. Returns the ticket of the copies.
///
/// # Errors
/// Errors of the devices.
pub(super) fn hand_on(
    from: (&mut dyn Queue, &Slice),
    to: &mut [&mut dyn Queue],
    slices: &[Slice],
) -> Result<Ticket> {
    let (queue, source) = from;
    let copies = slices.iter().map(|slice| copy(source, slice)).collect::<Result<Vec<_>>>()?;
    let ticket = queue.submit(&copies)?;
    let end: Arc<dyn QueuePoint> = queue.end()?;
    to.iter_mut().try_for_each(|queue| queue.follow(&*end))?;
    Ok(ticket)
}

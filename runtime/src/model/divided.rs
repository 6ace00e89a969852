//! Steps of a model that several devices divide: stages of layers, each of one device or of several that
//! divide these layers.
//!
//! A step is cut into micro-batches, which follow each other through the stages: in each turn every stage
//! runs another one, and passes the residual stream on afterwards. The members of a stage each run their
//! share of the commands, and exchange partial sums of the residual stream twice per layer, and logits once.

use super::graph::{Forward, Pass, StepInput};
use super::leaving::{LayerKv, wait_beside};
use super::meeting::SumMeeting;
use super::peers::{self, Carriers, Columns, PeerSums};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::{
    Cmd, Collective, Device, Error, ErrorKind, MatrixPart, Meeting, MeetingSeat, MemberSlice, Queue, Result,
    Slice, Ticket,
};
use mixfleet_scheduler::cost::Pieces;
use std::cmp::Ordering;
use std::sync::Arc;
use std::time::Duration;

/// Size in bytes up to which the threads of devices sum a residual stream: beyond, each would copy all of it.
const MEETING_BYTES_MAX: u64 = 256 << 10;

/// A member of an instance, ready to run its share of steps.
pub struct MemberRun<'a> {
    /// The member's device.
    pub device: &'a dyn Device,
    /// A queue of the device.
    pub queue: &'a mut dyn Queue,
    /// The member's share of the model.
    pub forward: &'a Forward,
}

impl MemberRun<'_> {
    fn wait(&mut self, ticket: Ticket, timeout: Duration, kv: &mut dyn LayerKv) -> Result<()> {
        let failed = |error: Error| error.context(self.device.info().id.clone());
        wait_beside(self.queue, ticket, timeout, kv).map_err(failed)
    }
}

/// A part of a step that passes the stages as a unit.
pub struct MicroBatch<'a> {
    /// The sequences; those with one token come first.
    pub parts: Vec<StepInput<'a>>,
    /// The indices of these sequences within the step.
    pub numbers: Vec<usize>,
}

impl<'a> MicroBatch<'a> {
    /// Cuts a step whose `parts` with one token come first; KV blocks have `block_tokens` tokens.
    pub fn cut(parts: &[StepInput<'a>], how: Pieces, (block_tokens, block_pages): (u32, u32)) -> Vec<Self> {
        let lengths: Vec<u32> = parts.iter().map(|part| to_u32(part.tokens.len())).collect();
        let batches = how.of(&lengths).into_iter().map(|pieces| {
            let mut batch = MicroBatch { parts: Vec::new(), numbers: Vec::new() };
            for (which, piece) in pieces {
                let whole = &parts[which];
                let (from, to) = (piece.start as usize, piece.end as usize);
                let draw = whole.draw.filter(|_| to == whole.tokens.len());
                let (start, tokens) = (whole.start + piece.start, &whole.tokens[from..to]);
                let blocks = (whole.start + piece.end).div_ceil(block_tokens);
                let pages = &whole.pages[..(blocks * block_pages) as usize];
                batch.parts.push(StepInput { start, tokens, pages, draw });
                batch.numbers.push(which);
            }
            batch
        });
        batches.collect()
    }

    /// Returns the indices, within the step, of sequences whose next token is drawn.
    pub fn drawing(&self) -> impl Iterator<Item = usize> {
        let all = self.parts.iter().zip(&self.numbers);
        all.filter(|(part, _)| part.draw.is_some()).map(|(_, &number)| number)
    }
}

/// A stage that runs a micro-batch.
struct Busy<'s, 'a> {
    members: &'s mut [MemberRun<'a>],
    /// The number of the stage's first member, and of the micro-batch.
    first: usize,
    batch: usize,
    passes: &'s [Pass],
    /// The tickets of all members; for a single device those of all layers and of the remaining phases.
    tickets: Vec<Option<Ticket>>,
    sums: Sums<'s>,
}

/// The executor of the residual stream's sums in the layers of a stage.
enum Sums<'s> {
    /// The thread that submits, between two phases.
    Submitter,
    /// The threads of the members' devices.
    Meeting(StepMeeting),
    /// The members' devices.
    Peers(AmongPeers<'s>),
}

/// Sums by the members' devices.
struct AmongPeers<'s> {
    sums: &'s mut PeerSums,
    /// Whether KV leaves, for which the host waits in each layer.
    leaves: bool,
    /// Commands with which each member must begin next: the end of the last sum.
    next: Vec<Vec<Cmd>>,
}

/// A meeting that no thread waits at once the step is over, however it ends.
struct StepMeeting(Arc<SumMeeting>);

impl Drop for StepMeeting {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// Runs the micro-batches of a step through stages, given in order like their members, and waits until all
/// are done; no part may take longer than `timeout`. KV leaves meanwhile. `drawn` is called once the first
/// member of the last stage has the logits of a micro-batch and has drawn from them.
///
/// # Errors
/// Errors of the devices and of the exchange, of `kv` and of `drawn`.
pub fn run_stages(
    stages: &mut [Vec<MemberRun<'_>>],
    mut carriers: Carriers<'_>,
    batches: &[MicroBatch<'_>],
    timeout: Duration,
    kv: &mut dyn LayerKv,
    drawn: &mut dyn FnMut(&MemberRun<'_>, &Pass, &MicroBatch<'_>) -> Result<()>,
) -> Result<()> {
    if stages.is_empty() || stages.iter().any(Vec::is_empty) {
        return Err(Error::invalid("a step needs members that run it"));
    }
    let mut passes: Vec<Vec<Pass>> = stages.iter().map(|_| Vec::new()).collect();
    let mut handed = Vec::new();
    for turn in 0..batches.len() + stages.len() - 1 {
        // the last stage first, since each takes the residual stream that the previous stage still holds
        for at in (0..stages.len()).rev() {
            passes[at] = match turn.checked_sub(at).and_then(|number| batches.get(number)) {
                None => Vec::new(),
                Some(MicroBatch { parts, .. }) => {
                    let begin = |member: &MemberRun<'_>| member.forward.begin(member.device, parts);
                    stages[at].iter().map(begin).collect::<Result<_>>()?
                }
            };
            if at > 0 && !passes[at].is_empty() {
                let (before, after) = stages.split_at_mut(at);
                let from = (&mut before[at - 1][0], &passes[at - 1][0]);
                let ticket = hand_on(&mut carriers, at - 1, from, (&mut after[0], &passes[at]))?;
                handed.extend(ticket.map(|ticket| (at - 1, ticket)));
            }
        }
        run_turn(stages, &mut carriers, (turn, &passes), timeout, kv)?;
        for (stage, ticket) in handed.drain(..) {
            stages[stage][0].wait(ticket, timeout, kv)?;
        }
        let (last, number) = (stages.len() - 1, turn + 1);
        if let Some(batch) = number.checked_sub(stages.len()).and_then(|number| batches.get(number)) {
            drawn(&stages[last][0], &passes[last][0], batch)?;
        }
    }
    Ok(())
}

/// Copies the residual stream of a stage to all members of the next one; returns a ticket of the stage's
/// first member to wait for if the devices copy.
fn hand_on(
    carriers: &mut Carriers<'_>,
    stage: usize,
    (first, pass): (&mut MemberRun<'_>, &Pass),
    (members, passes): (&mut [MemberRun<'_>], &[Pass]),
) -> Result<Option<Ticket>> {
    let from = first.forward.step_residual(pass);
    if carriers.peers.hands_on(stage) {
        let to = residuals(members, passes);
        return peers::hand_on((&mut *first.queue, &from), &mut queues(members), &to).map(Some);
    }
    let columns = 0..from.bytes / u64::from(pass.tokens().max(1));
    let to = slices(members, passes, Forward::step_residual);
    let whole = |at| MatrixPart { at, rows: None, columns: columns.clone() };
    let to: Vec<_> = to.into_iter().map(whole).collect();
    carriers.host.deal(&MemberSlice { device: first.device, slice: from }, pass.tokens(), &to)?;
    Ok(None)
}

/// Runs on every stage its current micro-batch, if there is one: in each turn a stage runs the micro-batch
/// that the previous stage has run.
fn run_turn(
    stages: &mut [Vec<MemberRun<'_>>],
    Carriers { host, peers }: &mut Carriers<'_>,
    (turn, passes): (usize, &[Vec<Pass>]),
    timeout: Duration,
    kv: &mut dyn LayerKv,
) -> Result<()> {
    let mut first = 0;
    let mut busy: Vec<Busy<'_, '_>> = Vec::new();
    for (at, ((members, passes), sums)) in stages.iter_mut().zip(passes).zip(peers.sums()).enumerate() {
        let count = members.len();
        if !passes.is_empty() {
            let (batch, tickets) = (turn - at, Vec::new());
            let stage = Busy { members, first, batch, passes, tickets, sums: Sums::Submitter };
            busy.push(stage.summed_by(sums, kv)?);
        }
        first += count;
    }
    for phase in 0..busy.iter().map(Busy::phases).max().unwrap_or(0) {
        let mut running: Vec<_> = busy.iter_mut().filter(|stage| phase < stage.phases()).collect();
        for stage in &mut running {
            stage.submit(phase, kv)?;
        }
        // a stage of one device exchanges nothing, and runs beside all phases of the others
        for stage in running.iter_mut().filter(|stage| stage.members.len() > 1) {
            // beside the MLP
            if !stage.meets() && phase < 2 * stage.layers() && !phase.is_multiple_of(2) {
                kv.leave(stage.first, stage.batch, phase / 2)?;
            }
            stage.wait(timeout, kv)?;
            stage.exchange(phase, &mut **host)?;
        }
    }
    let alone = || busy.iter().filter(|stage| stage.members.len() == 1);
    for layer in 0..alone().map(Busy::layers).max().unwrap_or(0) {
        for stage in busy.iter_mut().filter(|stage| stage.members.len() == 1 && layer < stage.layers()) {
            stage.wait_for(layer, timeout, kv)?;
            kv.leave(stage.first, stage.batch, layer)?;
        }
    }
    busy.iter_mut().try_for_each(|stage| stage.wait(timeout, kv))
}

impl<'s> Busy<'s, '_> {
    fn layers(&self) -> usize {
        self.members[0].forward.config().layers as usize
    }

    /// Selects sums by the devices if possible; else a meeting of the members if they support it and no KV
    /// leaves meanwhile.
    fn summed_by(mut self, peers: Option<&'s mut PeerSums>, kv: &dyn LayerKv) -> Result<Self> {
        if let Some(sums) = peers {
            let next = vec![Vec::new(); self.members.len()];
            self.sums = Sums::Peers(AmongPeers { sums, leaves: kv.leaves(self.batch), next });
            return Ok(self);
        }
        let slices = slices(self.members, self.passes, Forward::step_residual);
        let is_small = slices[0].slice.bytes <= MEETING_BYTES_MAX;
        let can_meet = self.members.len() > 1 && self.members.iter().all(|member| member.queue.can_meet());
        if can_meet && is_small && !kv.leaves(self.batch) {
            let meeting = SumMeeting::new(slices.into_iter().map(|member| member.slice).collect())?;
            self.sums = Sums::Meeting(StepMeeting(Arc::new(meeting)));
        }
        Ok(self)
    }

    fn meets(&self) -> bool {
        matches!(self.sums, Sums::Meeting(_))
    }

    fn has_logits(&self) -> bool {
        self.members[0].forward.has_head() && self.passes[0].rows() > 0
    }

    /// Number of phases between exchanges by the submitting thread.
    ///
    /// - One if the stage is one device, or if its devices exchange everything.
    /// - Layers with logits, and the draw, if the devices' threads exchange the rest.
    /// - Else attention and MLP of each layer, logits, and the draw. Devices that exchange everything have
    ///   these phases too where KV leaves, except for the draw.
    fn phases(&self) -> usize {
        let halves = 2 * self.layers();
        match (&self.sums, self.has_logits()) {
            _ if self.members.len() == 1 => 1,
            (Sums::Peers(AmongPeers { leaves: false, .. }), _) | (Sums::Meeting(_), false) => 1,
            (Sums::Meeting(_), true) => 2,
            (_, false) => halves,
            (Sums::Peers(_), true) => halves + 1,
            (Sums::Submitter, true) => halves + 2,
        }
    }

    /// The commands of a member in half a layer, and before the first one.
    fn half(forward: &Forward, pass: &Pass, half: usize) -> Result<Vec<Cmd>> {
        let mut list = if half == 0 { forward.embed(pass)? } else { Vec::new() };
        list.extend(match half.is_multiple_of(2) {
            true => forward.attention_block(half / 2, pass)?,
            false => forward.mlp_block(half / 2, pass)?,
        });
        Ok(list)
    }

    /// Submits a phase of devices that exchange everything among themselves, or the whole step if no KV
    /// leaves.
    fn submit_among_peers(&mut self, phase: usize, kv: &mut dyn LayerKv) -> Result<()> {
        let (halves, is_last) = (2 * self.layers(), phase + 1 == self.phases());
        let has_logits = self.has_logits();
        let (members, passes) = (&mut *self.members, self.passes);
        let Sums::Peers(AmongPeers { sums, leaves, next }) = &mut self.sums else { return Ok(()) };
        let now = if *leaves { phase.min(halves)..(phase + 1).min(halves) } else { 0..halves };
        let mut tickets = Vec::new();
        for half in now {
            for (at, ((member, pass), list)) in members.iter().zip(passes).zip(&mut *next).enumerate() {
                list.extend(Self::half(member.forward, pass, half)?);
                if half.is_multiple_of(2) {
                    list.extend(kv.gather(self.first + at, self.batch, half / 2)?);
                }
            }
            let slices = residuals(members, passes);
            (tickets, *next) = sums.submit(&mut queues(members), std::mem::take(next), &slices)?;
        }
        if is_last {
            let mut lists = std::mem::take(next);
            tickets = match has_logits {
                false => peers::submit_all(&mut queues(members), &lists)?,
                true => {
                    for ((member, pass), list) in members.iter().zip(passes).zip(&mut lists) {
                        list.extend(member.forward.logits_block(pass)?);
                    }
                    let (first, pass) = (members[0].forward, &passes[0]);
                    let parts = slices(members, passes, Forward::own_logits);
                    let parts: Vec<Slice> = parts.into_iter().map(|part| part.slice).collect();
                    let columns = Columns { whole: first.logits(pass), rows: pass.rows(), parts: &parts };
                    let draw = Vec::from_iter(first.draw_block(pass)?);
                    columns.join(&mut queues(members), lists, &draw)?
                }
            };
        }
        self.tickets = tickets.into_iter().map(Some).collect();
        Ok(())
    }

    /// Submits all layers, after each half of which the members meet, and the logits behind them.
    fn submit_meeting(&mut self, meeting: &Arc<SumMeeting>) -> Result<()> {
        let seat = |member| MeetingSeat { meeting: meeting.clone(), member };
        for layer in 0..self.layers() {
            // every member gets work before any gets more
            for half in 0..2 {
                for (at, (member, pass)) in self.members.iter_mut().zip(self.passes).enumerate() {
                    let MemberRun { forward, queue, .. } = member;
                    let list = Self::half(forward, pass, 2 * layer + half)?;
                    let ticket = queue.submit_then_meet(&list, seat(at))?;
                    if let Some(last) = self.tickets.get_mut(at) {
                        *last = Some(ticket)
                    } else {
                        self.tickets.push(Some(ticket))
                    }
                }
            }
        }
        if self.has_logits() {
            for ((member, pass), last) in self.members.iter_mut().zip(self.passes).zip(&mut self.tickets) {
                *last = Some(member.queue.submit(&member.forward.logits_block(pass)?)?);
            }
        }
        Ok(())
    }

    fn submit(&mut self, phase: usize, kv: &mut dyn LayerKv) -> Result<()> {
        let layers = self.layers();
        self.tickets.clear();
        if let ([MemberRun { forward, queue, .. }], pass) = (&mut *self.members, &self.passes[0]) {
            // layer by layer, so that the device begins while the next list is made
            let (mut list, head) = (forward.embed(pass)?, forward.head(pass)?);
            for layer in 0..layers {
                list.extend(forward.layer(layer, pass)?);
                list.extend(kv.gather(self.first, self.batch, layer)?);
                // the next stage gets what the last layer leaves
                let result = (layer + 1 == layers && head.is_empty()).then(|| forward.step_residual(pass));
                self.tickets.push(Some(queue.submit_for(&std::mem::take(&mut list), result.as_slice())?));
            }
            if !head.is_empty() {
                self.tickets.push(Some(queue.submit_for(&head, &forward.results(pass))?));
            }
            return Ok(());
        }
        let phase = match &self.sums {
            Sums::Peers(_) => return self.submit_among_peers(phase, kv),
            Sums::Meeting(StepMeeting(meeting)) if phase == 0 => {
                let meeting = meeting.clone();
                return self.submit_meeting(&meeting);
            }
            Sums::Meeting(_) => 2 * layers + phase,
            Sums::Submitter => phase,
        };
        let list = |forward: &Forward, pass: &Pass| match phase {
            _ if phase < 2 * layers => Self::half(forward, pass, phase),
            _ if phase == 2 * layers => forward.logits_block(pass),
            _ => Ok(Vec::from_iter(forward.draw_block(pass)?)),
        };
        // the logits' exchange or the draw follows
        let results = |forward: &Forward, pass: &Pass| match phase.cmp(&(2 * layers)) {
            Ordering::Less => vec![forward.step_residual(pass)],
            Ordering::Equal => vec![forward.own_logits(pass)],
            Ordering::Greater => forward.results(pass),
        };
        for (at, (member, pass)) in self.members.iter_mut().zip(self.passes).enumerate() {
            let mut list: Vec<Cmd> = list(member.forward, pass)?;
            if phase < 2 * layers && phase.is_multiple_of(2) {
                list.extend(kv.gather(self.first + at, self.batch, phase / 2)?);
            }
            let results = results(member.forward, pass);
            let ticket = (!list.is_empty()).then(|| member.queue.submit_for(&list, &results));
            self.tickets.push(ticket.transpose()?);
        }
        Ok(())
    }

    fn wait(&mut self, timeout: Duration, kv: &mut dyn LayerKv) -> Result<()> {
        if let [member] = &mut *self.members {
            // the last one is done when all are
            let last = self.tickets.drain(..).next_back().flatten();
            return last.map_or(Ok(()), |last| member.wait(last, timeout, kv));
        }
        let (mut ended, meets) = (Ok(()), self.meets());
        for (member, ticket) in self.members.iter_mut().zip(self.tickets.drain(..)) {
            let Some(ticket) = ticket else { continue };
            match member.wait(ticket, timeout, kv) {
                Ok(()) => {}
                // another member, which reports the reason, has ended the meeting
                Err(error) if error.kind == ErrorKind::Closed && meets => ended = Err(error),
                other => return other,
            }
        }
        ended
    }

    /// Waits until the stage's only member has done a layer.
    fn wait_for(&mut self, layer: usize, timeout: Duration, kv: &mut dyn LayerKv) -> Result<()> {
        let ticket = self.tickets.get(layer).copied().flatten();
        ticket.map_or(Ok(()), |ticket| self.members[0].wait(ticket, timeout, kv))
    }

    fn exchange(&self, phase: usize, exchange: &mut dyn Collective) -> Result<()> {
        let (members, passes) = (&*self.members, self.passes);
        let logits = 2 * self.layers();
        let phase = match (&self.sums, self.has_logits()) {
            (Sums::Submitter, _) => phase,
            (Sums::Peers(_), _) | (Sums::Meeting(_), false) => return Ok(()),
            (Sums::Meeting(_), true) => logits + phase,
        };
        if phase < logits {
            return exchange.sum(&slices(members, passes, Forward::step_residual));
        }
        if phase > logits {
            return Ok(());
        }
        let to = MemberSlice { device: members[0].device, slice: members[0].forward.logits(&passes[0]) };
        let rows = passes[0].rows();
        let mut end = 0;
        let columns = slices(members, passes, Forward::own_logits).into_iter().map(|at| {
            let start = end;
            end += at.slice.bytes / u64::from(rows);
            MatrixPart { at, rows: None, columns: start..end }
        });
        exchange.join(&columns.collect::<Vec<_>>(), rows, &to)
    }
}

fn queues<'m>(members: &'m mut [MemberRun<'_>]) -> Vec<&'m mut dyn Queue> {
    members.iter_mut().map(|member| &mut *member.queue as &mut dyn Queue).collect()
}

/// The residual streams of all members.
fn residuals(members: &[MemberRun<'_>], passes: &[Pass]) -> Vec<Slice> {
    members.iter().zip(passes).map(|(member, pass)| member.forward.step_residual(pass)).collect()
}

fn slices<'a>(
    members: &[MemberRun<'a>],
    passes: &[Pass],
    of: impl Fn(&Forward, &Pass) -> Slice,
) -> Vec<MemberSlice<'a>> {
    let all = members.iter().zip(passes);
    all.map(|(m, pass)| MemberSlice { device: m.device, slice: of(m.forward, pass) }).collect()
}

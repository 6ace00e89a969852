//! Steps of a model whose attention has devices of its own: the first member has the weights and keeps no KV,
//! the others keep the KV and attend to it ([`Partition::attention`]).
//!
//! [`Partition::attention`]: mixfleet_scheduler::cost::Partition::attention

use super::ModelConfig;
use super::arena::{Packer, attention_input_bytes, rows_of};
use super::attention::{Attention, AttentionArena, AttentionInputs, AttentionSizes, AttentionTables};
use super::divided::MemberRun;
use super::graph::{Forward, Pass, StepInput, StepShape};
use super::held::HeldRows;
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::{
    AttendedPart, BufferUsage, Cmd, Collective, DType, Device, Error, MatrixPart, MemberSlice, Queue, Result,
    Slice,
};
use mixfleet_scheduler::cost::{MemberShare, Partition};
use std::ops::Range;
use std::time::Duration;

/// A member that keeps KV and attends to it, and has no weights.
pub struct AttentionMember {
    attention: Attention,
    arena: AttentionArena,
    inputs: Slice,
    share: MemberShare,
    /// Which pages it has, of how many members, where pages are divided.
    pages: Option<(u32, u32)>,
    block_tokens: u32,
    /// Bytes of a head of activations.
    head_bytes: u64,
    alignment: u64,
}

/// A step whose inputs are on a member that attends.
pub struct AttentionPass {
    sizes: AttentionSizes,
    inputs: AttentionInputs,
    held: Held,
}

/// The rows of a step that a member has something of.
struct Held {
    /// Those that it attends to; all if none.
    rows: Option<Vec<u32>>,
    /// The first so many of them, which others may attend to as well.
    partial: u32,
    /// Those whose keys and values it writes; all if none.
    written: Option<Vec<u32>>,
}

impl AttentionMember {
    /// Allocates the KV pools of a member's share of a model, and what attention takes. `shape` is that of
    /// the instance's steps, with all of its blocks.
    ///
    /// # Errors
    /// Those of the device, and `Invalid` for a member that does not attend.
    pub fn new(
        device: &dyn Device,
        config: &ModelConfig,
        (partition, member): (&Partition, u32),
        shape: StepShape,
    ) -> Result<Self> {
        let attends = partition.shares().get(member as usize).filter(|share| !share.has_weights());
        let Some(share) = attends else {
            return Err(Error::invalid(format!("member {member} is none that attends")));
        };
        let config = config.of_member(share);
        let holders = partition.page_holders();
        let pages = (holders > 1).then(|| (member - 1, holders));
        let shape = StepShape { blocks: shape.blocks / holders, ..shape };
        let tokens = u64::from(shape.tokens_max);
        // every row of a divided sequence is attended to as a decode
        let decodes = if pages.is_some() { tokens } else { u64::from(shape.sequences_max) };
        let alignment = device.limits().alignment_bytes.max(4);
        let alloc = |bytes: u64| device.alloc(bytes.max(4), BufferUsage::Activations);
        Ok(AttentionMember {
            attention: Attention::new(device, &config, &shape, 0)?,
            arena: AttentionArena::new(&config, shape.activations, (tokens, decodes), &alloc)?,
            inputs: alloc(attention_input_bytes(&config, &shape, decodes, alignment))?,
            share: share.clone(),
            pages,
            block_tokens: shape.block_tokens,
            head_bytes: u64::from(config.head_dim) * shape.activations.size_bytes(),
            alignment,
        })
    }

    /// The pools of keys and values of each layer.
    pub fn kv_pools(&self) -> &[(Slice, Slice)] {
        self.attention.pools()
    }

    /// Uploads what it is told of a step. Parts with one token come first. No earlier step may still run.
    ///
    /// # Errors
    /// Those of the device.
    pub fn begin(&self, device: &dyn Device, parts: &[StepInput<'_>]) -> Result<AttentionPass> {
        let (windows, block) = (self.attention.windows(), self.block_tokens);
        let (sizes, tables, held) = match self.pages {
            None => {
                let decodes = parts.iter().take_while(|part| part.tokens.len() == 1).count();
                let (decode, prefill) = parts.split_at(decodes);
                let sizes = AttentionSizes::of(decode, prefill, windows);
                let tables = AttentionTables::of(decode, prefill, block, &sizes, windows);
                (sizes, tables, Held { rows: None, partial: 0, written: None })
            }
            Some(pages) => {
                let HeldRows { rows, partial, written, sizes, tables } =
                    HeldRows::of(parts, pages, block, windows);
                (sizes, tables, Held { rows: Some(rows), partial, written: Some(written) })
            }
        };
        let mut packer = Packer { bytes: Vec::new(), alignment: self.alignment, target: &self.inputs };
        let inputs = tables.put(&mut packer);
        device.write(&self.inputs.range(0, packer.bytes.len() as u64), &packer.bytes)?;
        Ok(AttentionPass { sizes, inputs, held })
    }

    /// The commands of layer `at`: KV write and attention.
    fn commands(&self, at: usize, pass: &AttentionPass) -> Result<Vec<Cmd>> {
        let mut list = Vec::with_capacity(4);
        self.attention.commands(at, &pass.sizes, &pass.inputs, &self.arena, &mut list)?;
        Ok(list)
    }

    /// Its part, in `here`, of a matrix that has a row of all `heads` or KV heads per token.
    fn part<'a>(
        &self,
        (device, here): (&'a dyn Device, &Slice),
        heads: &Range<u32>,
        (count, rows): (u32, Option<&'a Vec<u32>>),
    ) -> MatrixPart<'a> {
        let columns = u64::from(heads.start) * self.head_bytes..u64::from(heads.end) * self.head_bytes;
        let slice = here.range(0, u64::from(count) * (columns.end - columns.start));
        MatrixPart { at: MemberSlice { device, slice }, rows: rows.map(|rows| &rows[..]), columns }
    }

    /// Its queries, keys and values of a step.
    fn received<'a>(&self, device: &'a dyn Device, pass: &'a AttentionPass) -> [MatrixPart<'a>; 3] {
        let AttentionPass { sizes, held, .. } = pass;
        let (rows, written) = ((sizes.tokens, held.rows.as_ref()), (sizes.written, held.written.as_ref()));
        let (arena, MemberShare { heads, kv_heads, .. }) = (&self.arena, &self.share);
        [
            self.part((device, &arena.q), heads, rows),
            self.part((device, &arena.k), kv_heads, written),
            self.part((device, &arena.v), kv_heads, written),
        ]
    }

    /// What it attended to in a step.
    fn attended<'a>(&self, device: &'a dyn Device, pass: &'a AttentionPass) -> AttendedPart<'a> {
        let AttentionPass { sizes, held, .. } = pass;
        let heads = to_u32(self.share.heads.len());
        AttendedPart {
            rows: self.part(
                (device, &self.arena.attended),
                &self.share.heads,
                (sizes.tokens, held.rows.as_ref()),
            ),
            stat: MemberSlice {
                device,
                slice: rows_of(&self.arena.stat, held.partial * heads, 2, DType::F32),
            },
        }
    }
}

/// A member that attends, ready to run steps.
pub struct AttentionRun<'a> {
    /// The member's device.
    pub device: &'a dyn Device,
    /// A queue of the device.
    pub queue: &'a mut dyn Queue,
    /// The member's KV.
    pub member: &'a AttentionMember,
}

/// Runs a step on a model's member with the weights and on those that attend, whose passes are `passes`, and
/// waits until it is done; no part of it may take longer than `timeout`. The first member's device then has
/// the logits and has drawn from them.
///
/// # Errors
/// Those of the devices and of the exchange.
pub fn run_apart(
    model: &mut MemberRun<'_>,
    pass: &Pass,
    attending: &mut [AttentionRun<'_>],
    passes: &[AttentionPass],
    exchange: &mut dyn Collective,
    timeout: Duration,
) -> Result<()> {
    let (forward, device) = (model.forward, model.device);
    let mut list = forward.embed(pass)?;
    for layer in 0..forward.config().layers as usize {
        list.extend(forward.attention_inputs(layer, pass)?);
        run_list(model, &list, timeout)?;
        send((device, forward), pass, attending, passes, exchange)?;
        attend(attending, passes, layer, timeout)?;
        collect((device, forward), pass, attending, passes, exchange)?;
        list = vec![forward.attention_output(layer, pass)?];
        list.extend(forward.mlp_block(layer, pass)?);
    }
    list.extend(forward.head(pass)?);
    run_list(model, &list, timeout)
}

/// Exchanges what a layer of a step exchanges, whatever is there, and returns the bytes that crossed.
///
/// # Errors
/// Those of the devices and of the exchange.
pub fn exchange_layer(
    model: &MemberRun<'_>,
    pass: &Pass,
    attending: &[AttentionRun<'_>],
    passes: &[AttentionPass],
    exchange: &mut dyn Collective,
) -> Result<u64> {
    let model = (model.device, model.forward);
    let sent = send(model, pass, attending, passes, exchange)?;
    Ok(sent + collect(model, pass, attending, passes, exchange)?)
}

/// A matrix of activations on the first member, with a row of so many heads per token.
fn matrix<'a>(
    (device, forward): (&'a dyn Device, &Forward),
    pass: &Pass,
    slice: &Slice,
    heads: u32,
) -> MemberSlice<'a> {
    let columns = heads * forward.config().head_dim;
    MemberSlice { device, slice: rows_of(slice, pass.tokens(), columns, forward.shape().activations) }
}

/// Deals queries, keys and values to the members that attend; returns their bytes.
fn send(
    model: (&dyn Device, &Forward),
    pass: &Pass,
    attending: &[AttentionRun<'_>],
    passes: &[AttentionPass],
    exchange: &mut dyn Collective,
) -> Result<u64> {
    let (c, arena) = (model.1.config(), model.1.attention_arena());
    let sent = [(&arena.q, c.heads), (&arena.k, c.kv_heads), (&arena.v, c.kv_heads)];
    let received = attending.iter().zip(passes).map(|(run, pass)| run.member.received(run.device, pass));
    let received: Vec<[MatrixPart<'_>; 3]> = received.collect();
    let mut bytes = 0;
    for (which, (slice, heads)) in sent.into_iter().enumerate() {
        let parts: Vec<_> = received.iter().map(|parts| parts[which].clone()).collect();
        bytes += parts.iter().map(|part| part.at.slice.bytes).sum::<u64>();
        exchange.deal(&matrix(model, pass, slice, heads), pass.tokens(), &parts)?;
    }
    Ok(bytes)
}

/// Puts together on the first member what the others attended to; returns the bytes of it.
fn collect(
    model: (&dyn Device, &Forward),
    pass: &Pass,
    attending: &[AttentionRun<'_>],
    passes: &[AttentionPass],
    exchange: &mut dyn Collective,
) -> Result<u64> {
    let (heads, tokens) = (model.1.config().heads, pass.tokens());
    let attended = attending.iter().zip(passes).map(|(run, pass)| run.member.attended(run.device, pass));
    let attended: Vec<AttendedPart<'_>> = attended.collect();
    let to = matrix(model, pass, &model.1.attention_arena().attended, heads);
    let bytes = attended.iter().map(|part| part.rows.at.slice.bytes + part.stat.slice.bytes).sum();
    if passes.iter().any(|pass| pass.held.partial > 0) {
        exchange.merge(&attended, (tokens, heads), model.1.shape().activations, &to)?;
    } else {
        let parts: Vec<_> = attended.into_iter().map(|part| part.rows).collect();
        exchange.join(&parts, tokens, &to)?;
    }
    Ok(bytes)
}
/// Runs attention of a layer on all members that attend at the same time, and waits for all.
fn attend(
    attending: &mut [AttentionRun<'_>],
    passes: &[AttentionPass],
    layer: usize,
    timeout: Duration,
) -> Result<()> {
    let mut tickets = Vec::with_capacity(attending.len());
    for (AttentionRun { device, queue, member }, pass) in attending.iter_mut().zip(passes) {
        let list = member.commands(layer, pass)?;
        let AttendedPart { rows, stat } = member.attended(*device, pass);
        let results: Vec<Slice> =
            [rows.at.slice, stat.slice].into_iter().filter(|slice| slice.bytes > 0).collect();
        tickets.push(if list.is_empty() { None } else { Some(queue.submit_for(&list, &results)?) });
    }
    for (AttentionRun { device, queue, .. }, ticket) in attending.iter_mut().zip(tickets) {
        if let Some(ticket) = ticket {
            let failed = |error: Error| error.context(device.info().id.clone());
            queue.wait(ticket, timeout).map_err(failed)?;
        }
    }
    Ok(())
}

fn run_list(model: &mut MemberRun<'_>, list: &[Cmd], timeout: Duration) -> Result<()> {
    let ticket = model.queue.submit(list)?;
    let failed = |error: Error| error.context(model.device.info().id.clone());
    model.queue.wait(ticket, timeout).map_err(failed)?;
    Ok(())
}

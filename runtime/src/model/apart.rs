//! Steps of a model whose attention has devices of its own: the first member has the weights and keeps no KV,
//! the others keep the KV and attend to it ([`Partition::attention`]).
//!
//! [`Partition::attention`]: mixfleet_scheduler::cost::Partition::attention

use super::ModelConfig;
use super::arena::{Packer, attention_input_bytes, rows_of};
use super::attention::{Attention, AttentionArena, AttentionInputs, AttentionSizes};
use super::divided::MemberRun;
use super::graph::{Pass, StepInput, StepShape};
use mixfleet_hal::{
    BufferUsage, Cmd, Collective, Device, Error, MatrixPart, MemberSlice, Queue, Result, Slice,
};
use mixfleet_scheduler::cost::MemberShare;
use std::ops::Range;
use std::time::Duration;

/// A member that keeps KV and attends to it, and has no weights.
pub struct AttentionMember {
    attention: Attention,
    arena: AttentionArena,
    inputs: Slice,
    share: MemberShare,
    shape: StepShape,
    /// Bytes of a head of activations.
    head_bytes: u64,
    alignment: u64,
}

/// A step whose inputs are on a member that attends.
pub struct AttentionPass {
    sizes: AttentionSizes,
    inputs: AttentionInputs,
}

impl AttentionMember {
    /// Allocates the KV pools of a member's share of a model, and what attention takes.
    ///
    /// # Errors
    /// Those of the device.
    pub fn new(
        device: &dyn Device,
        config: &ModelConfig,
        share: &MemberShare,
        shape: StepShape,
    ) -> Result<Self> {
        let config = config.of_member(share);
        let (tokens, sequences) = (u64::from(shape.tokens_max), u64::from(shape.sequences_max));
        let alignment = device.limits().alignment_bytes.max(4);
        let alloc = |bytes: u64| device.alloc(bytes.max(4), BufferUsage::Activations);
        Ok(AttentionMember {
            attention: Attention::new(device, &config, &shape, 0)?,
            arena: AttentionArena::new(&config, shape.activations, (tokens, sequences), &alloc)?,
            inputs: alloc(attention_input_bytes(&config, &shape, alignment))?,
            share: share.clone(),
            shape,
            head_bytes: u64::from(config.head_dim) * shape.activations.size_bytes(),
            alignment,
        })
    }

    /// Uploads what it is told of a step. Parts with one token come first. No earlier step may still run.
    ///
    /// # Errors
    /// Those of the device.
    pub fn begin(&self, device: &dyn Device, parts: &[StepInput<'_>]) -> Result<AttentionPass> {
        let windows = self.attention.windows();
        let decodes = parts.iter().take_while(|part| part.tokens.len() == 1).count();
        let halves = parts.split_at(decodes);
        let sizes = AttentionSizes::of(halves.0, halves.1, windows);
        let mut packer = Packer { bytes: Vec::new(), alignment: self.alignment, target: &self.inputs };
        let block = self.shape.block_tokens;
        let inputs = AttentionInputs::put(&mut packer, halves, (0, 0), block, &sizes, windows);
        device.write(&self.inputs.range(0, packer.bytes.len() as u64), &packer.bytes)?;
        Ok(AttentionPass { sizes, inputs })
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
        pass: &AttentionPass,
    ) -> MatrixPart<'a> {
        let columns = u64::from(heads.start) * self.head_bytes..u64::from(heads.end) * self.head_bytes;
        let bytes = u64::from(pass.sizes.tokens) * (columns.end - columns.start);
        MatrixPart { at: MemberSlice { device, slice: here.range(0, bytes) }, rows: None, columns }
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
    let forward = model.forward;
    let (c, x) = (forward.config(), forward.shape().activations);
    let (tokens, arena) = (pass.tokens(), forward.attention_arena());
    let matrix = |device, slice: &Slice, heads: u32| {
        let slice = rows_of(slice, tokens, heads * c.head_dim, x);
        MemberSlice { device, slice }
    };
    let mut list = forward.embed(pass)?;
    for layer in 0..c.layers as usize {
        list.extend(forward.attention_inputs(layer, pass)?);
        run_list(model, &list, timeout)?;
        let sent = [(&arena.q, c.heads), (&arena.k, c.kv_heads), (&arena.v, c.kv_heads)];
        for (which, (slice, heads)) in sent.into_iter().enumerate() {
            let parts = attending.iter().zip(passes).map(|(AttentionRun { device, member, .. }, pass)| {
                let here = [&member.arena.q, &member.arena.k, &member.arena.v][which];
                let heads = if which == 0 { &member.share.heads } else { &member.share.kv_heads };
                member.part((*device, here), heads, pass)
            });
            exchange.deal(&matrix(model.device, slice, heads), tokens, &parts.collect::<Vec<_>>())?;
        }
        attend(attending, passes, layer, timeout)?;
        let parts = attending.iter().zip(passes).map(|(AttentionRun { device, member, .. }, pass)| {
            member.part((*device, &member.arena.attended), &member.share.heads, pass)
        });
        let to = matrix(model.device, &arena.attended, c.heads);
        exchange.join(&parts.collect::<Vec<_>>(), tokens, &to)?;
        list = vec![forward.attention_output(layer, pass)?];
        list.extend(forward.mlp_block(layer, pass)?);
    }
    list.extend(forward.head(pass)?);
    run_list(model, &list, timeout)
}

/// Runs attention of a layer on all members that attend at the same time, and waits for all.
fn attend(
    attending: &mut [AttentionRun<'_>],
    passes: &[AttentionPass],
    layer: usize,
    timeout: Duration,
) -> Result<()> {
    let mut tickets = Vec::with_capacity(attending.len());
    for (AttentionRun { queue, member, .. }, pass) in attending.iter_mut().zip(passes) {
        tickets.push(queue.submit(&member.commands(layer, pass)?)?);
    }
    for (AttentionRun { device, queue, .. }, ticket) in attending.iter_mut().zip(tickets) {
        let failed = |error: Error| error.context(device.info().id.clone());
        queue.wait(ticket, timeout).map_err(failed)?;
    }
    Ok(())
}

fn run_list(model: &mut MemberRun<'_>, list: &[Cmd], timeout: Duration) -> Result<()> {
    let ticket = model.queue.submit(list)?;
    let failed = |error: Error| error.context(model.device.info().id.clone());
    model.queue.wait(ticket, timeout).map_err(failed)?;
    Ok(())
}

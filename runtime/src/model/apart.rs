//! Steps of a model with separate attention devices: the first member has the weights and keeps no KV; the
//! others keep the KV and compute attention ([`Partition::attention`]).
//!
//! A step is one batch or two, each with its own activations on every member. With two, the first member
//! computes the products of one while the others compute attention of the other; one thread submits to all
//! queues.
//!
//! [`Partition::attention`]: mixfleet_scheduler::cost::Partition::attention

use super::ModelConfig;
use super::arena::{Activations, Packer, attention_input_bytes, rows_of};
use super::attention::{Attention, AttentionInputs, AttentionTables, attention_sizes};
use super::bind::{Binder, BoundMemory};
use super::graph::{Forward, Pass, StepInput, StepShape};
use super::held::HeldRows;
use super::leaving::{KvStays, LayerKv, wait_beside};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::{
    AttendedPart, BufferUsage, Cmd, Collective, DType, Device, Error, ErrorKind, MatrixPart, MemberSlice,
    Queue, Result, Slice, Ticket,
};
use mixfleet_scheduler::cost::{MemberShare, ModelShape, Partition};
use mixfleet_scheduler::layers::{Activation, AttentionSizes, BufferRoom, LayerOps};
use std::ops::Range;
use std::time::Duration;

/// The number of the first attention member.
const FIRST_ATTENDING: usize = 1;

/// A member that keeps KV and computes attention, and has no weights.
pub struct AttentionMember {
    attention: Attention,
    /// The member's share of the model.
    model: ModelShape,
    activations: Activations,
    inputs: Slice,
    share: MemberShare,
    /// The pages of this member, and the number of members, where pages are divided.
    pages: Option<(u32, u32)>,
    shape: StepShape,
    /// Bytes of a head of activations.
    head_bytes: u64,
    alignment: u64,
}

/// A batch whose inputs are on an attention member.
struct AttentionPass {
    sizes: AttentionSizes,
    inputs: AttentionInputs,
    held: Held,
}

/// The rows of a step that concern a member.
struct Held {
    /// Rows that the member computes attention of; all if none.
    rows: Option<Vec<u32>>,
    /// Number of leading rows that other members may attend to as well.
    partial: u32,
    /// Rows whose keys and values the member writes; all if none.
    written: Option<Vec<u32>>,
}

impl AttentionMember {
    /// Allocates the KV pools of a member's share of a model, and the buffers of attention. `shape` is the
    /// instance's, with the blocks that this member has a part of.
    ///
    /// # Errors
    /// Errors of the device, and `Invalid` for a member without attention.
    pub fn new(
        device: &dyn Device,
        config: &ModelConfig,
        (partition, member): (&Partition, u32),
        shape: StepShape,
    ) -> Result<Self> {
        let attends = partition.shares().get(member as usize).filter(|share| !share.has_weights());
        let Some(share) = attends else {
            return Err(Error::invalid(format!("member {member} does not compute attention")));
        };
        let own = config.of_member(share);
        let holders = partition.page_holders();
        let pages = (holders > 1).then(|| (member - 1, holders));
        let attention = Attention::new(device, &own, &shape, 0)?;
        AttentionMember::with(device, config, (share, pages), shape, attention)
    }

    /// Returns the member for the second of two batches in flight: the same KV, with its own activations.
    ///
    /// # Errors
    /// Errors of the device, and `Unsupported` if a step cannot be halved.
    pub fn for_second_batch(&self, device: &dyn Device, config: &ModelConfig) -> Result<Self> {
        let shape = self.shape.of_second_batch();
        let shape = shape.ok_or_else(|| Error::unsupported("a step of one sequence is one batch"))?;
        AttentionMember::with(device, config, (&self.share, self.pages), shape, self.attention.clone())
    }

    /// `shape` has the pages of this member.
    fn with(
        device: &dyn Device,
        config: &ModelConfig,
        (share, pages): (&MemberShare, Option<(u32, u32)>),
        shape: StepShape,
        attention: Attention,
    ) -> Result<Self> {
        let config = config.of_member(share);
        let tokens = u64::from(shape.tokens_max);
        // every row of a divided sequence is computed as a decode
        let decodes = if pages.is_some() { tokens } else { u64::from(shape.sequences_max) };
        let alignment = device.limits().alignment_bytes.max(4);
        let alloc = |bytes: u64| device.alloc(bytes.max(4), BufferUsage::Activations);
        let model = config.cost_shape(shape.activations, shape.kv, shape.block_tokens);
        let room = BufferRoom { tokens, sequences: shape.sequences_max.into(), decodes };
        Ok(AttentionMember {
            attention,
            activations: Activations::new(device, model.attention_buffers(room))?,
            model,
            inputs: alloc(attention_input_bytes(&config, &shape, decodes, alignment))?,
            share: share.clone(),
            pages,
            shape,
            head_bytes: u64::from(config.head_dim) * shape.activations.size_bytes(),
            alignment,
        })
    }

    /// The pools of keys and values of each layer.
    pub fn kv_pools(&self) -> &[(Slice, Slice)] {
        self.attention.pools()
    }

    /// Uploads the inputs of a batch. Parts with one token come first.
    fn begin(&self, device: &dyn Device, parts: &[StepInput<'_>]) -> Result<AttentionPass> {
        let (reaches, block) = (self.attention.reaches(), self.shape.block_tokens);
        let (sizes, tables, held) = match self.pages {
            None => {
                let decodes = parts.iter().take_while(|part| part.tokens.len() == 1).count();
                let (decode, prefill) = parts.split_at(decodes);
                let sizes = attention_sizes(decode, prefill, reaches);
                let tables = AttentionTables::of(decode, prefill, block, &sizes, reaches);
                (sizes, tables, Held { rows: None, partial: 0, written: None })
            }
            Some(pages) => {
                let HeldRows { rows, partial, written, sizes, tables } =
                    HeldRows::of(parts, pages, block, reaches.windows);
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
        let memory = BoundMemory {
            activations: &self.activations,
            weights: None,
            attention: Some((&self.attention, &pass.inputs)),
            inputs: None,
            layer: at,
        };
        let mut list = Binder::new(memory, 4);
        LayerOps::counted(&self.model).attend(self.attention.window(at), &pass.sizes, &mut list);
        list.finish()
    }

    /// The member's part, in `here`, of a matrix that has a row of all `heads` or KV heads per token.
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

    /// The member's queries, keys and values of a step.
    fn received<'a>(&self, device: &'a dyn Device, pass: &'a AttentionPass) -> [MatrixPart<'a>; 3] {
        let AttentionPass { sizes, held, .. } = pass;
        let (rows, written) = ((sizes.tokens, held.rows.as_ref()), (sizes.written, held.written.as_ref()));
        let MemberShare { heads, kv_heads, .. } = &self.share;
        let of = |buffer| (device, self.activations.of(buffer));
        [
            self.part(of(Activation::Q), heads, rows),
            self.part(of(Activation::K), kv_heads, written),
            self.part(of(Activation::V), kv_heads, written),
        ]
    }

    /// The member's attention output in a step.
    fn attended<'a>(&self, device: &'a dyn Device, pass: &'a AttentionPass) -> AttendedPart<'a> {
        let AttentionPass { sizes, held, .. } = pass;
        let heads = to_u32(self.share.heads.len());
        AttendedPart {
            rows: self.part(
                (device, self.activations.of(Activation::Attended)),
                &self.share.heads,
                (sizes.tokens, held.rows.as_ref()),
            ),
            stat: MemberSlice {
                device,
                slice: rows_of(self.activations.of(Activation::Stats), held.partial * heads, 2, DType::F32),
            },
        }
    }
}

/// An attention member, and its part of the batch.
struct Attends<'a> {
    device: &'a dyn Device,
    member: &'a AttentionMember,
    pass: AttentionPass,
}

/// A batch of a step, whose inputs are on all members.
pub struct ApartBatch<'a> {
    device: &'a dyn Device,
    forward: &'a Forward,
    pass: Pass,
    attending: Vec<Attends<'a>>,
}

impl<'a> ApartBatch<'a> {
    /// Uploads the inputs of a batch to the member with the weights and to the attention members. Parts with
    /// one token come first. No earlier batch may still run on the same activations.
    ///
    /// # Errors
    /// Errors of the devices.
    pub fn begin(
        (device, forward): (&'a dyn Device, &'a Forward),
        attending: impl IntoIterator<Item = (&'a dyn Device, &'a AttentionMember)>,
        parts: &[StepInput<'_>],
    ) -> Result<Self> {
        let pass = forward.begin(device, parts)?;
        let attending = attending.into_iter().map(|(device, member)| {
            let pass = member.begin(device, parts)?;
            Ok(Attends { device, member, pass })
        });
        Ok(ApartBatch { device, forward, pass, attending: attending.collect::<Result<_>>()? })
    }

    /// The first member's device, its share of the model and its part of the batch.
    pub fn first(&self) -> (&'a dyn Device, &'a Forward, &Pass) {
        (self.device, self.forward, &self.pass)
    }

    fn layers(&self) -> usize {
        self.forward.config().layers as usize
    }

    /// The commands of the first member after the attention of `layer` layers.
    fn products(&self, layer: usize) -> Result<Vec<Cmd>> {
        let (forward, pass) = (self.forward, &self.pass);
        let mut list = match layer.checked_sub(1) {
            None => forward.embed(pass)?,
            Some(before) => {
                let mut list = forward.attention_output(before, pass)?;
                list.extend(forward.mlp_block(before, pass)?);
                list
            }
        };
        match layer == self.layers() {
            true => list.extend(forward.head(pass)?),
            false => list.extend(forward.attention_inputs(layer, pass)?),
        }
        Ok(list)
    }

    /// Performs an exchange of a layer, and returns the bytes that crossed.
    ///
    /// # Errors
    /// Errors of the devices and of the exchange.
    pub fn exchange_layer(&self, exchange: &mut dyn Collective) -> Result<u64> {
        Ok(self.send(exchange)? + self.collect(exchange, 0)?)
    }

    /// A matrix of activations on the first member, with a row of `heads` heads per token.
    fn matrix(&self, buffer: Activation, heads: u32) -> MemberSlice<'a> {
        let slice = self.forward.activations().of(buffer);
        let columns = heads * self.forward.config().head_dim;
        let rows = rows_of(slice, self.pass.tokens(), columns, self.forward.shape().activations);
        MemberSlice { device: self.device, slice: rows }
    }

    /// Distributes queries, keys and values to the attention members; returns the number of bytes.
    fn send(&self, exchange: &mut dyn Collective) -> Result<u64> {
        let c = self.forward.config();
        let sent = [(Activation::Q, c.heads), (Activation::K, c.kv_heads), (Activation::V, c.kv_heads)];
        let received = self.attending.iter().map(|at| at.member.received(at.device, &at.pass));
        let received: Vec<[MatrixPart<'_>; 3]> = received.collect();
        let mut bytes = 0;
        for (which, (buffer, heads)) in sent.into_iter().enumerate() {
            let parts: Vec<_> = received.iter().map(|parts| parts[which].clone()).collect();
            bytes += parts.iter().map(|part| part.at.slice.bytes).sum::<u64>();
            exchange.deal(&self.matrix(buffer, heads), self.pass.tokens(), &parts)?;
        }
        Ok(bytes)
    }

    /// Gathers on the first member the attention output of a layer; returns the number of bytes.
    fn collect(&self, exchange: &mut dyn Collective, layer: usize) -> Result<u64> {
        let (heads, tokens) = (self.forward.config().heads, self.pass.tokens());
        let attended: Vec<AttendedPart<'_>> = self.attending.iter().map(Attends::attended).collect();
        let to = self.matrix(Activation::Attended, heads);
        let bytes = attended.iter().map(|part| part.rows.at.slice.bytes + part.stat.slice.bytes).sum();
        if self.attending.iter().any(|at| at.pass.held.partial > 0) {
            let (dtype, sinks) = (self.forward.shape().activations, self.forward.config().sinks_in(layer));
            exchange.merge(&attended, (tokens, heads), dtype, sinks, &to)?;
        } else {
            let parts: Vec<_> = attended.into_iter().map(|part| part.rows).collect();
            exchange.join(&parts, tokens, &to)?;
        }
        Ok(bytes)
    }
}

impl Attends<'_> {
    fn attended(&self) -> AttendedPart<'_> {
        self.member.attended(self.device, &self.pass)
    }

    /// Submits attention of a layer, and the gathering of the layer's KV; none if there is nothing to attend
    /// to.
    fn submit(&self, layer: usize, gathers: Vec<Cmd>, queue: &mut dyn Queue) -> Result<Option<Ticket>> {
        let mut list = self.member.commands(layer, &self.pass)?;
        list.extend(gathers);
        let AttendedPart { rows, stat } = self.attended();
        let results: Vec<Slice> =
            [rows.at.slice, stat.slice].into_iter().filter(|slice| slice.bytes > 0).collect();
        if list.is_empty() { Ok(None) } else { queue.submit_for(&list, &results).map(Some) }
    }
}

/// Queues of the member with the weights, and of each attention member.
pub struct ApartQueues<'a> {
    /// The first member's queue.
    pub first: &'a mut dyn Queue,
    /// The other queues, in the order of members.
    pub attending: Vec<&'a mut dyn Queue>,
}

/// Work in flight for a batch.
enum UnderWay {
    Products(Ticket),
    Attention(Vec<Option<Ticket>>),
    Nothing,
}

/// A batch and its progress.
struct InFlight<'b, 'a> {
    batch: &'b ApartBatch<'a>,
    number: usize,
    /// The layer whose queries, keys and values are computed or attended to.
    layer: usize,
    under_way: UnderWay,
}

impl InFlight<'_, '_> {
    /// Whether the batch waits for attention.
    fn attends(&self) -> bool {
        matches!(self.under_way, UnderWay::Attention(_))
    }

    /// Waits for the work in flight; KV leaves meanwhile.
    fn wait(&self, queues: &mut ApartQueues<'_>, timeout: Duration, kv: &mut dyn LayerKv) -> Result<()> {
        let mut wait = |device: &dyn Device, queue: &mut dyn Queue, ticket| {
            let named = |error: Error| error.context(device.info().id.clone());
            wait_beside(queue, ticket, timeout, kv).map_err(named)
        };
        match &self.under_way {
            UnderWay::Nothing => Ok(()),
            UnderWay::Products(ticket) => wait(self.batch.device, queues.first, *ticket),
            UnderWay::Attention(tickets) => {
                let all = self.batch.attending.iter().zip(&mut queues.attending).zip(tickets);
                all.filter_map(|((at, queue), ticket)| Some((at, queue, (*ticket)?)))
                    .try_for_each(|(at, queue, ticket)| wait(at.device, &mut **queue, ticket))
            }
        }
    }

    /// Whether the work in flight has ended. A failure is returned once, and ends the step.
    fn has_ended(&self, queues: &mut ApartQueues<'_>) -> Result<bool> {
        match self.wait(queues, Duration::ZERO, &mut KvStays) {
            Err(error) if error.kind == ErrorKind::Timeout => Ok(false),
            ended => ended.map(|()| true),
        }
    }

    /// Begins the work that follows. KV of a layer leaves beside the products that follow it.
    fn go_on(
        &mut self,
        queues: &mut ApartQueues<'_>,
        exchange: &mut dyn Collective,
        kv: &mut dyn LayerKv,
    ) -> Result<()> {
        let (batch, number) = (self.batch, self.number);
        self.under_way = match self.under_way {
            UnderWay::Products(_) if self.layer == batch.layers() => UnderWay::Nothing,
            UnderWay::Products(_) => {
                batch.send(exchange)?;
                let all = (FIRST_ATTENDING..).zip(&batch.attending).zip(&mut queues.attending);
                let tickets = all.map(|((member, at), queue)| {
                    let gathers = kv.gather(member, number, self.layer)?;
                    at.submit(self.layer, gathers, &mut **queue)
                });
                UnderWay::Attention(tickets.collect::<Result<_>>()?)
            }
            UnderWay::Attention(_) => {
                batch.collect(exchange, self.layer)?;
                self.layer += 1;
                let products = queues.first.submit(&batch.products(self.layer)?)?;
                kv.leave(FIRST_ATTENDING, number, self.layer - 1)?;
                UnderWay::Products(products)
            }
            UnderWay::Nothing => UnderWay::Products(queues.first.submit(&batch.products(0)?)?),
        };
        Ok(())
    }
}

/// Runs the batches of a step, one or two, and waits until all are done; no part may take longer than
/// `timeout`. KV leaves meanwhile. `drawn` is called once the first member's device has the logits of a
/// batch, with its number, and has drawn from them.
///
/// # Errors
/// Errors of the devices and of the exchange, of `kv` and of `drawn`.
pub fn run_apart(
    queues: &mut ApartQueues<'_>,
    batches: &[ApartBatch<'_>],
    exchange: &mut dyn Collective,
    timeout: Duration,
    kv: &mut dyn LayerKv,
    drawn: &mut dyn FnMut(usize, &ApartBatch<'_>) -> Result<()>,
) -> Result<()> {
    let new = |(number, batch)| InFlight { batch, number, layer: 0, under_way: UnderWay::Nothing };
    let mut all: Vec<_> = batches.iter().enumerate().map(new).collect();
    all.iter_mut().try_for_each(|batch| batch.go_on(queues, exchange, kv))?;
    // wait for the side that ends first: the next work there is submitted before the side becomes idle
    let mut attention_first = false;
    loop {
        let under_way = (0..all.len()).filter(|&at| !matches!(all[at].under_way, UnderWay::Nothing));
        // among batches on the same side the oldest, since a queue is ordered
        let next = under_way.clone().min_by_key(|&at| (all[at].attends() != attention_first, all[at].layer));
        let Some(next) = next else { return Ok(()) };
        all[next].wait(queues, timeout, kv)?;
        let other = under_way.clone().find(|&at| all[at].attends() != all[next].attends());
        if let Some(other) = other
            && all[other].has_ended(queues)?
        {
            attention_first = !all[next].attends();
        }
        all[next].go_on(queues, exchange, kv)?;
        if matches!(all[next].under_way, UnderWay::Nothing) {
            drawn(next, all[next].batch)?;
        }
    }
}

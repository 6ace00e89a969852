//! The members of an instance beside its first device, which share the model with it, or run attention for
//! it.
//!
//! The worker has the first one, whose device speaks for the instance. KV pages have the same numbers on all
//! members that keep some, each with its own heads and layers.

use super::draw::{LogitsRow, read_rows};
use crate::env::Env;
use crate::model::ModelConfig;
use crate::model::apart::{ApartBatch, ApartQueues, AttentionMember, run_apart};
use crate::model::divided::{MemberRun, MicroBatch, run_stages};
use crate::model::exchange::ThroughHost;
use crate::model::graph::{Forward, Pass, StepInput};
use crate::model::leaving::LayerKv;
use crate::model::peers::{Carriers, PeerCopies};
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{Collective, Device, Error, Queue, Result, Slice};
use mixfleet_scheduler::cost::{AttnSplit, ExpertsBy, LinkCost, Partition, Pieces};
use std::sync::Arc;
use std::time::Duration;

/// Rows of the large exchange whose time is measured, and how often.
const ROWS_TIMED: u32 = 128;
const TIMED: usize = 5;

/// What a device has of the model.
pub(super) enum MemberModel {
    /// Weights, and KV unless others attend.
    Weights(Box<Forward>),
    /// KV alone.
    Kv(Box<AttentionMember>),
}

/// A device with its share of the model, and a queue.
struct QueuedMember<M> {
    device: Arc<dyn Device>,
    model: M,
    queue: Box<dyn Queue>,
}

/// Devices beside the first one.
enum Group {
    /// They share the model with it, in stages of this many members.
    Divide(Stages, Vec<QueuedMember<Box<Forward>>>),
    /// They attend for it, to one batch or to two.
    Attend(Partition, Vec<QueuedMember<Box<AttentionMember>>>, Option<Box<SecondBatch>>),
}

/// What all members have for the second of two batches in flight.
struct SecondBatch {
    first: Forward,
    attending: Vec<AttentionMember>,
}

/// The stages of an instance.
struct Stages {
    /// Members of each.
    members: Vec<usize>,
    /// What they divide of experts.
    by: Vec<ExpertsBy>,
    /// The most prompt tokens that pass them as one.
    chunk_tokens: u32,
}

/// The other members, with queues.
pub(super) struct OtherMembers {
    group: Group,
    exchange: Box<dyn Collective>,
    /// What devices exchange without the host.
    peers: PeerCopies,
}

impl OtherMembers {
    /// Opens the queues of devices beside the first one, for a model of this configuration; under attention
    /// offload, of the attention devices. Pipeline stages process this many prompt tokens at a time.
    ///
    /// # Errors
    /// When a device gives no queue, or has another part of the model than the others.
    pub(super) fn open(
        first: (&dyn Device, &Forward),
        devices: Vec<(Arc<dyn Device>, MemberModel)>,
        (config, partition): (&ModelConfig, &Partition),
        chunk_tokens: u32,
    ) -> Result<Self> {
        let (mut dividing, mut attending) = (Vec::new(), Vec::new());
        for (device, model) in devices {
            let queue = device.queue()?;
            match model {
                MemberModel::Weights(model) => dividing.push(QueuedMember { device, model, queue }),
                MemberModel::Kv(model) => attending.push(QueuedMember { device, model, queue }),
            }
        }
        let group = match partition.split() {
            None if attending.is_empty() => {
                let (members, by) = (partition.stages(), partition.experts_by());
                Group::Divide(Stages { members, by, chunk_tokens }, dividing)
            }
            Some(_) if dividing.is_empty() => {
                let second = SecondBatch::open(first, &attending, config)?;
                Group::Attend(partition.clone(), attending, second)
            }
            _ => return Err(Error::invalid("members either divide a model or attend for the first one")),
        };
        let peers = match &group {
            Group::Divide(stages, members) => {
                let others = members.iter().map(|member| (&*member.device, &*member.model));
                let mut all = std::iter::once(first).chain(others);
                let of_stage = |&count: &usize| all.by_ref().take(count).collect();
                PeerCopies::open(&stages.members.iter().map(of_stage).collect::<Vec<_>>())
            }
            Group::Attend(..) => PeerCopies::default(),
        };
        Ok(OtherMembers { group, exchange: Box::new(ThroughHost::default()), peers })
    }

    /// The devices, in the order of members.
    pub(super) fn devices(&self) -> Vec<&Arc<dyn Device>> {
        match &self.group {
            Group::Divide(_, members) => members.iter().map(|member| &member.device).collect(),
            Group::Attend(_, members, _) => members.iter().map(|member| &member.device).collect(),
        }
    }

    /// Whether all of them copy beside a step.
    pub(super) fn copy_beside(&self) -> bool {
        self.devices().iter().all(|device| device.limits().copies_beside)
    }

    /// Their pools of keys and values by layer, in the order of members; none for members without KV.
    pub(super) fn kv_pools(&self) -> Vec<&[(Slice, Slice)]> {
        match &self.group {
            Group::Divide(_, members) => members.iter().map(|member| member.model.kv_pools()).collect(),
            Group::Attend(_, members, _) => members.iter().map(|member| member.model.kv_pools()).collect(),
        }
    }

    /// The instance's selector: those of all its devices, with `how` after the prefix of its kind.
    pub(super) fn joined(&self, how: &str, words: &[&str]) -> String {
        let divided = |by: &ExpertsBy| match by {
            ExpertsBy::Columns => "tp",
            ExpertsBy::Member => "ep",
        };
        let Group::Divide(Stages { members, by, .. }, _) = &self.group else {
            return format!("attn{how}:{}", words.join(","));
        };
        if members.len() == 1 {
            return format!("{}{how}:{}", divided(&by[0]), words.join(","));
        }
        let mut rest = words;
        let stages = members.iter().zip(by).map(|(&count, by)| {
            let (own, others) = rest.split_at(count);
            rest = others;
            if count == 1 { own.concat() } else { format!("({}:{})", divided(by), own.join(",")) }
        });
        format!("pp{how}:{}", stages.collect::<Vec<_>>().join(","))
    }

    /// The number of stages, and the most prompt tokens that pass them as one; none if there is one stage.
    pub(super) fn stages(&self) -> Option<(usize, u32)> {
        match &self.group {
            Group::Divide(stages, _) => {
                Some((stages.members.len(), stages.chunk_tokens)).filter(|(stages, _)| *stages > 1)
            }
            Group::Attend(..) => None,
        }
    }

    /// How KV is divided, where these attend.
    pub(super) fn split(&self) -> Option<AttnSplit> {
        self.partition().and_then(Partition::split)
    }

    /// Each member's part of the model, under attention offload.
    pub(super) fn partition(&self) -> Option<&Partition> {
        match &self.group {
            Group::Divide(..) => None,
            Group::Attend(partition, ..) => Some(partition),
        }
    }

    /// Whether products of one batch may run beside attention to another: `first`, the device with the
    /// weights, is not among the attention devices.
    pub(super) fn may_stagger(&self, first: &dyn Device) -> bool {
        self.devices().iter().all(|device| !std::ptr::addr_eq(Arc::as_ptr(device), first))
    }

    /// The cost of what crosses in a layer between the first device and these, where they attend: fitted to
    /// the shortest times for one row and for many. It leaves KV as it is.
    ///
    /// # Errors
    /// Those of the devices and of the exchange.
    pub(super) fn exchange_cost(
        &mut self,
        first: (&dyn Device, &Forward),
        env: &dyn Env,
    ) -> Result<LinkCost> {
        let shape = *first.1.shape();
        let rows = ROWS_TIMED.min(shape.tokens_max).min(shape.blocks.saturating_mul(shape.block_tokens));
        let block_pages = first.1.config().pages.parts.count();
        let pages: Vec<u32> = (0..rows.div_ceil(shape.block_tokens) * block_pages).collect();
        let ids = vec![0; rows as usize];
        let mut timed = [(0, 0.0); 2];
        for (timed, rows) in timed.iter_mut().zip([1, rows]) {
            let pages = &pages[..(rows.div_ceil(shape.block_tokens) * block_pages) as usize];
            let part = StepInput { start: 0, tokens: &ids[..rows as usize], pages, draw: None };
            let Group::Attend(_, members, _) = &self.group else {
                return Err(Error::unsupported("no members attend"));
            };
            let attending = members.iter().map(|member| (&*member.device, &*member.model));
            let batch = ApartBatch::begin(first, attending, &[part])?;
            *timed = (0, f64::INFINITY);
            for _ in 0..TIMED {
                let began = env.now();
                let bytes = batch.exchange_layer(&mut *self.exchange)?;
                *timed = (bytes, timed.1.min((env.now() - began).0));
            }
        }
        let [(few, short), (many, long)] = timed;
        let seconds_per_byte = ((long - short) / many.saturating_sub(few).max(1) as f64).max(0.0);
        let latency = Seconds((short - seconds_per_byte * few as f64).max(0.0));
        Ok(LinkCost { latency, seconds_per_byte, usd_per_byte: 0.0 })
    }

    /// The batches of a step whose sequences decode in this many groups; blocks of KV have this many tokens
    /// and pages.
    pub(super) fn cut<'a>(
        &self,
        parts: &[StepInput<'a>],
        groups: u32,
        block: (u32, u32),
    ) -> Vec<MicroBatch<'a>> {
        let (chunk_tokens, groups) = match &self.group {
            Group::Divide(Stages { members, chunk_tokens, .. }, _) if members.len() > 1 => {
                (*chunk_tokens, groups)
            }
            Group::Divide(..) => (u32::MAX, groups),
            Group::Attend(_, _, second) => (u32::MAX, if second.is_some() { groups.min(2) } else { 1 }),
        };
        MicroBatch::cut(parts, Pieces { chunk_tokens, groups }, block)
    }

    /// The number of layers whose KV each member sends at a time: all of a member that is a stage of its own,
    /// and the last two where members wait for each other in every layer.
    pub(super) fn layers_leaving(&self, first: &Forward) -> Vec<usize> {
        match &self.group {
            Group::Divide(Stages { members: counts, .. }, others) => {
                let all = std::iter::once(first).chain(others.iter().map(|member| &*member.model));
                let alone = counts.iter().flat_map(|&count| std::iter::repeat_n(count == 1, count));
                all.zip(alone)
                    .map(|(it, alone)| if alone { it.config().layers as usize } else { 2 })
                    .collect()
            }
            Group::Attend(_, others, _) => vec![2; 1 + others.len()],
        }
    }

    /// Runs the batches of a step on the first device and on the others, and returns a row for each part that
    /// draws. KV is sent during the step.
    ///
    /// # Errors
    /// Those of the devices, of the exchange and of `kv`.
    pub(super) fn run<'a>(
        &'a mut self,
        first: MemberRun<'a>,
        batches: &[MicroBatch<'_>],
        kv: &mut dyn LayerKv,
        timeout: Duration,
    ) -> Result<Vec<LogitsRow>> {
        let exchange = &mut *self.exchange;
        let mut rows: Vec<(usize, LogitsRow)> = Vec::new();
        match &mut self.group {
            Group::Divide(stages, members) => {
                let others = members.iter_mut().map(|QueuedMember { device, model, queue }| MemberRun {
                    device: &**device,
                    queue: &mut **queue,
                    forward: model,
                });
                let mut all = std::iter::once(first).chain(others);
                let of_stage = |&count: &usize| all.by_ref().take(count).collect();
                let mut of_stages: Vec<Vec<MemberRun<'a>>> = stages.members.iter().map(of_stage).collect();
                let mut read = |last: &MemberRun<'_>, pass: &Pass, batch: &MicroBatch<'_>| {
                    let drawn = read_rows(last.device, last.forward, pass)?;
                    rows.extend(batch.drawing().zip(drawn));
                    Ok(())
                };
                let carriers = Carriers { host: exchange, peers: &mut self.peers };
                run_stages(&mut of_stages, carriers, batches, timeout, kv, &mut read)?;
            }
            Group::Attend(_, members, second) => {
                let (mut models, mut attending) = (Vec::new(), Vec::<&mut dyn Queue>::new());
                for QueuedMember { device, model, queue } in members {
                    models.push((&**device, &**model));
                    attending.push(&mut **queue);
                }
                let (device, whole) = (first.device, (first.forward, models));
                let halves = second.iter().map(|second| {
                    let devices = whole.1.iter().map(|(device, _)| *device);
                    (&second.first, devices.zip(&second.attending).collect())
                });
                let places = std::iter::once(whole.clone()).chain(halves);
                let begun = places.zip(batches).map(|((forward, attending), batch)| {
                    ApartBatch::begin((device, forward), attending, &batch.parts)
                });
                let begun = begun.collect::<Result<Vec<_>>>()?;
                let mut read = |which: usize, batch: &ApartBatch<'_>| {
                    let (device, forward, pass) = batch.first();
                    let drawn = read_rows(device, forward, pass)?;
                    rows.extend(batches[which].drawing().zip(drawn));
                    Ok(())
                };
                let mut queues = ApartQueues { first: first.queue, attending };
                run_apart(&mut queues, &begun, exchange, timeout, kv, &mut read)?;
            }
        }
        rows.sort_by_key(|(part, _)| *part);
        Ok(rows.into_iter().map(|(_, row)| row).collect())
    }

    /// Opens new queues.
    ///
    /// # Errors
    /// When a device gives none.
    pub(super) fn renew_queues(&mut self) -> Result<()> {
        match &mut self.group {
            Group::Divide(_, members) => members.iter_mut().try_for_each(QueuedMember::renew),
            Group::Attend(_, members, _) => members.iter_mut().try_for_each(QueuedMember::renew),
        }
    }
}

impl SecondBatch {
    /// Allocates it; none if a step has one sequence at most, or the device with the weights attends too.
    fn open(
        (device, forward): (&dyn Device, &Forward),
        attending: &[QueuedMember<Box<AttentionMember>>],
        config: &ModelConfig,
    ) -> Result<Option<Box<Self>>> {
        let attends_too = attending.iter().any(|at| std::ptr::addr_eq(Arc::as_ptr(&at.device), device));
        if attends_too || forward.shape().of_second_batch().is_none() {
            return Ok(None);
        }
        let of = |QueuedMember { device, model, .. }: &QueuedMember<Box<AttentionMember>>| {
            model.for_second_batch(&**device, config)
        };
        let attending = attending.iter().map(of).collect::<Result<_>>()?;
        Ok(Some(Box::new(SecondBatch { first: forward.for_second_batch(device)?, attending })))
    }
}

impl<M> QueuedMember<M> {
    fn renew(&mut self) -> Result<()> {
        self.queue = self.device.queue()?;
        Ok(())
    }
}

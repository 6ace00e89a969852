//! The members of an instance beside its first device, which divide the model with it, or attend for it.
//!
//! The worker has the first one: it draws, and its device speaks for the instance. KV pages have the same
//! numbers on all members that keep some, each with its own heads. KV does not leave such an instance yet,
//! and none comes to it.

use crate::env::Env;
use crate::model::apart::{AttentionMember, AttentionPass, AttentionRun, exchange_layer, run_apart};
use crate::model::divided::{MemberRun, run_divided};
use crate::model::exchange::ThroughHost;
use crate::model::graph::{Forward, Pass, StepInput};
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{Collective, Device, Error, Queue, Result};
use mixfleet_scheduler::cost::{AttnSplit, LinkCost, Partition};
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
    /// They divide the model with it.
    Divide(Vec<QueuedMember<Box<Forward>>>),
    /// They attend for it.
    Attend(Partition, Vec<QueuedMember<Box<AttentionMember>>>),
}

/// The other members, with queues.
pub(super) struct OtherMembers {
    group: Group,
    exchange: Box<dyn Collective>,
}

/// The inputs of a step on the other members.
pub(super) enum OtherPasses {
    Divide(Vec<Pass>),
    Attend(Vec<AttentionPass>),
}

impl OtherMembers {
    /// Opens their queues: of devices that attend if attention has members of its own.
    ///
    /// # Errors
    /// When a device gives no queue, or has another part of the model than the others.
    pub(super) fn open(devices: Vec<(Arc<dyn Device>, MemberModel)>, partition: &Partition) -> Result<Self> {
        let (mut dividing, mut attending) = (Vec::new(), Vec::new());
        for (device, model) in devices {
            let queue = device.queue()?;
            match model {
                MemberModel::Weights(model) => dividing.push(QueuedMember { device, model, queue }),
                MemberModel::Kv(model) => attending.push(QueuedMember { device, model, queue }),
            }
        }
        let group = match partition.split() {
            None if attending.is_empty() => Group::Divide(dividing),
            Some(_) if dividing.is_empty() => Group::Attend(partition.clone(), attending),
            _ => return Err(Error::invalid("members either divide a model or attend for the first one")),
        };
        Ok(OtherMembers { group, exchange: Box::new(ThroughHost::default()) })
    }

    /// The devices, in the order of members.
    pub(super) fn devices(&self) -> Vec<&Arc<dyn Device>> {
        match &self.group {
            Group::Divide(members) => members.iter().map(|member| &member.device).collect(),
            Group::Attend(_, members) => members.iter().map(|member| &member.device).collect(),
        }
    }

    /// What stands before the devices in the instance's selector.
    pub(super) fn word(&self) -> &'static str {
        match self.group {
            Group::Divide(_) => "tp",
            Group::Attend(..) => "attn",
        }
    }

    /// How KV is divided, where these attend.
    pub(super) fn split(&self) -> Option<AttnSplit> {
        self.partition().and_then(Partition::split)
    }

    /// Who does what, where these attend.
    pub(super) fn partition(&self) -> Option<&Partition> {
        match &self.group {
            Group::Divide(_) => None,
            Group::Attend(partition, _) => Some(partition),
        }
    }

    /// The cost of what crosses in a layer between the first device and these, where they attend: fitted to
    /// the shortest times for one row and for many. It leaves KV as it is.
    ///
    /// # Errors
    /// Those of the devices and of the exchange.
    pub(super) fn exchange_cost(&mut self, first: &MemberRun<'_>, env: &dyn Env) -> Result<LinkCost> {
        let shape = *first.forward.shape();
        let rows = ROWS_TIMED.min(shape.tokens_max).min(shape.blocks.saturating_mul(shape.block_tokens));
        let pages: Vec<u32> = (0..rows.div_ceil(shape.block_tokens)).collect();
        let ids = vec![0; rows as usize];
        let mut timed = [(0, 0.0); 2];
        for (timed, rows) in timed.iter_mut().zip([1, rows]) {
            let pages = &pages[..rows.div_ceil(shape.block_tokens) as usize];
            let part = StepInput { start: 0, tokens: &ids[..rows as usize], pages, draw: None };
            let pass = first.forward.begin(first.device, std::slice::from_ref(&part))?;
            let OtherPasses::Attend(passes) = self.begin(&[part])? else {
                return Err(Error::unsupported("no members attend"));
            };
            let Group::Attend(_, members) = &mut self.group else { continue };
            let (attending, exchange) = (ready(members), &mut *self.exchange);
            *timed = (0, f64::INFINITY);
            for _ in 0..TIMED {
                let began = env.now();
                let bytes = exchange_layer(first, &pass, &attending, &passes, exchange)?;
                *timed = (bytes, timed.1.min((env.now() - began).0));
            }
        }
        let [(few, short), (many, long)] = timed;
        let seconds_per_byte = ((long - short) / many.saturating_sub(few).max(1) as f64).max(0.0);
        let latency = Seconds((short - seconds_per_byte * few as f64).max(0.0));
        Ok(LinkCost { latency, seconds_per_byte, usd_per_byte: 0.0 })
    }

    /// Uploads the inputs of a step to each.
    ///
    /// # Errors
    /// Those of the devices.
    pub(super) fn begin(&self, parts: &[StepInput<'_>]) -> Result<OtherPasses> {
        Ok(match &self.group {
            Group::Divide(members) => {
                let begin = |m: &QueuedMember<Box<Forward>>| m.model.begin(&*m.device, parts);
                OtherPasses::Divide(members.iter().map(begin).collect::<Result<_>>()?)
            }
            Group::Attend(_, members) => {
                let begin = |m: &QueuedMember<Box<AttentionMember>>| m.model.begin(&*m.device, parts);
                OtherPasses::Attend(members.iter().map(begin).collect::<Result<_>>()?)
            }
        })
    }

    /// Runs a step on the first device, where its inputs are `pass`, and on the others. Gives `pass` back.
    ///
    /// # Errors
    /// Those of the devices and of the exchange.
    pub(super) fn run<'a>(
        &'a mut self,
        mut first: MemberRun<'a>,
        pass: Pass,
        others: OtherPasses,
        timeout: Duration,
    ) -> Result<Pass> {
        match (&mut self.group, others) {
            (Group::Divide(members), OtherPasses::Divide(passes)) => {
                let passes: Vec<Pass> = std::iter::once(pass).chain(passes).collect();
                let others = members.iter_mut().map(|QueuedMember { device, model, queue }| MemberRun {
                    device: &**device,
                    queue: &mut **queue,
                    forward: model,
                });
                let mut members: Vec<_> = std::iter::once(first).chain(others).collect();
                run_divided(&mut members, &mut *self.exchange, &passes, timeout)?;
                passes.into_iter().next().ok_or_else(|| Error::invalid("a step has a first member"))
            }
            (Group::Attend(_, members), OtherPasses::Attend(passes)) => {
                let exchange = &mut *self.exchange;
                run_apart(&mut first, &pass, &mut ready(members), &passes, exchange, timeout)?;
                Ok(pass)
            }
            _ => Err(Error::invalid("the inputs of a step are those of other members")),
        }
    }

    /// Opens new queues.
    ///
    /// # Errors
    /// When a device gives none.
    pub(super) fn renew_queues(&mut self) -> Result<()> {
        match &mut self.group {
            Group::Divide(members) => members.iter_mut().try_for_each(QueuedMember::renew),
            Group::Attend(_, members) => members.iter_mut().try_for_each(QueuedMember::renew),
        }
    }
}

/// Members that attend, ready to run.
fn ready(members: &mut [QueuedMember<Box<AttentionMember>>]) -> Vec<AttentionRun<'_>> {
    let runs = members.iter_mut().map(|QueuedMember { device, model, queue }| AttentionRun {
        device: &**device,
        queue: &mut **queue,
        member: model,
    });
    runs.collect()
}

impl<M> QueuedMember<M> {
    fn renew(&mut self) -> Result<()> {
        self.queue = self.device.queue()?;
        Ok(())
    }
}

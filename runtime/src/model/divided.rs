//! Steps of a model that several devices divide: each runs its share of the commands, and they exchange
//! partial sums of the residual stream twice per layer, and logits once.

use super::graph::{Forward, Pass};
use mixfleet_hal::{Cmd, Collective, Device, Error, MatrixPart, MemberSlice, Queue, Result, Slice};
use std::time::Duration;

/// A member of an instance, ready to run its share of steps.
pub struct MemberRun<'a> {
    /// The member's device.
    pub device: &'a dyn Device,
    /// A queue of the device.
    pub queue: &'a mut dyn Queue,
    /// The member's share of the model.
    pub forward: &'a Forward,
}

/// Runs a step on all members, given in their order as are its `passes` on them, and waits until it is done;
/// no part of it may take longer than `timeout`. The first member's device then has the whole logits and has
/// drawn from them.
///
/// # Errors
/// Those of the devices and of the exchange.
pub fn run_divided(
    members: &mut [MemberRun<'_>],
    exchange: &mut dyn Collective,
    passes: &[Pass],
    timeout: Duration,
) -> Result<()> {
    let Some(layers) = members.first().map(|first| first.forward.config().layers as usize) else {
        return Err(Error::invalid("a step needs a member that runs it"));
    };
    for layer in 0..layers {
        run_all(members, passes, timeout, |forward, pass| {
            let mut list = if layer == 0 { forward.embed(pass)? } else { Vec::new() };
            list.extend(forward.attention_block(layer, pass)?);
            Ok(list)
        })?;
        exchange.sum(&slices(members, passes, Forward::step_residual))?;
        run_all(members, passes, timeout, |forward, pass| forward.mlp_block(layer, pass))?;
        exchange.sum(&slices(members, passes, Forward::step_residual))?;
    }
    if passes[0].rows() > 0 {
        run_all(members, passes, timeout, Forward::logits_block)?;
        let to = MemberSlice { device: members[0].device, slice: members[0].forward.logits(&passes[0]) };
        let rows = passes[0].rows();
        let mut end = 0;
        let columns = slices(members, passes, Forward::own_logits).into_iter().map(|at| {
            let start = end;
            end += at.slice.bytes / u64::from(rows);
            MatrixPart { at, rows: None, columns: start..end }
        });
        exchange.join(&columns.collect::<Vec<_>>(), rows, &to)?;
        let (first, pass) = (&mut members[..1], &passes[..1]);
        run_all(first, pass, timeout, |forward, pass| Ok(Vec::from_iter(forward.draw_block(pass)?)))?;
    }
    Ok(())
}

/// Runs a list of commands on each of `members` at the same time, and waits for all.
fn run_all(
    members: &mut [MemberRun<'_>],
    passes: &[Pass],
    timeout: Duration,
    list: impl Fn(&Forward, &Pass) -> Result<Vec<Cmd>>,
) -> Result<()> {
    let mut tickets = Vec::with_capacity(members.len());
    for (member, pass) in members.iter_mut().zip(passes) {
        let list = list(member.forward, pass)?;
        tickets.push(if list.is_empty() { None } else { Some(member.queue.submit(&list)?) });
    }
    for (member, ticket) in members.iter_mut().zip(tickets) {
        if let Some(ticket) = ticket {
            let failed = |error: Error| error.context(member.device.info().id.clone());
            member.queue.wait(ticket, timeout).map_err(failed)?;
        }
    }
    Ok(())
}

fn slices<'a>(
    members: &[MemberRun<'a>],
    passes: &[Pass],
    of: impl Fn(&Forward, &Pass) -> Slice,
) -> Vec<MemberSlice<'a>> {
    let all = members.iter().zip(passes);
    all.map(|(m, pass)| MemberSlice { device: m.device, slice: of(m.forward, pass) }).collect()
}

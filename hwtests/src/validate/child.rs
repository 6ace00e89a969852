//! The child process, which opens the device, runs one group on it and reports line by line.

use super::case::{CaseResult, CaseStatus, selects};
use super::protocol::{Assignment, ChildMessage};
use super::start::Open;
use super::{conformance, discover, memory, performance, soak};
use crate::bench::BenchError;
use mixfleet_hal::Device;
use std::io::{BufRead, Write};
use std::sync::Arc;
use std::time::Instant;

/// Runs levels that involve more than the device, namely links and serving. Given the device, the assignment,
/// which cases are wanted and where results go, it returns false for an unknown group. The transports and the
/// engine belong to the caller.
pub type Beyond<'a> =
    dyn Fn(&Arc<dyn Device>, &Assignment, &dyn Fn(&str) -> bool, &mut dyn FnMut(CaseResult)) -> bool + 'a;

/// Supports no levels beyond the device.
pub fn nothing_beyond(
    _: &Arc<dyn Device>,
    _: &Assignment,
    _: &dyn Fn(&str) -> bool,
    _: &mut dyn FnMut(CaseResult),
) -> bool {
    false
}

/// Reads an [`Assignment`] from `input`, opens its device, and writes [`ChildMessage`]s to `output` until the
/// group is complete or the device is gone.
///
/// # Errors
/// If the assignment cannot be read or a line cannot be written, because the parent is gone.
pub fn serve(
    input: &mut dyn BufRead,
    output: &mut dyn Write,
    open: &Open,
    beyond: &Beyond<'_>,
) -> std::io::Result<()> {
    let mut text = String::new();
    input.read_line(&mut text)?;
    let assignment: Assignment = serde_json::from_str(&text)?;
    let mut failure = None;
    let mut emit = |line: ChildMessage| {
        let written = serde_json::to_string(&line)
            .map_err(std::io::Error::from)
            .and_then(|text| writeln!(output, "{text}"))
            .and_then(|()| output.flush());
        failure = failure.take().or(written.err());
    };
    match open(&assignment.device) {
        Ok(device) => run(&device, &assignment, beyond, &mut emit),
        Err(reason) => emit(ChildMessage::CannotOpen(reason)),
    }
    failure.map_or(Ok(()), Err)
}

/// Runs one group on an open device. Stops early, without [`ChildMessage::End`], after a case that made the
/// device unusable.
pub fn run(
    opened: &Arc<dyn Device>,
    assignment: &Assignment,
    beyond: &Beyond<'_>,
    emit: &mut dyn FnMut(ChildMessage),
) {
    let device = &**opened;
    emit(ChildMessage::Opened(device.info().clone()));
    let settings = &assignment.settings;
    let (level, name) = assignment.group.split_once('.').unwrap_or((&assignment.group, ""));
    let wanted = |id: &str| {
        let asked = assignment.only.is_empty() || assignment.only.iter().any(|only| selects(only, id));
        asked && !assignment.done.iter().any(|done| done == id)
    };
    let went_well = match level {
        "l0" => {
            let results = discover::run(device, settings);
            results.into_iter().filter(|r| wanted(&r.id)).for_each(|r| emit(ChildMessage::Case(r)));
            true
        }
        "l1" => conformance::listed(device, settings, name)
            .iter()
            .filter(|(id, _)| wanted(id))
            .all(|(id, entry)| case(id, emit, |_| conformance::run(device, settings, id, entry))),
        "l2" if !wanted(&assignment.group) => true,
        "l2" => case(&assignment.group, emit, |emit| memory::run(device, settings, name, &mut paced(emit))),
        "l3" => performance::run(device, settings, &wanted, emit),
        "l5" => soaked(device, assignment, emit),
        _ => {
            emit(ChildMessage::Begin(assignment.group.clone()));
            if !beyond(opened, assignment, &wanted, &mut |result| emit(ChildMessage::Case(result))) {
                let reason = "this program has no such group";
                emit(ChildMessage::Case(CaseResult::new(&assignment.group, CaseStatus::NotRun, reason)));
            }
            true
        }
    };
    if went_well {
        emit(ChildMessage::End);
    }
}

/// Announces a case, runs it and reports its result; returns whether the device is still usable.
fn case(
    id: &str,
    emit: &mut dyn FnMut(ChildMessage),
    run: impl FnOnce(&mut dyn FnMut(ChildMessage)) -> CaseResult,
) -> bool {
    emit(ChildMessage::Begin(id.to_owned()));
    let result = run(emit);
    let good = !result.status.ends_the_device();
    emit(ChildMessage::Case(result));
    good
}

/// Forwards signs of life at most once per second.
fn paced<'a>(emit: &'a mut dyn FnMut(ChildMessage)) -> impl FnMut() + 'a {
    let mut spoken = Instant::now();
    move || {
        if spoken.elapsed().as_secs_f64() > 1.0 {
            spoken = Instant::now();
            emit(ChildMessage::Alive);
        }
    }
}

fn soaked(device: &dyn Device, assignment: &Assignment, emit: &mut dyn FnMut(ChildMessage)) -> bool {
    emit(ChildMessage::Begin("l5.soak".to_owned()));
    let start = Instant::now();
    let mut clock = || start.elapsed().as_secs_f64();
    let carried = assignment.soak.clone();
    let ended: Result<(), BenchError> = soak::run(device, &assignment.settings, carried, &mut clock, emit);
    let result = match ended {
        Ok(()) => return true,
        Err(trouble) => soak::broken(trouble),
    };
    let good = !result.status.ends_the_device();
    emit(ChildMessage::Case(result));
    good
}

//! A fleet and a load of the command line, ready to be simulated.

use super::args::SimulateArgs;
use super::subject::SimulationSubject;
use super::watch::RunWatch;
use crate::own_devices;
use crate::prices::PriceList;
use crate::scheduling::SchedulingArgs;
use anyhow::{Context, Result};
use mixfleet_hal::economics::Selection;
use mixfleet_scheduler::fleet::Admission;
use mixfleet_scheduler::models::find;
use mixfleet_sim::fleet_file::FleetFile;
use mixfleet_sim::simulate::{Results, Setup, run as simulate};
use mixfleet_sim::trace::{ClosedLoop, Progress, RecordedRun, Request, Requests, Trace, TraceError};
use std::collections::HashSet;
use std::path::Path;

/// Why requests are rejected that need more tokens than the model's context.
pub(super) const BEYOND_CONTEXT: &str = "beyond_context";

/// A fleet with its scheduling.
pub(super) struct OpenedFleet<'a> {
    pub(super) args: &'a SimulateArgs,
    pub(super) scheduling: &'a SchedulingArgs,
    pub(super) file: FleetFile,
    pub(super) setup: Setup,
    pub(super) simulated: SimulationSubject,
}

/// Where requests come from.
pub(super) enum RequestSource {
    Trace(Box<Trace>),
    Recorded(RecordedRun),
    Loop(ClosedLoop),
}

impl RequestSource {
    pub(super) fn progress(&self) -> Option<Progress> {
        match self {
            RequestSource::Trace(trace) => Some(trace.progress()),
            RequestSource::Recorded(_) | RequestSource::Loop(_) => None,
        }
    }
}

impl<'a> OpenedFleet<'a> {
    /// Reads the fleet at `path`, with rents from `prices` if there is a list.
    pub(super) fn open(
        args: &'a SimulateArgs,
        path: &Path,
        scheduling: &'a SchedulingArgs,
        prices: Option<&PriceList>,
    ) -> Result<Self> {
        let in_file = || format!("the fleet file {}", path.display());
        let mut file = own_devices::read_fleet(path, args.engine).with_context(in_file)?;
        file.check_serves().with_context(in_file)?;
        if let Some(list) = prices {
            let price = |id: &str| Selection::default().price_or_reference(id, &list.offers);
            file.reprice(&price).with_context(in_file)?;
        }
        let setup = setup(args, scheduling, &file)?;
        let simulated = SimulationSubject::new(args, path, &file, &setup)?;
        Ok(OpenedFleet { args, scheduling, file, setup, simulated })
    }

    /// The setup with one instance more of a pool.
    pub(super) fn with_one_more(&self, pool: usize) -> Result<Setup> {
        let mut file = self.file.clone();
        file.pools[pool].count += 1;
        setup(self.args, self.scheduling, &file)
    }

    pub(super) fn load(&self) -> Result<RequestSource> {
        let args = self.args;
        let seed = self.scheduling.seed;
        Ok(match (&args.trace, &args.against, args.closed_loop.load(seed)) {
            (_, Some(path), _) => RequestSource::Recorded(RecordedRun::read(path)?),
            (None, None, Some(load)) => RequestSource::Loop(load),
            _ => RequestSource::Trace(Box::new(args.open_trace()?)),
        })
    }

    /// Simulates a load on `setup`. Requests beyond the model's context are rejected on arrival, as engines
    /// do.
    pub(super) fn play(
        &self,
        load: &mut RequestSource,
        setup: &Setup,
        watch: &mut RunWatch,
    ) -> Result<Results> {
        let context = self.context();
        let mut refused = HashSet::new();
        let fitting = |item: Result<Request, TraceError>| {
            let mut request = match item {
                Ok(request) => request,
                Err(error) => return Some(Err(error)),
            };
            let tokens = u64::from(request.prompt_tokens) + u64::from(request.output_tokens);
            if context.is_some_and(|context| tokens > u64::from(context)) {
                refused.insert(request.id);
                return None;
            }
            // no client waits for an answer that never comes
            if let Some(turn) = &mut request.session {
                turn.after = turn.after.filter(|before| !refused.contains(before));
            }
            Some(Ok(request))
        };
        let mut results = match load {
            RequestSource::Recorded(run) => simulate(setup, run.trace(), watch)?,
            RequestSource::Trace(trace) => {
                let blocks = trace.block_tokens().unwrap_or(self.file.kv.block_tokens);
                let requests = self.args.replay.play(trace, self.scheduling.seed).filter_map(fitting);
                simulate(setup, requests.rechain(blocks, self.file.kv.block_tokens), watch)?
            }
            RequestSource::Loop(load) => simulate(setup, load.requests().filter_map(fitting), watch)?,
        };
        results.reject(BEYOND_CONTEXT, refused.len() as u64);
        Ok(results)
    }

    /// The context of the model, if it is a known one.
    pub(super) fn context(&self) -> Option<u32> {
        find(&self.file.model.name).ok().map(|model| model.context)
    }
}

fn setup(args: &SimulateArgs, scheduling: &SchedulingArgs, file: &FleetFile) -> Result<Setup> {
    let mut choices = scheduling.choices()?;
    if args.against.is_some() {
        // Recorded requests were served.
        choices.admission = Admission::None;
    }
    let mut setup = Setup::new(file, choices);
    setup.fleet.drop_at_decode = scheduling.drop_late;
    setup.fleet.wait_usd_per_s = scheduling.wait_usd_per_s;
    setup.fleet.kv_weight = scheduling.kv_weight;
    // the simulation uses predicted times, unless a slowdown says otherwise
    setup.fleet.trial_share = scheduling.trial_share.unwrap_or(0.0);
    setup.routers.count = args.routers.unwrap_or(setup.routers.count);
    Ok(setup)
}

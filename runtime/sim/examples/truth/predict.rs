//! Predicts runs as a user would: with a fleet file that names the part, and the simulator.

use crate::runs::{Run, SplitRun, Workers, mean};
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::cost::CostModel;
use mixfleet_scheduler::fleet::Admission;
use mixfleet_sim::fleet_file::FleetFile;
use mixfleet_sim::simulate::{Choices, Results, Setup, run as simulate};
use mixfleet_sim::trace::ClosedLoop;
use std::path::Path;

/// Requests of each client, as InferenceMAX sends.
const REQUESTS_PER_CLIENT: u64 = 10;

/// What a run is predicted to give.
pub(crate) struct Predicted {
    pub(crate) ttft_s: f64,
    pub(crate) tpot_s: f64,
    /// The error that the fleet file's resolution states.
    pub(crate) likely_error: Option<f64>,
}

/// The fleet of `pools`, the keys of each beside its part; `None` if the model does not fit into memory.
fn fleet(run: &Run, pools: &[String]) -> Result<Option<FleetFile>, String> {
    let Run { model, part, engine, stored, kv, .. } = run;
    let mut text = format!(
        "version = 1\n[model]\nname = '{}'\ndtype = '{stored}'\nkv_dtype = '{}'\n[engine]\nname = '{}'\n",
        model.name,
        kv.name(),
        engine.name
    );
    for pool in pools {
        text += &format!("[[pool]]\ndevice = '{part}'\n{pool}\n");
    }
    let none = |_: &Path| Err("there is no profile".to_owned());
    match FleetFile::parse(&text, Path::new(""), &none).map_err(|error| format!("{}: {error}", run.group())) {
        Err(error) if error.contains("does not fit") => {
            eprintln!("{error}");
            Ok(None)
        }
        other => other.map(Some),
    }
}

/// Simulates a run; `cost` replaces what the catalog gives. `None` for a model that does not fit into memory.
pub(crate) fn predict(run: &Run, cost: CostModel) -> Result<Option<Predicted>, String> {
    let pool = format!("name = 'all'\ndevices_per_instance = {}", run.devices);
    let Some(mut fleet) = fleet(run, &[pool])? else { return Ok(None) };
    fleet.pools[0].cost = cost;
    simulated(run, &fleet).map(Some)
}

/// Simulates a run whose prompts are computed apart, with a pool for each kind of worker.
pub(crate) fn predict_split(split: &SplitRun) -> Result<Option<Predicted>, String> {
    let pool = |role: &str, workers: Workers| {
        let Workers { count, devices, divided } = workers;
        format!(
            "name = '{role}'\nrole = '{role}'\ncount = {count}\ndevices_per_instance = {devices}\n\
             expert_parallel = {divided}"
        )
    };
    let pools = [pool("prefill", split.prefill), pool("decode", split.decode)];
    let Some(fleet) = fleet(&split.run, &pools)? else { return Ok(None) };
    simulated(&split.run, &fleet).map(Some)
}

/// Simulates a run's clients. The last pool decodes.
fn simulated(run: &Run, fleet: &FleetFile) -> Result<Predicted, String> {
    let load = ClosedLoop {
        clients: run.clients,
        requests: u64::from(run.clients) * REQUESTS_PER_CLIENT,
        prompt_tokens: run.prompt,
        output_tokens: run.answer,
        think: Seconds::ZERO,
        ramp: Seconds::ZERO,
        seed: 1,
    };
    let setup = Setup::new(fleet, Choices { admission: Admission::None, ..Choices::default() });
    let results = simulate(&setup, load.requests(), &mut ()).map_err(|error| error.to_string())?;
    let Results { completed, requests, .. } = results;
    if completed < requests {
        return Err(format!("{}: {completed} of {requests} requests were answered", run.group()));
    }
    Ok(Predicted {
        ttft_s: results.ttft_s.mean,
        tpot_s: results.tpot_s.mean,
        likely_error: fleet.pools.last().and_then(|pool| pool.likely_error),
    })
}

/// Output tokens per second: clients x tokens / (TTFT + the time of the other tokens).
pub(crate) fn tokens_per_s(run: &Run, ttft_s: f64, tpot_s: f64) -> f64 {
    let tokens = mean(run.answer);
    f64::from(run.clients) * tokens / (ttft_s + (tokens - 1.0) * tpot_s)
}

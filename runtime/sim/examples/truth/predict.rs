//! Predicts runs as a user would: with a fleet file that names the part, and the simulator.

use crate::fit;
use crate::published::Published;
use crate::rows::Figure;
use crate::runs::{Run, SplitRun, Workers, mean};
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::cost::{CostModel, EngineCost};
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

/// What a published load is predicted to give.
pub(crate) struct PredictedFigures {
    /// In the order of the measured ones.
    pub(crate) figures: Vec<f64>,
    pub(crate) likely_error: Option<f64>,
}

/// Simulates one of the instances of a published load.
///
/// # Errors
/// Why it cannot be expressed, or does not fit.
pub(crate) fn predict_published(
    figure: &Published,
    fitted: Option<EngineCost>,
) -> Result<PredictedFigures, String> {
    let Published { model, part, engine, stored, kv, tensor, stages, .. } = figure;
    let mut text = format!(
        "version = 1\n[model]\nname = '{}'\ndtype = '{stored}'\nkv_dtype = '{}'\n[engine]\nname = '{}'\n\
         [[pool]]\nname = 'all'\ndevice = '{}'\ndevices_per_instance = {tensor}\n",
        model.name,
        kv.name(),
        engine.name,
        part.id
    );
    if *stages > 1 {
        text += &format!("pipeline_stages = {stages}\n");
    }
    if figure.experts_by_member && *tensor > 1 {
        text += "experts_by_member = true\n";
    }
    if let Some(sequences) = figure.sequences_max {
        text += &format!("max_sequences = {sequences}\n");
    }
    let none = |_: &Path| Err("there is no profile".to_owned());
    let mut fleet = FleetFile::parse(&text, Path::new(""), &none).map_err(|error| error.to_string())?;
    if let Some(engine) = fitted.filter(|_| *stages == 1) {
        fleet.pools[0].cost = fit::cost_of(figure, engine);
    }
    let requests = figure.requests();
    let (count, tokens) = (requests.len() as f64, figure.tokens());
    let setup = Setup::new(&fleet, Choices { admission: Admission::None, ..Choices::default() });
    let results =
        simulate(&setup, requests.into_iter().map(Ok), &mut ()).map_err(|error| error.to_string())?;
    if (results.completed as f64) < count {
        return Err(format!("{}: {} of {count} requests were answered", figure.name, results.completed));
    }
    let rate = results.output_tokens_per_s * f64::from(figure.instances);
    let of = |(what, _): &(Figure, f64)| match what {
        Figure::Tpot => results.tpot_s.mean,
        Figure::DecodeAlone => 1.0 / results.tpot_s.mean,
        Figure::TokensPerS => rate,
        Figure::AllTokensPerS => rate * (tokens[0] + tokens[1]) / tokens[1],
        Figure::Duration => figure.requests as f64 * tokens[1] / rate,
        Figure::PromptAlone => tokens[0] / results.ttft_s.mean,
    };
    let figures = figure.measured.iter().map(of).collect();
    Ok(PredictedFigures { figures, likely_error: fleet.pools[0].likely_error })
}

/// Output tokens per second: clients x tokens / (TTFT + the time of the other tokens).
pub(crate) fn tokens_per_s(run: &Run, ttft_s: f64, tpot_s: f64) -> f64 {
    let tokens = mean(run.answer);
    f64::from(run.clients) * tokens / (ttft_s + (tokens - 1.0) * tpot_s)
}

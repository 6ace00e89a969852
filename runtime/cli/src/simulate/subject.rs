//! What a run simulated, so that its results can be read without its command line.

use super::args::SimulateArgs;
use crate::screen::{devices_of, word};
use anyhow::{Context, Result};
use mixfleet_hal::files::{self, TEXT_BYTES_MAX};
use mixfleet_hwtests::validate::sha256;
use mixfleet_scheduler::fleet::Role;
use mixfleet_sim::fleet_file::{AttentionDevices, FleetFile, InstancePool};
use mixfleet_sim::simulate::Setup;
use serde::Serialize;
use std::path::Path;

/// Number of hexadecimal digits of a fleet file's digest that are shown.
const DIGITS: usize = 12;

/// The model, the load, the fleet and how requests were placed.
#[derive(Debug, Serialize)]
pub(super) struct SimulationSubject {
    pub(super) model: String,
    /// How its weights are stored, where its shape is known.
    pub(super) dtype: Option<&'static str>,
    /// The trace, the recorded run or the closed loop.
    pub(super) load: String,
    /// The path of the fleet file.
    pub(super) fleet: String,
    /// The first digits of the SHA-256 of its bytes.
    pub(super) fleet_sha256: String,
    pub(super) policy: String,
    pub(super) admission: String,
    pub(super) objectives: String,
    /// The list of rents; `None` if they are the fleet file's and built-in ones.
    pub(super) prices: Option<String>,
    /// Rent of the fleet; `None` if the price of a pool is not known.
    pub(super) usd_per_hour: Option<f64>,
    pub(super) pools: Vec<SimulatedPool>,
}

/// A pool and its rent.
#[derive(Debug, Serialize)]
pub(super) struct SimulatedPool {
    pub(super) name: String,
    /// The catalog's id of the part, or the selector of a device of this machine; `None` where a file
    /// describes the device.
    pub(super) device: Option<String>,
    pub(super) role: Role,
    pub(super) instances: u32,
    pub(super) devices_per_instance: u32,
    /// Further devices that keep its KV and attend.
    pub(super) attention: Option<AttentionDevices>,
    pub(super) usd_per_hour_of_instance: Option<f64>,
    /// Where the price is from, and its date.
    pub(super) price_from: String,
}

impl SimulatedPool {
    fn new(pool: &InstancePool) -> Self {
        SimulatedPool {
            name: pool.name.clone(),
            device: pool.device.as_ref().or(pool.own_device.as_ref()).cloned(),
            role: pool.role,
            instances: pool.count,
            devices_per_instance: pool.devices_per_instance * pool.pipeline_stages,
            attention: pool.attention.clone(),
            usd_per_hour_of_instance: pool.usd_per_hour,
            price_from: pool.price_basis.clone(),
        }
    }

    /// The instances, their devices and their rent in words.
    pub(super) fn text(&self) -> String {
        let other = if self.role.keeps() { "host memory" } else { "device of a file" };
        let several = |count: u32, device: &Option<String>| {
            let device = device.as_deref().unwrap_or(other);
            if count == 1 { device.to_owned() } else { format!("{count} {device}") }
        };
        let device = self.device.as_deref().unwrap_or(other);
        let mut devices = devices_of(self.instances, self.devices_per_instance, device);
        if let Some(AttentionDevices { device, count, split }) = &self.attention {
            devices += &format!(" with {} for attention by {split}", several(*count, device));
        }
        let rent = match self.usd_per_hour_of_instance {
            Some(usd) => format!("${usd:.3} per hour each, {}", self.price_from),
            None => self.price_from.clone(),
        };
        format!("{devices}, {}; {rent}", word(&self.role))
    }
}

impl SimulationSubject {
    /// # Errors
    /// When the fleet file can no longer be read.
    pub(super) fn new(args: &SimulateArgs, path: &Path, fleet: &FleetFile, setup: &Setup) -> Result<Self> {
        let bytes =
            files::read(path, TEXT_BYTES_MAX).with_context(|| format!("cannot read {}", path.display()))?;
        let mut digest = sha256(&bytes);
        digest.truncate(DIGITS);
        let load =
            match (args.trace.as_ref().or(args.against.as_ref()), args.closed_loop.load(setup.fleet.seed)) {
                (Some(trace), _) => format!("{}{}", trace.display(), args.replay.text()),
                (None, load) => load.map_or_else(String::new, |load| load.to_string()),
            };
        let slo = setup.slo;
        Ok(SimulationSubject {
            model: fleet.model.name.clone(),
            dtype: fleet.model.shape.as_ref().map(|shape| shape.stored().name()),
            load,
            fleet: path.display().to_string(),
            fleet_sha256: digest,
            policy: word(&setup.fleet.policy),
            admission: word(&setup.fleet.admission),
            objectives: format!("TTFT {} s, TBT {} s ({})", slo.ttft_s, slo.tbt_s, word(&slo.tbt_metric)),
            prices: args.prices.as_ref().map(|list| list.display().to_string()),
            usd_per_hour: fleet.usd_per_hour(),
            pools: fleet.pools.iter().map(SimulatedPool::new).collect(),
        })
    }

    /// Names and values, without those of pools.
    pub(super) fn facts(&self) -> Vec<(&'static str, String)> {
        let fleet = format!("{} (sha256 {})", self.fleet, self.fleet_sha256);
        let dtype = self.dtype.map_or_else(String::new, |dtype| format!(" in {dtype}"));
        let mut facts = vec![
            ("model", format!("{}{dtype}", self.model)),
            ("load", self.load.clone()),
            ("fleet", fleet),
            ("scheduling", format!("{}, admission {}", self.policy, self.admission)),
            ("objectives", self.objectives.clone()),
        ];
        facts.extend(self.prices.iter().map(|list| ("prices", list.clone())));
        facts
    }
}

//! A planned fleet as FLEET.toml.

use super::PlanArgs;
use super::offers::Offers;
use crate::simulate::word;
use mixfleet_hal::StoredAs;
use mixfleet_scheduler::fleet::Policy;
use mixfleet_scheduler::models::KnownModel;
use mixfleet_scheduler::plan::market::{Market, PlannedPool};
use mixfleet_scheduler::plan::program::Duty;
use mixfleet_sim::fleet_file::{InstancePool, VERSION};
use std::fmt::Write as _;

/// What is common to all fleets of a plan.
pub(super) struct FleetText<'a> {
    pub(super) args: &'a PlanArgs,
    pub(super) model: &'static KnownModel,
    pub(super) stored: StoredAs,
    pub(super) market: &'a Market,
    pub(super) offers: &'a Offers,
}

/// The role that a fleet file gives to instances of a duty.
pub(super) fn role(duty: Duty) -> &'static str {
    match duty {
        Duty::Prefill => "prefill",
        Duty::Decode => "decode",
        _ => "auto",
    }
}

impl FleetText<'_> {
    /// The file of a fleet whose requests `policy` places; pools without instances are left out.
    pub(super) fn of(&self, pools: &[PlannedPool], policy: Policy) -> String {
        let FleetText { args, model, stored, market, offers } = self;
        let mut text = format!(
            "# planned by mixfleet plan\nversion = {VERSION}\n\n[model]\nname = \"{}\"\ndtype = \"{}\"\n\n[slo]\n\
             ttft_s = {:?}\ntbt_s = {:?}\n\n[engine]\nname = \"{}\"\n",
            model.name,
            stored.name(),
            args.ttft,
            args.tbt,
            args.engine.name
        );
        if policy != Policy::default() {
            let _ = write!(text, "\n[scheduling]\npolicy = \"{}\"\n", word(&policy));
        }
        for pool in pools.iter().filter(|pool| pool.count > 0) {
            let (id, role) = (market.parts()[pool.part].part.id, role(pool.duty));
            let name = format!("{role}-{}-x{}", id.to_ascii_lowercase(), pool.devices);
            let (rent, devices) = (market.rent(pool.part, pool.devices).0, pool.devices);
            let (count, nic) = (pool.count, InstancePool::NIC_GB_PER_S);
            let _ = write!(
                text,
                "\n[[pool]]\nname = \"{name}\"\nrole = \"{role}\"\ncount = {count}\ndevice = \"{id}\"\n\
                 devices_per_instance = {devices}\nusd_per_hour = {rent:?}    # {}\nnic_gb_per_s = {nic:?}\n",
                offers.prices[pool.part].basis.replace(char::is_control, " ")
            );
        }
        text
    }
}

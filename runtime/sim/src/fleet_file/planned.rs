//! A planned fleet as FLEET.toml.

use super::{VERSION, attending};
use mixfleet_hal::StoredAs;
use mixfleet_hal::economics::Price;
use mixfleet_hal::units::GB;
use mixfleet_scheduler::cost::ExpertsBy;
use mixfleet_scheduler::fleet::Policy;
use mixfleet_scheduler::plan::layouts::LayoutExperts;
use mixfleet_scheduler::plan::market::{Market, PlannedPool};
use mixfleet_scheduler::plan::program::Duty;
use mixfleet_scheduler::plan::tiers::PlannedTiers;
use std::fmt::Write as _;

/// Bandwidth between regions that no link joins: the least that a file may give.
const NO_LINK_GB_PER_S: f64 = 1e-6;

/// What the files of all fleets of a market are written from.
#[derive(Clone, Copy, Debug)]
pub struct PlannedText<'a> {
    /// The market, with the model, the engine and the objectives.
    pub market: &'a Market,
    /// The price of each of its parts, whose origin stands beside a pool's rent.
    pub prices: &'a [Price],
}

/// The role that a fleet file gives to instances of a duty.
pub fn role_of(duty: Duty) -> &'static str {
    match duty {
        Duty::Prefill => "prefill",
        Duty::Decode => "decode",
        _ => "auto",
    }
}

impl PlannedText<'_> {
    /// The file of a fleet of some pools, which stores weights so, has such tiers, and whose requests are
    /// placed by `policy`; pools without instances are left out.
    pub fn of(
        &self,
        pools: &[PlannedPool],
        stored: StoredAs,
        tiers: &PlannedTiers,
        policy: Policy,
    ) -> String {
        let PlannedText { market, prices } = self;
        let ask = market.ask();
        let mut text = format!(
            "# planned by mixfleet plan\nversion = {VERSION}\n\n[model]\nname = \"{}\"\ndtype = \"{}\"\n\n[slo]\n\
             ttft_s = {:?}\ntbt_s = {:?}\n\n[engine]\nname = \"{}\"\n",
            ask.model.name,
            stored.name(),
            ask.level.ttft.0,
            ask.level.tbt.0,
            ask.engine.name
        );
        if policy != Policy::default() {
            let _ = write!(text, "\n[scheduling]\npolicy = {}\n", serde_json::json!(policy));
        }
        for pool in pools.iter().filter(|pool| pool.count > 0) {
            let (offer, role) = (&market.parts()[pool.part], role_of(pool.duty));
            let layout = pool.layout;
            let mut name = self.name(pool);
            let (mut id, mut basis) = (offer.part.id.to_owned(), prices[pool.part].basis.clone());
            if let Some(others) = pool.attends {
                let attends = &market.parts()[others.part];
                id = format!("{}{id},{}", attending::WORD, attends.part.id);
                let _ = write!(name, "-x{}-{}", others.devices, attends.word());
                let _ = write!(basis, "; {}", prices[others.part].basis);
            }
            let below = if tiers.are_of(pool) { *tiers } else { PlannedTiers::default() };
            let rent = (market.rent_of(pool) + below.usd_per_hour).0;
            let devices = layout.per_stage();
            let (count, nic) = (pool.count, ask.nic.0 / GB);
            let _ = write!(
                text,
                "\n[[pool]]\nname = \"{name}\"\nrole = \"{role}\"\ncount = {count}\ndevice = \"{id}\"\n\
                 devices_per_instance = {devices}\nusd_per_hour = {rent:?}    # {}{}\nnic_gb_per_s = {nic:?}\n",
                basis.replace(char::is_control, " "),
                if below.dram.0 > 0.0 { ", and memory for KV" } else { "" }
            );
            if let Some(others) = pool.attends {
                let _ = writeln!(text, "attn_devices = {}", others.devices);
            }
            if let Some(lender) = pool.spare.and_then(|spare| spare.lender(pools)) {
                let _ = writeln!(text, "attn_pool = \"{}\"", self.name(&pools[lender]));
            }
            memory(&mut text, &below);
            if layout.stages > 1 {
                let _ = writeln!(text, "pipeline_stages = {}", layout.stages);
            }
            match layout.experts {
                LayoutExperts::Divided(ExpertsBy::Columns) => {}
                LayoutExperts::Divided(ExpertsBy::Member) => {
                    text.push_str("experts_by_member = true\n");
                    if ask.expert_skew > 0.0 {
                        let _ = writeln!(text, "expert_skew = {:?}", ask.expert_skew);
                    }
                }
                LayoutExperts::WithSequences => text.push_str("expert_parallel = true\n"),
            }
        }
        if tiers.nodes > 0 {
            let (count, rent, nic) = (tiers.nodes, tiers.usd_per_hour.0, ask.nic.0 / GB);
            let _ = write!(
                text,
                "\n[[pool]]\nname = \"kv\"\nrole = \"kv\"\ncount = {count}\nusd_per_hour = {rent:?}\nnic_gb_per_s = {nic:?}\n"
            );
            memory(&mut text, tiers);
        }
        self.links(&mut text, pools);
        text
    }

    /// The name of a pool without attention offload.
    fn name(&self, pool: &PlannedPool) -> String {
        let (layout, offer) = (pool.layout, &self.market.parts()[pool.part]);
        let as_one = layout.words().replace(' ', "-").replace(':', "");
        format!("{}-x{}{as_one}-{}", role_of(pool.duty), layout.devices, offer.word())
    }

    /// The links between the regions of some pools; where there is none, so little bandwidth that nothing
    /// goes over it.
    fn links(&self, text: &mut String, pools: &[PlannedPool]) {
        let market = self.market;
        let used = |region: &&str| {
            pools.iter().any(|pool| pool.count > 0 && market.parts()[pool.part].region == **region)
        };
        let regions: Vec<&str> = market.regions().into_iter().filter(used).collect();
        let pairs = regions.iter().flat_map(|from| regions.iter().map(move |to| (*from, *to)));
        for (from, to) in pairs.filter(|(from, to)| from != to) {
            let link = market.ask().links.iter().find(|link| link.from == from && link.to == to);
            let (bandwidth, latency, usd) = link.map_or((NO_LINK_GB_PER_S, 0.0, 0.0), |link| {
                (link.bandwidth.0 / GB, link.latency.0, link.usd_per_gb)
            });
            let _ = write!(
                text,
                "\n[[link]]\nfrom = \"*-in-{from}\"\nto = \"*-in-{to}\"\ngb_per_s = {bandwidth:?}\nlatency_s = {latency:?}\n\
                 usd_per_gb = {usd:?}\n"
            );
        }
    }
}

/// Host memory and disks for KV.
fn memory(text: &mut String, tiers: &PlannedTiers) {
    for (key, bytes) in [("dram_bytes", tiers.dram), ("ssd_bytes", tiers.ssd)] {
        if bytes.0 > 0.0 {
            let _ = writeln!(text, "{key} = {:?}", bytes.0);
        }
    }
}

//! The cheapest fleet whose attention has devices of its own, by rates alone.
//!
//! Prompts, the products with weights of decode steps, and attention over the KV are each rented on the part
//! where they cost least ([`candidates`](super::candidates) says what an instance carries of each). Nothing
//! simulates such a fleet, so that it stands beside a plan and is never its first.

use super::candidates::{AttentionLink, InstanceKind, PartKernels};
use super::forms::FleetForm;
use super::layouts::InstanceLayout;
use super::linear::Solver;
use super::load::SizeClass;
use super::margin::slower;
use super::market::{BUSY_MAX, FormedFleet, Market, PlannedPool, SEARCH};
use super::offered::kv_s;
use super::program::{Ceiling, DemandClass, Duty, Placing, Program, Rentable};
use mixfleet_hal::cast::{to_u32, to_u64};
use mixfleet_hal::units::{Ordered, UsdPerHour};

/// Parts that are tried for attention, those with the most bandwidth per dollar.
const PARTS_MAX: usize = 4;

/// What a request needs instances for.
const DUTIES_APART: [Duty; 3] = [Duty::Prefill, Duty::Linear, Duty::Attention];

/// Instances that may be rented for one duty, and what they carry.
struct OfDuty {
    part: usize,
    layout: InstanceLayout,
    duty: Duty,
    /// Instances that one request per second keeps busy, by class.
    loads: Vec<Option<f64>>,
}

impl Market {
    /// The cheapest fleet of instances for prompts, for products with weights, and for attention, where
    /// `link` is between the last two.
    ///
    /// # Errors
    /// Why there is none.
    pub fn attention_apart(&self, solver: &dyn Solver, link: &AttentionLink) -> Result<FormedFleet, String> {
        if self.regions().len() > 1 {
            return Err("attention is not planned apart over several regions".into());
        }
        let of_each = (0..self.ask.stored.len()).map(|stored| self.apart_in(solver, link, stored));
        let cheaper =
            |best: Result<FormedFleet, String>, next: Result<FormedFleet, String>| match (&best, &next) {
                (Ok(known), Ok(other)) if other.usd_per_hour < known.usd_per_hour => next,
                (Err(_), Ok(_)) => next,
                _ => best,
            };
        of_each.reduce(cheaper).unwrap_or_else(|| Err("no dtype is given".into()))
    }

    fn apart_in(
        &self,
        solver: &dyn Solver,
        link: &AttentionLink,
        stored: usize,
    ) -> Result<FormedFleet, String> {
        let mut all = self.cheapest_for_each_class(self.prompts(stored));
        all.extend(self.cheapest_for_each_class(self.products(link, stored)));
        all.extend(self.cheapest_for_each_class(self.attention(link, stored)?));
        let does =
            |duty: Duty, class: usize| all.iter().any(|of| of.duty == duty && of.loads[class].is_some());
        let served = |class: &usize| DUTIES_APART.into_iter().all(|duty| does(duty, *class));
        let served: Vec<usize> = (0..self.ask.classes.len()).filter(served).collect();
        let rate: f64 = served.iter().map(|&class| self.ask.classes[class].rate).sum();
        if rate < self.rate() - self.left_out_max() {
            return Err("too few requests can be served so within the objectives".into());
        }
        let program = self.program_of(&all, &served);
        let fleet = program.solve(solver, SEARCH).map_err(|error| error.to_string())?;
        let used = all.iter().zip(&fleet.counts).filter(|(_, count)| **count > 0);
        let pools: Vec<PlannedPool> = used
            .map(|(of, &count)| PlannedPool { part: of.part, layout: of.layout, duty: of.duty, count })
            .collect();
        let stored = self.ask.stored[stored];
        Ok(FormedFleet {
            form: FleetForm::Free,
            stored,
            usd_per_hour: self.usd_per_hour(&pools, stored),
            pools,
        })
    }

    fn prompts(&self, stored: usize) -> Vec<OfDuty> {
        let load = |kind: usize, class: usize| {
            let of = &self.kinds[kind];
            of.load_in_time(1, class).map(|load| load.max(of.links[class]))
        };
        self.of_kinds(stored, Duty::Prefill, load)
    }

    fn products(&self, link: &AttentionLink, stored: usize) -> Vec<OfDuty> {
        let load = |kind: usize, class: usize| {
            let size = &self.ask.classes[class].size;
            let carried = self.kinds[kind].instance.carries(Duty::Linear, size, &self.ask.level, Some(link));
            carried.ok().map(|carried| carried.instances)
        };
        self.of_kinds(stored, Duty::Linear, load)
    }

    fn of_kinds(&self, stored: usize, duty: Duty, load: impl Fn(usize, usize) -> Option<f64>) -> Vec<OfDuty> {
        let classes = 0..self.ask.classes.len();
        let of = |kind: usize| {
            let loads = classes.clone().map(|class| load(kind, class)).collect();
            let (part, layout) = (self.kinds[kind].part, self.kinds[kind].instance.layout);
            OfDuty { part, layout, duty, loads }
        };
        (0..self.kinds.len()).filter(|&kind| self.kinds[kind].stored == stored).map(of).collect()
    }

    /// Single devices, which need no room for weights.
    fn attention(&self, link: &AttentionLink, stored: usize) -> Result<Vec<OfDuty>, String> {
        let offers = &self.ask.parts;
        let rent_of_bandwidth =
            |part: &usize| offers[*part].usd_per_hour.0 / offers[*part].part.profile().bandwidth.0;
        let mut parts: Vec<usize> =
            (0..offers.len()).filter(|&part| offers[part].most.is_none_or(|most| most > 0)).collect();
        parts.sort_by_key(|part| Ordered(rent_of_bandwidth(part)));
        let (mut found, mut why) = (Vec::new(), "there is no part".to_owned());
        for part in parts.into_iter().take(PARTS_MAX) {
            let ask = &self.ask;
            let of = (offers[part].part, &PartKernels::of(offers[part].part));
            let instance =
                InstanceKind::of(of, InstanceLayout::of(1), ask.model, ask.stored[stored], ask.engine)?;
            let error = ask.engine.likely_error(&instance.profile, &instance.shape);
            let times = slower(error, ask.confidence);
            let load = |class: usize| {
                let size = &ask.classes[class].size;
                let carried = instance.carries(Duty::Attention, size, &ask.level, Some(link))?;
                Ok::<f64, String>((carried.instances * times).max(kv_s(
                    &instance,
                    &ask.classes[class],
                    ask.nic,
                )))
            };
            let loads: Vec<_> = (0..ask.classes.len()).map(load).collect();
            if let Some(Err(cause)) = loads.iter().find(|load| load.is_err()) {
                why.clone_from(cause);
            }
            let loads = loads.into_iter().map(Result::ok).collect();
            found.push(OfDuty { part, layout: InstanceLayout::of(1), duty: Duty::Attention, loads });
        }
        match found.iter().any(|of| of.loads.iter().any(Option::is_some)) {
            true => Ok(found),
            false => Err(why),
        }
    }

    /// Those that are cheapest for some class; beside a part of which there are only so many, the next ones.
    fn cheapest_for_each_class(&self, all: Vec<OfDuty>) -> Vec<OfDuty> {
        let mut kept = vec![false; all.len()];
        for class in 0..self.ask.classes.len() {
            let unit = |of: &OfDuty| Some(of.loads[class]? * self.rent(of.part, of.layout.devices).0);
            let mut units: Vec<(usize, f64)> =
                all.iter().enumerate().filter_map(|(at, of)| Some((at, unit(of)?))).collect();
            units.sort_by_key(|(_, usd)| Ordered(*usd));
            for (at, _) in units {
                kept[at] = true;
                if self.ask.parts[all[at].part].most.is_none() {
                    break;
                }
            }
        }
        all.into_iter().zip(kept).filter(|(_, kept)| *kept).map(|(of, _)| of).collect()
    }

    fn program_of(&self, all: &[OfDuty], served: &[usize]) -> Program {
        let ask = &self.ask;
        let limited: Vec<(usize, u32)> = (ask.parts.iter().enumerate())
            .filter_map(|(part, offer)| Some((part, offer.most.filter(|most| *most > 0)?)))
            .collect();
        let ceiling = |&(part, most): &(usize, u32)| Ceiling {
            name: ask.parts[part].name(),
            most: most.into(),
            usd_per_hour: UsdPerHour(0.0),
        };
        let classes = served.iter().map(|&class| {
            let SizeClass { size, rate, .. } = ask.classes[class];
            let name = format!("{} to {} tokens", size.input_tokens, size.output_tokens);
            DemandClass { name, rate, asks: Duty::Whole }
        });
        let mut program = Program {
            ceilings: limited.iter().map(ceiling).collect(),
            classes: classes.collect(),
            ..Program::default()
        };
        for (on, of) in all.iter().enumerate() {
            let spares = ask.parts[of.part].spares;
            let mut most = f64::from(spares) + 1.0;
            for (class, &index) in served.iter().enumerate() {
                let Some(load) = of.loads[index] else { continue };
                let instances = load / BUSY_MAX;
                most += instances * ask.classes[index].rate;
                program.placings.push(Placing { on, class, duty: of.duty, instances, takes: Vec::new() });
            }
            let takes = limited.iter().enumerate().filter(|(_, (part, _))| *part == of.part);
            program.rentables.push(Rentable {
                name: format!("{} x {} {:?}", of.layout.devices, ask.parts[of.part].name(), of.duty),
                usd_per_hour: self.rent(of.part, of.layout.devices),
                most: to_u32(to_u64(most.ceil())),
                takes: takes.map(|(at, _)| (at, f64::from(of.layout.devices))).collect(),
                spares,
            });
        }
        program
    }
}

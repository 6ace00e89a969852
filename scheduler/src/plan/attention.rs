//! The cheapest fleets with attention offload.
//!
//! Such an instance has the weights on devices of a part that is cheap by arithmetic, which compute prompts
//! too, and its KV on as many of another, cheap by bandwidth, as pay: [`ProductsKind`] says what it carries.
//! Prompts may also have instances of their own.

use super::candidates::{PartKernels, ProductsKind};
use super::forms::FleetForm;
use super::layouts::{IN_SERVER, InstanceLayout};
use super::linear::Solver;
use super::load::SizeClass;
use super::market::{BUSY_MAX, DUTIES, FormedFleet, Market, MarketAsk, PlannedPool, SEARCH, add};
use super::offered::MarketKind;
use super::program::{Ceiling, DemandClass, Duty, Placing, Program, Rentable};
use crate::cost::{AttnSplit, Partition};
use mixfleet_hal::cast::{to_u32, to_u64};
use mixfleet_hal::catalog::Part;
use mixfleet_hal::units::{Ordered, UsdPerHour};

/// Parts that are tried for the weights, those with the most arithmetic per dollar, and for attention, those
/// with the most bandwidth per dollar.
const PARTS_MAX: usize = 4;
/// Numbers of devices for attention that are tried.
const ATTENDING: [u32; 5] = [2, 4, 8, 16, 32];

/// Instances that may be rented for a duty, by index.
type OfDuty<'a> = (&'a MarketKind, usize);

/// The instances of a market with attention offload.
///
/// # Errors
/// Why there are none.
pub(super) fn instances(ask: &MarketAsk) -> Result<Vec<MarketKind>, String> {
    if ask.parts.iter().any(|offer| offer.region != ask.parts[0].region) {
        return Err("attention is not planned apart over several regions".into());
    }
    ask.engine.check_apart(1)?;
    for stored in &ask.stored {
        Partition::attention(&ask.model.shape_as(*stored), 1, AttnSplit::default())?;
    }
    let arithmetic = |part: &Part| {
        let profile = part.profile();
        profile.compute.iter().map(|(_, rate)| rate.0).fold(0.0, f64::max)
    };
    let (firsts, others) =
        (cheapest(ask, arithmetic), cheapest(ask, |part: &Part| part.profile().bandwidth.0));
    let attending: Vec<_> =
        others.iter().map(|&part| (part, PartKernels::of(ask.parts[part].part))).collect();
    let (mut found, mut why) = (Vec::new(), "no two parts hold the model and a request".to_owned());
    for &first in &firsts {
        let kernels = PartKernels::of(ask.parts[first].part);
        for (stored, &dtype) in ask.stored.iter().enumerate() {
            for devices in IN_SERVER.into_iter().filter(|devices| ask.engine.check_apart(*devices).is_ok()) {
                let (part, layout) = (ask.parts[first].part, InstanceLayout::of(devices));
                let weights = ask.model.weight_bytes(dtype);
                if part.memory_bytes() * f64::from(devices) < weights {
                    continue;
                }
                let products = ProductsKind::of((part, &kernels), layout, ask.model, dtype, ask.engine);
                let Ok(products) = products else { continue };
                for (at, kernels) in attending.iter().filter(|(at, _)| *at != first) {
                    for devices in ATTENDING {
                        match products.with(kernels, devices, ask.nic) {
                            Ok(kind) => found.extend(MarketKind::new(ask, (first, Some(*at), stored), kind)),
                            Err(cause) => why = cause,
                        }
                    }
                }
            }
        }
    }
    let in_stock = |of: &MarketKind| {
        of.takes().all(|(part, devices)| ask.parts[part].most.is_none_or(|most| devices <= most))
    };
    found.retain(in_stock);
    if found.is_empty() { Err(why) } else { Ok(found) }
}

/// The parts that are cheapest by a rate.
fn cheapest(ask: &MarketAsk, rate: impl Fn(&Part) -> f64) -> Vec<usize> {
    let offers = &ask.parts;
    let unit = |part: &usize| offers[*part].usd_per_hour.0 / rate(offers[*part].part).max(1.0);
    let mut parts: Vec<usize> =
        (0..offers.len()).filter(|&part| offers[part].most.is_none_or(|most| most > 0)).collect();
    parts.sort_by_key(|part| Ordered(unit(part)));
    parts.truncate(PARTS_MAX);
    parts
}

impl MarketKind {
    /// The duties other than prompts alone, and the classes, that it carries: itself, class and duty.
    pub(super) fn duties_apart(&self) -> impl Iterator<Item = (&Self, usize, usize)> {
        let classes = 0..self.in_time.len();
        let of_class = move |class: usize| {
            let duties = (0..DUTIES.len()).filter(|duty| DUTIES[*duty] != Duty::Prefill);
            duties
                .filter(move |duty| self.load_in_time(*duty, class).is_some())
                .map(move |duty| (self, class, duty))
        };
        classes.flat_map(of_class)
    }
}

impl Market {
    /// Instances with attention offload.
    pub(super) fn apart_kinds(&self) -> impl Iterator<Item = &MarketKind> {
        self.apart.iter().flatten()
    }

    /// The fleets in which all answers are decoded by instances with attention offload. These are the
    /// cheapest by rates, and the cheapest in which prompts have separate instances, if that is another,
    /// since prompts wait for each other where they are computed between decode steps.
    ///
    /// # Errors
    /// Why there is none.
    pub fn attention_apart(&self, solver: &dyn Solver) -> Result<Vec<FormedFleet>, String> {
        if let Err(why) = &*self.apart {
            return Err(why.clone());
        }
        let (mut found, mut why) = (Vec::new(), "no dtype is given".to_owned());
        for whole in [true, false] {
            let mut fleets = Vec::new();
            for stored in 0..self.ask.stored.len() {
                match self.apart_in(solver, stored, whole) {
                    Ok(fleet) => fleets.push(fleet),
                    Err(cause) => why = cause,
                }
            }
            self.sort(&mut fleets);
            fleets.into_iter().take(1).for_each(|fleet| add(&mut found, fleet));
        }
        if found.is_empty() { Err(why) } else { Ok(found) }
    }

    /// The cheapest fleet in a dtype; unless `whole`, without instances that compute prompts and decode.
    fn apart_in(&self, solver: &dyn Solver, stored: usize, whole: bool) -> Result<FormedFleet, String> {
        let of_duty = |duty: usize| {
            let apart = self.apart_kinds().filter(move |_| match DUTIES[duty] {
                Duty::Whole => whole,
                Duty::Prefill => false,
                Duty::Decode => true,
            });
            let prompts = self.kinds.iter().filter(move |_| DUTIES[duty] == Duty::Prefill);
            let own = prompts.chain(apart).filter(|of| of.stored == stored);
            self.cheapest_for_each_class(own.map(|of| (of, duty)).collect())
        };
        let all: Vec<OfDuty<'_>> = (0..DUTIES.len()).flat_map(of_duty).collect();
        let does = |duty: Duty, class: usize| {
            all.iter().any(|(of, own)| DUTIES[*own] == duty && of.load_in_time(*own, class).is_some())
        };
        let is_served = |class: &usize| {
            does(Duty::Whole, *class) || does(Duty::Prefill, *class) && does(Duty::Decode, *class)
        };
        let served: Vec<usize> = (0..self.ask.classes.len()).filter(is_served).collect();
        let rate: f64 = served.iter().map(|&class| self.ask.classes[class].rate).sum();
        if rate < self.rate() - self.left_out_max() {
            return Err("too few requests can be served so within the objectives".into());
        }
        let program = self.program_of(&all, &served);
        let fleet = program.solve(solver, SEARCH).map_err(|error| error.to_string())?;
        let used = all.iter().zip(&fleet.counts).filter(|(_, count)| **count > 0);
        let pool = |(&(of, duty), &count): (&OfDuty<'_>, &u32)| PlannedPool {
            part: of.part,
            layout: of.instance.layout,
            attends: of.attention(),
            spare: None,
            duty: DUTIES[duty],
            count,
        };
        let mut pools: Vec<PlannedPool> = used.map(pool).collect();
        pools.sort_by_key(|pool| (pool.duty != Duty::Prefill, pool.part, pool.layout));
        let stored = self.ask.stored[stored];
        let usd_per_hour = self.usd_per_hour(&pools, stored);
        Ok(FormedFleet { form: FleetForm::Free, stored, usd_per_hour, pools })
    }

    /// The cheapest ones for some class; for parts of limited number, also the next cheapest.
    fn cheapest_for_each_class<'a>(&self, all: Vec<OfDuty<'a>>) -> Vec<OfDuty<'a>> {
        let rent =
            |of: &MarketKind| of.takes().map(|(part, devices)| self.rent(part, devices).0).sum::<f64>();
        let mut kept = vec![false; all.len()];
        for class in 0..self.ask.classes.len() {
            let unit = |(of, duty): &OfDuty<'_>| Some(of.load_in_time(*duty, class)? * rent(of));
            let mut units: Vec<(usize, f64)> =
                all.iter().enumerate().filter_map(|(at, of)| Some((at, unit(of)?))).collect();
            units.sort_by_key(|(_, usd)| Ordered(*usd));
            for (at, _) in units {
                kept[at] = true;
                if all[at].0.takes().all(|(part, _)| self.ask.parts[part].most.is_none()) {
                    break;
                }
            }
        }
        all.into_iter().zip(kept).filter(|(_, kept)| *kept).map(|(of, _)| of).collect()
    }

    fn program_of(&self, all: &[OfDuty<'_>], served: &[usize]) -> Program {
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
        for (on, &(of, duty)) in all.iter().enumerate() {
            let spares = of.takes().map(|(part, _)| ask.parts[part].spares).max().unwrap_or(0);
            let mut most = f64::from(spares) + 1.0;
            for (class, &index) in served.iter().enumerate() {
                let Some(load) = of.load_in_time(duty, index) else { continue };
                let network = if DUTIES[duty] == Duty::Whole { 0.0 } else { of.links[index] };
                let instances = load.max(network) / BUSY_MAX;
                most += instances * ask.classes[index].rate;
                program.placings.push(Placing {
                    on,
                    class,
                    duty: DUTIES[duty],
                    instances,
                    takes: Vec::new(),
                });
            }
            let mut takes: Vec<(usize, f64)> = Vec::new();
            for (at, (part, _)) in limited.iter().enumerate() {
                let devices: u32 =
                    of.takes().filter(|(own, _)| own == part).map(|(_, devices)| devices).sum();
                if devices > 0 {
                    takes.push((at, f64::from(devices)));
                }
            }
            program.rentables.push(Rentable {
                name: format!("{} {:?}", on, DUTIES[duty]),
                usd_per_hour: of.takes().map(|(part, devices)| self.rent(part, devices)).sum(),
                most: to_u32(to_u64(most.ceil())),
                takes,
                spares,
            });
        }
        program
    }
}

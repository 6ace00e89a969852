//! Fleets of parts at prices for a load, cheapest first, and the bound below which there is none.
//!
//! A part may be rented as instances of one or several devices ([`layouts`](super::layouts)), for whole
//! requests, prompts alone or decoding alone. All instances of a fleet store the weights in one of the
//! requested dtypes. Fleets are searched by form ([`forms`](super::forms)): a part alone, prompts on one part
//! and decoding on another, requests divided by size over two parts, and the mix of the relaxed program over
//! all parts. Each form has a bound that costs one pass over its rates, so that only forms near the best are
//! solved as programs.
//!
//! The bound of all fleets lets every request take the cheapest instance of each duty, divides instances, and
//! leaves as many requests unserved as the objective allows. It is a bound on what the rates of
//! [`candidates`](super::candidates) allow; waiting, which only a simulation sees, comes on top.

use super::attention;
use super::candidates::ServiceLevel;
use super::forms::{Candidate, DutyCandidates, FleetForm};
use super::layouts::InstanceLayout;
use super::linear::{Column, LinearProgram, Relation, Search, Solution, Solver, Unsolved};
use super::load::SizeClass;
use super::offer::OfferedPart;
use super::offered::{MarketKind, PartOnOffer};
use super::program::{Ceiling, DemandClass, Duty, Placing, Program, Rentable, Unplanned};
use super::regions::RegionLink;
use crate::engines::KnownEngine;
use crate::models::KnownModel;
use mixfleet_hal::StoredAs;
use mixfleet_hal::cast::{to_u32, to_u64};
use mixfleet_hal::units::{BytesPerSecond, GB, Ordered, UsdPerHour};
use serde::Serialize;
use std::sync::Arc;

/// The duties of instances.
pub(super) const DUTIES: [Duty; 3] = [Duty::Whole, Duty::Prefill, Duty::Decode];
/// Share of its time that a planned instance works: one that always works has a queue without end.
pub(super) const BUSY_MAX: f64 = 0.9;
/// More devices to an instance are worth a candidate where they are cheaper by this much.
pub(super) const CHEAPER: f64 = 0.99;
/// How far programs are solved; more takes longer than the uncertainty of rates is worth.
pub(super) const SEARCH: Search = Search { nodes_max: 2000, gap: 0.002 };
/// Maximum number of programs of one sort of form.
pub(super) const PROGRAMS_MAX: usize = 16;
/// Share of their rent at which owned devices count in a program, so that it takes no more than are needed.
const SUNK: f64 = 1e-4;
/// Number of parts up to which all are candidates if no form of one or two of them works.
const PARTS_MAX: usize = 12;

/// What a fleet is wanted for, and what it may be made of.
#[derive(Clone, Debug)]
pub struct MarketAsk {
    /// The model.
    pub model: &'static KnownModel,
    /// Dtypes in which the weights may be stored: a fleet has one. The first of equally cheap fleets is
    /// taken.
    pub stored: Vec<StoredAs>,
    /// How unlike experts are in how often they are chosen: the standard deviation over the mean.
    pub expert_skew: f32,
    /// The engine on all instances.
    pub engine: &'static KnownEngine,
    /// The parts on offer.
    pub parts: Vec<OfferedPart>,
    /// The load.
    pub classes: Vec<SizeClass>,
    /// The longest answer that a request may request: memory is refused to requests that could outgrow it.
    pub answer_tokens_max: u32,
    /// The objectives.
    pub level: ServiceLevel,
    /// Share of requests that must meet them.
    pub attain: f64,
    /// The probability with which devices are as fast as planned: from 0.5, as predicted, to below 1
    /// ([`slower`](super::margin::slower)).
    pub confidence: f64,
    /// Network bandwidth of an instance, over which KV goes from prefill to decode.
    pub nic: BytesPerSecond,
    /// The links between the regions of the parts.
    pub links: Vec<RegionLink>,
}

/// Identical instances of a planned fleet.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedPool {
    /// Index of the part among those on offer.
    pub part: usize,
    /// Devices of an instance; those with the weights, if others attend.
    pub layout: InstanceLayout,
    /// The devices of an instance that attend, if they are others.
    pub attends: Option<PlannedAttention>,
    /// The lending instances whose devices run attention for a part of the requests, if any.
    pub spare: Option<PlannedSpare>,
    /// What the instances do.
    pub duty: Duty,
    /// Number of instances.
    pub count: u32,
}

/// Instances that compute prompts, whose devices attend to a part of what others decode, with an even share
/// of their room for KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PlannedSpare {
    /// Index of their part among those on offer.
    pub part: usize,
    /// Their devices.
    pub layout: InstanceLayout,
}

impl PlannedSpare {
    /// Which of some pools these are, if they have instances.
    pub fn lender(&self, pools: &[PlannedPool]) -> Option<usize> {
        pools.iter().position(|own| {
            own.duty == Duty::Prefill && own.count > 0 && (own.part, own.layout) == (self.part, self.layout)
        })
    }
}

/// Attention devices of an instance, which keep its KV, beside those with the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct PlannedAttention {
    /// Index of the part among those on offer.
    pub part: usize,
    /// Their number.
    pub devices: u32,
}

impl PlannedPool {
    /// What one instance takes: parts, and devices of each.
    pub fn takes(&self) -> impl Iterator<Item = (usize, u32)> + use<> {
        taken(self.part, self.layout, self.attends)
    }

    /// Devices of a part in all instances.
    pub fn devices_of(&self, part: usize) -> u64 {
        let own = self.takes().filter(|(of, _)| *of == part);
        own.map(|(_, devices)| u64::from(devices) * u64::from(self.count)).sum()
    }
}

/// What one instance takes: parts, and devices of each.
pub(super) fn taken(
    part: usize,
    layout: InstanceLayout,
    attends: Option<PlannedAttention>,
) -> impl Iterator<Item = (usize, u32)> + use<> {
    std::iter::once((part, layout.devices)).chain(attends.map(|others| (others.part, others.devices)))
}

/// A fleet that a program found.
#[derive(Clone, Debug, PartialEq)]
pub struct FormedFleet {
    /// How the work is divided.
    pub form: FleetForm,
    /// How its weights are stored.
    pub stored: StoredAs,
    /// The pools: prefill, decode, then whole.
    pub pools: Vec<PlannedPool>,
    /// Rent of all.
    pub usd_per_hour: UsdPerHour,
}

/// All that may be rented, and what it carries of a load.
#[derive(Clone, Debug)]
pub struct Market {
    pub(super) ask: MarketAsk,
    pub(super) kinds: Arc<[MarketKind]>,
    /// Instances with attention offload, or why there are none.
    pub(super) apart: Arc<Result<Vec<MarketKind>, String>>,
    /// By dtype, part and duty.
    pub(super) best: Arc<[DutyCandidates]>,
}

impl Market {
    /// What the parts of `ask` carry of its load. This takes most of a plan's time.
    pub fn new(ask: MarketAsk) -> Self {
        let rates = (0..ask.parts.len()).map(|part| PartOnOffer::new(&ask, part)).collect();
        Market::of(ask, rates)
    }

    /// The market of parts whose rates were found apart from each other, in the order of `ask`'s parts.
    pub fn of(ask: MarketAsk, rates: Vec<PartOnOffer>) -> Self {
        let kinds: Arc<[MarketKind]> = rates.into_iter().flat_map(|part| part.0).collect();
        let sizes = [ask.stored.len(), ask.parts.len(), ask.classes.len()];
        let apart = Arc::new(attention::instances(&ask));
        Market { best: DutyCandidates::of_all(&kinds, sizes).into(), kinds, apart, ask }
    }

    /// The same parts, one at another price.
    pub fn at_price(&self, part: usize, usd_per_hour: UsdPerHour) -> Market {
        let mut market = self.clone();
        market.ask.parts[part].usd_per_hour = usd_per_hour;
        market
    }

    /// The cheapest fleet of one or two of some parts.
    pub fn cheapest_of(&self, solver: &dyn Solver, parts: &[usize]) -> Option<FormedFleet> {
        let forms = self.forms().into_iter().flatten();
        let own =
            |form: &FleetForm| form.parts().is_some_and(|own| own.iter().all(|part| parts.contains(part)));
        self.best_of(solver, forms.filter(own).collect(), 1).pop()
    }

    /// The same parts under other rates of the classes, in requests per second.
    pub fn with_rates(&self, rates: &[f64]) -> Market {
        let mut market = self.clone();
        market.ask.classes.iter_mut().zip(rates).for_each(|(class, rate)| class.rate = *rate);
        market
    }

    /// What it was made for.
    pub fn ask(&self) -> &MarketAsk {
        &self.ask
    }

    /// The offers.
    pub fn parts(&self) -> &[OfferedPart] {
        &self.ask.parts
    }

    /// Rent of an instance.
    pub fn rent(&self, part: usize, devices: u32) -> UsdPerHour {
        self.ask.parts[part].usd_per_hour * f64::from(devices)
    }

    /// Rent of an instance of a pool.
    pub fn rent_of(&self, pool: &PlannedPool) -> UsdPerHour {
        pool.takes().map(|(part, devices)| self.rent(part, devices)).sum()
    }

    /// Rent of the devices of some pools that are not owned, and what the KV of the load pays between
    /// regions where weights are stored so.
    pub fn usd_per_hour(&self, pools: &[PlannedPool], stored: StoredAs) -> UsdPerHour {
        let of = |(part, offer): (usize, &OfferedPart)| {
            let devices = pools.iter().map(|pool| pool.devices_of(part)).sum::<u64>();
            offer.usd_per_hour * devices.saturating_sub(offer.owned.into()) as f64
        };
        self.ask.parts.iter().enumerate().map(of).sum::<UsdPerHour>()
            + self.traffic_usd_per_hour(pools, stored)
    }

    /// The rent below which there is no fleet, even if instances could be divided.
    ///
    /// # Errors
    /// As for a program: [`Market::shortfall`](super::shortfall) says more.
    pub fn lower_bound(&self, solver: &dyn Solver) -> Result<UsdPerHour, Unplanned> {
        Ok(UsdPerHour(self.relaxed(solver, 1.0, None)?.0.cost))
    }

    /// The optimum for `factor` times the load with divided instances, of one dtype or of all, and the
    /// candidates that it takes. With all dtypes, instances with attention offload are included, but not
    /// returned.
    #[expect(clippy::too_many_lines, reason = "one row of the program after the other")]
    pub(super) fn relaxed(
        &self,
        solver: &dyn Solver,
        factor: f64,
        stored: Option<usize>,
    ) -> Result<(Solution, Vec<Candidate>), Unplanned> {
        let classes = &self.ask.classes;
        let mut program = LinearProgram::default();
        let mut columns: Vec<Option<Candidate>> = Vec::new();
        let mut done: Vec<[Vec<(usize, f64)>; 2]> = vec![Default::default(); classes.len()];
        let mut over: Vec<Vec<(usize, f64)>> = vec![Vec::new(); self.ask.parts.len()];
        let mut owned = over.clone();
        for (class, demand) in classes.iter().enumerate() {
            for (duty, does) in DUTIES.into_iter().enumerate() {
                for candidate in self.cheapest_of_parts(stored, duty, class) {
                    let Some(devices) = self.kinds[candidate.0].devices(duty, class) else { continue };
                    let devices = devices * demand.rate * factor;
                    let part = self.kinds[candidate.0].part;
                    let offer = &self.ask.parts[part];
                    for rented in [true, false].into_iter().filter(|rented| *rented || offer.owned > 0) {
                        let price = if rented { offer.usd_per_hour.0 } else { 0.0 };
                        let column =
                            program.column(Column { cost: devices * price, most: 1.0, whole: false });
                        columns.push(Some(candidate));
                        for &stage in does.stages() {
                            done[class][stage as usize].push((column, 1.0));
                        }
                        over[part].push((column, devices));
                        if !rented {
                            owned[part].push((column, devices));
                        }
                    }
                }
            }
        }
        let groups = self.apart_kinds().filter(|_| stored.is_none());
        for (of, class, duty) in groups.flat_map(|of| of.duties_apart()) {
            let instances = of.loads[duty][class].unwrap_or(0.0) * classes[class].rate * factor;
            let rent: UsdPerHour = of.takes().map(|(part, devices)| self.rent(part, devices)).sum();
            let column = program.column(Column { cost: instances * rent.0, most: 1.0, whole: false });
            columns.push(None);
            for &stage in DUTIES[duty].stages() {
                done[class][stage as usize].push((column, 1.0));
            }
            for (part, devices) in of.takes() {
                over[part].push((column, instances * f64::from(devices)));
            }
        }
        // requests that are left unserved
        let mut unserved = Vec::new();
        for (class, stages) in done.iter_mut().enumerate() {
            let column = program.column(Column { cost: 0.0, most: 1.0, whole: false });
            stages.iter_mut().for_each(|terms| terms.push((column, 1.0)));
            unserved.push((column, classes[class].rate));
        }
        for terms in done.into_iter().flatten() {
            program.constrain(terms, Relation::Equal, 1.0);
        }
        let slack = (1.0 - self.ask.attain) * self.rate();
        program.constrain(unserved, Relation::AtMost, slack);
        let parts = self.ask.parts.iter();
        let mosts = parts.clone().map(|offer| offer.most).zip(over);
        for (most, terms) in mosts.chain(parts.map(|offer| Some(offer.owned)).zip(owned)) {
            if let Some(most) = most.filter(|_| !terms.is_empty()) {
                let scale = f64::from(most.max(1));
                let terms = terms.into_iter().map(|(column, devices)| (column, devices / scale)).collect();
                program.constrain(terms, Relation::AtMost, f64::from(most) / scale);
            }
        }
        let solution = solver.solve(&program, SEARCH, None).map_err(|error| match error {
            Unsolved::Infeasible => Unplanned::TooLittle,
            other => Unplanned::Solver(other),
        })?;
        let taken = columns.iter().zip(&solution.values).filter(|(_, share)| **share > 1e-9);
        let mut taken: Vec<Candidate> = taken.filter_map(|(candidate, _)| *candidate).collect();
        taken.sort_unstable();
        taken.dedup();
        Ok((solution, taken))
    }

    /// The cheapest candidate of each part for a duty and a class, which takes the fewest devices too. Of
    /// parts without an end only the cheapest counts.
    fn cheapest_of_parts(&self, stored: Option<usize>, duty: usize, class: usize) -> Vec<Candidate> {
        let mut best: Vec<Option<(f64, Candidate)>> = vec![None; self.ask.parts.len()];
        let of_dtype = |of: &MarketKind| stored.is_none_or(|stored| stored == of.stored);
        for (kind, of) in self.kinds.iter().enumerate().filter(|(_, of)| of_dtype(of)) {
            let Some(devices) = of.devices(duty, class) else { continue };
            let unit = devices * self.ask.parts[of.part].usd_per_hour.0;
            let known = &mut best[of.part];
            if known.is_none_or(|(least, _)| unit < least) {
                *known = Some((unit, (kind, duty)));
            }
        }
        let endless = |part: usize| self.ask.parts[part].most.is_none() && self.ask.parts[part].owned == 0;
        let all = best.into_iter().enumerate().filter_map(|(part, best)| Some((part, best?)));
        let (endless, limited): (Vec<_>, Vec<_>) = all.partition(|(part, _)| endless(*part));
        let least = endless.into_iter().min_by_key(|(_, (unit, _))| Ordered(*unit));
        limited.into_iter().chain(least).map(|(_, (_, candidate))| candidate).collect()
    }

    /// Requests per second of all classes.
    pub(super) fn rate(&self) -> f64 {
        self.ask.classes.iter().map(|class| class.rate).sum()
    }

    /// Requests per second that need not be served.
    pub(super) fn left_out_max(&self) -> f64 {
        (1.0 - self.ask.attain + 1e-9) * self.rate()
    }

    /// The cheapest fleets of different forms, cheapest first: up to `each` of every sort of form, those with
    /// attention offload, and the one in which prefill devices lend themselves for attention.
    pub fn rank(&self, solver: &dyn Solver, each: usize) -> Vec<FormedFleet> {
        let mut found: Vec<FormedFleet> = Vec::new();
        for forms in self.forms() {
            for fleet in self.best_of(solver, forms, each) {
                add(&mut found, fleet);
            }
        }
        self.add_free(solver, &mut found, f64::INFINITY);
        let apart = self.attention_apart(solver).unwrap_or_default();
        apart.into_iter().for_each(|fleet| add(&mut found, fleet));
        self.spare_attention(solver).into_iter().for_each(|fleet| add(&mut found, fleet));
        self.sort(&mut found);
        found
    }

    /// The cheapest fleet of any form.
    pub fn cheapest(&self, solver: &dyn Solver) -> Option<FormedFleet> {
        let mut found = self.best_of(solver, self.forms().into_iter().flatten().collect(), 1);
        let most = found.first().map_or(f64::INFINITY, |fleet| fleet.usd_per_hour.0);
        self.add_free(solver, &mut found, most);
        self.sort(&mut found);
        found.into_iter().next()
    }

    /// Adds fleets of what the relaxed program takes of all parts and of the best that were found, unless
    /// they cost at least `most`.
    fn add_free(&self, solver: &dyn Solver, found: &mut Vec<FormedFleet>, most: f64) {
        let parts = self.ask.parts.len();
        let near: Option<FormedFleet> =
            found.iter().min_by_key(|fleet| Ordered(fleet.usd_per_hour.0)).cloned();
        for stored in 0..self.ask.stored.len() {
            let mut free =
                self.relaxed(solver, 1.0, Some(stored)).map_or_else(|_| Vec::new(), |(_, taken)| taken);
            if near.is_none() && parts <= PARTS_MAX {
                let of = |part| (0..DUTIES.len()).flat_map(move |duty| &self.of_part(stored, part, duty).all);
                free.extend((0..parts).flat_map(of));
            }
            let near = near.iter().filter(|fleet| fleet.stored == self.ask.stored[stored]);
            free.extend(near.flat_map(|fleet| self.candidates(fleet.form, stored)));
            free.sort_unstable();
            free.dedup();
            for of_region in self.by_region(&free) {
                if most.is_finite() && self.bound_of_any(&of_region) >= most {
                    continue;
                }
                if let Ok(fleet) = self.solve(solver, FleetForm::Free, stored, &of_region) {
                    add(found, fleet);
                }
            }
        }
    }

    /// Puts the cheapest first, and among equals the first requested dtype.
    pub(super) fn sort(&self, fleets: &mut [FormedFleet]) {
        let asked = |fleet: &FormedFleet| self.ask.stored.iter().position(|stored| *stored == fleet.stored);
        fleets.sort_by_key(|fleet| (Ordered(fleet.usd_per_hour.0), asked(fleet)));
    }

    /// The cheapest fleet of some candidates.
    pub(super) fn solve(
        &self,
        solver: &dyn Solver,
        form: FleetForm,
        stored: usize,
        candidates: &[Candidate],
    ) -> Result<FormedFleet, Unplanned> {
        if self.bound_of_any(candidates).is_infinite() {
            return Err(Unplanned::TooLittle);
        }
        let program = self.program(candidates);
        let fleet = program.solve(solver, SEARCH)?;
        let rented = self.rentables(candidates);
        let mut pools: Vec<PlannedPool> = Vec::new();
        for (&((kind, duty), _), &count) in rented.iter().zip(&fleet.counts).filter(|(_, count)| **count > 0)
        {
            let of = &self.kinds[kind];
            let (part, layout, duty) = (of.part, of.instance.layout, DUTIES[duty]);
            let pool = PlannedPool { part, layout, attends: None, spare: None, duty, count };
            let same = |known: &&mut PlannedPool| PlannedPool { count, ..PlannedPool::clone(known) } == pool;
            match pools.iter_mut().find(same) {
                Some(known) => known.count += count,
                None => pools.push(pool),
            }
        }
        let order = |duty| [Duty::Prefill, Duty::Decode].iter().position(|first| *first == duty).unwrap_or(2);
        pools.sort_by_key(|pool| (order(pool.duty), pool.part, pool.layout));
        let stored = self.ask.stored[stored];
        Ok(FormedFleet { form, stored, usd_per_hour: self.usd_per_hour(&pools, stored), pools })
    }

    /// The rentables of some candidates, and the owned devices among them.
    fn rentables(&self, candidates: &[Candidate]) -> Vec<(Candidate, bool)> {
        let owned = |&(kind, _): &Candidate| self.ask.parts[self.kinds[kind].part].owned > 0;
        let of = |candidate: &Candidate| {
            [(*candidate, false)].into_iter().chain(owned(candidate).then_some((*candidate, true)))
        };
        candidates.iter().flat_map(of).collect()
    }

    fn program(&self, candidates: &[Candidate]) -> Program {
        let mut program = Program::default();
        let parts = || self.ask.parts.iter().enumerate();
        let stock = parts().filter_map(|(part, offer)| Some((part, false, offer.most?)));
        let owned = parts().map(|(part, offer)| (part, true, offer.owned));
        // parts, whether their owned devices are meant, and the number of devices
        let limited: Vec<_> = stock.chain(owned).filter(|(.., most)| *most > 0).collect();
        program.ceilings = limited
            .iter()
            .map(|&(part, _, most)| Ceiling {
                name: self.ask.parts[part].name(),
                most: most.into(),
                usd_per_hour: UsdPerHour(0.0),
            })
            .collect();
        let duties = candidates.iter().map(|&(kind, duty)| (self.kinds[kind].part, DUTIES[duty]));
        // a unit is a byte per second
        let link = self.link_taken(duties).map(|link| {
            program.ceilings.push(Ceiling {
                name: format!("the link from {} to {}", link.from, link.to),
                most: link.bandwidth.0,
                usd_per_hour: UsdPerHour(link.usd_per_gb / GB * 3600.0),
            });
            program.ceilings.len() - 1
        });
        let classes = &self.ask.classes;
        let served = |class: usize| {
            let can = |duty: Duty| {
                let own = candidates.iter().filter(|(_, own)| DUTIES[*own] == duty);
                own.copied().any(|(kind, duty)| self.kinds[kind].load_in_time(duty, class).is_some())
            };
            can(Duty::Whole) || can(Duty::Prefill) && can(Duty::Decode)
        };
        let served: Vec<usize> = (0..classes.len()).filter(|&class| served(class)).collect();
        program.classes = served
            .iter()
            .map(|&class| {
                let SizeClass { size, rate, .. } = classes[class];
                let name = format!("{} to {} tokens", size.input_tokens, size.output_tokens);
                DemandClass { name, rate, asks: Duty::Whole }
            })
            .collect();
        for (on, ((kind, duty), owned)) in self.rentables(candidates).into_iter().enumerate() {
            let of = &self.kinds[kind];
            let devices = of.instance.layout.devices;
            let spares = self.ask.parts[of.part].spares;
            let mut most = f64::from(spares) + 1.0;
            for (class, &index) in served.iter().enumerate() {
                let Some(load) = of.load_in_time(duty, index) else { continue };
                let network = if DUTIES[duty] == Duty::Whole { 0.0 } else { of.links[index] };
                let instances = load.max(network) / BUSY_MAX;
                most += instances * classes[index].rate;
                let duty = DUTIES[duty];
                let crosses = link.filter(|_| duty == Duty::Prefill);
                let takes = crosses.map(|at| (at, of.links[index] * self.ask.nic.0)).into_iter().collect();
                program.placings.push(Placing { on, class, duty, instances, takes });
            }
            let ceilings = limited.iter().enumerate();
            let takes = ceilings.filter(|(_, (part, of_owned, _))| *part == of.part && (!of_owned || owned));
            program.rentables.push(Rentable {
                name: format!("{} x {} {:?}", devices, self.ask.parts[of.part].name(), DUTIES[duty]),
                usd_per_hour: self.rent(of.part, devices) * if owned { SUNK } else { 1.0 },
                most: to_u32(to_u64(most.ceil())),
                takes: takes.map(|(at, _)| (at, f64::from(devices))).collect(),
                spares,
            });
        }
        program
    }
}

/// Adds a fleet, unless it has the pools and the dtype of one that is there.
pub(super) fn add(found: &mut Vec<FormedFleet>, fleet: FormedFleet) {
    if found.iter().all(|known| (&known.pools, known.stored) != (&fleet.pools, fleet.stored)) {
        found.push(fleet);
    }
}

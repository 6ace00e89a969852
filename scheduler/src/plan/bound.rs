//! The rent below which no fleet of whole instances carries a load.
//!
//! [`Market::lower_bound`] divides instances, which says little of a fleet of few. Here counts are whole, as
//! in a [`Program`], over all instances that may be rented, each for any duties at once and busy all of the
//! time:
//!
//! ```text
//! minimise  sum_k rent_k n_k    over whole n_k and shares x
//! where     sum of rate_c load_kdc x_kdc over duties d and classes c  <=  n_k     every kind of instance k
//!           each stage of each class is done, but for the requests that may be left unserved
//! ```
//!
//! A kind is omitted if whole instances of another do the same work at no higher rent. The load is that of
//! the whole time, or that of its densest span if that needs more: requests that arrive within a span must be
//! done when the last answer that begins in it must be.

use super::linear::Solver;
use super::market::{DUTIES, Market, SEARCH};
use super::offered::MarketKind;
use super::program::{Ceiling, DemandClass, Duty, Placing, Program, Rentable, Unplanned};
use mixfleet_hal::cast::{to_u32, to_u64};
use mixfleet_hal::units::{Seconds, UsdPerHour};

/// Requests of each class in slots of time of equal length, one after the other.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LoadSlots {
    /// Length of a slot.
    pub slot: Seconds,
    /// For each slot the number of requests of each class.
    pub requests: Vec<Vec<u64>>,
    /// Longest time between a request's arrival and its last token within its objectives.
    pub answer: Seconds,
}

/// What a fleet must do in a time.
struct Span {
    /// Requests per second of each class.
    rates: Vec<f64>,
    /// Requests per second that may be left unserved.
    unserved: f64,
}

impl Market {
    /// The rent below which no fleet of whole instances carries the load, nor any span of `slots`.
    ///
    /// # Errors
    /// As for [`Market::lower_bound`].
    pub fn whole_lower_bound(
        &self,
        solver: &dyn Solver,
        slots: Option<&LoadSlots>,
    ) -> Result<UsdPerHour, Unplanned> {
        let divided = self.lower_bound(solver)?;
        // owned parts cost nothing, whole or divided
        if self.ask.parts.iter().any(|offer| offer.owned > 0) {
            return Ok(divided);
        }
        let rates = self.ask.classes.iter().map(|class| class.rate).collect();
        let all = Span { rates, unserved: self.left_out_max() };
        let kinds = self.undominated();
        let bounds = std::iter::once(all).chain(slots.and_then(|slots| self.densest(slots))).map(|span| {
            // the divided bound reports a load that cannot be served
            let fleet = self.program_of_span(&kinds, &span).solve(solver, SEARCH);
            fleet.map_or(divided, |fleet| fleet.lower_bound)
        });
        Ok(bounds.fold(divided, UsdPerHour::max))
    }

    /// Kinds that no others replace at the same or a lower rent.
    fn undominated(&self) -> Vec<&MarketKind> {
        let all: Vec<&MarketKind> = self.kinds.iter().chain(self.apart_kinds()).collect();
        let rents: Vec<f64> = all.iter().map(|of| self.rent_of_kind(of)).collect();
        let is_endless = |of: &MarketKind| of.takes().all(|(part, _)| self.ask.parts[part].most.is_none());
        let dominates = |one: usize, other: usize| {
            let times = (rents[other] / rents[one]).floor();
            let same = rents[one] == rents[other] && one > other;
            one != other
                && times >= 1.0
                && is_endless(all[one])
                && all[one].does_all_of(all[other], times)
                && !(same && all[other].does_all_of(all[one], 1.0))
        };
        let kept = |at: &usize| !(0..all.len()).any(|other| dominates(other, *at));
        (0..all.len()).filter(kept).map(|at| all[at]).collect()
    }

    fn rent_of_kind(&self, of: &MarketKind) -> f64 {
        of.takes().map(|(part, devices)| self.rent(part, devices).0).sum()
    }

    /// The span whose requests cost most per second, where each has the cheapest instances.
    fn densest(&self, slots: &LoadSlots) -> Option<Span> {
        let classes = self.ask.classes.len();
        let usd: Vec<f64> = (0..classes).map(|class| self.least_usd(class)).collect();
        let of_slot =
            |counts: &Vec<u64>| counts.iter().zip(&usd).map(|(n, usd)| *n as f64 * usd).sum::<f64>();
        let values: Vec<f64> = slots.requests.iter().map(of_slot).collect();
        let mut best: Option<(f64, std::ops::Range<usize>)> = None;
        for from in 0..values.len() {
            let mut value = 0.0;
            for to in from + 1..=values.len() {
                value += values[to - 1];
                let density = value / slots.seconds(to - from);
                if best.as_ref().is_none_or(|(most, _)| density > *most) {
                    best = Some((density, from..to));
                }
            }
        }
        let (_, span) = best?;
        let seconds = slots.seconds(span.len());
        let sum = |class: usize| slots.requests[span.clone()].iter().map(|of| of[class]).sum::<u64>() as f64;
        let all: u64 = slots.requests.iter().flatten().sum();
        let rates = (0..classes).map(|class| sum(class) / seconds).collect();
        Some(Span { rates, unserved: (1.0 - self.ask.attain + 1e-9) * all as f64 / seconds })
    }

    /// Rent of what one request per second of a class keeps busy at least; 0 where none serves it.
    fn least_usd(&self, class: usize) -> f64 {
        let least = |duty: usize| {
            let all = self.kinds.iter().chain(self.apart_kinds());
            let usd = all.filter_map(|of| Some(of.loads[duty][class]? * self.rent_of_kind(of)));
            usd.fold(f64::INFINITY, f64::min)
        };
        let [whole, prefill, decode] = [0, 1, 2].map(least);
        let usd = whole.min(prefill + decode);
        if usd.is_finite() { usd } else { 0.0 }
    }

    fn program_of_span(&self, kinds: &[&MarketKind], span: &Span) -> Program {
        let stock = self.ask.parts.iter().enumerate();
        let stock: Vec<(usize, f64)> =
            stock.filter_map(|(part, offer)| Some((part, offer.most?.into()))).collect();
        // the last ceiling, and the last rentable, stand for unserved load
        let mosts = stock.iter().map(|(_, most)| *most).chain([span.unserved]);
        let ceiling =
            |most: f64| Ceiling { name: String::new(), most: most.max(1e-9), usd_per_hour: UsdPerHour(0.0) };
        let rented: Vec<usize> = (0..span.rates.len()).filter(|class| span.rates[*class] > 0.0).collect();
        let mut program = Program { ceilings: mosts.map(ceiling).collect(), ..Program::default() };
        for &class in &rented {
            let rate = span.rates[class];
            program.classes.push(DemandClass { name: format!("class {class}"), rate, asks: Duty::Whole });
        }
        for (on, of) in kinds.iter().enumerate() {
            let mut most = 1.0;
            for (class, &index) in rented.iter().enumerate() {
                for (duty, does) in DUTIES.into_iter().enumerate() {
                    let Some(instances) = of.loads[duty][index] else { continue };
                    most += instances * span.rates[index];
                    program.placings.push(Placing { on, class, duty: does, instances, takes: Vec::new() });
                }
            }
            let devices =
                |part: usize| of.takes().filter(|(own, _)| *own == part).map(|(_, n)| f64::from(n)).sum();
            let takes = stock.iter().enumerate().map(|(at, (part, _))| (at, devices(*part)));
            program.rentables.push(Rentable {
                name: format!("kind {on}"),
                usd_per_hour: UsdPerHour(self.rent_of_kind(of)),
                most: to_u32(to_u64(most.ceil())),
                takes: takes.filter(|(_, devices)| *devices > 0.0).collect(),
                spares: 0,
            });
        }
        let (name, usd_per_hour) = ("unserved".to_owned(), UsdPerHour(0.0));
        program.rentables.push(Rentable { name, usd_per_hour, most: 1, takes: Vec::new(), spares: 0 });
        program.placings.extend((0..rented.len()).map(|class| Placing {
            on: kinds.len(),
            class,
            duty: Duty::Whole,
            instances: 0.0,
            takes: vec![(stock.len(), 1.0)],
        }));
        program
    }
}

impl LoadSlots {
    /// Time within which the requests of this many slots must be done.
    fn seconds(&self, slots: usize) -> f64 {
        self.slot.0 * slots as f64 + self.answer.0
    }
}

impl MarketKind {
    /// Whether this many instances of it do all the work of one of `other`, as fast.
    fn does_all_of(&self, other: &MarketKind, times: f64) -> bool {
        let pairs = self.loads.iter().flatten().zip(other.loads.iter().flatten());
        pairs.into_iter().all(|pair| match pair {
            (_, None) => true,
            (None, Some(_)) => false,
            (Some(own), Some(its)) => *own <= its * times,
        })
    }
}

#[cfg(test)]
mod tests;

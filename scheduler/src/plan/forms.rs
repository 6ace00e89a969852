//! Forms of fleets, and what none of a form costs less than.

use super::linear::Solver;
use super::market::{BUSY_MAX, CHEAPER, DUTIES, FormedFleet, Market, PROGRAMS_MAX, PlannedPool, add};
use super::offered::MarketKind;
use super::program::Duty;
use mixfleet_hal::units::Ordered;
use serde::Serialize;

/// How the work is divided over parts, which are indices into those on offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FleetForm {
    /// Whole requests on one part.
    Alone(usize),
    /// Prompts on one part, decoding on another or the same.
    Split {
        /// The part for prompts.
        prefill: usize,
        /// The part for decoding.
        decode: usize,
    },
    /// Whole requests on two parts, by size.
    BySize(usize, usize),
    /// Any mix that the program takes of all parts.
    Free,
}

impl FleetForm {
    /// Its parts, each with the index of its duty in [`DUTIES`].
    fn duties(self) -> [Option<(usize, usize)>; 2] {
        let [whole, prefill, decode] = [0, 1, 2];
        match self {
            FleetForm::Alone(part) => [Some((part, whole)), None],
            FleetForm::Split { prefill: one, decode: other } => [Some((one, prefill)), Some((other, decode))],
            FleetForm::BySize(one, other) => [Some((one, whole)), Some((other, whole))],
            FleetForm::Free => [None; 2],
        }
    }

    /// Its parts; `None` if it may have all.
    pub(super) fn parts(self) -> Option<[usize; 2]> {
        match self {
            FleetForm::Alone(part) => Some([part; 2]),
            FleetForm::Split { prefill, decode } => Some([prefill, decode]),
            FleetForm::BySize(one, other) => Some([one, other]),
            FleetForm::Free => None,
        }
    }
}

/// Instances of a kind with a duty: index of the kind, and of the duty in [`DUTIES`].
pub(super) type Candidate = (usize, usize);

/// The instances of a part that are worth renting for a duty, with weights stored in one dtype. They depend
/// on no price, since one is that of a device.
#[derive(Debug)]
pub(super) struct DutyCandidates {
    /// More devices only where they are cheaper, or do what fewer cannot.
    pub(super) all: Vec<Candidate>,
    /// Devices that one request per second of a class keeps busy at least; `None` where none is in time.
    devices: Vec<Option<f64>>,
}

impl DutyCandidates {
    /// Forms of all `kinds`, by dtype, part and duty.
    pub(super) fn of_all(kinds: &[MarketKind], [dtypes, parts, classes]: [usize; 3]) -> Vec<Self> {
        let of = |at: usize| {
            let (stored, part, duty) =
                (at / DUTIES.len() / parts, at / DUTIES.len() % parts, at % DUTIES.len());
            let own = kinds.iter().enumerate().filter(|(_, kind)| (kind.stored, kind.part) == (stored, part));
            Self::of_kinds(own, duty, classes)
        };
        (0..dtypes * parts * DUTIES.len()).map(of).collect()
    }

    fn of_kinds<'a>(
        kinds: impl Iterator<Item = (usize, &'a MarketKind)>,
        duty: usize,
        classes: usize,
    ) -> Self {
        let mut found = DutyCandidates { all: Vec::new(), devices: vec![None; classes] };
        for (at, kind) in kinds {
            let mut worth = false;
            for (class, least) in found.devices.iter_mut().enumerate() {
                let Some(devices) = kind.devices_in_time(duty, class) else { continue };
                worth |= least.is_none_or(|least| devices < CHEAPER * least);
                *least = Some(least.map_or(devices, |least| least.min(devices)));
            }
            if worth {
                found.all.push((at, duty));
            }
        }
        found
    }
}

impl Market {
    /// The instances of a part for a duty.
    pub(super) fn of_part(&self, stored: usize, part: usize, duty: usize) -> &DutyCandidates {
        &self.best[(stored * self.ask.parts.len() + part) * DUTIES.len() + duty]
    }

    /// The candidates of a form.
    pub(super) fn candidates(&self, form: FleetForm, stored: usize) -> Vec<Candidate> {
        let own = form.duties().into_iter().flatten();
        own.flat_map(|(part, duty)| self.of_part(stored, part, duty).all.iter().copied()).collect()
    }

    /// Instances of the parts and duties of a fleet that it does not use, as pools of none.
    pub fn alternatives(&self, fleet: &FormedFleet) -> Vec<PlannedPool> {
        let stored = self.ask.stored.iter().position(|stored| *stored == fleet.stored).unwrap_or(0);
        let own = |pool: &PlannedPool| (pool.part, pool.layout, pool.duty);
        let mut found: Vec<PlannedPool> = Vec::new();
        for pool in &fleet.pools {
            let Some(duty) = DUTIES.iter().position(|duty| *duty == pool.duty) else { continue };
            for &(kind, _) in &self.of_part(stored, pool.part, duty).all {
                let layout = self.kinds[kind].instance.layout;
                let other = PlannedPool { layout, attends: None, spare: None, count: 0, ..pool.clone() };
                if fleet.pools.iter().chain(&found).all(|known| own(known) != own(&other)) {
                    found.push(other);
                }
            }
        }
        found
    }

    /// All forms of one or two parts, by sort.
    pub(super) fn forms(&self) -> [Vec<FleetForm>; 4] {
        let parts = self.ask.parts.len();
        let pairs = || (0..parts).flat_map(move |one| (0..parts).map(move |other| (one, other)));
        let split = |(prefill, decode)| FleetForm::Split { prefill, decode };
        [
            (0..parts).map(FleetForm::Alone).collect(),
            (0..parts).map(|part| split((part, part))).collect(),
            pairs().filter(|(one, other)| one != other).map(split).collect(),
            pairs().filter(|(one, other)| one < other).map(|(a, b)| FleetForm::BySize(a, b)).collect(),
        ]
    }

    /// The cheapest of some forms, in any dtype. Forms whose bound is not below the best rent so far are not
    /// solved.
    pub(super) fn best_of(
        &self,
        solver: &dyn Solver,
        forms: Vec<FleetForm>,
        each: usize,
    ) -> Vec<FormedFleet> {
        let mut found: Vec<FormedFleet> = Vec::new();
        for (bound, form, stored) in self.by_bound(&forms).into_iter().take(PROGRAMS_MAX) {
            if found.get(each - 1).is_some_and(|last| last.usd_per_hour.0 <= bound) {
                break;
            }
            if let Ok(fleet) = self.solve(solver, form, stored, &self.candidates(form, stored)) {
                add(&mut found, fleet);
                self.sort(&mut found);
                found.truncate(each);
            }
        }
        found
    }

    /// Whether a fleet of some forms costs less.
    pub(super) fn costs_less(&self, solver: &dyn Solver, forms: &[FleetForm], usd: f64) -> bool {
        let near = self.by_bound(forms).into_iter().filter(|(bound, ..)| *bound < usd);
        near.take(PROGRAMS_MAX).any(|(_, form, stored)| {
            let fleet = self.solve(solver, form, stored, &self.candidates(form, stored));
            fleet.is_ok_and(|fleet| fleet.usd_per_hour.0 < usd)
        })
    }

    /// Forms that serve enough requests in a dtype, with their bounds, by bound.
    fn by_bound(&self, forms: &[FleetForm]) -> Vec<(f64, FleetForm, usize)> {
        let dtypes = 0..self.ask.stored.len();
        let joined: Vec<FleetForm> = forms.iter().copied().filter(|form| self.is_joined(*form)).collect();
        let all = dtypes.flat_map(|stored| joined.iter().map(move |&form| (form, stored)));
        let with_bound = all.map(|(form, stored)| (self.bound_of(form, stored), form, stored));
        let mut forms: Vec<_> = with_bound.filter(|(bound, ..)| bound.is_finite()).collect();
        forms.sort_by_key(|(bound, ..)| Ordered(*bound));
        forms
    }

    /// What no fleet of a form of one or two parts costs less than; infinite if they do not serve enough
    /// requests.
    fn bound_of(&self, form: FleetForm, stored: usize) -> f64 {
        let offers = &self.ask.parts;
        let sides = form.duties().map(|side| {
            let (part, duty) = side?;
            Some((offers[part].usd_per_hour.0, &self.of_part(stored, part, duty).devices))
        });
        let unit = |class: usize| {
            let [one, other] = sides.map(|side| {
                let (usd, devices) = side?;
                devices[class].map(|devices| usd * devices)
            });
            match form {
                FleetForm::Split { .. } => Some(one? + other?),
                _ => one.into_iter().chain(other).reduce(f64::min),
            }
        };
        let mut parts: Vec<usize> = form.duties().into_iter().flatten().map(|(part, _)| part).collect();
        parts.dedup();
        self.bound(unit, &parts)
    }

    /// What no fleet of parts costs less than on which a request per second of each class costs `unit`.
    pub(super) fn bound(&self, unit: impl Fn(usize) -> Option<f64>, parts: &[usize]) -> f64 {
        let (mut usd, mut left_out) = (0.0, 0.0);
        for (class, demand) in self.ask.classes.iter().enumerate() {
            match unit(class) {
                Some(unit) => usd += unit * demand.rate,
                None => left_out += demand.rate,
            }
        }
        let offers = &self.ask.parts;
        let sunk: f64 =
            parts.iter().map(|&part| offers[part].usd_per_hour.0 * f64::from(offers[part].owned)).sum();
        if left_out > self.left_out_max() { f64::INFINITY } else { (usd / BUSY_MAX - sunk).max(0.0) }
    }

    /// The same of any candidates.
    pub(super) fn bound_of_any(&self, candidates: &[Candidate]) -> f64 {
        let unit = |class: usize| {
            let least = |duty: Duty| {
                let own = candidates.iter().filter(|(_, own)| DUTIES[*own] == duty);
                let of = own.filter_map(|&(kind, duty)| {
                    let of = &self.kinds[kind];
                    Some(of.devices_in_time(duty, class)? * self.ask.parts[of.part].usd_per_hour.0)
                });
                of.reduce(f64::min)
            };
            let halves = least(Duty::Prefill).zip(least(Duty::Decode)).map(|(one, other)| one + other);
            least(Duty::Whole).into_iter().chain(halves).reduce(f64::min)
        };
        let mut parts: Vec<usize> = candidates.iter().map(|(kind, _)| self.kinds[*kind].part).collect();
        parts.sort_unstable();
        parts.dedup();
        self.bound(unit, &parts)
    }
}

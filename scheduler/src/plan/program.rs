//! The cheapest numbers of instances for a load, as a mixed-integer program over measured rates.
//!
//! A request passes two stages, its prompt and decoding, of which an instance may do both or one. A *placing*
//! says that instances of a kind can do some stages of a class of requests, and how many instances one
//! request per second takes. The program, with counts n of kinds j at prices p, and shares x of placings r:
//!
//! ```text
//! minimise    sum_j p_j n_j  +  price of the use of each ceiling
//! subject to  sum over placings of class i that do stage s of x_r  =  1       every stage of every class
//!             sum over placings on kind j of rate x_r load_r  <=  n_j - spares  every kind
//!             use of a ceiling by counts and shares  <=  the ceiling
//! ```
//!
//! Counts are whole. Shares are any numbers from 0 to 1, or multiples of 1/slices, as where the load is cut
//! into equal slices of which each goes to one kind (Mélange, arXiv 2404.14527); such a program costs more
//! than a divided one, and is only worth its time for comparisons. Without the restriction to whole numbers
//! the optimum is a lower bound.

use super::linear::{Column, LinearProgram, Relation, Search, Solution, Solver, Unsolved};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::units::UsdPerHour;
use serde::{Deserialize, Serialize};

/// How far a count may lie above a whole number and still be that number.
const ROUNDING: f64 = 1e-6;
/// The least part of an instance that a whole class keeps busy: less is a count of zero to solvers.
const BUSY_MIN: f64 = 1e-4;

/// A part of the work of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkStage {
    /// Computing the prompt.
    Prefill,
    /// Its decode steps.
    Decode,
}

/// The stages that an instance does of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Duty {
    /// The whole request.
    Whole,
    /// The prompt alone.
    Prefill,
    /// Decoding alone.
    Decode,
}

impl Duty {
    /// Its stages.
    pub const fn stages(self) -> &'static [WorkStage] {
        match self {
            Duty::Whole => &[WorkStage::Prefill, WorkStage::Decode],
            Duty::Prefill => &[WorkStage::Prefill],
            Duty::Decode => &[WorkStage::Decode],
        }
    }
}

/// A kind of instance that may be rented.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Rentable {
    /// Its name, for display.
    pub name: String,
    /// Rent of one instance.
    pub usd_per_hour: UsdPerHour,
    /// Maximum number of instances.
    pub most: u32,
    /// Use of ceilings by one instance: indices, without duplicates, and amounts.
    pub takes: Vec<(usize, f64)>,
    /// If any are in use, this many spares are added in case others fail.
    pub spares: u32,
}

/// Requests of one sort.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DemandClass {
    /// Its name, for display.
    pub name: String,
    /// Requests per second.
    pub rate: f64,
    /// Stages that each request needs.
    pub asks: Duty,
}

/// Something that instances or requests share: devices of a sort, a link, a budget.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Ceiling {
    /// Its name, for display.
    pub name: String,
    /// The available amount, in any unit; positive.
    pub most: f64,
    /// Price of one unit that is used.
    pub usd_per_hour: UsdPerHour,
}

/// Instances of a kind can do some stages of a class.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Placing {
    /// Index of the kind of instance.
    pub on: usize,
    /// Index of the class.
    pub class: usize,
    /// What they do of a request.
    pub duty: Duty,
    /// Number of instances that one request per second keeps busy.
    pub instances: f64,
    /// Use of ceilings by one request per second: indices, without duplicates, and amounts.
    pub takes: Vec<(usize, f64)>,
}

/// Rentable kinds, demand, and placings.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Program {
    /// Kinds of instances.
    pub rentables: Vec<Rentable>,
    /// The load.
    pub classes: Vec<DemandClass>,
    /// Shared ceilings.
    pub ceilings: Vec<Ceiling>,
    /// Placings.
    pub placings: Vec<Placing>,
    /// The number of slices of a class, each of which goes to one kind of instance; `None` if a class may be
    /// divided arbitrarily.
    pub slices: Option<u32>,
}

/// The cheapest fleet of a program.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlannedFleet {
    /// The rent, including the use of priced ceilings.
    pub usd_per_hour: UsdPerHour,
    /// No fleet of whole instances costs less, as far as that was proven.
    pub lower_bound: UsdPerHour,
    /// Whether no fleet of whole instances costs less.
    pub proven: bool,
    /// Number of instances of each kind.
    pub counts: Vec<u32>,
    /// Each placing's share of its class.
    pub shares: Vec<f64>,
}

/// Why there is no fleet.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Unplanned {
    /// The program contradicts itself.
    #[error("the program is not valid: {0}")]
    Invalid(String),
    /// A stage that nothing can do.
    #[error("nothing that may be rented can do the {stage:?} of '{class}' within its objectives")]
    Unserved {
        /// Name of the class.
        class: String,
        /// The stage.
        stage: WorkStage,
    },
    /// All that may be rented does not carry the load.
    #[error("all that may be rented does not carry the load; allow more instances or a lower rate")]
    TooLittle,
    /// The solver found nothing.
    #[error("no fleet was found: {0}")]
    Solver(Unsolved),
}

impl Program {
    /// Finds the cheapest fleet, and a bound below which there is none.
    ///
    /// # Errors
    /// Why there is none, or none was found.
    pub fn solve(&self, solver: &dyn Solver, search: Search) -> Result<PlannedFleet, Unplanned> {
        self.check()?;
        let program = self.linear();
        let unplanned = |error| match error {
            Unsolved::Infeasible => Unplanned::TooLittle,
            other => Unplanned::Solver(other),
        };
        let relaxed = solver.solve(&program.relaxed(), search, None).map_err(unplanned)?;
        let start = self.slices.is_none().then(|| self.rounded_up(&relaxed));
        let found = solver.solve(&program, search, start.as_deref()).map_err(unplanned)?;
        let parts = self.slices.map_or(1.0, f64::from);
        let first = self.rentables.len();
        let counts = (0..first).map(|kind| to_u32(found.whole(kind))).collect();
        let shares = &found.values[first..first + self.placings.len()];
        Ok(PlannedFleet {
            usd_per_hour: UsdPerHour(found.cost),
            lower_bound: UsdPerHour(found.bound.max(relaxed.cost).min(found.cost)),
            proven: found.optimal,
            counts,
            shares: shares.iter().map(|share| share / parts).collect(),
        })
    }

    /// The linear program: counts, then the placings' numbers of slices (or shares), then whether each kind
    /// that has spares is in use.
    pub fn linear(&self) -> LinearProgram {
        let mut program = LinearProgram::default();
        let parts = self.slices.map_or(1.0, f64::from);
        let ceiling_price = |takes: &[(usize, f64)]| -> f64 {
            takes.iter().map(|&(at, amount)| self.ceilings[at].usd_per_hour.0 * amount).sum()
        };
        let mut over: Vec<Vec<(usize, f64)>> = vec![Vec::new(); self.ceilings.len()];
        let mut busy: Vec<Vec<(usize, f64)>> = vec![Vec::new(); self.rentables.len()];
        for (kind, rentable) in self.rentables.iter().enumerate() {
            let cost = rentable.usd_per_hour.0 + ceiling_price(&rentable.takes);
            let column = program.column(Column { cost, most: rentable.most.into(), whole: true });
            rentable.takes.iter().for_each(|&(at, amount)| over[at].push((column, amount)));
            busy[kind].push((column, -1.0));
        }
        let mut done: Vec<[Vec<(usize, f64)>; 2]> = vec![Default::default(); self.classes.len()];
        let first = program.columns.len();
        for placing in &self.placings {
            let rate = self.classes[placing.class].rate / parts;
            let cost = ceiling_price(&placing.takes) * rate;
            let column = program.column(Column { cost, most: parts, whole: self.slices.is_some() });
            placing.takes.iter().for_each(|&(at, amount)| over[at].push((column, amount * rate)));
            busy[placing.on].push((column, self.busy(placing) / parts));
            for &stage in placing.duty.stages() {
                done[placing.class][stage as usize].push((column, 1.0));
            }
        }
        for (class, stages) in self.classes.iter().zip(done) {
            let asked = |stage: usize| class.asks.stages().iter().any(|&asked| asked as usize == stage);
            for (_, terms) in stages.into_iter().enumerate().filter(|(stage, _)| asked(*stage)) {
                program.constrain(terms, Relation::Equal, parts);
            }
        }
        for (kind, mut terms) in busy.into_iter().enumerate() {
            let spares = self.rentables[kind].spares;
            if spares > 0 {
                let used = program.column(Column { cost: 0.0, most: 1.0, whole: true });
                terms.push((used, f64::from(spares)));
                let own = self.placings.iter().enumerate().filter(|(_, placing)| placing.on == kind);
                for (at, _) in own {
                    program.constrain(vec![(first + at, 1.0), (used, -parts)], Relation::AtMost, 0.0);
                }
            }
            program.constrain(terms, Relation::AtMost, 0.0);
        }
        for (ceiling, terms) in self.ceilings.iter().zip(over) {
            let terms = terms.into_iter().map(|(column, amount)| (column, amount / ceiling.most)).collect();
            program.constrain(terms, Relation::AtMost, 1.0);
        }
        program
    }

    /// The instances that a placing of a whole class keeps busy.
    fn busy(&self, placing: &Placing) -> f64 {
        let busy = placing.instances * self.classes[placing.class].rate;
        if busy > 0.0 { busy.max(BUSY_MIN) } else { 0.0 }
    }

    /// Where to start from: the relaxed optimum's shares on whole instances. It may break a limit.
    fn rounded_up(&self, relaxed: &Solution) -> Vec<f64> {
        let (kinds, placings) = (self.rentables.len(), self.placings.len());
        let mut values = relaxed.values.clone();
        values[..kinds].iter_mut().for_each(|count| *count = (*count - ROUNDING).ceil());
        let with_spares = (0..kinds).filter(|kind| self.rentables[*kind].spares > 0);
        for (kind, in_use) in with_spares.zip(kinds + placings..) {
            let own = |at: &usize| self.placings[*at].on == kind && values[kinds + at] > 0.0;
            let busy = |at: usize| values[kinds + at] * self.busy(&self.placings[at]);
            let used: Vec<usize> = (0..placings).filter(own).collect();
            if !used.is_empty() {
                let load: f64 = used.iter().map(|&at| busy(at)).sum();
                values[kind] = (load - ROUNDING).ceil() + f64::from(self.rentables[kind].spares);
                values[in_use] = 1.0;
            }
        }
        values
    }

    fn check(&self) -> Result<(), Unplanned> {
        let sound = |value: f64| value.is_finite() && value >= 0.0;
        let takes_sound = |takes: &[(usize, f64)]| {
            takes.iter().all(|&(at, amount)| at < self.ceilings.len() && sound(amount))
        };
        let invalid = |name: &str, what: &str| Err(Unplanned::Invalid(format!("{what} of '{name}'")));
        for rentable in &self.rentables {
            if !sound(rentable.usd_per_hour.0) || !takes_sound(&rentable.takes) {
                return invalid(&rentable.name, "the rent, or the use of a ceiling,");
            }
        }
        for ceiling in &self.ceilings {
            if !(sound(ceiling.most) && ceiling.most > 0.0 && sound(ceiling.usd_per_hour.0)) {
                return invalid(&ceiling.name, "the size or the price");
            }
        }
        for placing in &self.placings {
            let known = placing.on < self.rentables.len() && placing.class < self.classes.len();
            if !known || !sound(placing.instances) || !takes_sound(&placing.takes) {
                let class = self.classes.get(placing.class).map_or("an unknown class", |class| &class.name);
                return invalid(class, "a placing");
            }
        }
        for (at, class) in self.classes.iter().enumerate() {
            if !sound(class.rate) {
                return invalid(&class.name, "the rate");
            }
            let own = || self.placings.iter().filter(|placing| placing.class == at);
            let missing = |stage: &WorkStage| !own().any(|placing| placing.duty.stages().contains(stage));
            if let Some(&stage) = class.asks.stages().iter().find(|stage| missing(stage)) {
                return Err(Unplanned::Unserved { class: class.name.clone(), stage });
            }
        }
        match self.slices {
            Some(0) => Err(Unplanned::Invalid("no slices".into())),
            _ => Ok(()),
        }
    }
}

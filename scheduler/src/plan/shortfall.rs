//! Why no fleet meets an objective, and the nearest that one could meet.

use super::linear::Solver;
use super::market::Market;
use super::offer::OfferedPart;
use mixfleet_hal::units::{Ordered, Seconds};
use serde::Serialize;

/// Halvings in the search for the load that an inventory carries.
const HALVINGS: u32 = 12;

/// What binds.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "binds", rename_all = "snake_case")]
pub enum Shortfall {
    /// No instance holds the weights and enough of the requests.
    Memory {
        /// Share of the requests that some instance holds.
        held: f64,
    },
    /// Prompts take too long even alone.
    Ttft {
        /// The least TTFT that enough requests can meet.
        nearest_s: f64,
        /// Devices and part that reach it.
        on: String,
    },
    /// Steps take too long even alone.
    Tbt {
        /// The least TBT that enough requests can meet.
        nearest_s: f64,
        /// Devices and part that reach it.
        on: String,
    },
    /// The parts that there are do not carry the load.
    Inventory {
        /// The share of the load that they carry at most.
        carried: f64,
        /// What the cheapest fleet without limits needs beyond them.
        missing: Vec<MissingDevices>,
    },
    /// Every fleet has more instances than a simulation takes.
    Simulation {
        /// Instances of the smallest fleet.
        instances: u64,
        /// Instances that a simulation takes.
        most: u64,
    },
}

/// Devices that an inventory lacks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MissingDevices {
    /// The part.
    pub part: &'static str,
    /// How many more are needed.
    pub devices: u64,
}

impl std::fmt::Display for Shortfall {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Shortfall::Memory { held } if *held <= 0.0 => write!(
                f,
                "memory binds: no instance of up to 32 devices holds the model and one of the requests; allow \
                 larger parts, or store weights in fewer bits"
            ),
            Shortfall::Memory { held } => write!(
                f,
                "memory binds: no instance of up to 32 devices holds the model and more than {:.2} % of the \
                 requests; allow larger parts, or store weights in fewer bits",
                100.0 * held
            ),
            Shortfall::Ttft { nearest_s, on } => {
                write!(
                    f,
                    "TTFT binds: prompts take longer even alone; the nearest is {nearest_s:.3} s, on {on}"
                )
            }
            Shortfall::Tbt { nearest_s, on } => {
                write!(f, "TBT binds: steps take longer even alone; the nearest is {nearest_s:.4} s, on {on}")
            }
            Shortfall::Inventory { carried, missing } => {
                write!(
                    f,
                    "the inventory binds: it carries at most {:.1} % of the load within the objectives",
                    100.0 * carried
                )?;
                let words = |lack: &MissingDevices| format!("{} {}", lack.devices, lack.part);
                let words: Vec<String> = missing.iter().map(words).collect();
                match words.is_empty() {
                    true => Ok(()),
                    false => write!(f, "; with {} more it would carry all", words.join(" and ")),
                }
            }
            Shortfall::Simulation { instances, most } => write!(
                f,
                "the load takes {instances} instances or more, and a simulation takes {most}: plan for a part of the \
                 load, and rent that fleet several times"
            ),
        }
    }
}

impl Market {
    /// What keeps every fleet from the objectives; empty if the rates allow one.
    pub fn shortfall(&self, solver: &dyn Solver) -> Vec<Shortfall> {
        let level = self.ask.level;
        let mut found = Vec::new();
        match self.fastest(|(ttft, _)| ttft) {
            Err(held) => return vec![Shortfall::Memory { held }],
            Ok((least, on)) if least > level.ttft => found.push(Shortfall::Ttft { nearest_s: least.0, on }),
            Ok(_) => {}
        }
        if let Ok((least, on)) = self.fastest(|(_, tbt)| tbt)
            && least > level.tbt
        {
            found.push(Shortfall::Tbt { nearest_s: least.0, on });
        }
        if found.is_empty() && self.relaxed(solver, 1.0, None).is_err() {
            let (carried, missing) = (self.carried(solver), self.missing(solver));
            found.push(Shortfall::Inventory { carried, missing });
        }
        found
    }

    /// The least time that the required share of classes meets, and the fleet that reaches it; or the share
    /// of requests that memory holds.
    fn fastest(&self, time: impl Fn((Seconds, Seconds)) -> Seconds) -> Result<(Seconds, String), f64> {
        let mut least: Vec<(Seconds, f64, String)> = Vec::new();
        for class in &self.ask.classes {
            let of = |at: usize| {
                let times = self.kinds[at].instance.fastest(&class.slowest).ok()?;
                Some((time(times), at))
            };
            let best = (0..self.kinds.len()).filter_map(of).min_by_key(|(time, _)| Ordered(time.0));
            if let Some((time, at)) = best {
                let kind = &self.kinds[at];
                let layout = kind.instance.layout;
                let id = self.ask.parts[kind.part].part.id;
                let on = format!("{} x {id}{}", layout.devices, layout.words());
                least.push((time, class.rate, on));
            }
        }
        least.sort_by_key(|(time, ..)| Ordered(time.0));
        let mut wanted = self.rate() - self.left_out_max();
        for (time, rate, on) in &least {
            wanted -= rate;
            if wanted <= 0.0 {
                return Ok((*time, on.clone()));
            }
        }
        Err(least.iter().map(|(_, rate, _)| rate).fold(0.0, |sum, rate| sum + rate) / self.rate())
    }

    /// What the cheapest fleet without an inventory has beyond it.
    fn missing(&self, solver: &dyn Solver) -> Vec<MissingDevices> {
        let mut endless = self.clone();
        endless.ask.parts.iter_mut().for_each(|offer| offer.most = None);
        let Some(fleet) = endless.cheapest(solver) else { return Vec::new() };
        let lacks = |(part, offer): (usize, &OfferedPart)| {
            let wanted: u64 = fleet.pools.iter().map(|pool| pool.devices_of(part)).sum();
            let devices = wanted.saturating_sub(offer.most?.into());
            (devices > 0).then_some(MissingDevices { part: offer.part.id, devices })
        };
        self.ask.parts.iter().enumerate().filter_map(lacks).collect()
    }

    /// The share of the load that the relaxed program carries.
    fn carried(&self, solver: &dyn Solver) -> f64 {
        let (mut low, mut high) = (0.0, 1.0);
        for _ in 0..HALVINGS {
            let middle = 0.5 * (low + high);
            if self.relaxed(solver, middle, None).is_ok() { low = middle } else { high = middle }
        }
        low
    }
}

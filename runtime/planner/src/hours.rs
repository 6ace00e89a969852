//! What each hour of a load takes by the program, and what renting by the hour would save.

use crate::cores::on_all_cores;
use mixfleet_scheduler::plan::branching::Microlp;
use mixfleet_scheduler::plan::market::{FormedFleet, Market};

/// The plan of an hour.
pub struct HourPlan {
    /// Requests per second of all classes.
    pub requests_per_s: f64,
    /// Rent below which no fleet carries it by rates; `None` if none can be planned.
    pub lower_bound: Option<f64>,
    /// The cheapest fleet; `None` if there is none, or no request.
    pub fleet: Option<FormedFleet>,
}

impl HourPlan {
    /// Plans each hour, whose rates are those of the market's classes, on all cores.
    pub fn of_each(market: &Market, rates: &[Vec<f64>]) -> Vec<Self> {
        on_all_cores(rates.len(), |hour| HourPlan::of(market, &rates[hour]))
    }

    /// The plan under such rates of the market's classes.
    fn of(market: &Market, rates: &[f64]) -> Self {
        let requests_per_s = rates.iter().sum();
        if requests_per_s == 0.0 {
            return HourPlan { requests_per_s, lower_bound: Some(0.0), fleet: None };
        }
        let market = market.with_rates(rates);
        let lower_bound = market.lower_bound(&Microlp).ok().map(|usd| usd.0);
        let fleet = lower_bound.and_then(|_| market.cheapest(&Microlp));
        HourPlan { requests_per_s, lower_bound, fleet }
    }

    /// What it costs; `None` if no fleet serves it.
    pub fn usd_per_hour(&self) -> Option<f64> {
        match &self.fleet {
            Some(fleet) => Some(fleet.usd_per_hour.0),
            None => (self.requests_per_s == 0.0).then_some(0.0),
        }
    }
}

/// The hour with the most expensive fleet, the first of them if there are several. An hour that no fleet
/// serves counts as the most expensive.
pub fn dearest(hours: &[HourPlan]) -> Option<usize> {
    let usd = |hour: &HourPlan| hour.usd_per_hour().unwrap_or(f64::INFINITY);
    let rank = |(at, hour): &(usize, &HourPlan)| (*at, usd(hour));
    let all = hours.iter().enumerate().map(|each| rank(&each));
    all.reduce(|a, b| if b.1 > a.1 { b } else { a }).map(|(at, _)| at)
}

/// The cost of renting by the hour in the mean, and the share that it saves of the dearest hour's fleet all
/// the time. `None` if an hour cannot be served.
pub fn renting_by_the_hour(hours: &[HourPlan]) -> Option<(f64, f64)> {
    let costs: Vec<f64> = hours.iter().map(HourPlan::usd_per_hour).collect::<Option<_>>()?;
    let most = costs.iter().copied().fold(0.0, f64::max);
    let mean = costs.iter().sum::<f64>() / costs.len() as f64;
    (most > 0.0).then(|| (mean, 1.0 - mean / most))
}

#[cfg(test)]
mod tests {
    use super::*;
    use mixfleet_hal::units::UsdPerHour;
    use mixfleet_hal::{DType, StoredAs};
    use mixfleet_scheduler::plan::forms::FleetForm;

    fn hour(usd: Option<f64>, requests_per_s: f64) -> HourPlan {
        let stored = StoredAs::Plain(DType::Bf16);
        let of = |usd| FormedFleet {
            form: FleetForm::Free,
            stored,
            pools: Vec::new(),
            usd_per_hour: UsdPerHour(usd),
        };
        HourPlan { requests_per_s, lower_bound: usd, fleet: usd.map(of) }
    }

    #[test]
    fn renting_by_the_hour_saves_what_the_other_hours_need_less() {
        let day = [hour(Some(2.0), 1.0), hour(Some(8.0), 9.0), hour(None, 0.0), hour(Some(8.0), 8.0)];
        assert_eq!(dearest(&day), Some(1));
        assert_eq!(renting_by_the_hour(&day), Some((4.5, 1.0 - 4.5 / 8.0)));
        let unserved = [hour(Some(2.0), 1.0), hour(None, 50.0)];
        assert_eq!((dearest(&unserved), renting_by_the_hour(&unserved)), (Some(1), None));
        assert_eq!((dearest(&[]), renting_by_the_hour(&[])), (None, None));
    }
}

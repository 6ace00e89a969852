//! How fleets stand a load and times that are worse than planned.

/// Factors on the load, on the times of steps and on prices.
pub const FACTORS: [f64; 2] = [1.25, 1.5];
/// Maximum rent of a more robust fleet, as a multiple of the cheapest.
const DEARER_MAX: f64 = 1.05;

/// Shares of the requests that meet the objectives under [`FACTORS`]; `None` where the time ended.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct FleetStress {
    /// Load factor of the stress test.
    pub load: [Option<f64>; 2],
    /// Step time factor of the stress test.
    pub times: [Option<f64>; 2],
}

impl FleetStress {
    /// The largest factors on the load and on times under which `share` of the requests meet the objectives;
    /// 1 if none does.
    pub fn slack(&self, share: f64) -> [f64; 2] {
        [self.load, self.times].map(|attained| {
            let held = FACTORS.iter().zip(attained).take_while(|(_, of)| of.is_some_and(|of| of >= share));
            held.last().map_or(1.0, |(factor, _)| *factor)
        })
    }

    /// The mean of all four shares, if all are known.
    fn mean(&self) -> Option<f64> {
        self.load.iter().chain(&self.times).copied().sum::<Option<f64>>().map(|sum| sum / 4.0)
    }
}

/// The fleet that meets most objectives under stress, among those within 5 % of the cheapest; the cheapest of
/// equals. `fleets` are prices, cheapest first.
pub(crate) fn most_robust(fleets: &[(f64, FleetStress)]) -> Option<usize> {
    let most = DEARER_MAX * fleets.first()?.0;
    let near = fleets.iter().enumerate().take_while(|(_, (usd, _))| *usd <= most);
    let known: Option<Vec<(usize, f64)>> = near.map(|(at, (_, stress))| Some((at, stress.mean()?))).collect();
    known?.into_iter().reduce(|a, b| if b.1 > a.1 { b } else { a }).map(|(at, _)| at)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stress(load: [f64; 2], times: [f64; 2]) -> FleetStress {
        FleetStress { load: load.map(Some), times: times.map(Some) }
    }

    #[test]
    fn slack_is_the_largest_factor_that_holds_with_all_below_it() {
        assert_eq!(stress([0.999, 0.99], [0.98, 0.5]).slack(0.99), [1.5, 1.0]);
        assert_eq!(stress([0.995, 0.98], [0.98, 0.999]).slack(0.99), [1.25, 1.0]);
        assert_eq!(FleetStress::default().slack(0.99), [1.0, 1.0]);
    }

    #[test]
    fn the_most_robust_is_near_the_cheapest_and_the_cheapest_of_equals() {
        let [weak, strong] = [stress([0.9, 0.5], [0.9, 0.6]), stress([0.99, 0.7], [0.9, 0.6])];
        assert_eq!(most_robust(&[(10.0, weak), (10.4, strong), (20.0, stress([1.0; 2], [1.0; 2]))]), Some(1));
        assert_eq!(most_robust(&[(10.0, strong), (10.4, strong)]), Some(0));
        assert_eq!(most_robust(&[(10.0, weak), (10.4, FleetStress::default())]), None, "not all is known");
        assert_eq!(most_robust(&[]), None);
    }
}

//! KV that comes to an instance and leaves it beside its steps, and takes of their time.

use mixfleet_hal::cast::to_u32;
use mixfleet_scheduler::cost::KvCopy;

/// Time that copies must take to count: less is rounding.
const LEAST_S: f64 = 1e-9;

/// What copies still take of an instance's steps. It is spread over the time in which the KV comes and goes:
/// `share` of that time is lost to steps, which are `1 / (1 - share)` times as long.
#[derive(Debug, Default)]
pub(super) struct Copying {
    left_s: f64,
    share: f64,
    /// End of the last step, or when the first of these copies began: the device copies since, and does
    /// nothing else.
    since_s: f64,
}

impl Copying {
    /// Adds a copy that begins at `now_s`. Shares do not add up, since a network card carries one copy after
    /// the other.
    pub(super) fn add(&mut self, now_s: f64, copy: KvCopy) {
        if copy.takes.0 < LEAST_S {
            return;
        }
        if self.left_s < LEAST_S {
            *self = Copying { since_s: self.since_s.max(now_s), ..Copying::default() };
        }
        self.left_s += copy.takes.0;
        self.share = self.share.max(copy.share());
    }

    /// Begins a step at `now_s` that alone takes `step_s`: how many times as long it is, and for how many
    /// such steps this holds.
    pub(super) fn begin(&mut self, now_s: f64, step_s: f64) -> (f64, u32) {
        self.left_s -= (now_s - self.since_s).max(0.0) * self.share;
        self.since_s = now_s;
        if self.left_s < LEAST_S || step_s <= 0.0 {
            return (1.0, u32::MAX);
        }
        let all = self.left_s / step_s;
        let each = KvCopy::slows(self.share);
        let slower = 1.0 + each.min(all);
        if slower == 1.0 {
            self.left_s = 0.0;
            return (1.0, u32::MAX);
        }
        let steps = to_u32((all / each).min(f64::from(u32::MAX)));
        (slower, steps.max(1))
    }

    /// Ends steps at `now_s` that were `slower` times as long as alone and took `time_s`.
    pub(super) fn end(&mut self, now_s: f64, slower: f64, time_s: f64) {
        self.left_s -= time_s * (1.0 - 1.0 / slower);
        self.since_s = now_s;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mixfleet_hal::units::Seconds;

    fn copying(takes: f64, over: f64) -> Copying {
        let mut copying = Copying::default();
        copying.add(0.0, KvCopy { takes: Seconds(takes), over: Seconds(over) });
        copying
    }

    #[test]
    fn what_is_there_at_once_makes_one_step_longer() {
        let mut copying = copying(0.3, 0.0);
        let (slower, steps) = copying.begin(0.0, 0.1);
        assert!((slower - 4.0).abs() < 1e-9 && steps == 1, "{slower} {steps}");
        copying.end(0.4, slower, 0.4);
        assert_eq!(copying.begin(0.4, 0.1), (1.0, u32::MAX));
    }

    #[test]
    fn what_comes_over_a_link_is_spread_over_as_long() {
        // Of 1 s, 0.2 s are lost to steps: 8 steps of 0.1 s fit in, and a ninth finds nothing.
        let mut copying = copying(0.2, 1.0);
        let (slower, steps) = copying.begin(0.0, 0.1);
        assert!((slower - 1.25).abs() < 1e-9 && steps == 8, "{slower} {steps}");
        copying.end(1.0, slower, 1.0);
        assert_eq!(copying.begin(1.0, 0.1), (1.0, u32::MAX));
    }

    #[test]
    fn an_idle_device_copies_for_nothing() {
        let mut copying = copying(0.2, 1.0);
        let (slower, steps) = copying.begin(0.95, 0.1);
        assert!((slower - 1.1).abs() < 1e-9 && steps == 1, "{slower} {steps}");
        copying.end(1.06, slower, 0.11);
        copying.add(5.0, KvCopy { takes: Seconds(0.1), over: Seconds::ZERO });
        assert!((copying.begin(5.0, 0.1).0 - 2.0).abs() < 1e-9, "not for the time before it came");
    }

    #[test]
    fn rounding_is_nothing() {
        assert_eq!(copying(1e-12, 0.0).begin(0.0, 0.1), (1.0, u32::MAX));
        assert_eq!(copying(1e-3, 1e18).begin(0.0, 1e9), (1.0, u32::MAX));
    }
}

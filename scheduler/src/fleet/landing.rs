//! Predicting what KV takes of an instance's steps as it lands.

use super::Fleet;
use crate::cost::KvCopy;
use mixfleet_hal::units::{Bytes, Seconds};

/// What KV takes of steps that lands while a request decodes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct KvLandings {
    all: Seconds,
    /// The largest share of the device's time.
    share: f64,
}

impl FromIterator<KvCopy> for KvLandings {
    fn from_iter<T: IntoIterator<Item = KvCopy>>(copies: T) -> Self {
        let taking = copies.into_iter().filter(|copy| copy.takes.0 > 0.0);
        taking.fold(KvLandings::default(), |sum, copy| KvLandings {
            all: sum.all + copy.takes,
            share: sum.share.max(copy.share()),
        })
    }
}

impl KvLandings {
    /// The mean of `steps` steps that take `step` alone, the longest ones while it lands.
    pub(super) fn beside(&self, step: Seconds, steps: f64) -> Seconds {
        if self.all.0 <= 0.0 {
            return step;
        }
        step + (self.all * (1.0 / steps)).min(step * KvCopy::slows(self.share))
    }
}

impl Fleet {
    /// `bytes` bytes of KV that land where a request decodes, while a prefill of `prefill` elsewhere computes
    /// them; nothing if both are one instance.
    pub(super) fn lands(&self, (from, to): (usize, usize), bytes: Bytes, prefill: Seconds) -> KvCopy {
        let (from, to) = (&self.loads[from], &self.loads[to]);
        self.link(from, to).map_or(KvCopy::default(), |link| KvCopy {
            takes: to.spec.kv_copies.lands(bytes, self.config.layers),
            over: link.time(bytes).max(prefill),
        })
    }
}

//! A request on an instance.

use super::super::tiers::ByTier;
use super::{Gaps, Job};
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::batch::Place;
use std::ops::Range;

/// A request with blocks here.
pub(super) struct Sequence {
    pub(super) job: Job,
    /// Tokens whose KV is here.
    pub(super) context: u32,
    /// Tokens to have KV before the next one is drawn.
    pub(super) wanted: u32,
    pub(super) generated: u32,
    pub(super) last_token_s: f64,
    pub(super) gaps: Vec<Gaps>,
    /// Leading blocks of its chain that it holds in the cache.
    pub(super) pinned: usize,
    /// Other blocks that it holds.
    pub(super) private: u64,
    /// Blocks of its chain that come from elsewhere: first those that lower tiers held, then those of another instance.
    pub(super) staged: Range<usize>,
    /// Of those, the ones from lower tiers.
    pub(super) loaded: ByTier,
    /// Its prompt was begun here.
    pub(super) began: bool,
    /// Its first token came from elsewhere, or is out.
    pub(super) started: bool,
    /// Keys of its chain that others know too.
    pub(super) public: usize,
}

impl Sequence {
    pub(super) fn new(job: Job) -> Self {
        Sequence {
            wanted: job.prompt_tokens,
            public: job.chain.len(),
            job,
            context: 0,
            generated: 0,
            last_token_s: 0.0,
            gaps: Vec::new(),
            pinned: 0,
            private: 0,
            staged: 0..0,
            loaded: [0; 3],
            began: false,
            started: false,
        }
    }

    /// Its place in the order of all requests.
    pub(super) fn place(&self) -> Place {
        Place { due: Seconds(self.job.due_s), request: self.job.request }
    }

    pub(super) fn pending(&self) -> u32 {
        self.wanted - self.context
    }

    /// More tokens, in steps from `began_s` to `now_s`; what lay between the last token and them belongs to the first gap.
    pub(super) fn advance(&mut self, now_s: f64, began_s: f64, gaps: Gaps) {
        let waited_s = (began_s - self.last_token_s).max(0.0);
        if waited_s > 0.0 {
            let first_s = gaps.first_s + waited_s;
            self.gaps.push(Gaps { count: 1, first_s, last_s: first_s });
            if gaps.count > 1 {
                self.gaps.push(Gaps { count: gaps.count - 1, ..gaps });
            }
        } else {
            self.gaps.push(gaps);
        }
        self.generated += gaps.count;
        self.context += gaps.count;
        self.last_token_s = now_s;
    }
}

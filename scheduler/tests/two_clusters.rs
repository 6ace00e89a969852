//! The closed form of prompts that are divided by length between two clusters (prefill as a service, arXiv
//! 2604.15039), with which programs are compared.
//!
//! A local cluster has instances for prompts and for decoding. A remote one only computes prompts, those
//! longer than a threshold t, and sends their KV over a link. With the distribution f of prompt lengths, the
//! rate of requests is the least of
//!
//! ```text
//! remote instances / integral of T_remote f above t        bandwidth of the link / integral of KV f above t
//! local prefill instances / integral of T_local f up to t  local decode instances x requests/s of each
//! ```
//!
//! The first two rise with t and the third falls, so that the best t makes prompts wait nowhere; the best
//! division of local instances makes as many first tokens as answers. Both are found by going through all.
//! The paper writes `N / (T(mean length) p)` for `N / integral of T f`, which is the same where T is linear;
//! prefill is convex, so that the mean of its times is longer than the time of the mean.

use mixfleet_hal::units::{Bytes, BytesPerSecond, Seconds};

/// The share of prompts that have a length.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LengthShare {
    /// The length, of what no cache holds.
    pub(crate) tokens: u32,
    /// Their share of all prompts.
    pub(crate) share: f64,
}

/// Two clusters, between which prompts are to be divided.
pub(crate) struct RemotePrefill<'a> {
    /// Prompts by length, in increasing order.
    pub(crate) lengths: &'a [LengthShare],
    /// Instances of the remote cluster.
    pub(crate) remote: u32,
    /// Time of a prompt there.
    pub(crate) remote_prefill_s: &'a dyn Fn(u32) -> Seconds,
    /// KV of a prompt.
    pub(crate) kv_bytes: &'a dyn Fn(u32) -> Bytes,
    /// Bandwidth between the clusters.
    pub(crate) link: BytesPerSecond,
    /// Instances of the local cluster.
    pub(crate) local: u32,
    /// Time of a prompt there.
    pub(crate) local_prefill_s: &'a dyn Fn(u32) -> Seconds,
    /// Requests per second that one local instance decodes.
    pub(crate) decode_rate: f64,
}

/// A division of prompts and instances, and what it carries.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct DividedPrompts {
    /// Prompts with more tokens go to the remote cluster.
    pub(crate) threshold: u32,
    /// Local instances for prompts.
    pub(crate) prefill: u32,
    /// Local instances for decoding.
    pub(crate) decode: u32,
    /// Requests per second that all together carry.
    pub(crate) rate: f64,
    /// Share of requests that go to the remote cluster.
    pub(crate) remote_share: f64,
    /// What crosses the link at the rate of all together.
    pub(crate) link: BytesPerSecond,
}

/// What the prompts on one side of the threshold take, per request of either side.
#[derive(Clone, Copy, Default)]
struct Side {
    share: f64,
    seconds: f64,
    bytes: f64,
}

impl RemotePrefill<'_> {
    /// The division that carries most; of equal ones that with the fewest remote prompts, and then with the
    /// most instances for decoding. `None` without lengths.
    pub(crate) fn best(&self) -> Option<DividedPrompts> {
        let sides = self.sides();
        let all = sides.iter().rev().filter(|_| !self.lengths.is_empty());
        let divided = all.flat_map(|&(threshold, local, remote)| {
            (0..=self.local).map(move |prefill| self.divided(threshold, prefill, local, remote))
        });
        divided.reduce(|best, next| if next.rate > best.rate { next } else { best })
    }

    /// What a threshold carries with some number of local instances for prompts.
    pub(crate) fn at(&self, threshold: u32, prefill: u32) -> DividedPrompts {
        let sides = self.sides();
        let at = sides.partition_point(|(length, ..)| *length <= threshold) - 1;
        self.divided(threshold, prefill.min(self.local), sides[at].1, sides[at].2)
    }

    /// The local and remote requests at a threshold of 0 and of each length, in increasing order.
    fn sides(&self) -> Vec<(u32, Side, Side)> {
        let take = |side: &mut Side, length: &LengthShare, seconds: Seconds| {
            side.share += length.share;
            side.seconds += length.share * seconds.0;
            side.bytes += length.share * (self.kv_bytes)(length.tokens).0;
            *side
        };
        let thresholds = std::iter::once(0).chain(self.lengths.iter().map(|length| length.tokens));
        let mut sides: Vec<_> = thresholds.map(|at| (at, Side::default(), Side::default())).collect();
        let (mut local, mut remote) = (Side::default(), Side::default());
        for (at, length) in self.lengths.iter().enumerate() {
            sides[at + 1].1 = take(&mut local, length, (self.local_prefill_s)(length.tokens));
        }
        for (at, length) in self.lengths.iter().enumerate().rev() {
            sides[at].2 = take(&mut remote, length, (self.remote_prefill_s)(length.tokens));
        }
        sides
    }

    fn divided(&self, threshold: u32, prefill: u32, local: Side, remote: Side) -> DividedPrompts {
        let rate = |have: f64, each: f64| if each > 0.0 { have / each } else { f64::INFINITY };
        let computed = rate(f64::from(self.remote), remote.seconds);
        let remote_rate = computed.min(rate(self.link.0, remote.bytes));
        let local_rate = rate(f64::from(prefill), local.seconds);
        let decode = self.local - prefill;
        let decode_rate = f64::from(decode) * self.decode_rate;
        let least = remote_rate.min(local_rate).min(decode_rate);
        DividedPrompts {
            threshold,
            prefill,
            decode,
            rate: least,
            remote_share: remote.share,
            link: BytesPerSecond(least * remote.bytes),
        }
    }
}

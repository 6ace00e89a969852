//! Counters of KV exchanged with external engines.

use prometheus_client::encoding::EncodeLabelSet;

/// Labels of [`Metrics::kv_exchange_blocks`](super::Metrics::kv_exchange_blocks).
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ExchangeLabels {
    /// `in` or `out`.
    pub direction: &'static str,
    /// Of outgoing blocks, `sent`. Of incoming ones, `stored`; `held`, if they were there; `refused`, if they
    /// fail a check; or `no_room`.
    pub outcome: &'static str,
}

//! What is counted of KV that goes to engines of others and comes from them.

use prometheus_client::encoding::EncodeLabelSet;

/// Labels of [`Metrics::kv_exchange_blocks`](super::Metrics::kv_exchange_blocks).
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ExchangeLabels {
    /// `in` or `out`.
    pub direction: &'static str,
    /// Of blocks that go, `sent`. Of those that come, `stored`; `held`, if they were there; `refused`, if
    /// they are not what they should be; or `no_room`.
    pub outcome: &'static str,
}

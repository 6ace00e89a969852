//! Copies of hot prefixes ahead of demand, and of complete answers to KV nodes, which are sent like pulled
//! prefixes.
//!
//! The fleet machine orders a copy when a request with the prefix arrives, or when one is complete. The
//! receiver makes room for it as for flex requests, the holder sends as much as it still has, and the
//! received part stays in the receiver's cache. A copy that fails is dropped and not retried: the fleet
//! machine forgets a copy that does not arrive.

use super::coordinator::{Coordinator, Tracked};
use super::transfers::Transferred;
use crate::request::{GenerateRequest, Hints, ServiceTier};
use mixfleet_hal::cast::{to_u32, to_u64};
use mixfleet_scheduler::batch::RequestId;
use mixfleet_scheduler::fleet::{Action, Event, InstanceId};
use mixfleet_scheduler::transfer::PrefixSource;
use std::sync::Arc;

impl Coordinator {
    /// Offers the KV of a complete answer on `instance` to KV nodes, and starts the copy that one of them
    /// accepts.
    pub(super) fn offer(&mut self, request: RequestId, instance: InstanceId, tracked: &Tracked) {
        if !self.front.machine().has_kv_node() {
            return;
        }
        let wanted = &tracked.wanted;
        // the last token's KV was never computed
        let answer = &tracked.generated[..tracked.generated.len().saturating_sub(1)];
        let tokens = [&wanted.prompt_ids[..], answer].concat();
        let chains = self.chains(wanted, &tokens);
        let actions = self.fleet_step(Event::Offered { request, instance, chains });
        self.begin_copies(&actions, wanted, &tokens);
    }

    /// Starts the copies that were decided of prefixes of `text`, in the namespace of `wanted`.
    pub(super) fn begin_copies(&mut self, actions: &[Action], wanted: &GenerateRequest, text: &[u32]) {
        for action in actions {
            let Action::Replicate { from, to, ref hashes, .. } = *action else { continue };
            let Some(block_tokens) = self.instances.get(&to).map(|receiver| receiver.block_tokens) else {
                continue;
            };
            // The whole prefix is named; the part that the receiver has is not sent.
            let tokens = hashes.len() * block_tokens as usize;
            let Some(prefix) = text.get(..tokens) else { continue };
            let request = self.front.next_request();
            let wanted = Arc::new(GenerateRequest {
                prompt_ids: prefix.into(),
                forced_ids: Arc::default(),
                max_tokens: 1,
                logprobs: None,
                grammar: None,
                hints: Hints { tier: ServiceTier::Flex, ..Hints::default() },
                ..wanted.clone()
            });
            tracing::info!(%from, %to, tokens, "a prefix is copied");
            self.metrics.prefix_copies.inc();
            self.metrics.prefix_copy_tokens.inc_by(to_u64(tokens));
            self.copies.insert(request, wanted);
            let source = PrefixSource { holder: from, until: to_u32(tokens) };
            self.transfer(Transferred::CopyWanted { request, source, to });
        }
    }
}

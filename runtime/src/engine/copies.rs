//! Copies of hot prefixes ahead of demand, and of complete answers to KV nodes, which are sent like pulled
//! prefixes.
//!
//! The fleet machine asks for a copy when a request with the prefix arrives, or when one is complete. The
//! receiver makes room for it as for flex requests, the holder sends what it still has, and what lands stays
//! in the receiver's cache. A copy that fails is dropped and not retried: the fleet machine forgets a copy
//! that does not arrive.

use super::coordinator::{Coordinator, Tracked};
use super::messages::{HandOff, Job, Lacking, Landing, Order};
use crate::request::{GenerateRequest, Hints, ServiceTier};
use mixfleet_hal::cast::{to_u32, to_u64};
use mixfleet_scheduler::batch::{RequestId, Urgency};
use mixfleet_scheduler::fleet::{Action, Event, InstanceId};
use std::sync::Arc;

/// A copy in progress.
pub(super) struct CopyInProgress {
    from: InstanceId,
    to: InstanceId,
    /// The prefix as a prompt.
    wanted: Arc<GenerateRequest>,
}

impl Coordinator {
    /// Offers the KV of a complete answer to KV nodes, and starts the copy that one of them takes.
    pub(super) fn offer(&mut self, request: RequestId, tracked: &Tracked) {
        let instance = tracked.decode;
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
            // The whole prefix is named; what the receiver has of it is not sent.
            let tokens = hashes.len() * block_tokens as usize;
            let Some(prefix) = text.get(..tokens) else { continue };
            let request = self.front.next_request();
            let wanted = Arc::new(GenerateRequest {
                prompt_ids: prefix.into(),
                max_tokens: 1,
                logprobs: None,
                grammar: None,
                hints: Hints { tier: ServiceTier::Flex, ..Hints::default() },
                ..wanted.clone()
            });
            let job = self.copy_job(request, &wanted, to);
            tracing::info!(%from, %to, tokens, "a prefix is copied");
            self.metrics.prefix_copies.inc();
            self.metrics.prefix_copy_tokens.inc_by(to_u64(tokens));
            self.copies.insert(request, CopyInProgress { from, to, wanted });
            self.send(to, Order::Copy { job, holder: from });
        }
    }

    fn copy_job(&self, request: RequestId, wanted: &Arc<GenerateRequest>, on: InstanceId) -> Job {
        let now = self.began + self.env.now();
        let hasher = self.hasher(wanted, self.instances[&on].kv);
        let (wanted, generated) = (wanted.clone(), Vec::new());
        let urgency = Urgency { gives_way: true, ..Urgency::due_at(now) };
        Job { request, urgency, ready: now, attempt: 0, wanted, generated, hasher }
    }

    /// Asks the holder for a copy once the receiver has room for what it lacks.
    pub(super) fn ask_for_copy(&self, request: RequestId, lacking: Lacking, landing: Landing) {
        let Some(CopyInProgress { from, to, wanted }) = self.copies.get(&request) else { return };
        if let Some(wire) = self.wire(*from, *to) {
            let until = to_u32(wanted.prompt_ids.len());
            let to = HandOff { attempt: 0, lacking, to: *to, landing, wire };
            self.send(*from, Order::Lend { job: self.copy_job(request, wanted, *from), until, to });
        }
    }

    /// Forgets a copy that is complete or that its receiver gave up. False if `request` is none.
    pub(super) fn end_copy(&mut self, request: RequestId, is_complete: bool) -> bool {
        let Some(CopyInProgress { from, .. }) = self.copies.remove(&request) else { return false };
        if !is_complete {
            self.send(from, Order::Cancel { request });
        }
        true
    }

    /// Drops the copies that `lost` names by holder and receiver.
    pub(super) fn drop_copies(&mut self, lost: impl Fn(InstanceId, InstanceId) -> bool) {
        let directory = &self.directory;
        self.copies.retain(|&request, CopyInProgress { from, to, .. }| {
            let is_lost = lost(*from, *to);
            for end in [*from, *to].into_iter().filter(|_| is_lost) {
                directory.order(end, Order::Cancel { request });
            }
            !is_lost
        });
    }
}

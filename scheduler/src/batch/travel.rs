//! KV that comes from other instances, and KV that they read here.

use super::{Action, After, Instance, Phase, RequestId};
use crate::kv::hash::PrefixHasher;

impl Instance {
    pub(super) fn landed(
        &mut self,
        request: RequestId,
        valid: u32,
        next: Option<u32>,
        actions: &mut Vec<Action>,
    ) {
        let Some(sequence) = self.sequences.get_mut(&request) else { return };
        let length = sequence.tokens.len() as u32;
        // Nobody waits for it: a word that came twice, or from who has lost count.
        if sequence.phase != Phase::Receiving || valid > length {
            return;
        }
        sequence.phase = Phase::Running;
        sequence.tokens.extend(next);
        // Without a next token the last one is computed again, to draw it here.
        sequence.computed = if next.is_some() { valid } else { valid.min(length - 1) };
        sequence.pulls = 0;
        if sequence.after.is_some() {
            let (tokens_cached, pages) = (sequence.computed, sequence.pages.clone());
            actions.push(Action::Admitted { request, tokens_cached, pages });
        } else {
            sequence.after = Some(After::Decode);
        }
        self.publish(request, actions);
    }

    pub(super) fn lend(
        &mut self,
        request: RequestId,
        tokens: &[u32],
        hasher: PrefixHasher,
        actions: &mut Vec<Action>,
    ) {
        self.unlend(request);
        let mut chain = hasher.start(self.limits.block_tokens);
        chain.extend(&tokens[..tokens.len() - tokens.len() % self.limits.block_tokens as usize]);
        let pages = self.blocks.longest_prefix(chain.hashes(), tokens);
        pages.iter().for_each(|&page| self.blocks.acquire(page));
        self.lent.insert(request, pages.clone());
        actions.push(Action::Lent { request, pages });
    }

    /// Deepest blocks first, as `release_pages` does.
    pub(super) fn unlend(&mut self, request: RequestId) {
        for page in self.lent.remove(&request).unwrap_or_default().into_iter().rev() {
            self.blocks.release(page);
        }
    }
}

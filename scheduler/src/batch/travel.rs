//! KV that comes from other instances, and KV that they read here.

use super::{Action, After, Instance, Phase, RequestId, Text};

impl<T: Text> Instance<T> {
    pub(super) fn landed(
        &mut self,
        request: RequestId,
        valid: u32,
        next: bool,
        actions: &mut Vec<Action<T::Block>>,
    ) {
        let Some(sequence) = self.sequences.get_mut(request) else { return };
        let length = sequence.length;
        // No sequence waits for it: the message was repeated, or belongs to an earlier placement.
        if sequence.phase != Phase::Receiving || valid > length {
            return;
        }
        sequence.length += u32::from(next);
        // Without a next token the last token is computed again, to draw the next one here.
        let computed = if next { valid } else { valid.min(length - 1) };
        // cached blocks are complete here, unlike possibly the blocks that they would be computed from
        sequence.computed = computed.max(sequence.computed);
        sequence.pulls = 0;
        if sequence.after == Some(After::Keep) {
            sequence.computed = valid;
            self.publish(request, actions);
            self.drop_request(request);
            return actions.push(Action::Kept { request });
        }
        let is_handed_off = sequence.after.is_none();
        if !is_handed_off {
            let tokens_cached = sequence.computed;
            actions.push(Action::Admitted { request, tokens_cached });
        } else {
            sequence.after = Some(After::Decode);
        }
        self.enter(request, Phase::Running);
        if is_handed_off {
            // pages that layers with a window no longer read were not sent: they must not be found
            self.give_back(request);
        }
        self.publish(request, actions);
        self.give_back(request);
    }

    pub(super) fn lend(&mut self, request: RequestId, mut text: T, actions: &mut Vec<Action<T::Block>>) {
        self.unlend(request);
        let blocks = text.length() / self.limits.block_tokens;
        let pages = self.blocks.whole_prefix(&mut text, blocks);
        pages.iter().for_each(|&page| self.blocks.acquire(page));
        self.lent.insert(request, pages.clone());
        actions.push(Action::Lent { request, pages });
    }

    /// Releases deepest blocks first, as `release_pages` does.
    pub(super) fn unlend(&mut self, request: RequestId) {
        for page in self.lent.remove(request).unwrap_or_default().into_iter().rev() {
            self.blocks.release(page);
        }
    }
}

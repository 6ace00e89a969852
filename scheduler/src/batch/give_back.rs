//! Giving back what layers with a window read no longer.

use super::{BlockPool, Instance, RequestId, Sequence, Text};
use crate::kv::parts::{NO_PAGE, first_kept};
use mixfleet_hal::cast::to_usize;

/// Gives back the pages of a sequence that no later token reads, the first ones first.
pub(super) fn let_go<T: Text>(blocks: &mut BlockPool<T::Block>, sequence: &mut Sequence<T>) {
    if !blocks.parts().lets_go() {
        return;
    }
    let (block_tokens, count) = (blocks.block_tokens(), blocks.parts().count() as usize);
    for part in 0..count {
        let window = blocks.parts().windows()[part];
        let until = to_usize(first_kept(window, sequence.computed.into(), block_tokens));
        let until = until.min(sequence.pages.len() / count);
        let gone_before = |&block: &usize| sequence.pages[block * count + part] == NO_PAGE;
        let from = (0..until).rev().find(gone_before).map_or(0, |block| block + 1);
        for block in from..until {
            let page = std::mem::replace(&mut sequence.pages[block * count + part], NO_PAGE);
            blocks.release(page);
        }
    }
}

impl<T: Text> Instance<T> {
    /// Gives back the pages that a running sequence no longer reads. A sequence that hands its KV off keeps
    /// and sends all.
    pub(super) fn give_back(&mut self, request: RequestId) {
        if let Some(sequence) = self.sequences.get_mut(request)
            && sequence.preemptable()
        {
            let_go(&mut self.blocks, sequence);
        }
    }
}

//! The tokens of a sequence in a simulation: the keys of its blocks.

use super::Active;
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::random::bits;
use mixfleet_scheduler::batch::Text;
use mixfleet_scheduler::kv::BlockHash;
use std::sync::Arc;

/// Seed for the keys of generated blocks.
const OWN: u64 = 0x5EED_0F0E_17B1_0C45;

/// Set only in the keys of generated blocks.
const GENERATED: u64 = 1 << 63;

/// A key of a trace, without the bit of generated blocks.
pub(in crate::simulate) fn public(key: BlockHash) -> BlockHash {
    BlockHash(key.0 & !GENERATED)
}

/// Whether another request can have this block; others are not reported to the fleet.
pub(super) fn is_public(key: &BlockHash) -> bool {
    key.0 & GENERATED == 0
}

/// The key of a block of an answer.
fn generated(request: u64, block: u32) -> BlockHash {
    BlockHash(bits(request ^ OWN, u64::from(block)) | GENERATED)
}

/// The keys of the full blocks of the first `tokens` tokens of a prompt, whose keys are `chain`, and its
/// answer.
pub(in crate::simulate) fn with_answer(
    request: u64,
    (prompt_tokens, chain): (u32, &[BlockHash]),
    tokens: u32,
    block_tokens: u32,
) -> Vec<BlockHash> {
    let prompt = chain.iter().copied().take((prompt_tokens / block_tokens) as usize);
    let answer = (to_u32(prompt.len())..).map(|block| generated(request, block));
    prompt.chain(answer).take((tokens / block_tokens) as usize).collect()
}

/// The keys of a prompt's full blocks, and of generated blocks, which no other request has; with them the
/// state of the request, so that both are found at once.
#[derive(Debug)]
pub(super) struct Keys {
    request: u64,
    tokens: u32,
    /// Number of full blocks of the prompt with known keys.
    public: u32,
    chain: Arc<[BlockHash]>,
    pub(super) active: Active,
}

impl Keys {
    pub(super) fn new(request: u64, tokens: u32, chain: Arc<[BlockHash]>, block_tokens: u32) -> Self {
        let public = (tokens / block_tokens).min(to_u32(chain.len()));
        Keys { request, tokens, public, chain, active: Active::default() }
    }
}

impl Text for Keys {
    type Block = ();

    fn length(&self) -> u32 {
        self.tokens
    }

    fn hash(&mut self, block: u32) -> BlockHash {
        if block < self.public { self.chain[block as usize] } else { generated(self.request, block) }
    }

    fn block(&self, _: u32) {}

    fn has(&self, _: u32, _: &()) -> bool {
        true
    }
}

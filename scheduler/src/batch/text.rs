//! The tokens of a sequence as the machine sees them: it counts them, but never reads one.

use crate::kv::hash::Chain;
use crate::kv::{BlockHash, PrefixHasher};
use mixfleet_hal::cast::to_u32;
use std::fmt::Debug;

/// The tokens of a sequence. The worker has [`TokenIds`]; a simulation only has hash chains.
pub trait Text: Debug {
    /// The tokens of a block, to distinguish blocks with the same key.
    type Block: Debug + Default;

    /// Number of tokens when the sequence is added.
    fn length(&self) -> u32;

    /// The key of a full block, by index. It is requested for computed blocks and for blocks of the prompt.
    fn hash(&mut self, block: u32) -> BlockHash;

    /// The tokens of a full block, by index.
    fn block(&self, block: u32) -> Self::Block;

    /// Whether a full block, by index, has these tokens. Equal keys are not enough, since prompts determine
    /// the hashed content.
    fn has(&self, block: u32, tokens: &Self::Block) -> bool;
}

/// Tokens by their ids.
#[derive(Clone, Debug)]
pub struct TokenIds {
    ids: Vec<u32>,
    /// Keys of the full blocks requested so far.
    chain: Chain,
}

impl TokenIds {
    /// Takes `ids` in blocks of `block_tokens`, hashed in their tenant's namespace.
    pub fn new(ids: Vec<u32>, hasher: PrefixHasher, block_tokens: u32) -> Self {
        TokenIds { ids, chain: hasher.start(block_tokens) }
    }

    /// All tokens.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// The tokens of blocks, by index.
    pub fn of_blocks(&self, blocks: std::ops::Range<u32>) -> &[u32] {
        let at = |block: u32| block as usize * self.chain.block_tokens() as usize;
        &self.ids[at(blocks.start)..at(blocks.end)]
    }

    /// Appends a drawn token.
    pub fn push(&mut self, id: u32) {
        self.ids.push(id);
    }
}

impl Text for TokenIds {
    type Block = Box<[u32]>;

    fn length(&self) -> u32 {
        to_u32(self.ids.len())
    }

    fn hash(&mut self, block: u32) -> BlockHash {
        let (block_tokens, hashed) = (self.chain.block_tokens() as usize, self.chain.hashes().len());
        if hashed <= block as usize {
            self.chain.extend(&self.ids[hashed * block_tokens..(block as usize + 1) * block_tokens]);
        }
        self.chain.hashes()[block as usize]
    }

    fn block(&self, block: u32) -> Box<[u32]> {
        self.of_blocks(block..block + 1).into()
    }

    fn has(&self, block: u32, tokens: &Box<[u32]>) -> bool {
        *self.of_blocks(block..block + 1) == **tokens
    }
}

//! What a sequence's tokens are to the machine: it counts them, and never reads one.

use crate::kv::hash::Chain;
use crate::kv::{BlockHash, PrefixHasher};
use std::fmt::Debug;

/// The tokens of a sequence. The worker has [`TokenIds`]; a simulation has hash chains alone.
pub trait Text: Debug {
    /// What tells the tokens of a block from those of another one with the same key.
    type Block: Debug;

    /// Tokens when the sequence is taken in.
    fn length(&self) -> u32;

    /// The key of a full block, given its number. Asked for computed blocks and for blocks of the prompt.
    fn hash(&mut self, block: u32) -> BlockHash;

    /// The tokens of a full block, given its number.
    fn block(&self, block: u32) -> Self::Block;

    /// Whether a full block, given its number, has these tokens. Prompts choose what is hashed, so that equal
    /// keys are not enough.
    fn has(&self, block: u32, tokens: &Self::Block) -> bool;
}

/// Tokens by their ids.
#[derive(Clone, Debug)]
pub struct TokenIds {
    ids: Vec<u32>,
    /// Keys of the full blocks, as far as they were asked for.
    chain: Chain,
}

impl TokenIds {
    /// `ids`, in blocks of `block_tokens`, hashed in their tenant's namespace.
    pub fn new(ids: Vec<u32>, hasher: PrefixHasher, block_tokens: u32) -> Self {
        TokenIds { ids, chain: hasher.start(block_tokens) }
    }

    /// All tokens.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// The tokens of blocks, given their numbers.
    pub fn of_blocks(&self, blocks: std::ops::Range<u32>) -> &[u32] {
        let at = |block: u32| block as usize * self.chain.block_tokens() as usize;
        &self.ids[at(blocks.start)..at(blocks.end)]
    }

    /// Appends a token that was drawn.
    pub fn push(&mut self, id: u32) {
        self.ids.push(id);
    }
}

impl Text for TokenIds {
    type Block = Box<[u32]>;

    fn length(&self) -> u32 {
        self.ids.len() as u32
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

//! The tokens of a sequence as the machine sees them: it counts them, but never reads one.

use crate::kv::hash::Chain;
use crate::kv::{BlockHash, PrefixHasher};
use mixfleet_hal::cast::to_u32;
use std::fmt::Debug;
use std::sync::Arc;

/// The tokens of a sequence. The worker has [`TokenIds`]; a simulation only has hash chains.
pub trait Text: Debug {
    /// The tokens of a block, to distinguish blocks with the same key.
    type Block: Debug + Default;

    /// Number of tokens when the sequence is added.
    fn length(&self) -> u32;

    /// Number of further rows that could run beside its last token's: those whose tokens, and the tokens that
    /// are drawn from them, are known.
    fn known_ahead(&self) -> u32 {
        0
    }

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
    /// Tokens that will be drawn whatever their logits, and the position of the first one.
    forced: (usize, Arc<[u32]>),
    /// Keys of the full blocks requested so far.
    chain: Chain,
}

impl TokenIds {
    /// Takes `ids` in blocks of `block_tokens`, hashed in their tenant's namespace.
    pub fn new(ids: Vec<u32>, hasher: PrefixHasher, block_tokens: u32) -> Self {
        TokenIds { ids, forced: Default::default(), chain: hasher.start(block_tokens) }
    }

    /// The same, where the tokens drawn at position `first` and later are these.
    #[must_use]
    pub fn with_forced(self, first: usize, forced: Arc<[u32]>) -> Self {
        TokenIds { forced: (first, forced), ..self }
    }

    /// Tokens by position: of those here, or of those forced behind them.
    pub fn at(&self, positions: std::ops::Range<u32>) -> &[u32] {
        let (start, end) = (positions.start as usize, positions.end as usize);
        let (first, forced) = &self.forced;
        if end <= self.ids.len() { &self.ids[start..end] } else { &forced[start - first..end - first] }
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

    fn known_ahead(&self) -> u32 {
        let (first, forced) = &self.forced;
        // from the row of the last forced token a free one is drawn
        to_u32((first + forced.len()).saturating_sub(self.ids.len() + 1))
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

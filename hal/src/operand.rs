//! What an operation reads and writes: operands, their sizes, and the shape of paged KV.

use crate::DType;
use serde::{Deserialize, Serialize};

/// How a command uses an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperandAccess {
    /// The operand is only read.
    Read,
    /// Every element is overwritten, whatever it held before.
    Write,
    /// The operand is updated in place or in part, like paged KV.
    ReadWrite,
}

/// The number of elements of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// Exactly this many elements.
    Exactly(u64),
    /// Paged KV: any non-zero, whole number of pages of this many elements.
    PagesOf(u64),
}

/// One operand that a command takes, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operand {
    /// The operand's name, for messages.
    pub name: &'static str,
    /// How the command uses it.
    pub access: OperandAccess,
    /// Its element type.
    pub dtype: DType,
    /// Its size.
    pub extent: Extent,
}

/// The shape of paged KV: what the pages of one layer hold, however a backend lays them out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct KvShape {
    /// KV heads.
    pub kv_heads: u32,
    /// Length of a head.
    pub head_dim: u32,
    /// Tokens in a page.
    pub page_tokens: u32,
    /// Dtype of the paged KV.
    #[serde(rename = "kv")]
    pub dtype: DType,
}

impl KvShape {
    /// Elements of a token's keys, or of its values.
    pub fn row(&self) -> u64 {
        product(&[self.kv_heads, self.head_dim])
    }

    /// Bytes of a token's keys and values of one layer, in the wire layout of this dtype.
    pub fn wire_token_bytes(&self, wire: DType) -> u64 {
        2 * self.row() * wire.size_bytes()
    }
}

/// Dimensions come from other processes too: a product that does not fit is the largest number, of which no
/// memory has so many elements.
pub(crate) fn product(dims: &[u32]) -> u64 {
    dims.iter().fold(1, |all: u64, &dim| all.saturating_mul(u64::from(dim)))
}

//! What an operation reads and writes: operands, their sizes, and the shape of paged KV.

use crate::scaled::SCALE_BYTES;
use crate::{DType, OpSig};
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
    /// Elements that a head of one token takes as `dtype`: its own and, behind codes of eight bits, the four
    /// bytes of their scale ([`scaled`](crate::scaled)).
    pub const fn head_elements(&self, dtype: DType) -> u64 {
        self.head_dim as u64 + if dtype.is_scaled() { SCALE_BYTES as u64 } else { 0 }
    }

    /// Elements of a token's keys, or of its values, as they are stored.
    pub fn row(&self) -> u64 {
        u64::from(self.kv_heads).saturating_mul(self.head_elements(self.dtype))
    }

    /// Bytes of a token's keys and values of one layer, in the wire layout of this dtype.
    pub fn wire_token_bytes(&self, wire: DType) -> u64 {
        self.wire_elements(1, wire).saturating_mul(wire.size_bytes())
    }

    /// Elements of so many tokens' keys and values of one layer, in the wire layout of this dtype.
    pub(crate) fn wire_elements(&self, tokens: u32, wire: DType) -> u64 {
        product(&[tokens, 2, self.kv_heads]).saturating_mul(self.head_elements(wire))
    }
}

impl OpSig {
    /// Whether an operand of it holds heads of KV with scales ([`scaled`](crate::scaled)).
    pub fn has_scales(&self, operand: &Operand) -> bool {
        let of_gather = matches!(self, OpSig::KvGather { .. }) && operand.name == "out";
        operand.dtype.is_scaled() && (of_gather || matches!(operand.name, "k_pool" | "v_pool" | "wire"))
    }

    /// Checks that KV can be stored and sent as it says.
    pub(crate) fn check_kv(&self) -> Result<(), String> {
        let Some(kv) = self.kv() else { return Ok(()) };
        let wire = match *self {
            OpSig::KvGather { wire, .. } | OpSig::KvScatter { wire, .. } => wire,
            _ => kv.dtype,
        };
        match [kv.dtype, wire].into_iter().find(|dtype| !DType::KV.contains(dtype)) {
            Some(dtype) => return Err(format!("KV cannot be {dtype}")),
            None if kv.head_dim.is_multiple_of(4) => return Ok(()),
            None => {}
        }
        match kv.dtype.is_scaled() || wire.is_scaled() {
            true => Err(format!("heads of {} elements, behind which no scale is at a word", kv.head_dim)),
            false => Ok(()),
        }
    }
}

/// Dimensions come from other processes too: a product that does not fit is the largest number, of which no
/// memory has so many elements.
pub(crate) fn product(dims: &[u32]) -> u64 {
    dims.iter().fold(1, |all: u64, &dim| all.saturating_mul(u64::from(dim)))
}

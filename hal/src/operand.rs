//! What an operation reads and writes: operands, their sizes, and the shape of paged KV.

use crate::scaled::SCALE_BYTES;
use crate::{DType, OpSig, Scalar};
use serde::{Deserialize, Serialize};

/// How a command uses an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperandAccess {
    /// The operand is only read.
    Read,
    /// Every element is overwritten; the previous content is irrelevant.
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
    /// Of latent attention: how values lie in keys; without it there are values of their own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latent: Option<LatentKv>,
}

/// Keys that contain their values (multi-head latent attention: DeepSeek-AI 2024, arXiv 2405.04434), of one
/// head. Nothing else is stored for a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LatentKv {
    /// The value of a key is the first numbers of that key.
    pub rank: u32,
    /// What scores are multiplied by, which the length of a key does not say here.
    pub scale: Scalar,
}

impl KvShape {
    /// Elements that a head of one token takes as `dtype`: its own and, after eight-bit codes, the four bytes
    /// of their scale ([`scaled`](crate::scaled)). Eight-bit latents, as external engines keep them, have no
    /// scale.
    pub const fn head_elements(&self, dtype: DType) -> u64 {
        let has_scale = dtype.is_scaled() && self.latent.is_none();
        self.head_dim as u64 + if has_scale { SCALE_BYTES as u64 } else { 0 }
    }

    /// Elements of a token's keys, or of its values where it has some apart, as they are stored.
    pub fn row(&self) -> u64 {
        u64::from(self.kv_heads).saturating_mul(self.head_elements(self.dtype))
    }

    /// Rows of a token: one for keys, and one for values that are apart. Operations have a pool for each.
    pub const fn pools(&self) -> u32 {
        if self.latent.is_some() { 1 } else { 2 }
    }

    /// Elements of everything that is kept of a token.
    pub fn token(&self) -> u64 {
        self.row().saturating_mul(u64::from(self.pools()))
    }

    /// Length of a head's value, and so of what a query attends to.
    pub const fn value_dim(&self) -> u32 {
        match self.latent {
            Some(latent) => latent.rank,
            None => self.head_dim,
        }
    }

    /// What scores are multiplied by.
    pub fn scale(&self) -> f64 {
        self.latent.map_or_else(|| 1.0 / f64::from(self.head_dim).sqrt(), |latent| f64::from(latent.scale.0))
    }

    /// Bytes of a token's keys and values of one layer, in the wire layout of this dtype.
    pub fn wire_token_bytes(&self, wire: DType) -> u64 {
        self.wire_elements(1, wire).saturating_mul(wire.size_bytes())
    }

    /// Elements of the keys and values of `tokens` tokens in one layer, in the wire layout of this dtype.
    pub(crate) fn wire_elements(&self, tokens: u32, wire: DType) -> u64 {
        product(&[tokens, self.pools(), self.kv_heads]).saturating_mul(self.head_elements(wire))
    }

    /// Checks what the type cannot express.
    pub(crate) fn check(&self) -> Result<(), String> {
        let Some(LatentKv { rank, scale }) = self.latent else { return Ok(()) };
        if self.kv_heads != 1 || rank == 0 || rank > self.head_dim {
            let KvShape { kv_heads, head_dim, .. } = self;
            return Err(format!("latent KV of {kv_heads} heads with values of {rank} in keys of {head_dim}"));
        }
        if !(scale.0.is_finite() && scale.0 > 0.0) {
            return Err(format!("latent KV whose scores are multiplied by {}", scale.0));
        }
        Ok(())
    }
}

impl OpSig {
    /// Whether one of the operands holds heads of KV with scales ([`scaled`](crate::scaled)).
    pub fn has_scales(&self, operand: &Operand) -> bool {
        let of_gather = matches!(self, OpSig::KvGather { .. }) && operand.name == "out";
        operand.dtype.is_scaled() && (of_gather || matches!(operand.name, "k_pool" | "v_pool" | "wire"))
    }

    /// Checks that KV can be stored and sent as it says.
    pub(crate) fn check_kv(&self) -> Result<(), String> {
        let Some(kv) = self.kv() else { return Ok(()) };
        kv.check()?;
        let wire = match *self {
            OpSig::KvGather { wire, .. } | OpSig::KvScatter { wire, .. } => wire,
            _ => kv.dtype,
        };
        match [kv.dtype, wire].into_iter().find(|dtype| !DType::KV.contains(dtype)) {
            Some(dtype) => return Err(format!("KV cannot be {dtype}")),
            None if !kv.dtype.is_scaled() && !wire.is_scaled() => return Ok(()),
            None => {}
        }
        match kv.latent.is_some() {
            true => Err("latent KV cannot be codes of eight bits".into()),
            false if kv.head_dim.is_multiple_of(4) => Ok(()),
            false => Err(format!("heads of {} elements, behind which no scale is at a word", kv.head_dim)),
        }
    }
}

/// The part of each head that [`OpSig::Rope`] rotates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RotaryPart {
    /// The first number of the window.
    pub first: u32,
    /// Numbers in the window; even.
    pub length: u32,
    /// Whether a pair is two neighbours (2i, 2i + 1), as in DeepSeek, and not (i, i + length/2).
    pub interleaved: bool,
}

impl RotaryPart {
    /// The pairs' places in a head.
    pub fn pairs(&self) -> impl Iterator<Item = [u32; 2]> + use<> {
        let RotaryPart { first, length, interleaved } = *self;
        let half = length / 2;
        (0..half).map(move |i| {
            if interleaved { [first + 2 * i, first + 2 * i + 1] } else { [first + i, first + i + half] }
        })
    }
}

/// Columns of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ColumnsOf {
    /// Length of its rows.
    pub row: u32,
    /// The first of the columns.
    pub first: u32,
}

/// Dimensions come from other processes too: a product that overflows becomes the largest number, which
/// exceeds every memory.
pub(crate) fn product(dims: &[u32]) -> u64 {
    dims.iter().fold(1, |all: u64, &dim| all.saturating_mul(u64::from(dim)))
}

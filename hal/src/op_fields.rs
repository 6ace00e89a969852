//! The one list of operations and their fields, from which names and compact codecs are derived.
//!
//! Profiles and traces use the form of `serde`, which people and later releases can read. Processes that lend
//! devices to each other are of one release and write whole batches: they use the form of a [`FieldCodec`], a
//! few bytes for an operation.

use crate::op::{
    ColumnsOf, ExpertRouting, GroupedRows, KvShape, LatentKv, OpSig, RotaryPart, Scalar, Scoring,
};
use crate::{CodeKind, DType, MatrixKind, Quantised, Result, ScaleKind, ZeroKind};

/// Writes or reads fields. A writer leaves them as they are, a reader replaces them; each method fails if the
/// input is not such a value.
pub trait FieldCodec {
    /// A dimension, which is not zero.
    fn dim(&mut self, value: &mut u32) -> Result<()>;
    /// A number that may be zero.
    fn count(&mut self, value: &mut u32) -> Result<()>;
    /// A number that may be large.
    fn long(&mut self, value: &mut u64) -> Result<()>;
    /// A pattern of bits.
    fn bits(&mut self, value: &mut u32) -> Result<()>;
    /// Yes or no.
    fn flag(&mut self, value: &mut bool) -> Result<()>;
    /// One of a few, as its number among them.
    fn choice<T: Copy + PartialEq>(&mut self, value: &mut T, of: &[T]) -> Result<()>;
}

/// A type of fields.
trait OpField: Copy {
    /// What a reader begins with.
    const BLANK: Self;
    fn code(&mut self, by: &mut impl FieldCodec) -> Result<()>;
}

/// Codes a field by its type, or by the method of the codec that is named.
macro_rules! code {
    ($by:ident, $field:ident) => {
        OpField::code($field, $by)?
    };
    ($by:ident, $field:ident, $how:ident) => {
        $by.$how($field)?
    };
}

/// Types whose fields are coded one after the other.
macro_rules! structs {
    ($($type:ident { $($field:ident $(: $how:ident)?),* })*) => {$(
        impl OpField for $type {
            const BLANK: Self = $type { $($field: OpField::BLANK),* };
            fn code(&mut self, by: &mut impl FieldCodec) -> Result<()> {
                let $type { $($field),* } = self;
                $(code!(by, $field $(, $how)?);)*
                Ok(())
            }
        }
    )*};
}

/// Types of few values.
macro_rules! choices {
    ($($type:ident: $all:expr;)*) => {$(
        impl OpField for $type {
            const BLANK: Self = $all[0];
            fn code(&mut self, by: &mut impl FieldCodec) -> Result<()> {
                by.choice(self, &$all)
            }
        }
    )*};
}

/// The kinds of operations, in the order of their numbers.
macro_rules! operations {
    ($($name:literal $kind:ident { $($field:ident $(: $how:ident)?),* })*) => {
        impl OpSig {
            /// Returns the operation's name in snake case, without its shape.
            pub const fn name(&self) -> &'static str {
                match self {
                    $(OpSig::$kind { .. } => $name,)*
                }
            }

            /// An operation of each kind, whose fields a [`FieldCodec`] replaces.
            pub const BLANK: &[OpSig] = &[$(OpSig::$kind { $($field: OpField::BLANK),* }),*];

            /// Codes the fields in their order.
            ///
            /// # Errors
            /// Those of the codec.
            pub fn code(&mut self, by: &mut impl FieldCodec) -> Result<()> {
                match self {
                    $(OpSig::$kind { $($field),* } => {
                        $(code!(by, $field $(, $how)?);)*
                    })*
                }
                Ok(())
            }
        }
    };
}

operations! {
    "embed" Embed { tokens, vocab, hidden, table, out }
    "rms_norm" RmsNorm { rows, cols, eps, x, weight, out }
    "gemm" Gemm { m, n, k, x, weight, out, bias, accumulate }
    "rope" Rope { tokens, heads, head_dim, part, x }
    "kv_write" KvWrite { tokens, x, kv }
    "attn_prefill" AttnPrefill {
        tokens, sequences, heads, pages_max: count, pairs, kv_tokens, window, sinks, cap, x, kv
    }
    "attn_decode" AttnDecode { sequences, heads, pages_max: count, kv_tokens, cap, x, kv }
    "attn_merge" AttnMerge { parts, rows, head_dim, sinks: count, out }
    "silu_mul" SiluMul { elements, x }
    "add" Add { elements, x }
    "sample" Sample { rows, cols, history: count, tops: count }
    "copy" Copy { bytes }
    "fill" Fill { bytes, word: bits }
    "kv_gather" KvGather { tokens, kv, wire }
    "kv_scatter" KvScatter { tokens, kv, wire }
    "clamped_swiglu" ClampedSwiglu { elements, alpha, limit, x }
    "route" Route { tokens, bias, routing }
    "grouped_gemm" GroupedGemm { grouped, n, k, weight, x, out, bias }
    "combine" Combine { tokens, active, cols, x, accumulate }
    "quantised_embed" QuantisedEmbed { tokens, vocab, hidden, table, out }
    "quantised_gemm" QuantisedGemm { m, n, k, weight, x, out, bias, accumulate }
    "copy_columns" CopyColumns { rows, cols, from, to, x }
    "gelu_mul" GeluMul { elements, x }
    "soft_cap" SoftCap { elements, cap }
}

structs! {
    KvShape { kv_heads, head_dim, page_tokens, dtype, latent }
    ColumnsOf { row, first: count }
    ExpertRouting { experts, active, groups, groups_active, group_best, scoring, normalise, scale }
    GroupedRows { choices, fan, experts, touched: count, others: count }
    Quantised { code, group_rows, group_columns, scale, zero, outer }
}

choices! {
    DType: [DType::F32, DType::Bf16, DType::F16, DType::F8E4m3, DType::U32, DType::I8];
    Scoring: [Scoring::Softmax, Scoring::Sigmoid];
    CodeKind: CodeKind::ALL;
    ScaleKind: ScaleKind::ALL;
    ZeroKind: [ZeroKind::Middle, ZeroKind::Points, ZeroKind::Minima];
}

impl OpField for u32 {
    const BLANK: Self = 0;
    fn code(&mut self, by: &mut impl FieldCodec) -> Result<()> {
        by.dim(self)
    }
}

impl OpField for u64 {
    const BLANK: Self = 0;
    fn code(&mut self, by: &mut impl FieldCodec) -> Result<()> {
        by.long(self)
    }
}

impl OpField for bool {
    const BLANK: Self = false;
    fn code(&mut self, by: &mut impl FieldCodec) -> Result<()> {
        by.flag(self)
    }
}

impl OpField for Scalar {
    const BLANK: Self = Scalar(0.0);
    fn code(&mut self, by: &mut impl FieldCodec) -> Result<()> {
        let mut bits = self.0.to_bits();
        by.bits(&mut bits)?;
        *self = Scalar(f32::from_bits(bits));
        Ok(())
    }
}

/// A soft cap, if there is one.
impl OpField for Option<Scalar> {
    const BLANK: Self = None;
    fn code(&mut self, by: &mut impl FieldCodec) -> Result<()> {
        let (mut has, mut cap) = (self.is_some(), self.unwrap_or(OpField::BLANK));
        by.flag(&mut has)?;
        if has {
            cap.code(by)?;
        }
        *self = has.then_some(cap);
        Ok(())
    }
}

/// A window; none has no tokens.
impl OpField for Option<u32> {
    const BLANK: Self = None;
    fn code(&mut self, by: &mut impl FieldCodec) -> Result<()> {
        let mut tokens = self.unwrap_or(0);
        by.count(&mut tokens)?;
        *self = (tokens > 0).then_some(tokens);
        Ok(())
    }
}

/// Values that lie in keys; those apart have no rank.
impl OpField for Option<LatentKv> {
    const BLANK: Self = None;
    fn code(&mut self, by: &mut impl FieldCodec) -> Result<()> {
        let LatentKv { mut rank, mut scale } = self.unwrap_or(LatentKv { rank: 0, scale: OpField::BLANK });
        by.count(&mut rank)?;
        if rank > 0 {
            scale.code(by)?;
        }
        *self = (rank > 0).then_some(LatentKv { rank, scale });
        Ok(())
    }
}

/// A part of a head; all of it has no length here.
impl OpField for Option<RotaryPart> {
    const BLANK: Self = None;
    fn code(&mut self, by: &mut impl FieldCodec) -> Result<()> {
        let whole = RotaryPart { first: 0, length: 0, interleaved: false };
        let RotaryPart { mut first, mut length, mut interleaved } = self.unwrap_or(whole);
        by.count(&mut length)?;
        if length > 0 {
            by.count(&mut first)?;
            by.flag(&mut interleaved)?;
        }
        *self = (length > 0).then_some(RotaryPart { first, length, interleaved });
        Ok(())
    }
}

/// Weights, after whether they are quantised.
impl OpField for MatrixKind {
    const BLANK: Self = MatrixKind::Plain(OpField::BLANK);
    fn code(&mut self, by: &mut impl FieldCodec) -> Result<()> {
        let mut is_quantised = self.quantised().is_some();
        by.flag(&mut is_quantised)?;
        *self = match (is_quantised, *self) {
            (true, MatrixKind::Plain(_)) => MatrixKind::Quantised(OpField::BLANK),
            (false, MatrixKind::Quantised(_)) => MatrixKind::BLANK,
            (_, same) => same,
        };
        match self {
            MatrixKind::Plain(dtype) => dtype.code(by),
            MatrixKind::Quantised(how) => how.code(by),
        }
    }
}

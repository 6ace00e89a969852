//! What an operation's type cannot express.

use crate::op::{ColumnsOf, OpSig, RotaryPart};

impl OpSig {
    /// Checks what the type cannot express, such as divisibility.
    ///
    /// # Errors
    /// A message that states the violation.
    pub fn check(&self) -> Result<(), String> {
        let heads_divide = |heads: u32, kv_heads: u32| {
            if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
                return Err(format!("{}: {heads} heads do not divide over {kv_heads} KV heads", self.name()));
            }
            Ok(())
        };
        self.check_kv().map_err(|problem| format!("{}: {problem}", self.name()))?;
        match *self {
            OpSig::Rope { head_dim, part: None, .. } if head_dim % 2 != 0 => {
                Err(format!("rope: head_dim {head_dim} is odd"))
            }
            OpSig::Rope { head_dim, part: Some(RotaryPart { first, length, .. }), .. }
                if length % 2 != 0 || first.checked_add(length).is_none_or(|end| end > head_dim) =>
            {
                Err(format!("rope: {length} numbers from {first} on of a head of {head_dim}"))
            }
            OpSig::CopyColumns { cols, from, to, .. } => {
                let beyond = |of: &&ColumnsOf| of.first.checked_add(cols).is_none_or(|end| end > of.row);
                match [from, to].iter().find(beyond) {
                    Some(ColumnsOf { row, first }) => {
                        Err(format!("copy_columns: {cols} columns from {first} on of {row}"))
                    }
                    None => Ok(()),
                }
            }
            OpSig::AttnPrefill { cap: Some(cap), .. }
            | OpSig::AttnDecode { cap: Some(cap), .. }
            | OpSig::SoftCap { cap, .. }
                if !(cap.0.is_finite() && cap.0 > 0.0) =>
            {
                Err(format!("{}: a soft cap of {}", self.name(), cap.0))
            }
            OpSig::AttnPrefill { heads, kv, .. } | OpSig::AttnDecode { heads, kv, .. } => {
                heads_divide(heads, kv.kv_heads)
            }
            OpSig::Route { routing, .. } => routing.check(),
            OpSig::AttnMerge { rows, sinks, .. } if sinks > 0 && !rows.is_multiple_of(sinks) => {
                Err(format!("attn_merge: {rows} rows are no whole number of {sinks} heads"))
            }
            OpSig::GroupedGemm { grouped, k, weight, .. } => grouped.check(weight, k),
            OpSig::QuantisedEmbed { hidden: columns, table: quantised, .. }
            | OpSig::QuantisedGemm { k: columns, weight: quantised, .. } => {
                quantised.check(columns).map_err(|problem| format!("{}: {problem}", self.name()))
            }
            OpSig::Copy { bytes } | OpSig::Fill { bytes, .. } if bytes % 4 != 0 => {
                Err(format!("{}: {bytes} bytes are not a multiple of 4", self.name()))
            }
            _ => Ok(()),
        }
    }
}

//! What an operation says of an operand.

use crate::DType;

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

//! What the members of one instance over several devices exchange.

use crate::{Device, Result, Slice};

/// Memory of one member.
#[derive(Clone)]
pub struct MemberSlice<'a> {
    /// The member's device.
    pub device: &'a dyn Device,
    /// Elements on it.
    pub slice: Slice,
}

/// Exchanges among the members of an instance, whatever carries them. Members are given in their order, and
/// nothing that writes their slices may still run.
///
/// Results depend on the values alone and not on who is ready first, so that equal steps give equal bits.
pub trait Collective: Send {
    /// Replaces the f32 elements of every member by their sums over the members, added in the order of
    /// members (an all-reduce). All slices have the same length.
    ///
    /// # Errors
    /// Those of the devices and of what carries the values; the elements are then undefined.
    fn sum(&mut self, members: &[MemberSlice<'_>]) -> Result<()>;

    /// Joins matrices of `rows` rows of f32 side by side, in the order of members, into `to` (a gather).
    ///
    /// # Errors
    /// Those of the devices and of what carries the values; `to` is then undefined.
    fn join(&mut self, members: &[MemberSlice<'_>], rows: u32, to: &MemberSlice<'_>) -> Result<()>;
}

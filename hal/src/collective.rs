//! What the members of one instance over several devices exchange.

use crate::{DType, Device, Result, Slice};
use std::ops::Range;

/// Memory of one member.
#[derive(Clone)]
pub struct MemberSlice<'a> {
    /// The member's device.
    pub device: &'a dyn Device,
    /// Elements on it.
    pub slice: Slice,
}

/// A member's part of a matrix, which it has without gaps.
#[derive(Clone)]
pub struct MatrixPart<'a> {
    /// Where the part is: as many rows as `rows` names, each as long as `columns`.
    pub at: MemberSlice<'a>,
    /// The rows of the matrix, in the order in which the member has them; all in their order if none.
    pub rows: Option<&'a [u32]>,
    /// The bytes of each row of the matrix.
    pub columns: Range<u64>,
}

/// What a member attended to of rows of queries, by [`OpSig::AttnMerge`](crate::OpSig::AttnMerge) of one
/// part.
#[derive(Clone)]
pub struct AttendedPart<'a> {
    /// The rows, each of all heads.
    pub rows: MatrixPart<'a>,
    /// `[rows, heads, 2]` f32, maximum and sum as [`OpSig::AttnDecode`](crate::OpSig::AttnDecode) gives them,
    /// of the first of these rows, which other members may have attended to as well.
    pub stat: MemberSlice<'a>,
}

/// Exchanges among the members of an instance, over any connection. Members are given in their order, and no
/// kernel that writes their slices may still run.
///
/// Results depend on the values alone and not on which member is ready first, so that equal steps give equal
/// bits.
pub trait Collective: Send {
    /// Replaces the f32 elements of every member by their sums over the members, added in the order of
    /// members (an all-reduce). All slices have the same length.
    ///
    /// # Errors
    /// Those of the devices and of the connection; the elements are then undefined.
    fn sum(&mut self, members: &[MemberSlice<'_>]) -> Result<()>;

    /// Gives each member its part of a matrix of `rows` rows (a scatter).
    ///
    /// # Errors
    /// Those of the devices and of the connection, and `Invalid` for parts that are not of the matrix; the
    /// parts are then undefined.
    fn deal(&mut self, from: &MemberSlice<'_>, rows: u32, to: &[MatrixPart<'_>]) -> Result<()>;

    /// Assembles a matrix of `rows` rows from parts that cover it (a gather).
    ///
    /// # Errors
    /// Those of the devices and of the connection, and `Invalid` for parts that do not cover the matrix; `to`
    /// is then undefined.
    fn join(&mut self, from: &[MatrixPart<'_>], rows: u32, to: &MemberSlice<'_>) -> Result<()>;

    /// Puts together what members attended to of `rows` rows of `heads` heads of `dtype`. A row that has
    /// maxima and sums is the mean of its parts, weighted by these, as
    /// [`OpSig::AttnMerge`](crate::OpSig::AttnMerge) does, and summed in f32 in the order of members. `sinks`
    /// has the sink of each head, which join such rows here, or nothing.
    ///
    /// # Errors
    /// Those of the devices and of the connection, and `Invalid` for parts that do not cover the matrix; `to`
    /// is then undefined.
    fn merge(
        &mut self,
        from: &[AttendedPart<'_>],
        shape: (u32, u32),
        dtype: DType,
        sinks: &[f32],
        to: &MemberSlice<'_>,
    ) -> Result<()>;
}

//! Exchanges among the members of an instance through this process's memory.

use mixfleet_hal::cast::to_usize;
use mixfleet_hal::{Collective, Error, MatrixPart, MemberSlice, Result};

/// Exchanges through this process's memory.
#[derive(Debug, Default)]
pub struct ThroughHost {
    whole: Vec<u8>,
    part: Vec<u8>,
}

/// Reads a member's bytes.
fn read(from: &MemberSlice<'_>, into: &mut Vec<u8>) -> Result<()> {
    into.resize(to_usize(from.slice.bytes), 0);
    from.device.read(&from.slice, into)
}

/// A matrix in this process's memory.
struct Shape {
    rows: usize,
    row_bytes: usize,
}

impl Shape {
    fn of(at: &MemberSlice<'_>, rows: u32) -> Result<Self> {
        let bytes = at.slice.bytes;
        if rows == 0 || !bytes.is_multiple_of(u64::from(rows)) {
            return Err(Error::invalid(format!("{bytes} bytes are no matrix of {rows} rows")));
        }
        Ok(Shape { rows: rows as usize, row_bytes: to_usize(bytes / u64::from(rows)) })
    }

    /// Calls `copy` with the ranges of bytes of each row of a part in the matrix and in the part.
    fn rows_of(
        &self,
        part: &MatrixPart<'_>,
        mut copy: impl FnMut(std::ops::Range<usize>, std::ops::Range<usize>),
    ) -> Result<()> {
        let columns = to_usize(part.columns.start)..to_usize(part.columns.end);
        let (count, width) = (part.rows.map_or(self.rows, <[u32]>::len), columns.len());
        let fits = columns.end <= self.row_bytes && part.at.slice.bytes == (count * width) as u64;
        if !fits || part.rows.is_some_and(|rows| rows.iter().any(|&row| row as usize >= self.rows)) {
            let bytes = part.at.slice.bytes;
            return Err(Error::invalid(format!(
                "{bytes} bytes are not {count} rows of bytes {columns:?} of a matrix of {} rows of {} bytes",
                self.rows, self.row_bytes
            )));
        }
        for at in 0..count {
            let row = part.rows.map_or(at, |rows| rows[at] as usize) * self.row_bytes;
            copy(row + columns.start..row + columns.end, at * width..(at + 1) * width);
        }
        Ok(())
    }

    /// Whether a part is the whole matrix.
    fn is(&self, part: &MatrixPart<'_>) -> bool {
        part.rows.is_none() && part.columns == (0..self.row_bytes as u64)
    }
}

impl Collective for ThroughHost {
    fn sum(&mut self, members: &[MemberSlice<'_>]) -> Result<()> {
        let Some((first, others)) = members.split_first() else { return Ok(()) };
        if others.iter().any(|other| other.slice.bytes != first.slice.bytes) {
            return Err(Error::invalid("members with unlike numbers of elements cannot be summed"));
        }
        read(first, &mut self.whole)?;
        for other in others {
            read(other, &mut self.part)?;
            let (sums, _) = self.whole.as_chunks_mut::<4>();
            let (parts, _) = self.part.as_chunks::<4>();
            for (sum, part) in sums.iter_mut().zip(parts) {
                *sum = (f32::from_ne_bytes(*sum) + f32::from_ne_bytes(*part)).to_ne_bytes();
            }
        }
        members.iter().try_for_each(|member| member.device.write(&member.slice, &self.whole))
    }

    fn deal(&mut self, from: &MemberSlice<'_>, rows: u32, to: &[MatrixPart<'_>]) -> Result<()> {
        let shape = Shape::of(from, rows)?;
        read(from, &mut self.whole)?;
        for part in to.iter().filter(|part| part.at.slice.bytes > 0) {
            if shape.is(part) && part.at.slice.bytes == from.slice.bytes {
                part.at.device.write(&part.at.slice, &self.whole)?;
                continue;
            }
            self.part.resize(to_usize(part.at.slice.bytes), 0);
            let (whole, packed) = (&self.whole, &mut self.part);
            shape.rows_of(part, |of, at| packed[at].copy_from_slice(&whole[of]))?;
            part.at.device.write(&part.at.slice, &self.part)?;
        }
        Ok(())
    }

    fn join(&mut self, from: &[MatrixPart<'_>], rows: u32, to: &MemberSlice<'_>) -> Result<()> {
        let shape = Shape::of(to, rows)?;
        let all: u64 = from.iter().map(|part| part.at.slice.bytes).sum();
        if all != to.slice.bytes {
            return Err(Error::invalid(format!(
                "{all} bytes of members are no {} of {rows} rows",
                to.slice.bytes
            )));
        }
        self.whole.resize(to_usize(all), 0);
        for part in from.iter().filter(|part| part.at.slice.bytes > 0) {
            read(&part.at, &mut self.part)?;
            let (whole, packed) = (&mut self.whole, &self.part);
            shape.rows_of(part, |of, at| whole[of].copy_from_slice(&packed[at]))?;
        }
        to.device.write(&to.slice, &self.whole)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mixfleet_cpu::CpuBackend;
    use mixfleet_hal::{Backend, BufferUsage, Device};
    use std::sync::Arc;

    fn slice<'a>(device: &'a Arc<dyn Device>, bytes: &[u8]) -> MemberSlice<'a> {
        let slice = device.alloc(bytes.len() as u64, BufferUsage::Activations).unwrap();
        device.write(&slice, bytes).unwrap();
        MemberSlice { device: &**device, slice }
    }

    fn bytes(at: &MemberSlice<'_>) -> Vec<u8> {
        let mut bytes = Vec::new();
        read(at, &mut bytes).unwrap();
        bytes
    }

    #[test]
    fn parts_by_rows_and_by_columns_come_back_as_the_matrix() {
        let device = CpuBackend.open("cpu@0").unwrap();
        let matrix: Vec<u8> = (0..24).collect();
        let from = slice(&device, &matrix);
        let mut exchange = ThroughHost::default();
        let part = |rows: Option<&'static [u32]>, columns: std::ops::Range<u64>, count: u64| MatrixPart {
            at: slice(&device, &vec![99; (count * (columns.end - columns.start)) as usize]),
            rows,
            columns,
        };
        let columns = [part(None, 0..4, 3), part(None, 4..8, 3)];
        exchange.deal(&from, 3, &columns).unwrap();
        assert_eq!(bytes(&columns[1].at), [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23]);
        let rows = [part(Some(&[2, 0]), 0..8, 2), part(Some(&[1]), 0..8, 1)];
        exchange.deal(&from, 3, &rows).unwrap();
        assert_eq!(bytes(&rows[0].at)[..8], matrix[16..]);
        for parts in [columns, rows] {
            let to = slice(&device, &[0; 24]);
            exchange.join(&parts, 3, &to).unwrap();
            assert_eq!(bytes(&to), matrix);
        }
    }

    #[test]
    fn what_is_not_a_part_of_a_matrix_is_refused() {
        let device = CpuBackend.open("cpu@0").unwrap();
        let from = slice(&device, &[7; 24]);
        let mut exchange = ThroughHost::default();
        let mut error = |rows: u32, part: MatrixPart<'_>| exchange.deal(&from, rows, &[part]).unwrap_err();
        let at = || slice(&device, &[0; 8]);
        assert!(error(5, MatrixPart { at: at(), rows: None, columns: 0..8 }).to_string().contains("5 rows"));
        let row = |row: &'static [u32], columns| MatrixPart { at: at(), rows: Some(row), columns };
        assert!(error(3, row(&[3], 0..8)).to_string().contains("not 1 rows"));
        assert!(error(3, row(&[1], 4..12)).to_string().contains("not 1 rows"));
        let two = [row(&[0], 0..8), row(&[1], 0..8)];
        let to = slice(&device, &[0; 24]);
        assert!(exchange.join(&two, 3, &to).unwrap_err().to_string().contains("16 bytes"));
    }
}

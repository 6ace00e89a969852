//! Exchanges among the members of an instance through this process's memory.

use mixfleet_hal::cast::{to_f32, to_usize};
use mixfleet_hal::{AttendedPart, Collective, DType, Error, MatrixPart, MemberSlice, Result};

/// Bytes that are summed at a time where devices use host memory, so that they stay in a cache.
const PIECE_BYTES: u64 = 64 << 10;

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
            return Err(Error::invalid(format!("{bytes} bytes are not a matrix of {rows} rows")));
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
        // device memory has a high latency per copy
        let shares_memory = members.iter().all(|member| member.device.limits().imports_host_memory);
        let piece_bytes = if shares_memory { PIECE_BYTES } else { first.slice.bytes };
        let mut from = 0;
        while from < first.slice.bytes {
            let bytes = piece_bytes.min(first.slice.bytes - from);
            let piece = |of: &MemberSlice<'_>| of.slice.range(from, bytes);
            self.whole.resize(to_usize(bytes), 0);
            first.device.read(&piece(first), &mut self.whole)?;
            for other in others {
                self.part.resize(to_usize(bytes), 0);
                other.device.read(&piece(other), &mut self.part)?;
                let (sums, _) = self.whole.as_chunks_mut::<4>();
                let (parts, _) = self.part.as_chunks::<4>();
                for (sum, part) in sums.iter_mut().zip(parts) {
                    *sum = (f32::from_ne_bytes(*sum) + f32::from_ne_bytes(*part)).to_ne_bytes();
                }
            }
            members.iter().try_for_each(|member| member.device.write(&piece(member), &self.whole))?;
            from += bytes;
        }
        Ok(())
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

    fn merge(
        &mut self,
        from: &[AttendedPart<'_>],
        (rows, heads): (u32, u32),
        dtype: DType,
        sinks: &[f32],
        to: &MemberSlice<'_>,
    ) -> Result<()> {
        let shape = Shape::of(to, rows)?;
        let mut merged = Merge::new(rows, heads);
        let parts = from.iter().map(|part| {
            let mut stat = vec![0f32; to_usize(part.stat.slice.bytes / 4)];
            if !stat.is_empty() {
                part.stat.device.read(&part.stat.slice, bytemuck::cast_slice_mut(&mut stat))?;
            }
            let rows = part.rows.rows.map_or_else(|| (0..rows).collect(), <[u32]>::to_vec);
            merged.add(&rows, &stat)?;
            Ok((rows, stat))
        });
        let parts = parts.collect::<Result<Vec<_>>>()?;
        merged.check()?;
        merged.join(sinks);
        let mut sum = vec![0f32; to_usize(to.slice.bytes / dtype.size_bytes())];
        let head = sum.len() / (rows as usize * heads as usize);
        for (part, (numbers, stat)) in from.iter().zip(&parts) {
            if numbers.is_empty() {
                continue;
            }
            shape.rows_of(&part.rows, |_, _| {})?;
            read(&part.rows.at, &mut self.part)?;
            let attended = floats(&self.part, dtype);
            for (at, head_of) in attended.chunks_exact(head).enumerate() {
                let (row, which) = (numbers[at / heads as usize], at % heads as usize);
                let to = row as usize * heads as usize + which;
                let weight = stat.get(2 * at..2 * at + 2).map_or(1.0, |stat| merged.weight(to, stat));
                let sums = sum[to * head..(to + 1) * head].iter_mut();
                sums.zip(head_of).for_each(|(sum, x)| *sum += weight * x);
            }
        }
        self.whole.clear();
        match dtype {
            DType::F32 => self.whole.extend_from_slice(bytemuck::cast_slice(&sum)),
            _ => sum.iter().for_each(|&x| dtype.encode(f64::from(x), &mut self.whole)),
        }
        to.device.write(&to.slice, &self.whole)
    }
}

fn floats(bytes: &[u8], dtype: DType) -> Vec<f32> {
    match dtype {
        DType::F32 => bytes.as_chunks::<4>().0.iter().map(|x| f32::from_ne_bytes(*x)).collect(),
        _ => dtype.decode(bytes).into_iter().map(to_f32).collect(),
    }
}

/// Maxima and sums of the rows that several members attended to.
struct Merge {
    heads: usize,
    /// Per row and head: the largest score, and the sum of exponentials relative to it.
    all: Vec<(f32, f32)>,
    /// Rows that no member has, or that several have although one lacks its maximum.
    missing: Vec<bool>,
    doubled: bool,
}

impl Merge {
    fn new(rows: u32, heads: u32) -> Self {
        let (rows, heads) = (rows as usize, heads as usize);
        let all = vec![(f32::NEG_INFINITY, 0.0); rows * heads];
        Merge { heads, all, missing: vec![true; rows], doubled: false }
    }

    /// Adds a member's part of these rows; the first rows have maxima and sums.
    fn add(&mut self, rows: &[u32], stat: &[f32]) -> Result<()> {
        let partial = stat.len() / (2 * self.heads);
        if partial > rows.len() || rows.iter().any(|&row| row as usize >= self.missing.len()) {
            return Err(Error::invalid("a member attended to other rows than there are"));
        }
        for (at, &row) in rows.iter().enumerate() {
            let is_first = std::mem::replace(&mut self.missing[row as usize], false);
            self.doubled |= !is_first && at >= partial;
            if at >= partial {
                continue;
            }
            let to = &mut self.all[row as usize * self.heads..][..self.heads];
            let stats = stat[at * 2 * self.heads..].chunks_exact(2);
            for ((largest, sum), stat) in to.iter_mut().zip(stats) {
                let (max, part) = (stat[0], stat[1]);
                let most = largest.max(max);
                if most > f32::NEG_INFINITY {
                    *sum = *sum * (*largest - most).exp() + part * (max - most).exp();
                    *largest = most;
                }
            }
        }
        Ok(())
    }

    /// Adds the sinks of heads to the rows that have maxima.
    fn join(&mut self, sinks: &[f32]) {
        for row in self.all.chunks_mut(self.heads) {
            for ((largest, sum), &sink) in row.iter_mut().zip(sinks) {
                if *largest > f32::NEG_INFINITY {
                    let most = largest.max(sink);
                    *sum = *sum * (*largest - most).exp() + (sink - most).exp();
                    *largest = most;
                }
            }
        }
    }

    fn check(&self) -> Result<()> {
        if self.doubled || self.missing.contains(&true) {
            return Err(Error::invalid("members did not attend to every row once, or in parts with maxima"));
        }
        Ok(())
    }

    /// The share of a part, with its maximum and sum, in a row's head.
    fn weight(&self, at: usize, stat: &[f32]) -> f32 {
        let (largest, sum) = self.all[at];
        if sum > 0.0 { stat[1] * (stat[0] - largest).exp() / sum } else { 0.0 }
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
    fn sums_of_any_length_are_those_of_all_members() {
        let device = CpuBackend.open("cpu@0").unwrap();
        for length in [0, 1, 1000, PIECE_BYTES as usize / 4, PIECE_BYTES as usize / 2 + 3] {
            let of = |step: f32| (0..length).map(|at| at as f32 * step).collect::<Vec<f32>>();
            let members = [1.0, 2.0, -0.5].map(|step| slice(&device, bytemuck::cast_slice(&of(step))));
            ThroughHost::default().sum(&members).unwrap();
            for member in &members {
                assert!(floats(&bytes(member), DType::F32) == of(2.5), "{length}");
            }
        }
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

    /// A member's rows, the first ones with maxima and sums, in a dtype.
    fn attended<'a>(
        device: &'a Arc<dyn Device>,
        (rows, values): (&'a [u32], &[f32]),
        stat: &[f32],
        dtype: DType,
    ) -> AttendedPart<'a> {
        let mut encoded = Vec::new();
        values.iter().for_each(|&x| dtype.encode(f64::from(x), &mut encoded));
        let columns = 0..4 * dtype.size_bytes();
        let rows = MatrixPart { at: slice(device, &encoded), rows: Some(rows), columns };
        let mut slice = slice(device, &[0; 64]);
        slice.slice = slice.slice.range(0, stat.len() as u64 * 4);
        if !stat.is_empty() {
            device.write(&slice.slice, bytemuck::cast_slice(stat)).unwrap();
        }
        AttendedPart { rows, stat: slice }
    }

    #[test]
    fn what_several_attended_to_is_weighted_by_maxima_and_sums() {
        let device = CpuBackend.open("cpu@0").unwrap();
        for dtype in DType::FLOATS {
            let of = |rows, values: &[f32], stat: &[f32]| attended(&device, (rows, values), stat, dtype);
            // two heads of two: of row 1 the first member has a third of one head, and nothing of the other
            let infinite = f32::NEG_INFINITY;
            let first = of(&[1, 0], &[4.0, 1.0, 0.0, 0.0, 9.0, 8.0, 7.0, 6.0], &[2.0, 1.0, infinite, 0.0]);
            let second = of(&[1], &[1.0, 4.0, 5.0, 6.0], &[2.0, 2.0, 1.0, 3.0]);
            let parts = [first, second];
            let to = slice(&device, &vec![0; 8 * dtype.size_bytes() as usize]);
            ThroughHost::default().merge(&parts, (2, 2), dtype, &[], &to).unwrap();
            let merged = floats(&bytes(&to), dtype);
            assert_eq!(merged, [9.0, 8.0, 7.0, 6.0, 2.0, 3.0, 5.0, 6.0], "{dtype}");
        }
        let of = |rows, stat: &[f32]| attended(&device, (rows, &[0.0; 4]), stat, DType::F32);
        let to = slice(&device, &[0; 32]);
        for parts in [vec![of(&[0], &[])], vec![of(&[0], &[]), of(&[0], &[]), of(&[1], &[])]] {
            let error = ThroughHost::default().merge(&parts, (2, 2), DType::F32, &[], &to).unwrap_err();
            assert!(error.to_string().contains("every row once"), "{error}");
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

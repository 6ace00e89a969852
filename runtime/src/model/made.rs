//! Matrices with another stored form than a plain array: quantised, or derived from stored tensors.

use super::names::Cut;
use mixfleet_hal::cast::{to_u32, to_usize};
use mixfleet_hal::quantised::{QuantisedPart, SUPER_COLUMNS};
use mixfleet_hal::{HostMemory, MatrixKind, Quantised, ScaleKind};
use std::borrow::Cow;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// A stored tensor that weights are derived from.
#[derive(Clone, Debug)]
pub(super) struct SourceTensor {
    pub(super) shard: usize,
    /// Range of the tensor's bytes in the shard.
    pub(super) range: Range<usize>,
}

impl SourceTensor {
    pub(super) fn bytes<'a>(&self, shards: &'a [Arc<dyn HostMemory>]) -> &'a [u8] {
        shards.get(self.shard).and_then(|shard| shard.as_bytes().get(self.range.clone())).unwrap_or_default()
    }
}

/// Derives an array from stored bytes.
pub(super) type Recipe = Arc<dyn Fn(&[u8]) -> Vec<u8> + Send + Sync>;

/// One array of a matrix.
#[derive(Clone)]
pub(super) enum MadePart {
    /// Stored in its final form.
    InPlace(SourceTensor),
    /// Derived when it is placed.
    Made(SourceTensor, Recipe),
}

impl MadePart {
    pub(super) fn made(
        source: &SourceTensor,
        how: impl Fn(&[u8]) -> Vec<u8> + Send + Sync + 'static,
    ) -> Self {
        MadePart::Made(source.clone(), Arc::new(how))
    }

    /// The source of the array.
    pub(super) fn source(&self) -> &SourceTensor {
        match self {
            MadePart::InPlace(source) | MadePart::Made(source, _) => source,
        }
    }
}

impl fmt::Debug for MadePart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = if matches!(self, MadePart::InPlace(_)) { "in place" } else { "made" };
        write!(f, "{how} of {:?}", self.source())
    }
}

/// A matrix and the sources of its arrays.
#[derive(Clone, Debug)]
pub(super) struct MadeMatrix {
    pub(super) kind: MatrixKind,
    pub(super) rows: u32,
    pub(super) columns: u32,
    /// In the order of [`MatrixKind::parts`].
    pub(super) parts: Vec<MadePart>,
}

/// A part of a matrix, and how each of its arrays is cut out of the whole.
pub(super) struct CutMatrix {
    pub(super) kind: MatrixKind,
    pub(super) rows: u32,
    pub(super) columns: u32,
    pub(super) cuts: Vec<PartCut>,
}

/// The cut of an array: all of it, whole rows, or single elements.
pub(super) enum PartCut {
    Whole,
    Rows(Range<usize>),
    /// Byte ranges of rows.
    Bytes {
        rows: Range<usize>,
        bytes: Range<usize>,
    },
    /// Row and byte offset of each element, and the size of an element.
    Elements {
        rows: Vec<usize>,
        starts: Vec<usize>,
        bytes: usize,
    },
}

fn part_bytes(part: &QuantisedPart) -> usize {
    to_usize(part.elements().saturating_mul(part.dtype.size_bytes()))
}

impl MadeMatrix {
    /// Checks that the arrays match the description and that arrays used in place have the expected size.
    ///
    /// # Errors
    /// A message that describes the fault.
    pub(super) fn new(
        kind: MatrixKind,
        (rows, columns): (u32, u32),
        parts: Vec<MadePart>,
    ) -> Result<Self, String> {
        if let MatrixKind::Quantised(quantised) = kind {
            quantised.check(columns)?;
        }
        let matrix = MadeMatrix { kind, rows, columns, parts };
        for (kind, part) in matrix.described().iter().zip(&matrix.parts) {
            if let MadePart::InPlace(source) = part
                && source.range.len() != part_bytes(kind)
            {
                let (found, needed) = (source.range.len(), part_bytes(kind));
                return Err(format!("{found} bytes of {}, expected {needed}", kind.name));
            }
        }
        Ok(matrix)
    }

    fn described(&self) -> Vec<QuantisedPart> {
        self.kind.parts(1, self.rows, self.columns)
    }

    /// The bytes of an array.
    ///
    /// # Errors
    /// When the derived bytes have another size than the description requires.
    pub(super) fn array<'a>(
        &self,
        at: usize,
        shards: &'a [Arc<dyn HostMemory>],
    ) -> Result<Cow<'a, [u8]>, String> {
        let bytes = match &self.parts[at] {
            MadePart::InPlace(source) => Cow::Borrowed(source.bytes(shards)),
            MadePart::Made(source, how) => Cow::Owned(how(source.bytes(shards))),
        };
        let part = self.described()[at];
        if bytes.len() == part_bytes(&part) {
            return Ok(bytes);
        }
        Err(format!("its {} have {} bytes, expected {}", part.name, bytes.len(), part_bytes(&part)))
    }

    /// All weights, for the oracle; none where stored bytes are damaged.
    pub(super) fn values(&self, shards: &[Arc<dyn HostMemory>]) -> Option<Vec<f64>> {
        let kinds = self.described();
        let mut arrays = Vec::with_capacity(kinds.len());
        for (at, kind) in kinds.iter().enumerate() {
            arrays.push(kind.dtype.decode(&self.array(at, shards).ok()?));
        }
        match self.kind {
            MatrixKind::Plain(_) => arrays.pop(),
            MatrixKind::Quantised(quantised) => {
                let arrays: Vec<&[f64]> = arrays.iter().map(|array| array.as_slice()).collect();
                let decoded = quantised.decode(&arrays, 1, self.rows, self.columns);
                Some(decoded.into_iter().map(|(value, _)| value).collect())
            }
        }
    }

    /// The matrix of some of its rows.
    ///
    /// # Errors
    /// When codes or scales cannot be cut there.
    pub(super) fn rows_of(&self, rows: Range<u64>) -> Result<MadeMatrix, String> {
        let CutMatrix { kind, rows, columns, cuts } = self.cut(&Cut::Rows(rows))?;
        let described = self.described();
        let part = |((part, cut), of): ((&MadePart, PartCut), &QuantisedPart)| {
            let array_rows = to_usize(of.rows);
            match part {
                MadePart::InPlace(source) => match cut.piece(source.range.len(), array_rows) {
                    Some(piece) => {
                        let start = source.range.start;
                        let range = start + piece.start..start + piece.end;
                        MadePart::InPlace(SourceTensor { range, ..source.clone() })
                    }
                    None => MadePart::made(source, move |bytes| cut.of(bytes, array_rows).into_owned()),
                },
                MadePart::Made(source, how) => {
                    let how = how.clone();
                    MadePart::made(source, move |bytes| cut.of(&how(bytes), array_rows).into_owned())
                }
            }
        };
        let parts = self.parts.iter().zip(cuts).zip(&described).map(part).collect();
        MadeMatrix::new(kind, (rows, columns), parts)
    }

    /// Bytes of all arrays.
    pub(super) fn size_bytes(&self) -> u64 {
        self.described().iter().map(|part| part_bytes(part) as u64).sum()
    }

    /// A part of the matrix. Where scales of several rows or columns are cut through, the part has scales of
    /// fewer.
    ///
    /// # Errors
    /// When codes or scales cannot be cut there.
    pub(super) fn cut(&self, cut: &Cut) -> Result<CutMatrix, String> {
        let (rows, columns) = match cut {
            Cut::Whole => (0..self.rows, 0..self.columns),
            Cut::Rows(rows) => (to_u32(rows.start)..to_u32(rows.end), 0..self.columns),
            Cut::Columns(columns) => (0..self.rows, to_u32(columns.start)..to_u32(columns.end)),
            Cut::RowsOfEach(rows, of) => return self.cut_rows_of_each(rows, *of),
        };
        let whole_rows = columns == (0..self.columns);
        let described = self.described();
        let of_rows = |part: &QuantisedPart| match (cut, whole_rows) {
            (Cut::Whole, _) => PartCut::Whole,
            (_, true) => PartCut::Rows(rows.start as usize..rows.end as usize),
            (_, false) => {
                let each = part.columns * part.dtype.size_bytes();
                let byte = |column: u32| to_usize(each * u64::from(column) / u64::from(self.columns));
                let bytes = byte(columns.start)..byte(columns.end);
                PartCut::Bytes { rows: rows.start as usize..rows.end as usize, bytes }
            }
        };
        let len = |range: &Range<u32>| range.end - range.start;
        let (kind, cuts) = match self.kind {
            MatrixKind::Plain(_) => (self.kind, described.iter().map(of_rows).collect()),
            MatrixKind::Quantised(quantised) => {
                let part = cut_of(&quantised, &rows, &columns)?;
                let cuts = described.iter().map(|array| match array.name {
                    _ if *cut == Cut::Whole => PartCut::Whole,
                    "outer" => PartCut::Whole,
                    "scales" | "zeros" => elements(&quantised, &part, (&rows, &columns), array),
                    _ => of_rows(array),
                });
                (MatrixKind::Quantised(part), cuts.collect())
            }
        };
        Ok(CutMatrix { kind, rows: len(&rows), columns: len(&columns), cuts })
    }
}

impl MadeMatrix {
    /// A range of rows of each of the equal matrices of `of` rows that form this one.
    fn cut_rows_of_each(&self, rows: &Range<u64>, of: u64) -> Result<CutMatrix, String> {
        let kind = self.kind;
        if let MatrixKind::Quantised(quantised) = kind
            && (quantised.group_rows != 1 || quantised.outer)
        {
            return Err(format!("{quantised} weights of several matrices cannot be divided by rows"));
        }
        let all = (0..u64::from(self.rows) / of.max(1)).flat_map(|matrix| {
            let first = matrix * of;
            first + rows.start..first + rows.end
        });
        let all: Vec<usize> = all.map(to_usize).collect();
        let of_part = |part: &QuantisedPart| {
            let row_bytes = to_usize(part.columns * part.dtype.size_bytes());
            let rows = all.iter().map(|row| row * row_bytes).collect();
            PartCut::Elements { rows, starts: vec![0], bytes: row_bytes }
        };
        let cuts = self.described().iter().map(of_part).collect();
        Ok(CutMatrix { kind, rows: to_u32(all.len()), columns: self.columns, cuts })
    }
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The alternative for a model whose rows cannot be divided.
const INSTEAD: &str = "divide the layers instead (pp:)";

/// The description of a part.
fn cut_of(whole: &Quantised, rows: &Range<u32>, columns: &Range<u32>) -> Result<Quantised, String> {
    let group = |range: &Range<u32>, group: u32| {
        let inside = range.is_empty() || range.start / group == (range.end - 1) / group;
        if range.start.is_multiple_of(group) || inside { group } else { gcd(range.start, group) }
    };
    let part = Quantised {
        group_rows: group(rows, whole.group_rows),
        group_columns: group(columns, whole.group_columns),
        ..*whole
    };
    let step = match whole.scale {
        ScaleKind::I8 => SUPER_COLUMNS,
        _ if whole.code.high_bits() > 0 => 32 / whole.code.high_bits(),
        _ => 32 / whole.code.low_bits(),
    };
    if !columns.start.is_multiple_of(step) {
        let start = columns.start;
        return Err(format!(
            "{whole} weights cannot be divided at column {start}, which is not a multiple of {step}: {INSTEAD}"
        ));
    }
    let fits = part.check(columns.end - columns.start);
    fits.map_err(|problem| format!("{problem}: {INSTEAD}"))?;
    Ok(part)
}

/// Positions of a part's scales among those of the whole.
fn elements(
    whole: &Quantised,
    part: &Quantised,
    (rows, columns): (&Range<u32>, &Range<u32>),
    array: &QuantisedPart,
) -> PartCut {
    let bytes = whole.scale.dtype().map_or(1, |dtype| to_usize(dtype.size_bytes()));
    let row_bytes = to_usize(array.columns * array.dtype.size_bytes());
    let (group_rows, group_columns) = part.groups(rows.end - rows.start, columns.end - columns.start);
    let at = |start: u32, group: u32, of: u32, whole: u32| ((start + group * of) / whole) as usize;
    let rows = (0..group_rows).map(|group| at(rows.start, group, part.group_rows, whole.group_rows));
    let starts = (0..group_columns)
        .map(|group| bytes * at(columns.start, group, part.group_columns, whole.group_columns));
    PartCut::Elements { rows: rows.map(|row| row * row_bytes).collect(), starts: starts.collect(), bytes }
}

impl CutMatrix {
    /// Bytes of all arrays.
    pub(super) fn size_bytes(&self) -> u64 {
        self.kind.parts(1, self.rows, self.columns).iter().map(|part| part_bytes(part) as u64).sum()
    }
}

impl PartCut {
    /// The bytes of an array that are in the part, if they are contiguous.
    pub(super) fn piece(&self, all: usize, array_rows: usize) -> Option<Range<usize>> {
        let row_bytes = all / array_rows.max(1);
        match self {
            PartCut::Whole => Some(0..all),
            PartCut::Rows(rows) => Some(rows.start * row_bytes..rows.end * row_bytes),
            PartCut::Bytes { .. } | PartCut::Elements { .. } => None,
        }
    }

    /// The part of an array of `array_rows` rows.
    pub(super) fn of<'a>(&self, array: &'a [u8], array_rows: usize) -> Cow<'a, [u8]> {
        if let Some(piece) = self.piece(array.len(), array_rows) {
            return Cow::Borrowed(&array[piece]);
        }
        let row_bytes = array.len() / array_rows.max(1);
        let mut part = Vec::new();
        match self {
            PartCut::Bytes { rows, bytes } => {
                for row in rows.clone() {
                    part.extend_from_slice(&array[row * row_bytes..][bytes.clone()]);
                }
            }
            PartCut::Elements { rows, starts, bytes } => {
                for row in rows {
                    for start in starts {
                        part.extend_from_slice(&array[row + start..][..*bytes]);
                    }
                }
            }
            PartCut::Whole | PartCut::Rows(_) => {}
        }
        Cow::Owned(part)
    }
}

#[cfg(test)]
#[path = "made_tests.rs"]
mod tests;

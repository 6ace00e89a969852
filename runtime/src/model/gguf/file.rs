//! The header of a GGUF file: metadata and positions of tensors, each checked against the file's length
//! before it is used.

use super::super::error::{Error, LFS_POINTER, LFS_PROBLEM, Result};
use super::kinds::GgmlKind;
use mixfleet_hal::cast::to_usize;
use std::collections::HashMap;
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Maximum size of a header: a vocabulary of 256,000 tokens takes less than 16 MiB.
const HEADER_BYTES_MAX: u64 = 128 << 20;
/// Minimum size of a key or tensor entry in a header, which bounds their number.
const ENTRY_BYTES_MIN: u64 = 12;
const DIMENSIONS_MAX: u32 = 4;
/// Maximum number of files of a model.
const FILES_MAX: u64 = 10_000;
const MAGIC: &[u8; 4] = b"GGUF";

/// Whether a path is that of a GGUF file.
pub(in super::super) fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|kind| kind.eq_ignore_ascii_case("gguf"))
}

/// A value of the metadata.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum GgufValue {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Flag(bool),
    Text(String),
    /// An array of texts.
    Texts(Vec<String>),
    /// An array of numbers.
    Numbers(Vec<f64>),
}

/// A tensor in the file.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct GgufTensor {
    pub(super) kind: GgmlKind,
    /// Rows and columns; a vector is a row.
    pub(super) rows: u64,
    pub(super) columns: u64,
    /// The index of the file, in a model of several files.
    pub(super) shard: usize,
    /// Range of the tensor's bytes in the file.
    pub(super) range: Range<usize>,
}

/// The metadata of a GGUF file, with the tensors of all files of a model.
#[derive(Clone, Debug)]
pub(in super::super) struct GgufFile {
    pub(super) file: PathBuf,
    values: HashMap<String, GgufValue>,
    pub(super) tensors: HashMap<String, GgufTensor>,
}

/// A header that is being parsed.
struct Reader<'a, R> {
    file: &'a Path,
    source: R,
    at: u64,
    end: u64,
    /// Description of the part that is being parsed.
    part: String,
}

impl<R: Read> Reader<'_, R> {
    fn error(&self, problem: impl Into<String>) -> Error {
        Error::file(self.file, problem)
    }

    fn left(&self) -> u64 {
        self.end - self.at
    }

    /// The header ends before something that it announces.
    fn too_short(&self, needed: &str) -> Error {
        let Reader { at, end, part, .. } = self;
        self.error(match *end {
            HEADER_BYTES_MAX => {
                format!("{part}: {needed} at byte {at} are more than the {end} bytes that a header may have")
            }
            _ => format!(
                "{part}: {needed} are expected at byte {at}, and the file has {end} bytes: truncated or damaged"
            ),
        })
    }

    fn fill(&mut self, into: &mut [u8]) -> Result<()> {
        let bytes = into.len() as u64;
        if bytes > self.left() {
            return Err(self.too_short(&format!("{bytes} bytes")));
        }
        self.source.read_exact(into).map_err(|e| Error::read(self.file, e))?;
        self.at += bytes;
        Ok(())
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut taken = [0; N];
        self.fill(&mut taken)?;
        Ok(taken)
    }

    fn u32(&mut self) -> Result<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn text(&mut self) -> Result<String> {
        let length = self.count("bytes of text", 1)?;
        let at = self.at;
        let mut bytes = vec![0; length];
        self.fill(&mut bytes)?;
        let wrong = |_| self.error(format!("text at byte {at} of the header is not UTF-8"));
        String::from_utf8(bytes).map_err(wrong)
    }

    /// Reads a number of entries of at least `least` bytes each.
    fn count(&mut self, what: &str, least: u64) -> Result<usize> {
        let count = self.u64()?;
        if count > self.left() / least {
            return Err(self.too_short(&format!("{count} {what}")));
        }
        Ok(to_usize(count))
    }

    fn value(&mut self, key: &str, kind: u32) -> Result<GgufValue> {
        Ok(match kind {
            0 => GgufValue::Unsigned(u64::from(self.array::<1>()?[0])),
            1 => GgufValue::Signed(i64::from(i8::from_le_bytes(self.array()?))),
            2 => GgufValue::Unsigned(u64::from(u16::from_le_bytes(self.array()?))),
            3 => GgufValue::Signed(i64::from(i16::from_le_bytes(self.array()?))),
            4 => GgufValue::Unsigned(u64::from(self.u32()?)),
            5 => GgufValue::Signed(i64::from(i32::from_le_bytes(self.array()?))),
            6 => GgufValue::Float(f64::from(f32::from_le_bytes(self.array()?))),
            7 => GgufValue::Flag(self.array::<1>()?[0] != 0),
            8 => GgufValue::Text(self.text()?),
            9 => self.list(key)?,
            10 => GgufValue::Unsigned(self.u64()?),
            11 => GgufValue::Signed(i64::from_le_bytes(self.array()?)),
            12 => GgufValue::Float(f64::from_le_bytes(self.array()?)),
            other => return Err(self.error(format!("key '{key}' has a value of the unknown type {other}"))),
        })
    }

    fn list(&mut self, key: &str) -> Result<GgufValue> {
        let kind = self.u32()?;
        let least = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            8 | 10..=12 => 8,
            other => return Err(self.error(format!("key '{key}' is an array of the unknown type {other}"))),
        };
        let count = self.count("entries of an array", least)?;
        if kind == 8 {
            return (0..count).map(|_| self.text()).collect::<Result<_>>().map(GgufValue::Texts);
        }
        let number = |reader: &mut Self| {
            Ok(match reader.value(key, kind)? {
                GgufValue::Unsigned(value) => value as f64,
                GgufValue::Signed(value) => value as f64,
                GgufValue::Float(value) => value,
                GgufValue::Flag(value) => f64::from(u8::from(value)),
                GgufValue::Text(_) | GgufValue::Texts(_) | GgufValue::Numbers(_) => 0.0,
            })
        };
        (0..count).map(|_| number(self)).collect::<Result<_>>().map(GgufValue::Numbers)
    }
}

/// Checks the file's mark and version.
fn check_beginning(reader: &mut Reader<'_, impl Read>) -> Result<()> {
    let magic = reader.array()?;
    if magic == LFS_POINTER[..magic.len()] {
        return Err(reader.error(LFS_PROBLEM));
    }
    if &magic != MAGIC {
        return Err(reader.error("not a GGUF file: it does not begin with 'GGUF'"));
    }
    let version = reader.u32()?;
    if (2..=3).contains(&version.swap_bytes()) {
        return Err(reader.error("a big-endian file is not supported; convert it to little-endian"));
    }
    if !(2..=3).contains(&version) {
        return Err(reader.error(format!("version {version} of GGUF is not supported; supported: 2, 3")));
    }
    Ok(())
}

/// Refuses tensors that share bytes.
fn check_apart(file: &Path, tensors: &HashMap<String, GgufTensor>) -> Result<()> {
    let mut placed: Vec<_> = tensors.iter().map(|(name, tensor)| (&tensor.range, name)).collect();
    placed.sort_by_key(|(range, name)| (range.start, range.end, *name));
    match placed.windows(2).find(|pair| pair[1].0.start < pair[0].0.end) {
        Some(pair) => {
            Err(Error::tensor(file, pair[1].1, format!("its bytes overlap those of '{}'", pair[0].1)))
        }
        None => Ok(()),
    }
}

impl GgufFile {
    /// Reads the header of a file, and those of the other files of a divided model.
    ///
    /// # Errors
    /// As [`parse`](Self::parse), and when a file cannot be read or is not the part that its name says.
    pub(in super::super) fn open(file: &Path) -> Result<Self> {
        let mut first = Self::open_one(file)?;
        for (at, file) in first.other_files()?.iter().enumerate() {
            first.join(Self::open_one(file)?, at + 1)?;
        }
        first.check_complete()?;
        Ok(first)
    }

    fn open_one(file: &Path) -> Result<Self> {
        let failed = |e| Error::read(file, e);
        let opened = mixfleet_hal::files::open(file).map_err(failed)?;
        let length = opened.metadata().map_err(failed)?.len();
        Self::read(file, std::io::BufReader::new(opened), length, length)
    }

    /// Parses the header at the beginning of `bytes`, of a file of `length` bytes.
    ///
    /// # Errors
    /// When the header is damaged or inconsistent, when a tensor exceeds the file or has an unsupported type.
    pub(in super::super) fn parse(file: &Path, bytes: &[u8], length: u64) -> Result<Self> {
        Self::read(file, bytes, bytes.len() as u64, length)
    }

    /// Parses the header of a file of `length` bytes from the first `bytes` bytes.
    fn read(file: &Path, source: impl Read, bytes: u64, length: u64) -> Result<Self> {
        let mut reader =
            Reader { file, source, at: 0, end: bytes.min(HEADER_BYTES_MAX), part: "the beginning".into() };
        check_beginning(&mut reader)?;
        let tensor_count = reader.count("tensors", ENTRY_BYTES_MIN)?;
        let value_count = reader.count("keys", ENTRY_BYTES_MIN)?;
        let mut values = HashMap::new();
        for at in 1..=value_count {
            reader.part = format!("key {at} of {value_count}");
            let key = reader.text()?;
            reader.part = format!("the value of key '{key}'");
            let kind = reader.u32()?;
            let value = reader.value(&key, kind)?;
            if values.insert(key.clone(), value).is_some() {
                return Err(reader.error(format!("key '{key}' occurs twice in the header")));
            }
        }
        let mut infos = Vec::new();
        for at in 1..=tensor_count {
            reader.part = format!("tensor {at} of {tensor_count}");
            infos.push(info(&mut reader)?);
        }
        let mut gguf = GgufFile { file: file.to_owned(), values, tensors: HashMap::new() };
        let alignment = gguf.number("general.alignment")?.unwrap_or(32);
        if !alignment.is_power_of_two() || alignment > 1 << 20 {
            return Err(gguf.error("general.alignment", format!("{alignment}, expected a power of two")));
        }
        let start = reader.at.next_multiple_of(alignment);
        for (name, mut tensor, offset) in infos {
            let bytes = tensor.range.len() as u64;
            let from = start.checked_add(offset);
            let end = from.and_then(|from| from.checked_add(bytes)).filter(|end| *end <= length);
            if !offset.is_multiple_of(alignment) {
                let problem = format!("at byte {offset} of the data, which is no multiple of {alignment}");
                return Err(Error::tensor(file, &name, problem));
            }
            let (Some(from), Some(end)) = (from, end) else {
                let problem =
                    format!("{bytes} bytes at {offset} of the data, which begin at byte {start} of {length}");
                return Err(Error::tensor(file, &name, format!("{problem}: truncated?")));
            };
            tensor.range = to_usize(from)..to_usize(end);
            if gguf.tensors.insert(name.clone(), tensor).is_some() {
                return Err(Error::tensor(file, &name, "occurs twice in the header"));
            }
        }
        check_apart(file, &gguf.tensors)?;
        Ok(gguf)
    }

    /// The other files of a model that is divided into several (`NAME-00001-of-00003.gguf`), of which this is
    /// the first; none for a single file.
    ///
    /// # Errors
    /// When this is not the first file, or its name does not say which part it is.
    pub(super) fn other_files(&self) -> Result<Vec<PathBuf>> {
        const COUNT: &str = "split.count";
        let count = self.number(COUNT)?.unwrap_or(0);
        if count <= 1 {
            return Ok(Vec::new());
        }
        let name = self.file.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let named = |part: u64| format!("-{part:05}-of-{count:05}.gguf");
        if self.number("split.no")?.unwrap_or(0) != 0 {
            let problem = format!("this is a later one of {count} files: give the first one, *{}", named(1));
            return Err(self.error("split.no", problem));
        }
        let Some(stem) = name.strip_suffix(&named(1)).filter(|_| count <= FILES_MAX) else {
            let problem = format!("the model is divided into {count} files, expected the name *{}", named(1));
            return Err(self.error(COUNT, problem));
        };
        Ok((2..=count).map(|part| self.file.with_file_name(format!("{stem}{}", named(part)))).collect())
    }

    /// Adds the tensors of another file of the same model.
    ///
    /// # Errors
    /// When its number differs from the name's, or a tensor occurs twice.
    pub(super) fn join(&mut self, other: GgufFile, shard: usize) -> Result<()> {
        let number = other.number("split.no")?;
        if number != Some(shard as u64) {
            let problem = format!("{number:?}, expected {shard}: it is another part than its name says");
            return Err(other.error("split.no", problem));
        }
        for (name, tensor) in other.tensors {
            let tensor = GgufTensor { shard, ..tensor };
            if self.tensors.insert(name.clone(), tensor).is_some() {
                return Err(Error::tensor(&other.file, &name, "also occurs in an earlier file"));
            }
        }
        Ok(())
    }

    /// Checks that all files together have as many tensors as the first one says.
    pub(super) fn check_complete(&self) -> Result<()> {
        const TENSORS: &str = "split.tensors.count";
        match self.number(TENSORS)? {
            Some(count) if count != self.tensors.len() as u64 => {
                let problem = format!("{count}, and the files have {} tensors", self.tensors.len());
                Err(self.error(TENSORS, problem))
            }
            _ => Ok(()),
        }
    }

    /// The first byte of the first tensor.
    #[cfg(test)]
    pub(super) fn tensors_start(&self) -> usize {
        self.tensors.values().map(|tensor| tensor.range.start).min().unwrap_or(0)
    }

    /// An error about a key.
    pub(super) fn error(&self, key: &str, problem: impl Into<String>) -> Error {
        Error::Field { file: self.file.clone(), field: key.to_owned(), problem: problem.into() }
    }

    /// The names of all keys.
    pub(super) fn keys(&self) -> impl Iterator<Item = &str> {
        self.values.keys().map(String::as_str)
    }

    /// Whether a key is present with a value other than none, zero, false or one.
    pub(super) fn has_effect(&self, key: &str) -> bool {
        match self.values.get(key) {
            None => false,
            Some(GgufValue::Unsigned(value)) => *value > 0,
            Some(GgufValue::Signed(value)) => *value != 0,
            Some(GgufValue::Float(value)) => *value != 0.0 && *value != 1.0,
            Some(GgufValue::Flag(value)) => *value,
            Some(GgufValue::Text(value)) => !value.is_empty(),
            Some(GgufValue::Texts(values)) => !values.is_empty(),
            Some(GgufValue::Numbers(values)) => values.iter().any(|value| *value != 0.0),
        }
    }

    fn wrong(&self, key: &str, expected: &str) -> Error {
        self.error(key, format!("expected {expected}"))
    }

    pub(super) fn number(&self, key: &str) -> Result<Option<u64>> {
        match self.values.get(key) {
            None => Ok(None),
            Some(GgufValue::Unsigned(value)) => Ok(Some(*value)),
            Some(GgufValue::Signed(value)) if *value >= 0 => Ok(Some(value.unsigned_abs())),
            Some(GgufValue::Numbers(of_layers)) => match of_layers.as_slice() {
                [first, rest @ ..] if rest.iter().all(|other| other == first) && first.fract() == 0.0 => {
                    Ok(Some(*first).filter(|first| *first >= 0.0).map(mixfleet_hal::cast::to_u64))
                }
                _ => Err(self.wrong(key, "the same number for all layers; others are not supported")),
            },
            Some(_) => Err(self.wrong(key, "a whole number from 0 on")),
        }
    }

    pub(super) fn token(&self, key: &str) -> Result<Option<u32>> {
        let number = self.number(key)?;
        number.map(|id| u32::try_from(id).map_err(|_| self.wrong(key, "a token id"))).transpose()
    }

    pub(super) fn float(&self, key: &str) -> Result<Option<f64>> {
        match self.values.get(key) {
            None => Ok(None),
            Some(GgufValue::Float(value)) if value.is_finite() => Ok(Some(*value)),
            Some(GgufValue::Unsigned(value)) => Ok(Some(*value as f64)),
            Some(GgufValue::Signed(value)) => Ok(Some(*value as f64)),
            Some(_) => Err(self.wrong(key, "a finite number")),
        }
    }

    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>> {
        match self.values.get(key) {
            None => Ok(None),
            Some(GgufValue::Flag(value)) => Ok(Some(*value)),
            Some(_) => Err(self.wrong(key, "true or false")),
        }
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&str>> {
        match self.values.get(key) {
            None => Ok(None),
            Some(GgufValue::Text(value)) => Ok(Some(value)),
            Some(_) => Err(self.wrong(key, "a text")),
        }
    }

    pub(super) fn texts(&self, key: &str) -> Result<Option<&[String]>> {
        match self.values.get(key) {
            None => Ok(None),
            Some(GgufValue::Texts(values)) => Ok(Some(values)),
            Some(_) => Err(self.wrong(key, "a list of texts")),
        }
    }

    pub(super) fn numbers(&self, key: &str) -> Result<Option<&[f64]>> {
        match self.values.get(key) {
            None => Ok(None),
            Some(GgufValue::Numbers(values)) => Ok(Some(values)),
            Some(_) => Err(self.wrong(key, "a list of numbers")),
        }
    }
}

/// Parses a tensor's entry: name, shape, type and offset in the data.
fn info(reader: &mut Reader<impl Read>) -> Result<(String, GgufTensor, u64)> {
    let name = reader.text()?;
    let dimensions = reader.u32()?;
    if !(1..=DIMENSIONS_MAX).contains(&dimensions) {
        return Err(Error::tensor(reader.file, &name, format!("{dimensions} dimensions, expected 1 to 4")));
    }
    let mut lengths = Vec::with_capacity(dimensions as usize);
    for _ in 0..dimensions {
        lengths.push(reader.u64()?);
    }
    let kind = reader.u32()?;
    let offset = reader.u64()?;
    let wrong = |problem: String| Error::tensor(reader.file, &name, problem);
    let (columns, rest) = (lengths[0], &lengths[1..]);
    let Some(rows) = rest.iter().try_fold(1u64, |all, length| all.checked_mul(*length)) else {
        return Err(wrong(format!("more than 2^64 rows: {lengths:?}")));
    };
    if rows > u64::from(u32::MAX) || columns > u64::from(u32::MAX) {
        return Err(wrong(format!("{rows} x {columns} weights are more than any model has")));
    }
    let Some(kind) = GgmlKind::of(kind) else {
        let (kind, supported) = (GgmlKind::name_of(kind), GgmlKind::names());
        return Err(wrong(format!("{kind} is not supported; supported: {supported}")));
    };
    let (weights, block_bytes) = (kind.columns(), kind.bytes() as u64);
    if !columns.is_multiple_of(weights) {
        return Err(wrong(format!(
            "rows of {columns} weights are not a whole number of blocks of {weights}"
        )));
    }
    let bytes = (columns / weights).checked_mul(block_bytes).and_then(|row| row.checked_mul(rows));
    let Some(bytes) = bytes.and_then(|bytes| usize::try_from(bytes).ok()) else {
        return Err(wrong(format!("{rows} x {columns} weights are more than any file holds")));
    };
    Ok((name, GgufTensor { kind, rows, columns, shard: 0, range: 0..bytes }, offset))
}

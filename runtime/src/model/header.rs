//! The header of a safetensors file: eight bytes of length, a JSON object, then the tensors' bytes.
//!
//! It is parsed here and not by the `safetensors` crate because an error must name the tensor: the crate
//! names neither a tensor whose bytes are cut off nor one that occurs twice.

use super::error::{Error, LFS_POINTER, LFS_PROBLEM, Result};
use mixfleet_hal::cast::to_usize;
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::Value;
use std::ops::Range;
use std::path::Path;

/// The format's own limit on the header.
const HEADER_BYTES_MAX: u64 = 100_000_000;
const LENGTH_BYTES: usize = 8;

/// The position of a tensor in its file, checked against the file's length.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Entry {
    /// The format's name of the element type: `BF16`.
    pub(super) dtype: String,
    pub(super) shape: Vec<u64>,
    /// Its range of bytes in the file.
    pub(super) range: Range<usize>,
}

#[derive(serde::Deserialize)]
struct RawEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// Reads and checks the header of `file`, whose content is `bytes`.
///
/// # Errors
/// When the header is too long, is not JSON or names a tensor twice; when a tensor exceeds the file, overlaps
/// another, leaves a gap (which the format forbids) or has another size than its shape requires.
pub(super) fn read(file: &Path, bytes: &[u8]) -> Result<Vec<(String, Entry)>> {
    let start = header_end(file, bytes)?;
    let pairs: Pairs = serde_json::from_slice(&bytes[LENGTH_BYTES..start])
        .map_err(|e| Error::file(file, format!("damaged safetensors header: {e}")))?;
    let data_bytes = (bytes.len() - start) as u64;
    let mut entries = Vec::with_capacity(pairs.0.len());
    for (name, value) in pairs.0 {
        if name == "__metadata__" {
            continue;
        }
        let raw: RawEntry = serde_json::from_value(value)
            .map_err(|e| Error::tensor(file, &name, format!("damaged header entry: {e}")))?;
        let (begin, end) = raw.data_offsets;
        if begin > end {
            return Err(Error::tensor(file, &name, format!("its bytes {begin}..{end} run backwards")));
        }
        if end > data_bytes {
            let problem = format!(
                "needs bytes {begin}..{end} of the data, but the file holds {data_bytes}: truncated?"
            );
            return Err(Error::tensor(file, &name, problem));
        }
        check_size(file, &name, &raw)?;
        let range = start + to_usize(begin)..start + to_usize(end);
        entries.push((name, Entry { dtype: raw.dtype, shape: raw.shape, range }));
    }
    check_cover(file, &entries, start, bytes.len())?;
    check_unique(file, &entries)?;
    Ok(entries)
}

fn header_end(file: &Path, bytes: &[u8]) -> Result<usize> {
    if bytes.starts_with(LFS_POINTER) {
        return Err(Error::file(file, LFS_PROBLEM));
    }
    let Some(length) = bytes.first_chunk::<LENGTH_BYTES>() else {
        return Err(Error::file(
            file,
            format!("{} bytes, too short for safetensors: truncated?", bytes.len()),
        ));
    };
    let length = u64::from_le_bytes(*length);
    if length > HEADER_BYTES_MAX {
        let problem =
            format!("a header of {length} bytes, expected at most {HEADER_BYTES_MAX}: not safetensors?");
        return Err(Error::file(file, problem));
    }
    let end = LENGTH_BYTES + to_usize(length);
    if end > bytes.len() {
        let problem = format!("a header of {length} bytes in a file of {}: truncated?", bytes.len());
        return Err(Error::file(file, problem));
    }
    Ok(end)
}

/// Compares the size of a tensor with its shape, where the dtype is known.
fn check_size(file: &Path, name: &str, raw: &RawEntry) -> Result<()> {
    let element_bytes = match raw.dtype.as_str() {
        "F32" => 4,
        "BF16" | "F16" => 2,
        _ => return Ok(()),
    };
    let (begin, end) = raw.data_offsets;
    let needed = raw.shape.iter().try_fold(element_bytes, |product: u64, dim| product.checked_mul(*dim));
    if needed == Some(end - begin) {
        return Ok(());
    }
    let needed = needed.map_or("more than 2^64".into(), |bytes| bytes.to_string());
    let problem = format!("{} bytes, expected {needed} for {} {:?}", end - begin, raw.dtype, raw.shape);
    Err(Error::tensor(file, name, problem))
}

/// Checks that the tensors are contiguous from the header's end to the file's end.
fn check_cover(file: &Path, entries: &[(String, Entry)], start: usize, end: usize) -> Result<()> {
    let mut by_place: Vec<_> = entries.iter().collect();
    by_place.sort_by_key(|(_, entry)| (entry.range.start, entry.range.end));
    let mut at = start;
    for (name, entry) in by_place {
        if entry.range.start != at {
            let what =
                if entry.range.start < at { "overlaps another tensor" } else { "leaves a gap before it" };
            let problem = format!("at byte {} of the file, expected {at}: it {what}", entry.range.start);
            return Err(Error::tensor(file, name, problem));
        }
        at = entry.range.end;
    }
    if at != end {
        return Err(Error::file(file, format!("{} bytes after the last tensor", end - at)));
    }
    Ok(())
}

fn check_unique(file: &Path, entries: &[(String, Entry)]) -> Result<()> {
    let mut names: Vec<_> = entries.iter().map(|(name, _)| name).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(Error::tensor(file, pair[0], "occurs twice in the header")),
        None => Ok(()),
    }
}

/// A JSON object as a list, so that a repeated key is detected.
struct Pairs(Vec<(String, Value)>);

impl<'de> Deserialize<'de> for Pairs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Collect;
        impl<'de> Visitor<'de> for Collect {
            type Value = Pairs;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Pairs, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    pairs.push(pair);
                }
                Ok(Pairs(pairs))
            }
        }
        deserializer.deserialize_map(Collect)
    }
}

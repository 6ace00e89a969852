//! Writes requests as lines of Mooncake's format.

use crate::trace::Request;
use mixfleet_hal::cast::to_u64;
use std::io::{BufWriter, Write};
use std::path::Path;

/// Appends `request` as one line, with `hash_ids` for its chain.
pub fn write_line(line: &mut Vec<u8>, request: &Request, hash_ids: &[u64]) {
    line.extend_from_slice(b"{\"timestamp\": ");
    number(line, to_u64((request.at.0 * 1e3).round()));
    line.extend_from_slice(b", \"input_length\": ");
    number(line, request.prompt_tokens.into());
    line.extend_from_slice(b", \"output_length\": ");
    number(line, request.output_tokens.into());
    line.extend_from_slice(b", \"hash_ids\": [");
    for (place, &id) in hash_ids.iter().enumerate() {
        if place > 0 {
            line.extend_from_slice(b", ");
        }
        number(line, id);
    }
    line.extend_from_slice(b"]}\n");
}

/// Appends a number. `format!` takes three times as long, and a trace has about a hundred numbers per line.
fn number(line: &mut Vec<u8>, value: u64) {
    serde_json::to_writer(line, &value).expect("a number, in memory");
}

/// A file that is compressed as its name says: `.zst`, `.gz`, or not at all.
pub enum Output<W: Write> {
    /// Uncompressed.
    Plain(BufWriter<W>),
    /// Zstandard.
    Zstandard(zstd::Encoder<'static, W>),
    /// Gzip.
    Gzip(flate2::write::GzEncoder<W>),
}

impl<W: Write> Output<W> {
    /// Writes to `inner`, compressed as the extension of `name` says.
    pub fn new(inner: W, name: &Path) -> std::io::Result<Self> {
        Ok(match name.extension().and_then(|ending| ending.to_str()) {
            Some("zst") => Output::Zstandard(zstd::Encoder::new(inner, 0)?),
            Some("gz") => Output::Gzip(flate2::write::GzEncoder::new(inner, flate2::Compression::default())),
            _ => Output::Plain(BufWriter::with_capacity(1 << 17, inner)),
        })
    }

    /// Ends the file. Without it, the last requests are missing.
    pub fn finish(self) -> std::io::Result<()> {
        match self {
            Output::Plain(mut inner) => inner.flush(),
            Output::Zstandard(inner) => inner.finish()?.flush(),
            Output::Gzip(inner) => inner.finish()?.flush(),
        }
    }

    fn inner(&mut self) -> &mut dyn Write {
        match self {
            Output::Plain(inner) => inner,
            Output::Zstandard(inner) => inner,
            Output::Gzip(inner) => inner,
        }
    }
}

impl<W: Write> Write for Output<W> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.inner().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.inner().flush()
    }
}

//! Lines of a file that may be compressed, with at most one line in memory.

use super::{Format, TraceError};
use std::io::{BufRead, BufReader, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Maximum length of a line: a file without newlines would otherwise fill the memory.
const LINE_BYTES_MAX: u64 = 64 << 20;

const GZIP: [u8; 2] = [0x1f, 0x8b];
const ZSTANDARD: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

/// The position in a file being read, which other threads may query.
#[derive(Clone, Debug, Default)]
pub struct Progress {
    bytes: Arc<AtomicU64>,
    total: Option<u64>,
}

impl Progress {
    /// Bytes of the file read so far, in compressed form.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Size of the file in bytes; unknown for a pipe.
    pub fn total(&self) -> Option<u64> {
        self.total
    }
}

struct Counted<R> {
    inner: R,
    bytes: Arc<AtomicU64>,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.bytes.fetch_add(count as u64, Ordering::Relaxed);
        Ok(count)
    }
}

/// The decompressed lines of a trace, with their numbers.
pub(super) struct Lines {
    input: Box<dyn BufRead + Send>,
    name: String,
    /// Number of lines read so far, including blank ones.
    number: u64,
    line: Vec<u8>,
    peeked: bool,
    progress: Progress,
}

impl Lines {
    pub(super) fn new(
        name: String,
        raw: impl Read + Send + 'static,
        total: Option<u64>,
    ) -> Result<Self, TraceError> {
        let progress = Progress { bytes: Arc::default(), total };
        let counted = Counted { inner: raw, bytes: progress.bytes.clone() };
        let (input, number): (Box<dyn BufRead + Send>, _) = match decompressed(counted) {
            Ok(input) => (input, 0),
            Err(cause) => return Err(TraceError::Read { name, line: 0, cause }),
        };
        Ok(Lines { input, name, number, line: Vec::new(), peeked: false, progress })
    }

    /// The next line that is not blank, without its line end; none at the end of the file.
    pub(super) fn next(&mut self) -> Result<Option<&[u8]>, TraceError> {
        if self.peeked {
            self.peeked = false;
            return Ok(Some(&self.line));
        }
        while self.read_line()? {
            if !self.line.is_empty() {
                return Ok(Some(&self.line));
            }
        }
        Ok(None)
    }

    /// The next line, without consuming it.
    pub(super) fn peek(&mut self) -> Result<Option<&[u8]>, TraceError> {
        self.peeked = self.next()?.is_some();
        Ok(self.peeked.then_some(&self.line))
    }

    /// Reads a line, trimmed, into `self.line`; false at the end.
    fn read_line(&mut self) -> Result<bool, TraceError> {
        self.line.clear();
        let read = (&mut self.input).take(LINE_BYTES_MAX + 1).read_until(b'\n', &mut self.line);
        let error = |cause| TraceError::Read { name: self.name.clone(), line: self.number, cause };
        let count = read.map_err(error)?;
        if count as u64 > LINE_BYTES_MAX {
            return Err(error(std::io::Error::other(format!(
                "a line is longer than {LINE_BYTES_MAX} bytes"
            ))));
        }
        if self.number == 0 && self.line.starts_with(b"\xef\xbb\xbf") {
            self.line.drain(..3);
        }
        self.number += u64::from(count > 0);
        self.line.truncate(self.line.trim_ascii_end().len());
        let blanks = self.line.len() - self.line.trim_ascii_start().len();
        self.line.drain(..blanks);
        Ok(count > 0)
    }

    /// The error for an invalid last line.
    pub(super) fn error(&self, format: Format, cause: String) -> TraceError {
        TraceError::Line { name: self.name.clone(), line: self.number, cause, format }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn progress(&self) -> Progress {
        self.progress.clone()
    }
}

/// Decompresses `raw` as its first bytes require, regardless of the file's name.
fn decompressed(raw: impl Read + Send + 'static) -> std::io::Result<Box<dyn BufRead + Send>> {
    let mut raw = BufReader::with_capacity(1 << 16, raw);
    // A pipe may deliver fewer bytes at first than the magic number has.
    let mut head = Vec::new();
    (&mut raw).take(ZSTANDARD.len() as u64).read_to_end(&mut head)?;
    let (zstandard, gzip) = (head.starts_with(&ZSTANDARD), head.starts_with(&GZIP));
    let whole = std::io::Cursor::new(head).chain(raw);
    Ok(if zstandard {
        Box::new(BufReader::with_capacity(1 << 17, zstd::Decoder::new(whole)?))
    } else if gzip {
        Box::new(BufReader::with_capacity(1 << 17, flate2::bufread::MultiGzDecoder::new(whole)))
    } else {
        Box::new(whole)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn all(bytes: Vec<u8>) -> Result<Vec<(u64, String)>, TraceError> {
        let mut lines = Lines::new("t".into(), std::io::Cursor::new(bytes), None)?;
        let mut found = Vec::new();
        while let Some(line) = lines.next()? {
            let line = String::from_utf8_lossy(line).into_owned();
            found.push((lines.number, line));
        }
        Ok(found)
    }

    #[test]
    fn every_compression_gives_the_same_lines() {
        let text = b"\xef\xbb\xbfone\r\n\n  two \nthree".to_vec();
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(&text).unwrap();
        let gzip = gzip.finish().unwrap();
        let zstandard = zstd::encode_all(&text[..], 1).unwrap();
        let expected = vec![(1, "one".to_string()), (3, "two".into()), (4, "three".into())];
        for bytes in [text, gzip, zstandard] {
            assert_eq!(all(bytes).unwrap(), expected);
        }
    }

    #[test]
    fn a_cut_file_is_an_error() {
        let text: Vec<u8> = (0..5000u32).flat_map(|i| format!("{}\n", i * i).into_bytes()).collect();
        let whole = zstd::encode_all(&text[..], 1).unwrap();
        let error = all(whole[..whole.len() / 2].to_vec()).unwrap_err();
        assert!(error.to_string().starts_with("cannot read t"), "{error}");
    }

    #[test]
    fn nothing_and_less_than_a_magic_number_are_plain_text() {
        assert_eq!(all(Vec::new()).unwrap(), []);
        assert_eq!(all(b"a".to_vec()).unwrap(), [(1, "a".to_string())]);
    }

    #[test]
    fn peeking_leaves_the_line() {
        let mut lines = Lines::new("t".into(), &b"a\nb\n"[..], None).unwrap();
        assert_eq!(lines.peek().unwrap(), Some(&b"a"[..]));
        assert_eq!(lines.next().unwrap(), Some(&b"a"[..]));
        assert_eq!(lines.next().unwrap(), Some(&b"b"[..]));
        assert_eq!(lines.peek().unwrap(), None);
    }
}

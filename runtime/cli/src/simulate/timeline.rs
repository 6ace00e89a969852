//! The pools' load over time as a CSV table.

use mixfleet_sim::simulate::Sample;
use std::fs::File;
use std::io::{BufWriter, Result, Write};
use std::path::Path;

const HEADER: &str = "time_s,pool,queued,prefilling,receiving,decoding,used_tokens,cached_tokens,prefill_utilisation,\
                      decode_utilisation,prefill_load,decode_load,fleet_arrived,fleet_rejected,dropped,completed";

/// A CSV file that grows with the run.
pub(super) struct TimelineFile {
    out: BufWriter<File>,
    pools: Vec<String>,
    /// The error that stopped the writing, if any.
    written: Result<()>,
}

impl TimelineFile {
    pub(super) fn create(path: &Path, pools: &[String]) -> Result<Self> {
        let mut out = BufWriter::new(File::create(path)?);
        writeln!(out, "{HEADER}")?;
        let pools = pools.iter().map(|name| quoted(name)).collect();
        Ok(TimelineFile { out, pools, written: Ok(()) })
    }

    pub(super) fn add(&mut self, sample: &Sample) {
        if self.written.is_ok() {
            self.written = self.write(sample);
        }
    }

    fn write(&mut self, s: &Sample) -> Result<()> {
        write!(self.out, "{:.3},{},", s.time_s, self.pools[s.pool as usize])?;
        for count in [s.queued, s.prefilling, s.receiving, s.decoding, s.used_tokens, s.cached_tokens] {
            write!(self.out, "{count},")?;
        }
        for share in [s.prefill_utilisation, s.decode_utilisation, s.prefill_load, s.decode_load] {
            write!(self.out, "{share:.6},")?;
        }
        writeln!(self.out, "{},{},{},{}", s.fleet_arrived, s.fleet_rejected, s.dropped, s.completed)
    }

    /// Finishes the file, and returns an error if not all of it was written.
    pub(super) fn finish(mut self) -> Result<()> {
        self.written?;
        self.out.flush()
    }
}

/// A name as a field of CSV (RFC 4180).
fn quoted(name: &str) -> String {
    if name.contains([',', '"', '\n', '\r']) {
        format!("\"{}\"", name.replace('"', "\"\""))
    } else {
        name.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_one_field() {
        assert_eq!(quoted("prefill"), "prefill");
        assert_eq!(quoted("a,b"), "\"a,b\"");
        assert_eq!(quoted("a\"b"), "\"a\"\"b\"");
    }
}

//! A profile as a card for the terminal.

use super::document::{Flag, ProfileDocument, ReachedRate, Unit};
use super::text::{bar, gibibytes};
use crate::numbers::scaled;
use std::fmt::Write as _;

const BAR: usize = 20;

/// Renders the card: name, bars for compute, bandwidth and links, and what a dollar buys.
pub fn card(document: &ProfileDocument) -> String {
    let mut card = Card { document, out: String::new() };
    card.head();
    card.compute();
    card.memory();
    card.attention();
    card.links();
    card.long_runs();
    card.expected();
    card.remarks();
    card.out
}

struct Card<'a> {
    document: &'a ProfileDocument,
    out: String,
}

impl Card<'_> {
    fn line(&mut self, label: &str, text: &str) {
        let _ = writeln!(self.out, "  {label:<9}{}", text.trim_end());
    }

    fn head(&mut self) {
        let d = &self.document.device;
        let (memory, day) = (gibibytes(d.memory_bytes), self.document.measured_at.get(..10).unwrap_or(""));
        // 0 means that the backend cannot know
        let units = if d.compute_units == 0 { String::new() } else { format!("{} units, ", d.compute_units) };
        let _ = writeln!(self.out, "  {}, {units}{memory} ({})", d.name, d.id);
        let s = &self.document.summary;
        let level = format!("{:?}", self.document.level).to_lowercase();
        let mut text = format!("{} points in {:.0} s, {level}", s.ok, self.document.seconds);
        for (count, what) in [
            (s.flagged, "flagged"),
            (s.unsupported, "unsupported"),
            (s.skipped, "skipped"),
            (s.error, "wrong or failed"),
        ] {
            if count > 0 {
                let _ = write!(text, ", {count} {what}");
            }
        }
        if !self.document.complete {
            text += ", INCOMPLETE";
        }
        self.line("measured", format!("{day} {text}").trim_start());
    }

    /// Renders a rate with its bar, and the rate per dollar.
    fn bar_line(&mut self, label: &str, what: &str, reached: &ReachedRate, best: f64, unit: Unit) {
        let name = match unit {
            Unit::Flop => "FLOP/s",
            Unit::Byte => "B/s",
        };
        let per_dollar = match &self.document.economics {
            Some(price) => format!("  per $/h {}", scaled(reached.rate / price.usd_per_hour, name)),
            None => String::new(),
        };
        let (rate, bar) = (scaled(reached.rate, name), bar(reached.rate / best, BAR));
        let doubt = self.doubt(reached);
        self.line(label, &format!("{what:<7}{rate:>14}  |{bar}|{per_dollar}{doubt}"));
    }

    /// Returns the spread of the samples behind a number, if it is too wide to trust.
    fn doubt(&self, reached: &ReachedRate) -> String {
        let noisy = self.document.point(&reached.point).filter(|point| point.flags.contains(&Flag::Noisy));
        let spread = noisy.and_then(|point| point.seconds.as_ref());
        spread.map(|s| format!(" (noisy: CV {:.0} %)", 100.0 * s.cv)).unwrap_or_default()
    }

    fn compute(&mut self) {
        let compute = &self.document.summary.compute;
        let best = compute.iter().map(|c| c.reached.rate).fold(0.0, f64::max);
        for (i, c) in compute.iter().enumerate() {
            self.bar_line(if i == 0 { "compute" } else { "" }, &c.dtype, &c.reached, best, Unit::Flop);
        }
    }

    fn memory(&mut self) {
        let s = &self.document.summary;
        let rows = [("read", &s.memory_read), ("write", &s.memory_write), ("copy", &s.memory_copy)];
        let best = rows.iter().filter_map(|(_, r)| r.as_ref().map(|r| r.rate)).fold(0.0, f64::max);
        let mut label = "memory";
        for (what, reached) in rows {
            if let Some(reached) = reached {
                self.bar_line(label, what, reached, best, Unit::Byte);
                label = "";
            }
        }
        if let Some(price) = &self.document.economics {
            let (bytes, usd) = (gibibytes(price.bytes), price.usd_per_hour);
            self.line("capacity", &format!("{bytes} per $/h, at {usd} $/h ({})", price.source));
        }
    }

    fn attention(&mut self) {
        let s = &self.document.summary;
        let mut parts = Vec::new();
        if let Some(reached) = &s.decode_attention {
            parts.push(format!("decode reads KV at {}{}", scaled(reached.rate, "B/s"), self.doubt(reached)));
        }
        if let Some(reached) = &s.prefill_attention {
            parts.push(format!("prefill {}{}", scaled(reached.rate, "FLOP/s"), self.doubt(reached)));
        }
        if let Some(rows) = s.ridge_rows {
            parts.push(format!("ridge at {rows:.0} rows"));
        }
        if !parts.is_empty() {
            self.line("attention", &format!(" {}", parts.join(", ")));
        }
    }

    fn links(&mut self) {
        let (s, f) = (&self.document.summary, &self.document.fits);
        let mut parts = Vec::new();
        for (name, reached, lines) in [
            ("to device", &s.host_to_device, &f.host_to_device),
            ("to host", &s.device_to_host, &f.device_to_host),
        ] {
            let fixed = lines.first().map(|line| line.fixed_s).filter(|fixed_s| *fixed_s > 0.0);
            let fixed = fixed.map(|fixed_s| format!(" + {}", scaled(fixed_s, "s"))).unwrap_or_default();
            if let Some(reached) = reached {
                parts.push(format!("{name} {}{fixed}{}", scaled(reached.rate, "B/s"), self.doubt(reached)));
            }
        }
        if !parts.is_empty() {
            self.line("links", &parts.join(", "));
        }
        if let (Some(batch), Some(command)) = (f.launch_s, f.launch_per_command_s) {
            let (batch, command) = (scaled(batch, "s"), scaled(command, "s"));
            let more = f.dependence_s.map(|s| format!(", {} more after an unlike one", scaled(s, "s")));
            let more = more.unwrap_or_default();
            self.line("launch", &format!("{batch} a batch, {command} a command{more}"));
        }
    }

    fn long_runs(&mut self) {
        let runs = self
            .document
            .points
            .iter()
            .filter_map(|p| Some((p.id.strip_prefix("sustained.")?, p.long_run.as_ref()?)));
        let parts: Vec<String> = runs
            .map(|(name, run)| {
                let energy =
                    run.joules_per_run.map(|j| format!(", {} a run", scaled(j, "J"))).unwrap_or_default();
                format!("{name} {:.0} % of burst after {:.0} s{energy}", 100.0 * run.ratio, run.seconds)
            })
            .collect();
        if !parts.is_empty() {
            self.line("long run", &parts.join("; "));
        }
    }

    fn expected(&mut self) {
        let mut label = "predicts";
        for expected in &self.document.expected {
            let from = match expected.from.as_slice() {
                [] => "no other part".to_owned(),
                from => format!("{} other parts", from.len()),
            };
            self.line(
                label,
                &format!(
                    "{:<13} within {:.0} % on average, from {} points and {from}",
                    expected.op,
                    100.0 * expected.error,
                    expected.points
                ),
            );
            label = "";
        }
    }

    fn remarks(&mut self) {
        let document = self.document;
        let flags: Vec<&str> = document.conditions.flags.iter().map(|f| f.name()).collect();
        if !flags.is_empty() {
            self.line("beware", &flags.join(", "));
        }
        for check in document.checks.iter().filter(|check| !check.passed) {
            self.line("WRONG", &format!("{}: {}", check.class, check.reason.as_deref().unwrap_or("")));
        }
    }
}

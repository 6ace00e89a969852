//! A profile as a card for the terminal.

use super::document::{Flag, PointResult, ProfileDocument, Rate, ReachedRate};
use super::work::PointGroup;
use crate::datasheet::catalog_part;
use mixfleet_hal::DType;
use mixfleet_hal::catalog::Part;
use mixfleet_report::numbers::scaled;
use mixfleet_report::text::{bar, gibibytes, histogram};
use std::fmt::Write as _;

const BAR: usize = 18;
/// Bars of a histogram of samples.
const BINS: usize = 6;

/// Renders the card: name, bars for compute and bandwidth beside the datasheet of a known part, the samples
/// behind each, links, and what a dollar buys.
pub fn card(document: &ProfileDocument) -> String {
    let mut card = ProfileCard { document, part: catalog_part(&document.device.name), out: String::new() };
    card.head();
    card.compute();
    card.memory();
    card.attention();
    card.links();
    card.long_runs();
    card.dollar();
    card.expected();
    card.remarks();
    card.out
}

/// Renders every measured point in a section for each group, the fastest first, with the distribution of
/// its samples.
pub fn points(document: &ProfileDocument) -> String {
    let mut out = String::new();
    for group in PointGroup::ALL {
        let of_group = || document.points.iter().filter(|point| point.group == group);
        let mut measured: Vec<&PointResult> = of_group().filter(|point| point.seconds.is_some()).collect();
        if measured.is_empty() {
            continue;
        }
        let speed = |point: &PointResult| point.rate().map_or(0.0, |rate| rate.value);
        measured.sort_by(|a, b| speed(b).total_cmp(&speed(a)).then_with(|| a.id.cmp(&b.id)));
        let _ = writeln!(out, "\n  {}: {} of {} measured", group.name(), measured.len(), of_group().count());
        let names = measured.iter().map(|point| point.id.len()).max().unwrap_or(0).max("point".len());
        let _ = writeln!(out, "  {:<names$}  {:>7}  {:>11}  {:>6}  samples", "point", "median", "rate", "CV");
        for point in measured {
            let Some(seconds) = &point.seconds else { continue };
            let (median, cv) = (scaled(seconds.median, "s"), format!("{:.1} %", 100.0 * seconds.cv));
            let rate = point.rate().map_or_else(|| "-".to_owned(), Rate::text);
            let samples = histogram(&seconds.samples, BINS);
            let _ = writeln!(out, "  {:<names$}  {median:>7}  {rate:>11}  {cv:>6}  {samples}", point.id);
        }
    }
    out
}

struct ProfileCard<'a> {
    document: &'a ProfileDocument,
    /// The part of the catalog that it is, if it is one.
    part: Option<&'static Part>,
    out: String,
}

impl ProfileCard<'_> {
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

    /// Renders rows of a section, the fastest first, each with what its datasheet promises: bars are shares
    /// of that, or of the best row for a part without one.
    fn bars(&mut self, section: &str, unit: &str, mut rows: Vec<(&str, &ReachedRate, Option<f64>)>) {
        rows.sort_by(|(_, a, _), (_, b, _)| b.rate.total_cmp(&a.rate));
        let best = rows.iter().map(|(_, reached, _)| reached.rate).fold(0.0, f64::max);
        let (mut label, known) = (section, rows.iter().any(|(_, _, claim)| claim.is_some()));
        if let (Some(part), true) = (self.part, known) {
            self.line(label, &format!("{:<21}  of the datasheet of {}", "", part.id));
            label = "";
        }
        for (what, reached, claim) in rows {
            let share = claim.map(|claim| reached.rate / claim);
            let bar = match (share, known) {
                (None, true) => " ".repeat(BAR + 2),
                (share, _) => format!("|{}|", bar(share.unwrap_or(reached.rate / best), BAR)),
            };
            let share = share.map(|share| format!("{:>3.0} %", 100.0 * share)).unwrap_or_default();
            let share = if known { format!(" {share:>5}") } else { share };
            let (rate, samples) = (scaled(reached.rate, unit), self.samples(reached));
            self.line(label, &format!("{what:<7}{rate:>14}  {bar}{share}  {samples}"));
            label = "";
        }
    }

    /// The samples behind a number, from fast to slow, and their spread.
    fn samples(&self, reached: &ReachedRate) -> String {
        let Some(point) = self.document.point(&reached.point) else { return String::new() };
        let Some(seconds) = &point.seconds else { return String::new() };
        let word = if point.flags.contains(&Flag::Noisy) { "noisy" } else { "CV" };
        let digits = usize::from(seconds.cv < 0.0995);
        format!("{} {word} {:.digits$} %", histogram(&seconds.samples, BINS), 100.0 * seconds.cv)
    }

    /// Returns the spread of the samples behind a number, if it is too wide to trust.
    fn doubt(&self, reached: &ReachedRate) -> String {
        let noisy = self.document.point(&reached.point).filter(|point| point.flags.contains(&Flag::Noisy));
        let spread = noisy.and_then(|point| point.seconds.as_ref());
        spread.map(|s| format!(" (noisy: CV {:.0} %)", 100.0 * s.cv)).unwrap_or_default()
    }

    fn compute(&mut self) {
        let claim = |name: &str| self.part?.rates.of(name.parse::<DType>().ok()?).map(|rate| rate.0);
        let compute = &self.document.summary.compute;
        let rows = compute.iter().map(|c| (c.dtype.as_str(), &c.reached, claim(&c.dtype))).collect();
        self.bars("compute", "FLOP/s", rows);
    }

    fn memory(&mut self) {
        let s = &self.document.summary;
        let claim = self.part.map(|part| part.bandwidth().0);
        let all = [("read", &s.memory_read), ("write", &s.memory_write), ("copy", &s.memory_copy)];
        let rows = all.into_iter().filter_map(|(what, reached)| Some((what, reached.as_ref()?, claim)));
        self.bars("memory", "B/s", rows.collect());
    }

    fn dollar(&mut self) {
        let Some(price) = &self.document.economics else { return };
        let (usd, s) = (price.usd_per_hour, &self.document.summary);
        let mut parts: Vec<(f64, String)> = Vec::new();
        for c in &s.compute {
            let rate = c.reached.rate / usd;
            parts.push((rate, format!("{} {}", c.dtype, scaled(rate, "FLOP/s"))));
        }
        parts.sort_by(|(a, _), (b, _)| b.total_cmp(a));
        let mut parts: Vec<String> = parts.into_iter().map(|(_, words)| words).collect();
        parts.extend(s.memory_read.iter().map(|read| format!("read {}", scaled(read.rate / usd, "B/s"))));
        parts.push(gibibytes(price.bytes));
        self.line("1 $/h", &format!("buys {}; at {usd} $/h ({})", parts.join(", "), price.source));
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
            let more = f.dependence_s.map(|s| format!(", {} more in a layer", scaled(s, "s")));
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

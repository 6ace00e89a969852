//! `part.toml`: a vendor's claims and waivers for a part. A part without a file is validated in full, only
//! without claims.

use super::case::{CaseResult, CaseStatus, WaivedBy, matches};
use super::performance;
use crate::profile::WorkItem;
use crate::profile::work::SustainedLoad;
use regex_lite::Regex;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use toml::{Table, Value};

/// An error in a part file: where, why, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{place}: {problem}")]
pub struct PartError {
    /// The table and key of the error.
    pub place: String,
    /// The problem, with a suggestion if there is one.
    pub problem: String,
}

fn wrong<T>(place: impl Into<String>, problem: impl Into<String>) -> Result<T, PartError> {
    Err(PartError { place: place.into(), problem: problem.into() })
}

/// The quantity that a number measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Quantity {
    /// Bytes per second; more is better.
    BytesPerSecond,
    /// Floating-point or integer operations per second; more is better.
    FlopPerSecond,
    /// Seconds; less is better.
    Seconds,
}

impl Quantity {
    /// Returns the unit without a prefix.
    pub const fn unit(self) -> &'static str {
        match self {
            Quantity::BytesPerSecond => "B/s",
            Quantity::FlopPerSecond => "FLOP/s",
            Quantity::Seconds => "s",
        }
    }
}

/// Every unit that a claim may use. GB is 1e9, GiB is 2^30.
const UNITS: [(&str, Quantity, f64); 18] = [
    ("B/s", Quantity::BytesPerSecond, 1.0),
    ("MB/s", Quantity::BytesPerSecond, 1e6),
    ("GB/s", Quantity::BytesPerSecond, 1e9),
    ("TB/s", Quantity::BytesPerSecond, 1e12),
    ("GiB/s", Quantity::BytesPerSecond, 1_073_741_824.0),
    ("FLOP/s", Quantity::FlopPerSecond, 1.0),
    ("GFLOP/s", Quantity::FlopPerSecond, 1e9),
    ("TFLOP/s", Quantity::FlopPerSecond, 1e12),
    ("PFLOP/s", Quantity::FlopPerSecond, 1e15),
    ("op/s", Quantity::FlopPerSecond, 1.0),
    ("Gop/s", Quantity::FlopPerSecond, 1e9),
    ("Top/s", Quantity::FlopPerSecond, 1e12),
    ("TOP/s", Quantity::FlopPerSecond, 1e12),
    ("TOPS", Quantity::FlopPerSecond, 1e12),
    ("s", Quantity::Seconds, 1.0),
    ("ms", Quantity::Seconds, 1e-3),
    ("us", Quantity::Seconds, 1e-6),
    ("ns", Quantity::Seconds, 1e-9),
];

/// One number that the vendor claims.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Claim {
    /// The point of the profile.
    pub point: String,
    /// The claimed value, in the unit without prefix.
    pub value: f64,
    /// The quantity of the value.
    pub quantity: Quantity,
    /// The vendor's own unit, used for display.
    pub unit: String,
    /// The share of the value that must be reached, above 0 and up to 1; a measured time may exceed the claim
    /// by its inverse.
    pub at_least: f64,
    /// Source of the claim.
    pub source: String,
}

impl Claim {
    /// Formats `value`, given in the unit without prefix, in the vendor's unit with the given number of
    /// significant digits.
    pub fn in_words(&self, value: f64, digits: usize) -> String {
        let scale = UNITS.iter().find(|(name, ..)| *name == self.unit).map_or(1.0, |(.., scale)| *scale);
        let rounded = format!("{:.*e}", digits.saturating_sub(1), value / scale);
        // a float prints its shortest decimal form
        format!("{} {}", rounded.parse::<f64>().unwrap_or(f64::NAN), self.unit)
    }
}

/// Whether a point measures `quantity`.
fn counts(work: &WorkItem, quantity: Quantity) -> bool {
    match (work, quantity) {
        (_, Quantity::Seconds) | (WorkItem::Sustained(SustainedLoad::Gemm), _) => true,
        (WorkItem::Launch(_), _) => false,
        (WorkItem::Op(sig), Quantity::FlopPerSecond) => sig.flops() > 0.0,
        (_, Quantity::FlopPerSecond) => false,
        (_, Quantity::BytesPerSecond) => true,
    }
}

/// A wrong case that is let through until a date.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Waiver {
    /// Pattern of case ids.
    pub case: String,
    /// Reason for the waiver.
    pub reason: String,
    /// The last day on which it holds, as `YYYY-MM-DD`.
    pub until: String,
}

/// The parts that a file is about.
#[derive(Clone, Debug)]
struct Match {
    name: Option<Regex>,
    pci: Option<String>,
}

/// A parsed part file.
#[derive(Clone, Debug)]
pub struct PartFile {
    of: Match,
    /// The claims of the vendor.
    pub claims: Vec<Claim>,
    /// All waivers, including expired ones.
    pub waivers: Vec<Waiver>,
}

/// A table whose keys are looked up one by one; leftover keys are an error.
struct TableKeys<'a> {
    place: String,
    table: &'a Table,
    known: Vec<&'static str>,
}

impl<'a> TableKeys<'a> {
    fn new(place: impl Into<String>, table: &'a Table) -> Self {
        TableKeys { place: place.into(), table, known: Vec::new() }
    }

    fn get(&mut self, key: &'static str) -> Option<&'a Value> {
        self.known.push(key);
        self.table.get(key)
    }

    fn optional_text(&mut self, key: &'static str) -> Result<Option<String>, PartError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) if !text.trim().is_empty() => Ok(Some(text.clone())),
            Some(other) => {
                let problem = format!("must be a text in quotes and not empty, not {}", other.type_str());
                wrong(format!("{}.{key}", self.place), problem)
            }
        }
    }

    fn text(&mut self, key: &'static str) -> Result<String, PartError> {
        match self.optional_text(key)? {
            Some(text) => Ok(text),
            None => wrong(&self.place, format!("'{key}' is missing")),
        }
    }

    fn number(&mut self, key: &'static str) -> Result<f64, PartError> {
        let place = format!("{}.{key}", self.place);
        let number = match self.get(key) {
            None => return wrong(&self.place, format!("'{key}' is missing")),
            Some(Value::Float(number)) => *number,
            Some(Value::Integer(number)) => *number as f64,
            Some(other) => return wrong(place, format!("must be a number, not {}", other.type_str())),
        };
        if number.is_finite() && number > 0.0 { Ok(number) } else { wrong(place, "must be above 0") }
    }

    /// Reads the date of `key`: a TOML date, or a string of the same form.
    fn date(&mut self, key: &'static str) -> Result<String, PartError> {
        let text = match self.get(key) {
            None => {
                return wrong(&self.place, format!("'{key}' is missing: a waiver without an end is none"));
            }
            Some(Value::String(text)) => text.clone(),
            Some(Value::Datetime(date)) => date.to_string(),
            Some(other) => other.type_str().to_owned(),
        };
        if is_date(&text) {
            return Ok(text);
        }
        wrong(format!("{}.{key}", self.place), format!("'{text}' is not a date such as 2027-03-01"))
    }

    /// Reads an array of tables.
    fn tables(&mut self, key: &'static str) -> Result<Vec<&'a Table>, PartError> {
        let problem = || format!("must be tables: write [[{key}]]");
        match self.get(key) {
            None => Ok(Vec::new()),
            Some(Value::Array(items)) => {
                let tables = items.iter().map(|item| item.as_table());
                tables.collect::<Option<Vec<_>>>().map_or_else(|| wrong(key, problem()), Ok)
            }
            Some(_) => wrong(key, problem()),
        }
    }

    fn finish(self) -> Result<(), PartError> {
        match self.table.keys().find(|key| !self.known.contains(&key.as_str())) {
            Some(unknown) => {
                let near = nearest(unknown, &self.known);
                wrong(self.place, format!("unknown key '{unknown}'{near}; known: {}", self.known.join(", ")))
            }
            None => Ok(()),
        }
    }
}

/// Returns `: did you mean 'x'?` if a known word is similar.
fn nearest(word: &str, known: &[&str]) -> String {
    let distance = |other: &&&str| strsim::damerau_levenshtein(&word.to_lowercase(), &other.to_lowercase());
    match known.iter().min_by_key(distance) {
        Some(near) if distance(&near) <= 1 + word.len() / 3 => format!(" (did you mean '{near}'?)"),
        _ => String::new(),
    }
}

/// Whether the text is a valid date of the form `YYYY-MM-DD`, which compares like a date.
pub(crate) fn is_date(text: &str) -> bool {
    let parts: Vec<&str> = text.split('-').collect();
    let [year, month, day] = parts[..] else { return false };
    let number = |text: &str, digits: usize| {
        let well_formed = text.len() == digits && text.bytes().all(|b| b.is_ascii_digit());
        well_formed.then(|| text.parse::<u32>().ok()).flatten()
    };
    let (Some(year), Some(month), Some(day)) = (number(year, 4), number(month, 2), number(day, 2)) else {
        return false;
    };
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let days = match month {
        1 | 3 | 5 | 7 | 8 | 10 | 12 => 31,
        4 | 6 | 9 | 11 => 30,
        2 => 28 + u32::from(leap),
        _ => 0,
    };
    (1..=days).contains(&day)
}

impl PartFile {
    /// Parses a part file.
    ///
    /// # Errors
    /// The first error in it.
    pub fn parse(text: &str) -> Result<PartFile, PartError> {
        let table: Table = match text.parse() {
            Ok(table) => table,
            Err(error) => return wrong("TOML", format!("{error}").trim_end()),
        };
        let mut top = TableKeys::new("top level", &table);
        let of = match top.get("match") {
            Some(Value::Table(table)) => Match::parse(table)?,
            Some(_) => return wrong("match", "must be a table: match = { name = \"...\" }"),
            None => {
                let problem = "missing: say which part it is about, as match = { name = \"regex\" } or { pci = \"10de:2684\" }";
                return wrong("match", problem);
            }
        };
        let claims = top.tables("claim")?;
        let claims =
            claims.into_iter().enumerate().map(|(i, table)| claim(i, table)).collect::<Result<_, _>>()?;
        let waivers = top.tables("waiver")?;
        let waivers =
            waivers.into_iter().enumerate().map(|(i, table)| waiver(i, table)).collect::<Result<_, _>>()?;
        top.finish()?;
        Ok(PartFile { of, claims, waivers })
    }

    /// Checks that the file is about a device with this name and PCI id (`vendor:device` in hexadecimal), if
    /// known.
    ///
    /// # Errors
    /// Why it is not.
    pub fn is_about(&self, name: &str, pci: Option<&str>) -> Result<(), String> {
        if let Some(regex) = &self.of.name
            && !regex.is_match(name)
        {
            return Err(format!("the part file is about '{}', the device is '{name}'", regex.as_str()));
        }
        match (&self.of.pci, pci) {
            (Some(want), Some(got)) if want.eq_ignore_ascii_case(got) => Ok(()),
            (Some(want), Some(got)) => Err(format!("the part file is about PCI {want}, the device is {got}")),
            (Some(want), None) => {
                Err(format!("the part file is about PCI {want}, and the device's PCI id is not known"))
            }
            (None, _) => Ok(()),
        }
    }

    /// Waives wrong cases for which a waiver holds on `today` (`YYYY-MM-DD`). An expired waiver has no
    /// effect, and the case's reason says so.
    pub fn waive(&self, cases: &mut [CaseResult], today: &str) {
        for case in cases.iter_mut().filter(|case| case.status.is_wrong()) {
            let mut fitting = self.waivers.iter().filter(|waiver| matches(&waiver.case, &case.id)).peekable();
            let Some(&first) = fitting.peek() else { continue };
            if let Some(waiver) = fitting.find(|waiver| today <= waiver.until.as_str()) {
                let Waiver { case: pattern, reason, until } = waiver.clone();
                case.waived_by = Some(WaivedBy { waiver: pattern, reason, until, was: case.status });
                case.status = CaseStatus::Waived;
                performance::waived(case);
            } else {
                let reason = case.reason.take().unwrap_or_default();
                case.reason =
                    Some(format!("{reason} (the waiver '{}' expired on {})", first.case, first.until));
            }
        }
    }
}

impl Match {
    fn parse(table: &Table) -> Result<Match, PartError> {
        let mut keys = TableKeys::new("match", table);
        let name = match keys.optional_text("name")? {
            Some(text) => match Regex::new(&text) {
                Ok(regex) => Some(regex),
                Err(error) => return wrong("match.name", format!("not a regular expression: {error}")),
            },
            None => None,
        };
        let pci = keys.optional_text("pci")?;
        keys.finish()?;
        if let Some(pci) = &pci
            && !Regex::new("^[0-9a-fA-F]{4}:[0-9a-fA-F]{4}$").is_ok_and(|form| form.is_match(pci))
        {
            return wrong("match.pci", format!("'{pci}' is not of the form vendor:device, as in 10de:2684"));
        }
        if name.is_none() && pci.is_none() {
            return wrong("match", "needs 'name' (a regular expression) or 'pci' (10de:2684)");
        }
        Ok(Match { name, pci })
    }
}

fn claim(i: usize, table: &Table) -> Result<Claim, PartError> {
    let mut keys = TableKeys::new(format!("claim {}", i + 1), table);
    let point = keys.text("point")?;
    let place = format!("claim {} ({point})", i + 1);
    keys.place.clone_from(&place);
    let (value, unit) = (keys.number("value")?, keys.text("unit")?);
    let (at_least, source) = (keys.number("at_least")?, keys.text("source")?);
    keys.finish()?;
    let Some((_, quantity, scale)) = UNITS.iter().find(|(name, ..)| *name == unit) else {
        let known: Vec<&str> = UNITS.iter().map(|(name, ..)| *name).collect();
        let near = nearest(&unit, &known);
        return wrong(place, format!("unknown unit '{unit}'{near}; known: {}", known.join(", ")));
    };
    // page sizes are the device's own, so no name holds one
    let Some(work) = WorkItem::parse(&point, 16) else {
        let problem = "is no point of the profile; 'mixfleet profile --json' lists names such as gemm.bf16.m2048.n8192.k8192 \
                       and memory_read.512MiB";
        return wrong(place, problem);
    };
    if !counts(&work, *quantity) {
        let able: Vec<&str> =
            UNITS.iter().filter(|(_, other, _)| counts(&work, *other)).map(|(name, ..)| *name).collect();
        let problem =
            format!("does not count {}: '{unit}' does not fit it; {} do", quantity.unit(), able.join(", "));
        return wrong(place, problem);
    }
    if at_least > 1.0 {
        return wrong(place, format!("at_least = {at_least}: the share that must be reached is at most 1"));
    }
    Ok(Claim { point, value: value * scale, quantity: *quantity, unit, at_least, source })
}

fn waiver(i: usize, table: &Table) -> Result<Waiver, PartError> {
    let mut keys = TableKeys::new(format!("waiver {}", i + 1), table);
    let (case, reason, until) = (keys.text("case")?, keys.text("reason")?, keys.date("until")?);
    keys.finish()?;
    // a pattern that matches an id of every level would waive the whole validation
    if (0..=9).all(|level| matches(&case, &format!("l{level}.x"))) {
        let problem = format!(
            "'{case}' would waive everything: name the operation or check, as in l1.attn_decode.f16.*"
        );
        return wrong(format!("waiver {}.case", i + 1), problem);
    }
    Ok(Waiver { case, reason, until })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"
        match = { name = "^acme X\\d", pci = "1ae9:0042" }
        [[claim]]
        point = "memory_read.512MiB"
        value = 864
        unit = "GB/s"
        at_least = 0.85
        source = "datasheet rev C p.2"
        [[waiver]]
        case = "l1.attn_decode.f16.*"
        reason = "errata 17"
        until = 2027-03-01
    "#;

    fn problem(from: &str, to: &str) -> String {
        assert!(GOOD.contains(from), "{from}");
        PartFile::parse(&GOOD.replacen(from, to, 1)).unwrap_err().to_string()
    }

    #[test]
    fn a_part_file_is_read_in_plain_units() {
        let part = PartFile::parse(GOOD).unwrap();
        let claim = &part.claims[0];
        assert_eq!((claim.value, claim.quantity), (864e9, Quantity::BytesPerSecond));
        assert_eq!(claim.in_words(claim.value, 12), "864 GB/s");
        assert_eq!(claim.in_words(87.4591e9, 4), "87.46 GB/s");
        assert_eq!(part.waivers[0].until, "2027-03-01");
        assert!(part.is_about("acme X1", Some("1AE9:0042")).is_ok());
        assert!(part.is_about("acme Y1", Some("1ae9:0042")).unwrap_err().contains("acme Y1"));
        assert!(part.is_about("acme X1", Some("1ae9:0043")).unwrap_err().contains("1ae9:0043"));
        assert!(part.is_about("acme X1", None).is_err());
    }

    #[test]
    fn what_is_wrong_is_said_with_a_suggestion() {
        for (from, to, words) in [
            ("point =", "pint =", "'point' is missing"),
            ("memory_read.512MiB", "memory_read.f32.512MiB", "is no point of the profile"),
            ("source =", "sauce = 1\nsource =", "did you mean 'source'?"),
            ("l1.attn_decode.f16.*", "*", "would waive everything"),
            ("l1.attn_decode.f16.*", "*.*", "waiver 1.case"),
            ("l1.attn_decode.f16.*", "l*", "name the operation"),
            ("[[waiver]]", "[[waver]]", "did you mean 'waiver'?"),
            ("\"GB/s\"", "\"GBps\"", "did you mean 'GB/s'?"),
            ("\"GB/s\"", "\"TFLOP/s\"", "does not count FLOP/s"),
            ("memory_read.512MiB", "launch.empty", "'GB/s' does not fit it; s, ms, us, ns do"),
            ("\"GB/s\"", "\"parsec\"", "known: B/s, MB/s"),
            ("864", "-1", "must be above 0"),
            ("864", "\"864\"", "must be a number"),
            ("0.85", "85", "at most 1"),
            ("2027-03-01", "\"2027-02-30\"", "not a date"),
            ("until = 2027-03-01", "", "without an end"),
            ("1ae9:0042", "1ae9", "vendor:device"),
            ("^acme", "(acme", "regular expression"),
            ("match =", "[match]\n#", "needs 'name'"),
            ("[[claim]]", "[claim]", "[[claim]]"),
            ("value = 864", "value =", "TOML"),
        ] {
            let told = problem(from, to);
            assert!(told.contains(words), "{from} -> {to}: {told}");
        }
        assert!(problem("864", "-1").contains("claim 1 (memory_read.512MiB)"));
    }

    #[test]
    fn a_waiver_holds_through_its_last_day_and_no_longer() {
        let part = PartFile::parse(GOOD).unwrap();
        let case = CaseResult::new("l1.attn_decode.f16.f16.h4", CaseStatus::Fail, "wrong");
        let other = CaseResult::new("l1.attn_decode.bf16.f16.h4", CaseStatus::Fail, "wrong");
        let judged = |today: &str| {
            let mut cases = [case.clone(), other.clone()];
            part.waive(&mut cases, today);
            cases
        };
        let [waived, untouched] = judged("2027-03-01");
        assert_eq!((waived.status, waived.waived_by.unwrap().was), (CaseStatus::Waived, CaseStatus::Fail));
        assert_eq!(untouched, other);
        let [expired, _] = judged("2027-03-02");
        assert_eq!(expired.status, CaseStatus::Fail);
        assert!(expired.reason.unwrap().contains("expired on 2027-03-01"));
    }

    #[test]
    fn dates_are_days_that_exist() {
        for (text, want) in
            [("2028-02-29", true), ("2027-02-29", false), ("2027-13-01", false), ("27-01-01", false)]
        {
            assert_eq!(is_date(text), want, "{text}");
        }
    }
}

//! `sim:PART[#NAME][,compute][,dilation:FACTOR][,faults:FILE]`

use mixfleet_hal::{Error, Result};

/// Syntax of selectors, for messages.
pub(crate) const USAGE: &str = "sim:PART[#NAME][,compute][,dilation:FACTOR][,faults:FILE]";

/// A parsed selector.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Selector {
    /// A catalog part, or the path of a profile.
    pub(crate) part: String,
    /// Whether real results are requested.
    pub(crate) compute: bool,
    /// Real seconds per simulated second.
    pub(crate) dilation: Option<f64>,
    /// Path of a fault plan.
    pub(crate) faults: Option<String>,
}

impl Selector {
    /// Parses a selector; the name after `#` only distinguishes several devices of one part.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let wrong = |what: String| Error::invalid(format!("'{text}': {what}; expected {USAGE}"));
        let rest = text.strip_prefix("sim:").ok_or_else(|| wrong("no part is named".into()))?;
        let mut words = rest.split(',');
        let part = words.next().unwrap_or_default();
        let part = part.rsplit_once('#').map_or(part, |(part, _)| part);
        if part.is_empty() {
            return Err(wrong("no part is named".into()));
        }
        let mut selector = Selector { part: part.to_owned(), compute: false, dilation: None, faults: None };
        for word in words {
            match word.split_once(':') {
                None if word == "compute" => selector.compute = true,
                Some(("dilation", factor)) => {
                    let factor = factor.parse().ok().filter(|f: &f64| f.is_finite() && *f > 0.0);
                    let factor = factor.ok_or_else(|| wrong(format!("'{word}' has no positive number")))?;
                    selector.dilation = Some(factor);
                }
                Some(("faults", path)) if !path.is_empty() => selector.faults = Some(path.to_owned()),
                _ => return Err(wrong(format!("'{word}' is not known"))),
            }
        }
        Ok(selector)
    }

    /// Whether `part` is a file and not a catalog name.
    pub(crate) fn is_file(&self) -> bool {
        self.part.contains(['/', '\\']) || self.part.to_ascii_lowercase().ends_with(".json")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_is_understood() {
        let plain = Selector::parse("sim:RTX-4090").unwrap();
        assert_eq!(plain, Selector { part: "RTX-4090".into(), compute: false, dilation: None, faults: None });
        assert_eq!(Selector::parse("sim:RTX-4090#2").unwrap(), plain);
        let all = Selector::parse("sim:a/b#1.json#x,compute,dilation:2.5,faults:c:\\plan.json").unwrap();
        assert_eq!((all.part.as_str(), all.compute, all.dilation), ("a/b#1.json", true, Some(2.5)));
        assert_eq!(all.faults.as_deref(), Some("c:\\plan.json"));
        assert!(all.is_file() && !plain.is_file());
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, what) in [
            ("sim", "no part"),
            ("sim:", "no part"),
            ("sim:#2", "no part"),
            ("sim:x,fast", "'fast'"),
            ("sim:x,dilation:0", "'dilation:0'"),
            ("sim:x,dilation:nan", "'dilation:nan'"),
            ("sim:x,faults:", "'faults:'"),
        ] {
            let error = Selector::parse(text).unwrap_err().to_string();
            assert!(error.contains(what) && error.contains(USAGE), "{error}");
        }
    }
}

//! Horizontal bars as inline SVG, one per share.
//!
//! ```
//! use mixfleet_report::bars::{Bars, BarRow};
//! use mixfleet_report::html::{Html, Tone};
//! let row = BarRow {
//!     name: "read".into(), value: 0.86, words: "86.0 %".into(), tone: Tone::Good, mark: Some(0.8),
//! };
//! let mut body = Html::default();
//! Bars { label: "share of the claim", full: Some(1.0), rows: &[row] }.draw(&mut body, "Of the claim.");
//! assert!(body.as_str().contains("86.0 %"));
//! ```

use crate::html::{Drawing, Html, TableCell, Tone, escape};
use crate::svg::shortened;
use std::fmt::Write as _;

const WIDTH: f64 = 860.0;
/// Where bars begin, and the widest one ends.
const FROM: f64 = 270.0;
const TO: f64 = 640.0;
const ROW: f64 = 22.0;
/// Characters for which there is room before a bar, and behind it.
const ROOM: (usize, usize) = (34, 27);

/// One bar.
#[derive(Clone, Debug, PartialEq)]
pub struct BarRow {
    /// What the bar is about.
    pub name: String,
    /// Length of the bar, at least 0; a value that is not finite is as long as the longest one.
    pub value: f64,
    /// The value in words.
    pub words: String,
    /// Its colour.
    pub tone: Tone,
    /// A value that it is to reach, drawn as a line across it.
    pub mark: Option<f64>,
}

/// Bars under each other, from a common start.
#[derive(Clone, Copy, Debug)]
pub struct Bars<'a> {
    /// The label of each row.
    pub label: &'a str,
    /// A value at which a line is drawn through all rows, such as the whole of a share.
    pub full: Option<f64>,
    /// The bars, from top to bottom.
    pub rows: &'a [BarRow],
}

impl Bars<'_> {
    /// Appends the bars with their caption and numbers, or nothing if there are none.
    pub fn draw(&self, body: &mut Html, caption: &str) {
        if !self.rows.is_empty() {
            body.figure(&self.drawing(), caption);
        }
    }

    fn drawing(&self) -> Drawing {
        let finite = |value: &f64| value.is_finite() && *value > 0.0;
        let values = self.rows.iter().flat_map(|row| [Some(row.value), row.mark]).flatten();
        let most = values.chain(self.full).filter(finite).fold(f64::MIN_POSITIVE, f64::max);
        let at = |value: f64| match value {
            value if value.is_nan() || value > most => TO,
            value => FROM + value.max(0.0) / most * (TO - FROM),
        };
        let height = ROW * self.rows.len() as f64 + 10.0;
        let label = escape(self.label);
        let mut svg = format!("<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"{label}\">");
        for (row, top) in self.rows.iter().zip((0..).map(|i| 4.0 + ROW * f64::from(i))) {
            let (name, words) = (shortened(&row.name, ROOM.0), shortened(&row.words, ROOM.1));
            // zero is shown as a line, to distinguish it from a missing bar
            let width = (at(row.value) - FROM).max(1.5);
            let _ = write!(
                svg,
                "<g><title>{}: {}</title><text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>\
                 <rect class=\"ground\" x=\"{FROM}\" y=\"{top:.1}\" width=\"{}\" height=\"16\"/>\
                 <rect class=\"{}\" x=\"{FROM}\" y=\"{top:.1}\" width=\"{width:.1}\" height=\"16\"/>\
                 <text x=\"{}\" y=\"{:.1}\">{}</text></g>",
                escape(&row.name),
                escape(&row.words),
                FROM - 8.0,
                top + 12.0,
                escape(&name),
                TO - FROM,
                row.tone.class(),
                TO + 8.0,
                top + 12.0,
                escape(&words)
            );
            if let Some(mark) = row.mark {
                let (x, end) = (at(mark), top + 18.0);
                let _ = write!(svg, "<path class=\"roof\" d=\"M{x:.1},{:.1} V{end:.1}\"/>", top - 2.0);
            }
        }
        if let Some(full) = self.full {
            let x = at(full);
            let _ = write!(svg, "<path class=\"roof\" stroke-dasharray=\"2 4\" d=\"M{x:.1},0 V{height}\"/>");
        }
        svg.push_str("</svg>");
        let row =
            |row: &BarRow| vec![TableCell::text(&row.name), TableCell::number(&row.words).tone(row.tone)];
        Drawing {
            svg,
            label: self.label.to_owned(),
            header: vec!["of".to_owned(), self.label.to_owned()],
            rows: self.rows.iter().map(row).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_in_proportion_and_stay_inside() {
        let row = |name: &str, value: f64| BarRow {
            name: name.into(),
            value,
            words: "x".repeat(99),
            tone: Tone::Bad,
            mark: Some(0.5),
        };
        let rows = [row("half", 0.5), row("<none>", 0.0), row("beyond", f64::INFINITY), row("whole", 1.0)];
        let drawing = Bars { label: "share", full: Some(1.0), rows: &rows }.drawing();
        let widths: Vec<f64> = drawing
            .svg
            .split("<rect class=\"bad\"")
            .skip(1)
            .map(|bar| bar.split("width=\"").nth(1).unwrap().split('"').next().unwrap().parse().unwrap())
            .collect();
        assert_eq!(widths, [(TO - FROM) / 2.0, 1.5, TO - FROM, TO - FROM]);
        assert!(drawing.svg.contains("&lt;none&gt;") && !drawing.svg.contains("<none>"));
        assert_eq!((drawing.rows.len(), drawing.header.len()), (4, 2));
        let mut body = Html::default();
        Bars { label: "share", full: None, rows: &[] }.draw(&mut body, "");
        assert_eq!(body.as_str(), "");
    }
}

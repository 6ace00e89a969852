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

/// Places of a drawing for wide windows, with names before bars, and for phones, with names above them.
const WIDE: BarFrame =
    BarFrame { width: 860.0, from: 270.0, to: 640.0, row: 22.0, name_room: 34, is_narrow: false };
const NARROW: BarFrame =
    BarFrame { width: 350.0, from: 4.0, to: 346.0, row: 42.0, name_room: 22, is_narrow: true };
/// Characters for which there is room beside a name or a bar.
const WORDS_ROOM: usize = 27;

/// Where bars begin, and the widest one ends.
#[derive(Clone, Copy)]
struct BarFrame {
    width: f64,
    from: f64,
    to: f64,
    row: f64,
    name_room: usize,
    is_narrow: bool,
}

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
        let row =
            |row: &BarRow| vec![TableCell::text(&row.name), TableCell::number(&row.words).tone(row.tone)];
        Drawing {
            svg: self.framed(WIDE),
            narrow: self.framed(NARROW),
            label: self.label.to_owned(),
            header: vec!["of".to_owned(), self.label.to_owned()],
            rows: self.rows.iter().map(row).collect(),
        }
    }

    fn framed(&self, frame: BarFrame) -> String {
        let BarFrame { width, from, to, row: tall, name_room, is_narrow } = frame;
        let finite = |value: &f64| value.is_finite() && *value > 0.0;
        let values = self.rows.iter().flat_map(|row| [Some(row.value), row.mark]).flatten();
        let most = values.chain(self.full).filter(finite).fold(f64::MIN_POSITIVE, f64::max);
        let at = |value: f64| match value {
            value if value.is_nan() || value > most => to,
            value => from + value.max(0.0) / most * (to - from),
        };
        let height = tall * self.rows.len() as f64 + 10.0;
        let label = escape(self.label);
        let mut svg = format!("<svg viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"{label}\">");
        for (row, top) in self.rows.iter().zip((0..).map(|i| 4.0 + tall * f64::from(i))) {
            let (name, words) = (shortened(&row.name, name_room), shortened(&row.words, WORDS_ROOM));
            let (name, words) = (escape(&name), escape(&words));
            let baseline = top + 12.0;
            let texts = match is_narrow {
                true => format!(
                    "<text x=\"{from}\" y=\"{baseline:.1}\">{name}</text>\
                     <text x=\"{to}\" y=\"{baseline:.1}\" text-anchor=\"end\">{words}</text>"
                ),
                false => format!(
                    "<text x=\"{}\" y=\"{baseline:.1}\" text-anchor=\"end\">{name}</text>\
                     <text x=\"{}\" y=\"{baseline:.1}\">{words}</text>",
                    from - 8.0,
                    to + 8.0
                ),
            };
            let top = if is_narrow { top + 18.0 } else { top };
            // zero is shown as a line, to distinguish it from a missing bar
            let long = (at(row.value) - from).max(1.5);
            let _ = write!(
                svg,
                "<g><title>{}: {}</title>{texts}\
                 <rect class=\"ground\" x=\"{from}\" y=\"{top:.1}\" width=\"{}\" height=\"16\"/>\
                 <rect class=\"{}\" x=\"{from}\" y=\"{top:.1}\" width=\"{long:.1}\" height=\"16\"/></g>",
                escape(&row.name),
                escape(&row.words),
                to - from,
                row.tone.class(),
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
        svg
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
        let whole = WIDE.to - WIDE.from;
        assert_eq!(widths, [whole / 2.0, 1.5, whole, whole]);
        assert!(drawing.svg.contains("&lt;none&gt;") && !drawing.svg.contains("<none>"));
        assert_eq!((drawing.rows.len(), drawing.header.len()), (4, 2));
        let mut body = Html::default();
        Bars { label: "share", full: None, rows: &[] }.draw(&mut body, "");
        assert_eq!(body.as_str(), "");
    }
}

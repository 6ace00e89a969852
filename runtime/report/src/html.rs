//! Self-contained report pages: no script, no font and no picture from outside; light, dark and print.
//!
//! [`Html`] collects markup. Text is escaped; only [`Html::raw`] takes markup. [`page`] adds the frame and
//! the style.
//!
//! ```
//! use mixfleet_report::html::{Html, TableCell, Tone, page};
//! let mut body = Html::default();
//! body.heading(2, "Results");
//! body.table(&["case", "outcome", "error"], &[vec![
//!     TableCell::text("gemm <bf16>"), TableCell::badge("pass", Tone::Good), TableCell::number("0.31"),
//! ]]);
//! let text = page("conformance", "cpu", &body);
//! assert!(text.contains("gemm &lt;bf16&gt;") && text.starts_with("<!doctype html>"));
//! ```

use std::fmt::Write as _;

/// The meaning of a cell's or badge's colour.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tone {
    /// Neutral.
    #[default]
    Plain,
    /// Good.
    Good,
    /// Worth a look.
    Warn,
    /// Bad.
    Bad,
    /// Less important, such as not tried or not present.
    Muted,
}

impl Tone {
    /// Returns the CSS class.
    pub const fn class(self) -> &'static str {
        match self {
            Tone::Plain => "plain",
            Tone::Good => "good",
            Tone::Warn => "warn",
            Tone::Bad => "bad",
            Tone::Muted => "muted",
        }
    }
}

/// One cell of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableCell {
    text: String,
    tone: Tone,
    number: bool,
    badge: bool,
    link: Option<String>,
}

impl TableCell {
    /// Creates a cell of text.
    pub fn text(text: impl Into<String>) -> TableCell {
        TableCell { text: text.into(), tone: Tone::Plain, number: false, badge: false, link: None }
    }

    /// Creates a cell with a formatted number, right-aligned with tabular digits.
    pub fn number(text: impl Into<String>) -> TableCell {
        TableCell { number: true, ..TableCell::text(text) }
    }

    /// Creates a cell with a coloured badge.
    pub fn badge(text: impl Into<String>, tone: Tone) -> TableCell {
        TableCell { tone, badge: true, ..TableCell::text(text) }
    }

    /// Creates a cell with a link to a file beside the page.
    pub fn link(text: impl Into<String>, to: impl Into<String>) -> TableCell {
        TableCell { link: Some(to.into()), ..TableCell::text(text) }
    }

    /// Returns the cell in another colour.
    pub fn tone(self, tone: Tone) -> TableCell {
        TableCell { tone, ..self }
    }
}

/// A drawing with its numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drawing {
    /// Markup of the drawing.
    pub svg: String,
    /// The same for windows as narrow as a phone's.
    pub narrow: String,
    /// Alternative text for readers who cannot see it.
    pub label: String,
    /// Header of the table of its numbers.
    pub header: Vec<String>,
    /// The numbers that it shows.
    pub rows: Vec<Vec<TableCell>>,
}

/// Markup under construction.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Html(String);

impl Html {
    /// Appends markup that the caller has escaped.
    pub fn raw(&mut self, markup: &str) {
        self.0.push_str(markup);
    }

    /// Appends a heading of level 1 to 6; level 1 is the page's title.
    pub fn heading(&mut self, level: u8, text: &str) {
        let level = level.clamp(1, 6);
        let _ = writeln!(self.0, "<h{level}>{}</h{level}>", escape(text));
    }

    /// Appends a paragraph of text.
    pub fn paragraph(&mut self, text: &str) {
        let _ = writeln!(self.0, "<p>{}</p>", escape(text));
    }

    /// Appends a highlighted paragraph.
    pub fn note(&mut self, tone: Tone, text: &str) {
        let _ = writeln!(self.0, "<p class=\"note {}\">{}</p>", tone.class(), escape(text));
    }

    /// Appends a coloured badge.
    pub fn badge(&mut self, tone: Tone, text: &str) {
        let _ = write!(self.0, "<span class=\"badge {}\">{}</span> ", tone.class(), escape(text));
    }

    /// Appends large figures side by side, as (label, value, remark).
    pub fn tiles(&mut self, tiles: &[(String, String, String)]) {
        self.0.push_str("<div class=\"tiles\">\n");
        for (label, value, remark) in tiles {
            let (label, value, remark) = (escape(label), escape(value), escape(remark));
            let _ =
                writeln!(self.0, "<div><small>{label}</small><b>{value}</b><small>{remark}</small></div>");
        }
        self.0.push_str("</div>\n");
    }

    /// Appends names and values in two columns.
    pub fn facts<N: AsRef<str>, V: AsRef<str>>(&mut self, facts: &[(N, V)]) {
        self.0.push_str("<dl>\n");
        for (name, value) in facts {
            let _ = writeln!(self.0, "<dt>{}</dt><dd>{}</dd>", escape(name.as_ref()), escape(value.as_ref()));
        }
        self.0.push_str("</dl>\n");
    }

    /// Appends a table; rows may be shorter than the header.
    pub fn table(&mut self, header: &[&str], rows: &[Vec<TableCell>]) {
        self.begin_scroll(&format!("table of {}", header.join(", ")));
        self.0.push_str("<table>\n<thead><tr>");
        for (column, name) in header.iter().enumerate() {
            let numeric = rows.first().and_then(|row| row.get(column)).is_some_and(|cell| cell.number);
            let class = if numeric { " class=\"number\"" } else { "" };
            let _ = match *name {
                "" => write!(self.0, "<td></td>"),
                name => write!(self.0, "<th scope=\"col\"{class}>{}</th>", escape(name)),
            };
        }
        self.0.push_str("</tr></thead>\n<tbody>\n");
        for row in rows {
            self.0.push_str("<tr>");
            row.iter().for_each(|cell| self.cell(cell));
            self.0.push_str("</tr>\n");
        }
        self.0.push_str("</tbody></table></div>\n");
    }

    /// Opens a box that scrolls by itself if its content is wider than the window, also by keyboard.
    fn begin_scroll(&mut self, label: &str) {
        let label = escape(label);
        let _ = write!(self.0, "<div class=\"scroll\" tabindex=\"0\" role=\"group\" aria-label=\"{label}\">");
    }

    fn cell(&mut self, cell: &TableCell) {
        let (tone, text) = (cell.tone.class(), escape(&cell.text));
        let number = if cell.number { "number " } else { "" };
        let _ = if let Some(to) = &cell.link {
            write!(self.0, "<td><a href=\"{}\">{text}</a></td>", escape(to))
        } else if cell.badge {
            write!(self.0, "<td><span class=\"badge {tone}\">{text}</span></td>")
        } else {
            write!(self.0, "<td class=\"{number}{tone}\">{text}</td>")
        };
    }

    /// Opens a collapsible section, which [`Html::end_details`] closes. In print it is expanded.
    pub fn begin_details(&mut self, summary: &str, open: bool) {
        let open = if open { " open" } else { "" };
        let _ = writeln!(self.0, "<details{open}><summary>{}</summary>", escape(summary));
    }

    /// Closes the section opened by [`Html::begin_details`].
    pub fn end_details(&mut self) {
        self.0.push_str("</details>\n");
    }

    /// Appends a drawing with its caption, and its numbers in a table that is closed and not printed.
    pub fn figure(&mut self, drawing: &Drawing, caption: &str) {
        let Drawing { svg, narrow, label, header, rows } = drawing;
        let _ = writeln!(
            self.0,
            "<figure><div class=\"wide\">{svg}</div><div class=\"narrow\">{narrow}</div>\
             <figcaption>{}</figcaption>",
            escape(caption)
        );
        let _ = writeln!(
            self.0,
            "<details class=\"data\"><summary>Numbers of this chart: {}</summary>",
            escape(label)
        );
        self.table(&header.iter().map(String::as_str).collect::<Vec<_>>(), rows);
        self.0.push_str("</details></figure>\n");
    }

    /// Returns the markup so far.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Escapes the five characters that have a meaning in markup and attributes.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            // not allowed in HTML, and of no use in a report
            '\0'..='\u{8}' | '\u{b}' | '\u{c}' | '\u{e}'..='\u{1f}' => out.push('\u{fffd}'),
            _ => out.push(c),
        }
    }
    out
}

/// Returns the whole document, with `title` in the tab and at the top, and `subtitle` below it.
pub fn page(title: &str, subtitle: &str, body: &Html) -> String {
    let (title, subtitle, body) = (escape(title), escape(subtitle), body.as_str());
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"generator\" content=\"mixfleet {}\">\n<title>{title}</title>\n\
         <style>\n{STYLE}</style>\n</head>\n<body>\n<header><h1>{title}</h1><p>{subtitle}</p></header>\n\
         <main>\n{body}</main>\n</body>\n</html>\n",
        env!("CARGO_PKG_VERSION")
    )
}

/// Chart colours are `--s0` to `--s5`, which are distinguishable with red-green blindness too (after Okabe
/// and Ito).
const STYLE: &str = "\
:root { color-scheme: light dark; --ink: #1c2024; --soft: #60646c; --line: #d9dce1; --ground: #ffffff;
  --panel: #f6f7f9; --good: #18794e; --warn: #8a5a00; --bad: #c62a2f; --good-bg: #e3f5ec; --warn-bg: #fff3d6;
  --bad-bg: #ffe7e7; --muted-bg: #eceef1; --s0: #0072b2; --s1: #d55e00; --s2: #009e73; --s3: #a3478f;
  --s4: #8a6d00; --s5: #3f7fbf; }
@media screen and (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --soft: #9ba1a8; --line: #33383f;
  --ground: #14171a; --panel: #1c2024; --good: #57d9a3; --warn: #ffca5c; --bad: #ff8a8a; --good-bg: #10301f;
  --warn-bg: #362a08; --bad-bg: #3b1517; --muted-bg: #282d33; --s0: #56b4e9; --s1: #ff9a52; --s2: #3fd6a8;
  --s3: #e08fd0; --s4: #f0d24a; --s5: #9fc5ee; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 70rem; padding: 1.5rem; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif; }
header p { color: var(--soft); margin: 0 0 1rem; }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere; }
p { overflow-wrap: anywhere; }
a { color: var(--s0); }
h2 { font-size: 1.15rem; margin: 2rem 0 .6rem; padding-top: .8rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.2rem 0 .4rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .7rem; }
.tiles div { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: .6rem .8rem; }
.tiles small { display: block; color: var(--soft); }
.tiles b { display: block; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: .5rem 0; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 1rem; font-size: .87rem; }
th, td { text-align: left; padding: .28rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 600; white-space: nowrap; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.good { color: var(--good); } td.warn { color: var(--warn); } td.bad { color: var(--bad); }
td.muted { color: var(--soft); }
.badge { display: inline-block; border-radius: 999px; padding: 0 .6em; font-size: .82rem; font-weight: 600;
  background: var(--muted-bg); color: var(--soft); white-space: nowrap; }
.badge.good { background: var(--good-bg); color: var(--good); }
.badge.warn { background: var(--warn-bg); color: var(--warn); }
.badge.bad { background: var(--bad-bg); color: var(--bad); }
.note { border-left: 4px solid var(--line); background: var(--panel); padding: .5rem .8rem; border-radius: 4px; }
.note.good { border-color: var(--good); } .note.warn { border-color: var(--warn); }
.note.bad { border-color: var(--bad); }
details { margin: .5rem 0; }
summary { cursor: pointer; color: var(--soft); }
figure { margin: 1rem 0; }
figcaption, .data { color: var(--soft); font-size: .87rem; }
svg { display: block; width: 100%; height: auto; font: 12px system-ui, sans-serif; }
.narrow { display: none; } .narrow svg { max-width: 26rem; }
@media screen and (max-width: 40rem) { body { padding: .8rem; } .wide { display: none; } .narrow { display: block; }
  dl { grid-template-columns: 1fr; } dd { margin-bottom: .3rem; } }
svg text { fill: var(--soft); }
svg .spot { fill: transparent; }
svg .ground { fill: var(--panel); } svg .good { fill: var(--good); } svg .warn { fill: var(--warn); }
svg .bad { fill: var(--bad); } svg .plain { fill: var(--s0); } svg .muted { fill: var(--soft); }
svg .axis { stroke: var(--soft); fill: none; }
svg .grid { stroke: var(--line); fill: none; }
svg .roof { stroke: var(--ink); fill: none; stroke-width: 2; }
@media print { :root { color-scheme: light; } body { max-width: none; padding: 0; font-size: 11px; }
  h2, figure, tr, .tiles div { break-inside: avoid; } h2 { break-after: avoid; }
  details::details-content { content-visibility: visible; } .data { display: none; }
  .scroll { overflow: visible; } table { font-size: 9px; }
  th, td, .number, .badge { white-space: normal; overflow-wrap: anywhere; } th, td { padding: .15rem .3rem; }
  .badge, .tiles div, .note { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_cannot_become_markup() {
        let hostile = "</td><script>alert('x')</script>\" & \u{1}";
        let mut body = Html::default();
        body.heading(9, hostile);
        body.paragraph(hostile);
        body.note(Tone::Warn, hostile);
        body.facts(&[(hostile, hostile)]);
        body.table(&[hostile], &[vec![TableCell::text(hostile), TableCell::badge(hostile, Tone::Bad)]]);
        body.tiles(&[(hostile.into(), hostile.into(), hostile.into())]);
        body.begin_details(hostile, true);
        body.end_details();
        let (header, rows) = (vec![hostile.to_owned()], vec![vec![TableCell::text(hostile)]]);
        body.figure(
            &Drawing {
                svg: "<svg></svg>".into(),
                narrow: "<svg></svg>".into(),
                label: hostile.into(),
                header,
                rows,
            },
            hostile,
        );
        let text = page(hostile, hostile, &body);
        assert!(!text.contains("<script") && !text.contains("alert('") && !text.contains('\u{1}'));
        assert_eq!(text.matches("<table>").count(), text.matches("</table>").count());
    }

    #[test]
    fn a_page_asks_for_nothing_from_outside() {
        let text = page("t", "s", &Html::default());
        for word in ["http:", "https:", "@import", "url(", "<link", "src="] {
            assert!(!text.contains(word), "{word}");
        }
    }

    #[test]
    fn numbers_align_with_their_header() {
        let mut body = Html::default();
        body.table(&["name", "us"], &[vec![TableCell::text("a"), TableCell::number("1").tone(Tone::Good)]]);
        assert!(body.as_str().contains("<th scope=\"col\" class=\"number\">us</th>"));
        assert!(body.as_str().contains("<td class=\"number good\">1</td>"));
    }
}

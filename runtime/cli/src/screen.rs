//! Text for people, folded to the width of their screen.

use mixfleet_hal::printable::printable_lines;
use serde::Serialize;
use std::io::{self, IsTerminal, StdoutLock, Write};

/// Standard output, without control characters except line ends and tabs. Lines of text fold at the
/// terminal's width, or at `COLUMNS` if that is set, and are left alone in a pipe; those of documents for
/// programs are never folded.
pub(crate) fn output(is_document: bool) -> Folding<StdoutLock<'static>> {
    let columns = if is_document { None } else { columns() };
    Folding::new(io::stdout().lock(), columns)
}

/// The width to fold at: that of the terminal, unless `COLUMNS` says another one; none in a pipe.
pub(crate) fn columns() -> Option<usize> {
    let told = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
    let seen = || terminal_size::terminal_size_of(io::stdout()).map(|(width, _)| usize::from(width.0));
    told.filter(|&columns| columns > 0).or_else(seen)
}

/// Whether lines can be written over.
pub(crate) fn is_terminal() -> bool {
    io::stdout().is_terminal()
}

/// Devices with the instances that they form: `3 x L4`, `6 x RTX-4090 as 3 pairs`, `8 x H200 as 2 instances`.
pub(crate) fn devices_of(instances: u32, devices_each: u32, name: &str) -> String {
    let all = u64::from(instances) * u64::from(devices_each);
    let form = match (devices_each, instances) {
        (1, _) => String::new(),
        (2, 1) => " as a pair".to_owned(),
        (2, _) => format!(" as {instances} pairs"),
        (_, 1) => " as one instance".to_owned(),
        (..) => format!(" as {instances} instances"),
    };
    format!("{all} x {name}{form}")
}

/// A value's name in JSON.
pub(crate) fn word(value: &impl Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(word)) => word,
        Ok(other) => other.to_string(),
        Err(error) => error.to_string(),
    }
}

/// Folds lines that are longer than the screen between words. The rest is aligned with the last cell of a
/// table, or with the first word of the line.
pub(crate) struct Folding<W: Write> {
    to: W,
    columns: Option<usize>,
    /// The text since the last end of a line.
    line: Vec<u8>,
}

impl<W: Write> Folding<W> {
    /// Folds at this column, or nowhere.
    pub(crate) fn new(to: W, columns: Option<usize>) -> Self {
        Folding { to, columns, line: Vec::new() }
    }

    /// Writes what controls the terminal, which other text cannot.
    pub(crate) fn control(&mut self, sequence: &str) -> io::Result<()> {
        self.flush()?;
        self.to.write_all(sequence.as_bytes())
    }
}

impl<W: Write> Write for Folding<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let Some(columns) = self.columns else {
            // A line may come in pieces; characters are never split between them.
            match std::str::from_utf8(bytes) {
                Ok(text) => self.to.write_all(printable_lines(text).as_bytes())?,
                Err(_) => self.to.write_all(bytes)?,
            }
            return Ok(bytes.len());
        };
        for part in bytes.split_inclusive(|&byte| byte == b'\n') {
            self.line.extend_from_slice(part);
            if part.ends_with(b"\n") {
                let line = std::mem::take(&mut self.line);
                match std::str::from_utf8(&line) {
                    Ok(text) => self.to.write_all(folded(&printable_lines(text), columns).as_bytes())?,
                    Err(_) => self.to.write_all(&line)?,
                }
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.write_all(&std::mem::take(&mut self.line))?;
        self.to.flush()
    }
}

impl<W: Write> Drop for Folding<W> {
    fn drop(&mut self) {
        // as with standard output itself, there is no way left to report an error
        let _ = self.flush();
    }
}

/// Splits a line into as many as needed. A word longer than the screen stays whole.
fn folded(line: &str, columns: usize) -> String {
    let mut rest: Vec<char> = line.chars().collect();
    let indent = indent(&rest, columns);
    let mut lines = String::with_capacity(line.len());
    // the end of the line takes no column
    while rest.len() > columns + 1 {
        let starts = rest.iter().take_while(|c| **c == ' ').count().max(indent.min(rest.len()));
        let is_break = |&at: &usize| rest[at] == ' ' && rest[at - 1] != ' ';
        let before = (starts + 1..=columns).rev().find(is_break);
        let Some(at) = before.or_else(|| (columns.max(starts) + 1..rest.len()).find(is_break)) else { break };
        let next = (at..rest.len()).find(|&at| rest[at] != ' ').unwrap_or(rest.len());
        lines.extend(&rest[..at]);
        lines.push('\n');
        rest.splice(..next, std::iter::repeat_n(' ', indent));
    }
    lines.extend(rest);
    lines
}

/// The column at which a line continues: the start of the last cell that leaves room, else of the first word
/// of an indented line, else 2.
fn indent(line: &[char], columns: usize) -> usize {
    let words = line.iter().take_while(|c| **c == ' ').count();
    let cell = |&at: &usize| line[at] != ' ' && line[at - 1] == ' ' && line[at - 2] == ' ';
    let last = (words + 3..line.len()).filter(cell).take_while(|at| *at <= columns / 2).last();
    last.unwrap_or(if words == 0 { 2 } else { words }).min(columns / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(text: &str, columns: usize) -> String {
        let mut folding = Folding::new(Vec::new(), Some(columns));
        // in pieces, as formatted text comes
        for piece in text.as_bytes().chunks(3) {
            folding.write_all(piece).unwrap();
        }
        folding.flush().unwrap();
        String::from_utf8(std::mem::take(&mut folding.to)).unwrap()
    }

    #[test]
    fn a_long_cell_goes_on_below_its_beginning() {
        let text = "  ttft   the time to the first token of an answer\n  tbt    between tokens\n";
        let narrow = "  ttft   the time to the\n         first token of\n         an answer\n  tbt    between tokens\n";
        assert_eq!(shown(text, 24), narrow);
        assert_eq!(shown(text, 200), text);
    }

    #[test]
    fn a_sentence_goes_on_below_its_words_and_a_long_word_stays_whole() {
        assert_eq!(shown("a sentence of words\n", 10), "a sentence\n  of words\n");
        let path = "see /a/path/that/is/longer/than/any/screen for more\n";
        assert_eq!(shown(path, 20), "see\n  /a/path/that/is/longer/than/any/screen\n  for more\n");
        assert_eq!(shown("without an end", 5), "without an end");
    }

    #[test]
    fn counts_are_of_devices() {
        let all = [(3, 1), (1, 2), (4, 2), (1, 4), (2, 4)].map(|(count, each)| devices_of(count, each, "L4"));
        let expected = [
            "3 x L4",
            "2 x L4 as a pair",
            "8 x L4 as 4 pairs",
            "4 x L4 as one instance",
            "8 x L4 as 2 instances",
        ];
        assert_eq!(all, expected);
    }

    #[test]
    fn nothing_is_lost_and_lines_fit_at_any_width() {
        let mut random = mixfleet_hal::random::Stream::new(3);
        for case in 0..2000 {
            let words = random.below(30);
            let text: String = (0..words)
                .map(|_| {
                    let letters = "w".repeat(1 + random.below(8) as usize);
                    letters + &" ".repeat(1 + random.below(3) as usize)
                })
                .collect();
            let text = format!("{}{}\n", " ".repeat(random.below(6) as usize), text.trim_end());
            let columns = 20 + random.below(60) as usize;
            let folded = shown(&text, columns);
            assert!(folded.split_whitespace().eq(text.split_whitespace()), "case {case}: {folded:?}");
            assert!(folded.lines().all(|line| line.len() <= columns), "case {case}, {columns}: {folded:?}");
        }
    }
}

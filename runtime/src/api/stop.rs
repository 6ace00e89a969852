//! Stop strings: cuts an answer before the first one, and sends no part of it.

/// Passes text through until a stop string is complete. Text that could still become one is held back, so the
/// output does not depend on how the input was divided into pieces.
#[derive(Debug)]
pub(crate) struct StopFilter {
    stops: Vec<String>,
    /// Whether the stop string that is found is passed through too.
    includes_stop: bool,
    /// A suffix of the text so far that is a proper prefix of a stop string.
    held: String,
}

/// The result of adding a piece of text.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Passed {
    /// Text that can be sent.
    pub(crate) text: String,
    /// Whether a stop string was found, which ends the answer.
    pub(crate) stopped: bool,
}

impl StopFilter {
    /// Creates a filter for `stops`, none of which is empty.
    pub(crate) fn new(stops: Vec<String>, includes_stop: bool) -> Self {
        StopFilter { stops, includes_stop, held: String::new() }
    }

    /// Adds a piece in which no stop string ends.
    pub(crate) fn push_unstopped(&mut self, piece: &str) -> String {
        let mut text = std::mem::take(&mut self.held);
        text.push_str(piece);
        self.let_through(text)
    }

    /// Adds the next piece. The stop string that is complete first wins; of those complete at the same
    /// character, the longest.
    pub(crate) fn push(&mut self, piece: &str) -> Passed {
        let mut text = std::mem::take(&mut self.held);
        let seen = text.len();
        text.push_str(piece);
        // text that ends before the piece was passed through on purpose
        let found = |stop: &String| {
            let from = (seen + 1).saturating_sub(stop.len());
            let from = (from..=text.len()).find(|at| text.is_char_boundary(*at))?;
            text[from..].find(stop.as_str()).map(|start| (from + start + stop.len(), from + start))
        };
        if let Some((end, start)) = self.stops.iter().filter_map(found).min() {
            text.truncate(if self.includes_stop { end } else { start });
            return Passed { text, stopped: true };
        }
        Passed { text: self.let_through(text), stopped: false }
    }

    /// Returns the text, except for a suffix that may become a stop string.
    fn let_through(&mut self, mut text: String) -> String {
        let held_bytes = self.stops.iter().map(|stop| overlap(&text, stop)).max().unwrap_or(0);
        self.held = text.split_off(text.len() - held_bytes);
        text
    }

    /// Ends the text and returns what was held back, which is not a stop string after all.
    pub(crate) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Length in bytes of the longest suffix of `text` that is a proper prefix of `stop`.
pub(super) fn overlap(text: &str, stop: &str) -> usize {
    let longest = text.len().min(stop.len() - 1);
    let fits = |bytes: &usize| text.as_bytes().ends_with(&stop.as_bytes()[..*bytes]);
    // Both are UTF-8 and the match ends at the end of a character, so it starts at the start of one.
    (1..=longest).rev().find(|bytes| stop.is_char_boundary(*bytes) && fits(bytes)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run<'a>(stops: &[String], pieces: impl Iterator<Item = &'a str>) -> (String, bool) {
        let mut filter = StopFilter::new(stops.to_vec(), false);
        let mut shown = String::new();
        for piece in pieces {
            let passed = filter.push(piece);
            shown.push_str(&passed.text);
            if passed.stopped {
                return (shown, true);
            }
        }
        shown.push_str(&filter.finish());
        (shown, false)
    }

    /// Checks every prefix of the text for a stop string at its end.
    fn oracle(stops: &[String], text: &str) -> (String, bool) {
        let ends = text.char_indices().map(|(start, character)| start + character.len_utf8());
        for end in ends {
            let ending = stops.iter().filter(|stop| text[..end].ends_with(stop.as_str()));
            if let Some(longest) = ending.map(String::len).max() {
                return (text[..end - longest].to_string(), true);
            }
        }
        (text.to_string(), false)
    }

    #[test]
    fn holds_back_what_may_become_a_stop_string() {
        let mut filter = StopFilter::new(vec!["abc".into(), "bx".into()], false);
        assert_eq!(filter.push("zab"), Passed { text: "z".into(), stopped: false });
        assert_eq!(filter.push("x!"), Passed { text: "a".into(), stopped: true });
    }

    #[test]
    fn a_stop_string_counts_where_it_ends_behind_the_minimum() {
        let mut filter = StopFilter::new(vec!["ab".into(), "é!".into()], true);
        assert_eq!(filter.push_unstopped("xaby"), "xaby");
        assert_eq!(filter.push_unstopped("a"), "", "it may become one");
        assert_eq!(filter.push("c"), Passed { text: "ac".into(), stopped: false });
        assert_eq!(filter.push_unstopped("abé"), "ab");
        assert_eq!(filter.push("!?"), Passed { text: "é!".into(), stopped: true });
    }

    proptest! {
        #[test]
        fn output_is_independent_of_the_cuts(
            text in "[abé]{0,40}",
            stops in prop::collection::vec("[abé]{1,4}", 0..4),
            cuts in prop::collection::vec(1usize..5, 1..40),
        ) {
            let characters: Vec<char> = text.chars().collect();
            let mut pieces = Vec::new();
            let mut rest = characters.as_slice();
            for cut in cuts.iter().cycle() {
                if rest.is_empty() { break }
                let (piece, tail) = rest.split_at(rest.len().min(*cut));
                pieces.push(piece.iter().collect::<String>());
                rest = tail;
            }
            let shown = run(&stops, pieces.iter().map(String::as_str));
            prop_assert_eq!(shown, oracle(&stops, &text));
        }
    }
}

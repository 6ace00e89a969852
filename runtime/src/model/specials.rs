//! Finds the names of special tokens in text.

use super::error::{Error, Result};
use aho_corasick::AhoCorasick;
use std::collections::HashSet;
use std::ops::Range;

/// The names of a tokenizer's special tokens, without regard to case, since templates may change it.
#[derive(Debug)]
pub(super) struct Specials {
    /// The names as the tokenizer spells them; the patterns of `whole`, in this order.
    names: Vec<String>,
    whole: AhoCorasick,
    /// Beginnings of names, in lower case: text that ends with one may be completed by text that a template
    /// appends.
    beginnings: HashSet<Box<[u8]>>,
    /// Ends of names, in lower case: text that starts with one may complete text that a template prepends.
    ends: HashSet<Box<[u8]>>,
    bytes_max: usize,
}

impl Specials {
    pub(super) fn new<'a>(tokens: impl Iterator<Item = &'a str>) -> Result<Self> {
        // A single character cannot be interrupted.
        let names: Vec<String> =
            tokens.filter(|token| token.chars().count() > 1).map(str::to_owned).collect();
        let tokens: Vec<String> = names.iter().map(|name| name.to_ascii_lowercase()).collect();
        let whole = AhoCorasick::builder().ascii_case_insensitive(true).build(&tokens);
        let whole = whole.map_err(|error| Error::Tokenizer(error.to_string()))?;
        let (mut beginnings, mut ends) = (HashSet::new(), HashSet::new());
        for token in &tokens {
            for (at, _) in token.char_indices().skip(1) {
                let (beginning, end) = token.split_at(at);
                beginnings.extend((beginning.chars().count() > 1).then(|| beginning.as_bytes().into()));
                ends.extend((end.chars().count() > 1).then(|| end.as_bytes().into()));
            }
        }
        let bytes_max = tokens.iter().map(String::len).max().unwrap_or(0);
        Ok(Specials { names, whole, beginnings, ends, bytes_max })
    }

    /// The names of more than one character, as the tokenizer spells them.
    pub(super) fn names(&self) -> &[String] {
        &self.names
    }

    /// Byte ranges of all names in `text`, in any case, including those that overlap.
    pub(super) fn find(&self, text: &str) -> Vec<Range<usize>> {
        self.whole.find_overlapping_iter(text).map(|found| found.range()).collect()
    }

    /// How often each of [`names`](Self::names) is in `text`, in any case.
    pub(super) fn counts(&self, text: &str) -> Vec<usize> {
        let mut counts = vec![0; self.names.len()];
        self.whole.find_overlapping_iter(text).for_each(|found| counts[found.pattern().as_usize()] += 1);
        counts
    }

    /// Positions in `text` at which a mark keeps it and its neighbours from becoming special tokens: inside
    /// each name in it, and inside the part of a name at either end. No position is at an end of the text,
    /// with or without surrounding white space.
    pub(super) fn places(&self, text: &str) -> Vec<usize> {
        let inside = |start: usize| start + text[start..].chars().next().map_or(0, char::len_utf8);
        let mut places: Vec<usize> =
            self.whole.find_overlapping_iter(text).map(|found| inside(found.start())).collect();
        let trimmed = text.trim();
        let lead = text.len() - text.trim_start().len();
        for length in 2..=self.bytes_max.min(trimmed.len()) {
            let (head, tail) = (&trimmed.as_bytes()[..length], &trimmed.as_bytes()[trimmed.len() - length..]);
            if self.ends.contains(head.to_ascii_lowercase().as_slice()) {
                places.push(inside(lead));
            }
            if self.beginnings.contains(tail.to_ascii_lowercase().as_slice()) {
                places.push(inside(lead + trimmed.len() - length));
            }
        }
        places.sort_unstable();
        places.dedup();
        places
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(text: &str) -> Vec<usize> {
        Specials::new(["<|end|>", "|>!", "é!", "x"].into_iter()).unwrap().places(text)
    }

    #[test]
    fn every_way_to_a_special_token_is_interrupted() {
        assert_eq!(places("a plain text < of | x, and more"), [0; 0]);
        assert_eq!(places("ab<|end|>c"), [3], "a whole name");
        assert_eq!(places("ab<|END|>!"), [3, 8], "another case, and one that overlaps it");
        assert_eq!(places("an é! is a name too"), [5]);
        assert_eq!(places("so <|e"), [4], "the beginning of a name at the end");
        assert_eq!(places("  nd|> \n"), [3, 5], "the end of one name, the beginning of another, white space");
        assert_eq!(places(" <|en \n"), [2]);
        assert_eq!(places("in <|en the middle, nd|> also"), [0; 0]);
    }
}

//! Finds the calls of tools in an answer while it is written.

use super::stop::overlap;
use super::tool_bodies::{self, CalledFunction, ReadCalls};
use super::tools::{ToolCall, ToolPieces};
use crate::model::{CallMarks, ToolStyle};

/// Maximum number of closing marks that one call may hold within its texts.
const CLOSES_MAX: usize = 64;

/// Finds the calls in the text of an answer. What only looks like a call stays text.
#[derive(Debug)]
pub(crate) struct ToolReader {
    style: ToolStyle,
    marks: CallMarks,
    functions: Vec<CalledFunction>,
    parallel: bool,
    /// Text that may be a call, or the beginning of one.
    held: String,
    /// Bytes of `held` in which the end of its call was searched, and the number of ends that were none.
    searched: usize,
    closes: usize,
    /// White space that may be followed by a call.
    blank: String,
    calls: usize,
    any_text: bool,
}

impl ToolReader {
    pub(super) fn new(style: ToolStyle, functions: Vec<CalledFunction>, parallel: bool) -> Self {
        ToolReader {
            style,
            marks: style.marks(),
            functions,
            parallel,
            held: String::new(),
            searched: 0,
            closes: 0,
            blank: String::new(),
            calls: 0,
            any_text: false,
        }
    }

    /// Number of calls so far.
    pub(crate) fn calls(&self) -> usize {
        self.calls
    }

    /// Adds the next piece of text.
    pub(crate) fn push(&mut self, piece: &str) -> ToolPieces {
        self.held.push_str(piece);
        let mut pieces = ToolPieces::default();
        while !pieces.ended && self.step(&mut pieces) {}
        pieces
    }

    /// Whether a call may begin without its mark where the answer begins.
    fn may_be_bare(&self) -> bool {
        let is_bare = matches!(
            self.style,
            ToolStyle::Bare { .. }
                | ToolStyle::Listed(_)
                | ToolStyle::Named
                | ToolStyle::Pythonic { marked: false }
        );
        is_bare && !self.any_text && self.calls == 0
    }

    /// Takes something off what is held; false if that needs more text.
    fn step(&mut self, pieces: &mut ToolPieces) -> bool {
        if self.held.starts_with(self.marks.open) {
            return self.step_call(pieces);
        }
        if self.may_be_bare()
            && self.held.trim_start().chars().next().is_none_or(|first| "{[".contains(first))
        {
            return false;
        }
        let marks = [self.marks.open].into_iter().chain(self.marks.around.iter().copied());
        let marks: Vec<&str> = marks.chain(self.bare_beginnings().iter().copied()).collect();
        let found =
            marks.iter().filter_map(|mark| Some((self.held.find(mark)?, *mark))).min_by_key(|found| found.0);
        match found {
            None => {
                let held = marks.iter().map(|mark| overlap(&self.held, mark)).max().unwrap_or(0);
                let rest = self.held.split_off(self.held.len() - held);
                let text = std::mem::replace(&mut self.held, rest);
                self.add_text(&text, pieces);
                false
            }
            Some((start, mark)) => {
                let rest = self.held.split_off(start);
                let text = std::mem::replace(&mut self.held, rest);
                self.add_text(&text, pieces);
                if self.marks.around.contains(&mark) {
                    self.blank.push_str(mark);
                    self.held.drain(..mark.len());
                    return true;
                }
                // a call without a mark lasts to the end of the answer
                mark == self.marks.open
            }
        }
    }

    /// How calls begin behind text where they have no marks.
    fn bare_beginnings(&self) -> &'static [&'static str] {
        match self.style {
            ToolStyle::Bare { .. } => &["{\"name\"", "[{\"name\"", "{\"type\": \"function\""],
            _ => &[],
        }
    }

    fn step_call(&mut self, pieces: &mut ToolPieces) -> bool {
        let open = self.marks.open.len();
        if self.marks.close.is_empty() {
            return false;
        }
        let from = self.searched.max(open);
        let Some(found) = self.held.get(from..).and_then(|rest| rest.find(self.marks.close)) else {
            let tail = self.held.len().saturating_sub(self.marks.close.len());
            self.searched =
                (from..=tail.max(from)).rev().find(|at| self.held.is_char_boundary(*at)).unwrap_or(from);
            return false;
        };
        let (start, end) = (from + found, from + found + self.marks.close.len());
        match tool_bodies::read(self.style, &self.held[open..start], &self.functions) {
            ReadCalls::Calls(calls) => {
                self.take_calls(calls, pieces);
                self.held.drain(..end);
                if pieces.ended {
                    self.held.clear();
                }
            }
            // the closing mark may stand in a text
            ReadCalls::Incomplete if self.closes < CLOSES_MAX => {
                self.closes += 1;
                self.searched = end;
                return true;
            }
            // another call may begin behind the mark
            ReadCalls::Incomplete | ReadCalls::Other => {
                let text = self.marks.open;
                self.held.drain(..text.len());
                self.add_text(text, pieces);
            }
        }
        (self.searched, self.closes) = (0, 0);
        true
    }

    fn take_calls(&mut self, mut calls: Vec<ToolCall>, pieces: &mut ToolPieces) {
        self.blank.clear();
        if !self.parallel {
            calls.truncate(1);
            pieces.ended = true;
        }
        self.calls += calls.len();
        pieces.calls.extend(calls);
    }

    /// White space before and between calls is no text, which only what follows tells.
    fn add_text(&mut self, text: &str, pieces: &mut ToolPieces) {
        self.blank.push_str(text);
        if !text.trim().is_empty() || self.any_text && self.calls == 0 {
            self.any_text = true;
            pieces.text.push_str(&std::mem::take(&mut self.blank));
        }
    }

    /// Ends the text. What was cut within a call stays text.
    pub(crate) fn finish(&mut self) -> ToolPieces {
        let mut pieces = ToolPieces::default();
        let held = std::mem::take(&mut self.held);
        let marked = held.strip_prefix(self.marks.open);
        let begins = self.bare_beginnings().iter().any(|beginning| held.starts_with(beginning));
        let inside = marked.or((self.may_be_bare() || begins).then_some(held.as_str()));
        let inside = inside.map(|inside| {
            let ends = self.marks.around.iter().find_map(|mark| inside.trim_end().strip_suffix(mark));
            ends.unwrap_or(inside)
        });
        // where only a closing mark says that a call is whole, one without it was cut
        let is_whole = |inside: &&str| {
            self.style != ToolStyle::KeysAndValues && inside.trim_end().ends_with(['}', ']', ')', '>'])
        };
        let inside = inside.filter(is_whole);
        let read = inside.map(|inside| tool_bodies::read(self.style, inside, &self.functions));
        if let Some(ReadCalls::Calls(calls)) = read {
            self.take_calls(calls, &mut pieces);
            pieces.ended = false;
            return pieces;
        }
        self.add_text(&held, &mut pieces);
        if self.calls == 0 {
            pieces.text.push_str(&std::mem::take(&mut self.blank));
        }
        pieces
    }
}

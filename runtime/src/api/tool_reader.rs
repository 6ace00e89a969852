//! Finds the calls of tools in an answer while it is written.

use super::harmony::HarmonyReader;
use super::stop::overlap;
use super::tool_bodies::{self, CalledFunction, ReadCalls};
use super::tool_stream::{self, CallPlace, JsonScan};
use super::tools::{CallPiece, ToolCall, ToolPieces};
use crate::model::{CallMarks, ListMarks, ToolStyle};

/// Maximum number of closing marks that one call may hold within its texts.
const CLOSES_MAX: usize = 64;

/// Finds the calls in the text of an answer. Text that only resembles a call stays text.
#[derive(Debug)]
pub(crate) struct ToolReader {
    style: ToolStyle,
    marks: CallMarks,
    functions: Vec<CalledFunction>,
    parallel: bool,
    /// Whether arguments are passed on while they are written, and where they are.
    streams: bool,
    place: Option<CallPlace>,
    /// Reads answers of gpt-oss in place of the other fields.
    harmony: Option<HarmonyReader>,
    /// Text that may be a call, or the beginning of one.
    held: String,
    /// Number of bytes of `held` in which the end of the call was searched, and of false ends found.
    searched: usize,
    closes: usize,
    /// White space that may be followed by a call.
    blank: String,
    calls: usize,
    any_text: bool,
}

impl ToolReader {
    pub(super) fn new(
        style: ToolStyle,
        functions: Vec<CalledFunction>,
        parallel: bool,
        streams: bool,
    ) -> Self {
        let harmony = (style == ToolStyle::Harmony).then(|| HarmonyReader::new(functions.clone(), parallel));
        ToolReader {
            harmony,
            style,
            marks: style.marks(),
            functions,
            parallel,
            streams,
            place: None,
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
        self.harmony.as_ref().map_or(self.calls, HarmonyReader::calls)
    }

    /// Adds the next piece of text.
    pub(crate) fn push(&mut self, piece: &str) -> ToolPieces {
        if let Some(harmony) = &mut self.harmony {
            return harmony.push(piece);
        }
        self.held.push_str(piece);
        let mut pieces = ToolPieces::default();
        while !pieces.ended && self.step(&mut pieces) {}
        pieces
    }

    /// Whether a call may begin without its mark at the beginning of the answer.
    fn may_be_bare(&self) -> bool {
        let is_bare = matches!(
            self.style,
            ToolStyle::Bare { .. }
                | ToolStyle::Listed(_)
                | ToolStyle::Named
                | ToolStyle::Pythonic { marked: false }
        ) && !matches!(self.style, ToolStyle::Listed(ListMarks::Cohere | ListMarks::Action));
        is_bare && !self.any_text && self.calls == 0
    }

    /// Consumes part of `held`; false if that needs more text.
    fn step(&mut self, pieces: &mut ToolPieces) -> bool {
        if let Some(place) = self.place {
            return self.step_streamed(place, pieces);
        }
        if self.held.starts_with(self.marks.open) {
            return self.begin_streamed(self.marks.open.len(), pieces) || self.step_call(pieces);
        }
        if self.may_be_bare()
            && self.held.trim_start().chars().next().is_none_or(|first| "{[".contains(first))
        {
            return self.style != ToolStyle::Named && self.begin_streamed(0, pieces);
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

    /// Begins to stream a call that stands at `from` in `held`, if that is possible already.
    fn begin_streamed(&mut self, from: usize, pieces: &mut ToolPieces) -> bool {
        let begun = match self.streams {
            true => tool_stream::begin(self.style, &self.held[from..], &self.functions),
            false => None,
        };
        let Some(begun) = begun else { return false };
        self.blank.clear();
        let name = Some(begun.name);
        pieces.calls.push(CallPiece { index: self.calls, name, arguments: String::new() });
        self.calls += 1;
        self.held.drain(..from + begun.at);
        self.place = Some(CallPlace::Arguments(JsonScan::default()));
        true
    }

    /// Continues a call that is being streamed; false if that needs more text.
    fn step_streamed(&mut self, place: CallPlace, pieces: &mut ToolPieces) -> bool {
        match place {
            CallPlace::Arguments(mut scan) => {
                let kept =
                    overlap(&self.held, if self.marks.close.is_empty() { "\0" } else { self.marks.close });
                let ready = self.held.len() - kept;
                let end = scan.end(&self.held[..ready], self.marks.close);
                let rest = self.held.split_off(end.unwrap_or(ready));
                let arguments = std::mem::replace(&mut self.held, rest);
                if !arguments.is_empty() {
                    pieces.calls.push(CallPiece { index: self.calls - 1, name: None, arguments });
                }
                self.place = Some(CallPlace::Arguments(scan));
                if end.is_none() {
                    return false;
                }
                self.place = Some(CallPlace::Behind);
                pieces.ended = !self.parallel;
                true
            }
            CallPlace::Behind => match self.style {
                ToolStyle::Bare { .. } | ToolStyle::Listed(_) => self.step_list(pieces),
                ToolStyle::Named => {
                    self.place = None;
                    true
                }
                _ => self.step_to_close(),
            },
            CallPlace::Closing => self.step_to_close(),
        }
    }

    /// Continues behind a call that others may follow without a mark.
    fn step_list(&mut self, pieces: &mut ToolPieces) -> bool {
        let rest = self.held.trim_start_matches(|sign: char| sign.is_whitespace() || "},;".contains(sign));
        self.held = rest.to_owned();
        if self.held.is_empty() {
            return false;
        }
        if self.held.starts_with('{') {
            return self.begin_streamed(0, pieces);
        }
        if self.held.starts_with(']') {
            self.held.drain(..1);
        }
        self.place = (!self.marks.close.is_empty()).then_some(CallPlace::Closing);
        true
    }

    /// Drops the text before the closing mark, and the mark.
    fn step_to_close(&mut self) -> bool {
        match self.held.find(self.marks.close) {
            Some(at) => {
                self.held.drain(..at + self.marks.close.len());
                self.place = None;
                true
            }
            None => {
                let kept = overlap(&self.held, self.marks.close);
                self.held.drain(..self.held.len() - kept);
                false
            }
        }
    }

    /// Beginnings of calls behind text in styles without marks.
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
            // the closing mark may stand within a text
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
        for ToolCall { name, arguments } in calls {
            pieces.calls.push(CallPiece { index: self.calls, name: Some(name), arguments });
            self.calls += 1;
        }
    }

    /// White space before and between calls is not text, which only later text decides.
    fn add_text(&mut self, text: &str, pieces: &mut ToolPieces) {
        self.blank.push_str(text);
        if !text.trim().is_empty() || self.any_text && self.calls == 0 {
            self.any_text = true;
            pieces.text.push_str(&std::mem::take(&mut self.blank));
        }
    }

    /// Ends the text. A call that was cut stays text.
    pub(crate) fn finish(&mut self) -> ToolPieces {
        if let Some(harmony) = &mut self.harmony {
            return harmony.finish();
        }
        let mut pieces = ToolPieces::default();
        let held = std::mem::take(&mut self.held);
        match self.place {
            Some(CallPlace::Arguments(_)) if !held.is_empty() => {
                pieces.calls.push(CallPiece { index: self.calls - 1, name: None, arguments: held });
                return pieces;
            }
            // a last call without arguments
            Some(CallPlace::Behind) if held.starts_with('{') => {
                match tool_bodies::read(self.style, &held, &self.functions) {
                    ReadCalls::Calls(calls) => self.take_calls(calls, &mut pieces),
                    _ => pieces.text = held,
                }
                pieces.ended = false;
                return pieces;
            }
            Some(_) => return pieces,
            None => {}
        }
        let marked = held.strip_prefix(self.marks.open);
        let begins = self.bare_beginnings().iter().any(|beginning| held.starts_with(beginning));
        let inside = marked.or((self.may_be_bare() || begins).then_some(held.as_str()));
        // text may follow calls that a stream would have begun
        let is_bare = matches!(self.style, ToolStyle::Bare { .. });
        let begins = |text: &&str| tool_stream::begin(self.style, text, &self.functions).is_some();
        let whole = inside.filter(|text| is_bare && begins(text));
        let (inside, behind) = match whole.map(|text| text.split_at(tool_bodies::leading_values(text))) {
            Some((calls, behind)) => (Some(calls), behind.trim_start_matches([' ', '\n', ';', ','])),
            None => (inside, ""),
        };
        let inside = inside.map(|inside| {
            let ends = self.marks.around.iter().find_map(|mark| inside.trim_end().strip_suffix(mark));
            ends.unwrap_or(inside)
        });
        // where only a closing mark shows that a call is whole, one without it was cut
        let is_whole = |inside: &&str| {
            self.style != ToolStyle::KeysAndValues && inside.trim_end().ends_with(['}', ']', ')', '>'])
        };
        let inside = inside.filter(is_whole);
        let read = inside.map(|inside| tool_bodies::read(self.style, inside, &self.functions));
        if let Some(ReadCalls::Calls(calls)) = read {
            self.take_calls(calls, &mut pieces);
            pieces.text.push_str(if pieces.ended { "" } else { behind });
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

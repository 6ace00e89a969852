//! Answers in the harmony format of gpt-oss: messages in channels, one for the client's text, one for
//! reasoning, and one for tool calls.

use super::stop::overlap;
use super::tool_bodies::CalledFunction;
use super::tools::{CallPiece, ToolPieces};

const MESSAGE: &str = "<|message|>";
const CHANNEL: &str = "<|channel|>";
/// Marks that end a message.
const ENDS: [&str; 4] = ["<|end|>", "<|call|>", "<|return|>", "<|start|>"];
/// First mark of a message's head; an answer that begins otherwise is text.
const HEADS: [&str; 4] = [CHANNEL, " to=", "<|start|>", "<|constrain|>"];

/// The reader's position in an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HarmonyPart {
    /// Before the text of a message.
    Head,
    /// Text for the client.
    Said,
    /// Reasoning, and preambles that are not for the client.
    Thought,
    /// Arguments of a call.
    Call,
}

/// Finds the parts of an answer.
#[derive(Debug)]
pub(super) struct HarmonyReader {
    functions: Vec<CalledFunction>,
    parallel: bool,
    part: HarmonyPart,
    /// Whether a message has ended.
    any_message: bool,
    /// Text that has not been returned yet.
    held: String,
    calls: usize,
}

impl HarmonyReader {
    pub(super) fn new(functions: Vec<CalledFunction>, parallel: bool) -> Self {
        let (part, held) = (HarmonyPart::Head, String::new());
        HarmonyReader { functions, parallel, part, any_message: false, held, calls: 0 }
    }

    /// Number of calls so far.
    pub(super) fn calls(&self) -> usize {
        self.calls
    }

    /// Adds the next piece of text.
    pub(super) fn push(&mut self, piece: &str) -> ToolPieces {
        self.held.push_str(piece);
        let mut pieces = ToolPieces::default();
        while !pieces.ended && self.step(&mut pieces) {}
        pieces
    }

    /// Ends the answer.
    pub(super) fn finish(&mut self) -> ToolPieces {
        let mut pieces = ToolPieces::default();
        let rest = std::mem::take(&mut self.held);
        let is_head = self.any_message || HEADS.iter().any(|head| rest.starts_with(head));
        if self.part != HarmonyPart::Head || !is_head {
            self.tell(rest, &mut pieces);
        }
        pieces
    }

    /// Consumes part of `held`; false if that needs more text.
    fn step(&mut self, pieces: &mut ToolPieces) -> bool {
        if self.part == HarmonyPart::Head {
            return self.step_head(pieces);
        }
        let end = ENDS.iter().filter_map(|end| Some((self.held.find(end)?, end.len()))).min();
        let Some((at, length)) = end else {
            let kept = ENDS.iter().map(|end| overlap(&self.held, end)).max().unwrap_or(0);
            let rest = self.held.split_off(self.held.len() - kept);
            let text = std::mem::replace(&mut self.held, rest);
            self.tell(text, pieces);
            return false;
        };
        let rest = self.held.split_off(at + length);
        let mut text = std::mem::replace(&mut self.held, rest);
        text.truncate(at);
        self.tell(text, pieces);
        pieces.ended = self.part == HarmonyPart::Call && !self.parallel;
        self.part = HarmonyPart::Head;
        self.any_message = true;
        true
    }

    fn step_head(&mut self, pieces: &mut ToolPieces) -> bool {
        if self.held.is_empty() {
            return false;
        }
        if let Some(at) = self.held.find(MESSAGE) {
            let rest = self.held.split_off(at + MESSAGE.len());
            let head = std::mem::replace(&mut self.held, rest);
            self.part = self.part_of(&head, pieces);
            return true;
        }
        // the next message begins with its role
        let may_begin = |head: &&str| self.held.starts_with(*head) || head.starts_with(&*self.held);
        if HEADS.iter().any(may_begin) || self.any_message {
            return false;
        }
        self.part = HarmonyPart::Said;
        true
    }

    /// The part that follows a head, such as `<|channel|>commentary to=functions.look json`.
    fn part_of(&mut self, head: &str, pieces: &mut ToolPieces) -> HarmonyPart {
        let word = |mark: &str| {
            let (_, behind) = head.split_once(mark)?;
            behind.split(['<', ' ']).next().map(str::trim)
        };
        let called = word("to=").map(|to| to.strip_prefix("functions.").unwrap_or(to));
        if let Some(name) = called.filter(|name| self.functions.iter().any(|(known, _)| known == name)) {
            let name = Some(name.to_owned());
            pieces.calls.push(CallPiece { index: self.calls, name, arguments: String::new() });
            self.calls += 1;
            return HarmonyPart::Call;
        }
        match word(CHANNEL) {
            Some("analysis") => HarmonyPart::Thought,
            Some("commentary") if called.is_some() => HarmonyPart::Thought,
            _ => HarmonyPart::Said,
        }
    }

    fn tell(&mut self, text: String, pieces: &mut ToolPieces) {
        if text.is_empty() {
            return;
        }
        match self.part {
            HarmonyPart::Thought => pieces.thought.push_str(&text),
            HarmonyPart::Call => {
                pieces.calls.push(CallPiece { index: self.calls - 1, name: None, arguments: text });
            }
            HarmonyPart::Said | HarmonyPart::Head => pieces.text.push_str(&text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Text, reasoning and calls of an answer that arrives letter by letter.
    fn read(text: &str) -> (String, String, Vec<(String, String)>) {
        let functions = vec![("look".to_owned(), serde_json::json!({}))];
        let mut reader = HarmonyReader::new(functions, true);
        let (mut said, mut thought, mut calls) = (String::new(), String::new(), Vec::new());
        let mut take = |pieces: ToolPieces| {
            said += &pieces.text;
            thought += &pieces.thought;
            pieces.calls.into_iter().for_each(|piece| piece.add_to(&mut calls));
        };
        text.chars().for_each(|letter| take(reader.push(&letter.to_string())));
        take(reader.finish());
        let calls = calls.into_iter().map(|call| (call.name, call.arguments)).collect();
        (said, thought, calls)
    }

    #[test]
    fn channels_are_told_apart() {
        let answer =
            "<|channel|>analysis<|message|>Hm <b>.<|end|><|start|>assistant<|channel|>final<|message|>Yes.";
        assert_eq!(read(answer), ("Yes.".into(), "Hm <b>.".into(), vec![]));
        assert_eq!(read("plain {text}"), ("plain {text}".into(), String::new(), vec![]));
        assert_eq!(read("<|channel|>final<|message|>a<|return|>").0, "a");
        // a preamble before a call
        assert_eq!(read("<|channel|>commentary<|message|>I look.<|end|>").0, "I look.");
        assert_eq!(read("<|channel|>analy"), (String::new(), String::new(), vec![]), "cut within a head");
    }

    #[test]
    fn calls_have_their_recipient_before_or_behind_the_channel() {
        let call = vec![("look".to_owned(), "{\"x\": 1}".to_owned())];
        for head in [
            "<|channel|>commentary to=functions.look <|constrain|>json",
            "<|channel|>commentary to=functions.look<|constrain|>json",
            " to=functions.look<|channel|>commentary json",
        ] {
            let thought = "<|channel|>analysis<|message|>t<|end|><|start|>assistant";
            for end in ["", "<|call|>"] {
                let answer = format!("{thought}{head}<|message|>{{\"x\": 1}}{end}");
                assert_eq!(read(&answer), (String::new(), "t".into(), call.clone()), "{answer}");
            }
        }
        let other = "<|channel|>commentary to=browser.search json<|message|>{}<|call|>";
        assert_eq!(read(other), (String::new(), "{}".into(), vec![]), "no tool of the client's");
    }
}

//! Turns the engine's updates into the text of each choice.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::Seat;
use super::prompt_report::{PromptReader, ToldPrompt};
use super::stop::{Passed, StopFilter};
use super::tally::Tally;
use super::text::TextDecoder;
use super::text_rules::TextRules;
use super::tool_reader::ToolReader;
use super::tools::{CallPiece, ToolPieces};
use crate::request::{Failure, FinishReason, Logprobs, Update, UpdateReceiver, logprobs_bytes};

/// A generated token with the values for `logprobs`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TokenLogprobs {
    pub(crate) id: u32,
    /// Characters of the text before this token.
    pub(crate) text_offset: usize,
    /// Whether it ends the answer without being part of its text.
    pub(crate) is_hidden_end: bool,
    /// None for the first token of a prompt, which has no predecessor.
    pub(crate) logprobs: Option<Logprobs>,
}

impl TokenLogprobs {
    /// Bytes of the token's text.
    pub(crate) fn bytes(&self) -> usize {
        size_of::<Self>() + self.logprobs.as_ref().map_or(0, logprobs_bytes)
    }

    /// Truncates the alternatives to at most `most`.
    pub(crate) fn with_tops(mut self, most: u32) -> Self {
        if let Some(logprobs) = &mut self.logprobs {
            logprobs.top.truncate(most as usize);
        }
        self
    }
}

/// How one update changes a choice.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Delta {
    /// Text to send; often empty while a character, a stop string or a call may still be completed.
    pub(crate) text: String,
    /// Reasoning of the model, where its format separates reasoning from the answer.
    pub(crate) thought: String,
    /// Tool calls, whole or in pieces.
    pub(crate) calls: Vec<CallPiece>,
    /// Log-probabilities of the tokens in this update, if the request asked for them.
    pub(crate) logprobs: Vec<TokenLogprobs>,
    /// Ids of the tokens in this update, if they are returned.
    pub(crate) ids: Vec<u32>,
    /// Log-probabilities of the prompt, if they are returned separately; set once.
    pub(crate) prompt: Option<Vec<TokenLogprobs>>,
    /// Set once, on the last delta.
    pub(crate) finish: Option<FinishReason>,
}

/// Settings by which a choice is read.
pub(crate) struct ChoiceSetup {
    pub(crate) decoder: Box<dyn TextDecoder>,
    pub(crate) rules: TextRules,
    /// Finds tool calls, if there are tools.
    pub(crate) tools: Option<ToolReader>,
    /// Tokens that end the answer.
    pub(crate) end_ids: Arc<[u32]>,
    /// Alternatives per token, if log-probabilities are requested.
    pub(crate) logprobs: Option<u32>,
    /// Reads the prompt, if the answer reports anything about the prompt.
    pub(crate) prompt: Option<PromptReader>,
    /// Whether the ids of tokens are returned.
    pub(crate) returns_ids: bool,
    /// Whether the answer has no generated tokens.
    pub(crate) is_empty: bool,
}

/// One choice: decodes its tokens, matches stop strings, counts.
pub(crate) struct Choice {
    setup: ChoiceSetup,
    filter: StopFilter,
    characters: usize,
    generated: u32,
    cached: Option<u32>,
}

impl Choice {
    pub(crate) fn new(mut setup: ChoiceSetup) -> Self {
        let stops = std::mem::take(&mut setup.rules.stops);
        let filter = StopFilter::new(stops, setup.rules.includes_stop);
        Choice { setup, filter, characters: 0, generated: 0, cached: None }
    }

    /// Number of prompt tokens that the engine has yet to return.
    fn prompt_left(&self) -> usize {
        self.setup.prompt.as_ref().map_or(0, PromptReader::left)
    }

    /// Whether the next token belongs to the answer.
    fn awaits_answer(&self) -> bool {
        self.prompt_left() == 0 && !self.setup.is_empty
    }

    /// A change by text that passed the filter, and by the end of the answer, if it has ended.
    fn delta(
        &mut self,
        text: String,
        logprobs: Vec<TokenLogprobs>,
        mut finish: Option<FinishReason>,
    ) -> Delta {
        let Some(tools) = &mut self.setup.tools else {
            return Delta { text, logprobs, finish, ..Delta::default() };
        };
        let ToolPieces { mut text, mut thought, mut calls, ended } = tools.push(&text);
        if finish.is_some() {
            let rest = tools.finish();
            text.push_str(&rest.text);
            thought.push_str(&rest.thought);
            calls.extend(rest.calls);
        } else if ended {
            finish = Some(FinishReason::Stop);
        }
        if finish == Some(FinishReason::Stop) && tools.calls() > 0 {
            finish = Some(FinishReason::ToolCalls);
        }
        Delta { text, thought, calls, logprobs, finish, ..Delta::default() }
    }

    /// Applies the next update. A failure ends the answer.
    fn take(&mut self, update: Update) -> Result<Delta, Failure> {
        match update {
            Update::Placed { .. } => Ok(Delta::default()),
            Update::Token { id, logprobs } => {
                if let Some(prompt) = self.setup.prompt.as_mut().filter(|prompt| prompt.left() > 0) {
                    prompt.take(id, logprobs).map_err(Failure::engine)?;
                    return Ok(self.with_prompt(Delta::default()));
                }
                let mut delta = self.take_token(id, logprobs).map_err(Failure::engine)?;
                if self.setup.returns_ids && !self.setup.is_empty {
                    delta.ids.push(id);
                }
                Ok(self.with_prompt(delta))
            }
            Update::Started { cached_tokens } => {
                self.cached = Some(cached_tokens);
                Ok(Delta::default())
            }
            Update::Finished { reason } => {
                let delta = self.finish(reason).map_err(Failure::engine)?;
                Ok(self.with_prompt(delta))
            }
            Update::Failed(failure) => Err(failure),
        }
    }

    /// Adds the report on the prompt, once it is complete.
    fn with_prompt(&mut self, delta: Delta) -> Delta {
        let Some(prompt) = self.setup.prompt.take_if(|prompt| prompt.left() == 0) else { return delta };
        let ToldPrompt { text, mut echoed, logprobs } = prompt.told();
        let characters = text.chars().count();
        self.characters += characters;
        let moved =
            |entry: TokenLogprobs| TokenLogprobs { text_offset: entry.text_offset + characters, ..entry };
        echoed.extend(delta.logprobs.into_iter().map(moved));
        Delta { text: text + &delta.text, logprobs: echoed, prompt: logprobs, ..delta }
    }

    fn finish(&mut self, reason: FinishReason) -> Result<Delta, String> {
        if self.setup.is_empty {
            return Ok(self.delta(String::new(), Vec::new(), Some(FinishReason::Length)));
        }
        let tail = self.setup.decoder.finish()?;
        let mut passed = self.filtered(&tail);
        if passed.stopped {
            return Ok(self.delta(passed.text, Vec::new(), Some(FinishReason::Stop)));
        }
        passed.text.push_str(&self.filter.finish());
        Ok(self.delta(passed.text, Vec::new(), Some(reason)))
    }

    /// Looks for stop strings, unless the answer is too short to end.
    fn filtered(&mut self, text: &str) -> Passed {
        match self.generated > self.setup.rules.min_tokens || self.setup.rules.min_tokens == 0 {
            true => self.filter.push(text),
            false => Passed { text: self.filter.push_unstopped(text), stopped: false },
        }
    }

    fn take_token(&mut self, id: u32, logprobs: Option<Logprobs>) -> Result<Delta, String> {
        if self.setup.is_empty {
            return Ok(Delta::default());
        }
        self.generated += 1;
        let text_offset = self.characters;
        let is_hidden_end = self.setup.end_ids.contains(&id) && !self.setup.rules.includes_stop;
        let logprobs = match (self.setup.logprobs, logprobs) {
            (None, _) => Vec::new(),
            (Some(tops), Some(logprobs)) => {
                let logprobs = Some(logprobs);
                vec![TokenLogprobs { id, text_offset, is_hidden_end, logprobs }.with_tops(tops)]
            }
            (Some(_), None) => return Err("the engine returned a token without its log-probability".into()),
        };
        if is_hidden_end {
            return Ok(Delta { logprobs, ..Delta::default() });
        }
        let text = self.setup.decoder.push(id)?;
        self.characters += text.chars().count();
        let passed = self.filtered(&text);
        Ok(self.delta(passed.text, logprobs, passed.stopped.then_some(FinishReason::Stop)))
    }
}

/// Token counts that `usage` reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: u32,
    pub(crate) completion_tokens: u32,
    /// Reused prompt tokens; unknown if the tenant may not see them, or if a stop string ended the answer
    /// before the engine had reported them.
    pub(crate) cached_tokens: Option<u32>,
}

/// All choices of a response while they are generated. Dropping it cancels them in the engine; a client that
/// leaves pays for the tokens generated until then.
pub(crate) struct Answer {
    running: Vec<(Choice, Option<UpdateReceiver>)>,
    /// Index of the choice that is polled first next time, so that no choice starves the others.
    next: usize,
    /// Updates that were received and not applied yet, with the indices of their choices.
    ahead: VecDeque<(usize, Option<Update>)>,
    prompt_tokens: u32,
    choices_per_prompt: usize,
    tally: Tally,
    seat: Seat,
}

impl Drop for Answer {
    fn drop(&mut self) {
        for (index, update) in std::mem::take(&mut self.ahead) {
            match update {
                Some(Update::Token { .. }) if self.running[index].0.awaits_answer() => {
                    self.tally.left(1, None);
                }
                Some(Update::Started { cached_tokens }) => self.running[index].0.cached = Some(cached_tokens),
                _ => {}
            }
        }
        for (choice, updates) in &mut self.running {
            let Some(updates) = updates else { continue };
            let (mut unread, mut of_prompt) = (0, choice.prompt_left());
            while let Some(update) = updates.try_recv() {
                match update {
                    Update::Token { .. } if of_prompt > 0 => of_prompt -= 1,
                    Update::Token { .. } if choice.setup.is_empty => {}
                    Update::Token { .. } => unread += 1,
                    Update::Started { cached_tokens } => choice.cached = Some(cached_tokens),
                    _ => {}
                }
            }
            self.tally.left(unread, choice.cached);
        }
    }
}

impl Answer {
    /// Creates an answer from `running`, which holds `choices_per_prompt` choices of the first prompt, then
    /// of the second, and so on.
    pub(crate) fn new(
        running: Vec<(Choice, UpdateReceiver)>,
        prompt_tokens: u32,
        choices_per_prompt: usize,
        tally: Tally,
        seat: Seat,
    ) -> Self {
        let running = running.into_iter().map(|(choice, updates)| (choice, Some(updates))).collect();
        Answer { running, next: 0, ahead: VecDeque::new(), prompt_tokens, choices_per_prompt, tally, seat }
    }

    /// Number of choices in the response.
    pub(crate) fn len(&self) -> usize {
        self.running.len()
    }

    /// Tokens generated so far for a choice.
    pub(crate) fn generated(&self, index: usize) -> u32 {
        self.running[index].0.generated
    }

    /// The next change of any choice, with the choice's index, or `None` when all have finished. After an
    /// error everything is cancelled.
    pub(crate) async fn next(&mut self) -> Option<Result<(usize, Delta), Failure>> {
        if self.running.iter().all(|(_, updates)| updates.is_none()) {
            return None;
        }
        let (index, update) = match self.ahead.pop_front() {
            Some(ahead) => ahead,
            None => poll_fn(|context| self.poll_any(context)).await,
        };
        if matches!(update, Some(Update::Token { .. })) && self.running[index].0.awaits_answer() {
            self.tally.token(index);
        }
        let (choice, updates) = &mut self.running[index];
        let delta = match update {
            Some(update) => choice.take(update),
            None => Err(Failure::engine("the engine stopped before the answer was complete")),
        };
        match &delta {
            Ok(Delta { finish: None, .. }) => {}
            Ok(Delta { finish: Some(reason), .. }) => {
                *updates = None;
                self.tally.finished(*reason, 1);
                self.tally.choice_done(choice.generated, choice.cached);
                if self.running.iter().all(|(_, updates)| updates.is_none()) {
                    self.tally.succeeded();
                }
            }
            Err(failure) => {
                self.running.iter_mut().for_each(|(_, updates)| *updates = None);
                self.tally.failed(failure);
            }
        }
        Some(delta.map(|delta| (index, delta)))
    }

    /// Waits until a choice has a token, or ends.
    ///
    /// # Errors
    /// When it fails before that; everything is cancelled then.
    pub(crate) async fn begun(&mut self) -> Result<(), Failure> {
        loop {
            let (index, update) = poll_fn(|context| self.poll_any(context)).await;
            match update {
                Some(Update::Failed(failure)) => {
                    self.running.iter_mut().for_each(|(_, updates)| *updates = None);
                    self.tally.failed(&failure);
                    return Err(failure);
                }
                Some(Update::Placed { .. } | Update::Started { .. }) => {
                    self.ahead.push_back((index, update));
                }
                update => {
                    self.ahead.push_back((index, update));
                    return Ok(());
                }
            }
        }
    }

    /// An update of some choice; its inner `None` means that the engine has closed the channel.
    fn poll_any(&mut self, context: &mut Context<'_>) -> Poll<(usize, Option<Update>)> {
        let count = self.running.len();
        for index in (self.next..count).chain(0..self.next) {
            let Some(updates) = &mut self.running[index].1 else { continue };
            if let Poll::Ready(update) = updates.poll_recv(context) {
                self.next = (index + 1) % count;
                return Poll::Ready((index, update));
            }
        }
        Poll::Pending
    }

    /// Token counts so far. A prompt and its cached part count once, however many choices it has.
    pub(crate) fn usage(&self) -> Usage {
        let choices = || self.running.iter().map(|(choice, _)| choice);
        Usage {
            prompt_tokens: self.prompt_tokens,
            completion_tokens: choices().map(|choice| choice.generated).sum(),
            cached_tokens: match self.seat.tenant().hide_cached_tokens {
                true => None,
                false => choices().step_by(self.choices_per_prompt).map(|choice| choice.cached).sum(),
            },
        }
    }
}

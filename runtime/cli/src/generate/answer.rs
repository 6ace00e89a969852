//! The answer to a prompt, with times.

use super::SCHEMA;
use anyhow::{Result, bail};
use mixfleet_runtime::env::Env;
use mixfleet_runtime::model::TokenStream;
use mixfleet_runtime::request::{Update, UpdateReceiver};
use serde_json::{Value, json};
use std::io::Write;
use std::pin::pin;
use std::sync::Arc;

/// One copy's answer.
pub(crate) struct CollectedAnswer {
    stream: Option<TokenStream>,
    /// Whether its text is printed as it comes.
    shown: bool,
    pub(crate) text: String,
    pub(crate) ids: Vec<u32>,
    placement: Value,
    /// When each token came.
    pub(crate) times_s: Vec<f64>,
    /// Whether it was ended before its end.
    pub(crate) stopped: bool,
}

impl CollectedAnswer {
    pub(crate) fn new(stream: TokenStream, shown: bool) -> Self {
        let (text, ids, times_s) = Default::default();
        CollectedAnswer {
            stream: Some(stream),
            shown,
            text,
            ids,
            placement: Value::Null,
            times_s,
            stopped: false,
        }
    }

    /// Collects the answer to its end.
    pub(crate) async fn collect(self, updates: UpdateReceiver, env: Arc<impl Env>) -> Result<Self> {
        self.collect_until(updates, env, std::future::pending()).await
    }

    /// Collects the answer to its end, or to that of `stop`.
    pub(crate) async fn collect_until(
        mut self,
        mut updates: UpdateReceiver,
        env: Arc<impl Env>,
        stop: impl Future<Output = ()>,
    ) -> Result<Self> {
        let mut stop = pin!(stop);
        loop {
            let update = tokio::select! {
                update = updates.recv() => update,
                () = &mut stop => {
                    self.stopped = true;
                    break;
                }
            };
            let Some(update) = update else { break };
            match update {
                Update::Placed { prefill, decode } => {
                    self.placement = json!({"prefill": prefill, "decode": decode})
                }
                Update::Token { id, .. } => {
                    self.times_s.push(env.now().0);
                    self.ids.push(id);
                    let part = self.stream.as_mut().map(|stream| stream.push(id)).transpose()?;
                    self.add(&part.unwrap_or_default())?;
                }
                Update::Started { .. } => {}
                Update::Finished { .. } => break,
                Update::Failed(failure) => bail!(failure.message),
            }
        }
        let rest = self.stream.take().map(TokenStream::finish).transpose()?;
        self.add(&rest.unwrap_or_default())?;
        Ok(self)
    }

    fn add(&mut self, part: &str) -> Result<()> {
        self.text.push_str(part);
        if self.shown {
            let mut out = std::io::stdout().lock();
            out.write_all(part.as_bytes())?;
            out.flush()?;
        }
        Ok(())
    }
}

/// The answers to all copies of a prompt.
pub(crate) struct PromptAnswers {
    pub(crate) answers: Vec<CollectedAnswer>,
    pub(crate) start_s: f64,
    pub(crate) energy_j: Option<f64>,
}

impl PromptAnswers {
    /// Time and tokens between the last copy's first token and the first copy's last: all copies decode then,
    /// and none computes its prompt.
    fn together(&self) -> Option<(f64, usize)> {
        let first = |answer: &CollectedAnswer| answer.times_s.first().copied();
        let last = |answer: &CollectedAnswer| answer.times_s.last().copied();
        let begin =
            self.answers.iter().map(first).collect::<Option<Vec<_>>>()?.into_iter().reduce(f64::max)?;
        let end = self.answers.iter().map(last).collect::<Option<Vec<_>>>()?.into_iter().reduce(f64::min)?;
        let times = self.answers.iter().flat_map(|answer| &answer.times_s);
        let tokens = times.filter(|time| **time > begin && **time <= end).count();
        (end > begin && tokens > 0).then_some((end - begin, tokens))
    }

    pub(crate) fn document(&self, prompt_ids: &[u32]) -> Value {
        let batch = self.answers.len();
        let tokens: usize = self.answers.iter().map(|answer| answer.ids.len()).sum();
        let first = &self.answers[0];
        let ttft_s = first.times_s.first().map(|first| first - self.start_s);
        let together = self.together();
        let tokens_per_s = together.map(|(time_s, tokens)| tokens as f64 / time_s);
        let joules_per_token = self.energy_j.filter(|_| tokens > 0).map(|joules| joules / tokens as f64);
        json!({
            "schema": SCHEMA, "prompt_ids": prompt_ids, "ids": first.ids, "text": first.text,
            "placement": first.placement, "ttft_s": ttft_s, "batch": batch,
            "tbt_s": tokens_per_s.map(|rate| batch as f64 / rate), "tokens_per_s": tokens_per_s,
            "tokens_measured": together.map(|(_, tokens)| tokens),
            "energy_j": self.energy_j, "joules_per_token": joules_per_token,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answers(times_s: &[&[f64]]) -> PromptAnswers {
        let answer = |times_s: &&[f64]| CollectedAnswer {
            stream: None,
            shown: false,
            text: String::new(),
            ids: vec![7; times_s.len()],
            placement: Value::Null,
            times_s: times_s.to_vec(),
            stopped: false,
        };
        PromptAnswers { answers: times_s.iter().map(answer).collect(), start_s: 1.0, energy_j: Some(6.0) }
    }

    #[test]
    fn a_rate_counts_while_all_copies_decode() {
        let one = answers(&[&[2.0, 3.0, 5.0]]).document(&[1]);
        assert_eq!((&one["ttft_s"], &one["tbt_s"]), (&json!(1.0), &json!(1.5)));
        assert_eq!((&one["tokens_per_s"], &one["joules_per_token"]), (&json!(2.0 / 3.0), &json!(2.0)));
        // from 3 to 6: 2 tokens of the first, 3 of the second
        let two = answers(&[&[2.0, 3.0, 4.0, 6.0], &[3.0, 4.0, 5.0, 6.0, 9.0]]).document(&[1]);
        assert_eq!((&two["batch"], &two["tokens_measured"]), (&json!(2), &json!(5)));
        assert_eq!((&two["tokens_per_s"], &two["tbt_s"]), (&json!(5.0 / 3.0), &json!(1.2)));
        // one had ended before the other began
        let apart = answers(&[&[2.0, 3.0], &[4.0, 5.0]]).document(&[1]);
        assert_eq!((&apart["tokens_per_s"], &apart["tbt_s"]), (&Value::Null, &Value::Null));
        let none = answers(&[&[]]).document(&[1]);
        assert_eq!((&none["ttft_s"], &none["tbt_s"]), (&Value::Null, &Value::Null));
    }
}

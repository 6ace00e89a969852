//! Changes to a request's logits before a token is drawn.
//!
//! These are penalties, masks of tokens that its grammar forbids, that the answer may not have or that would
//! end a too short answer, and forced tokens of the prompt whose log-probabilities are wanted.

use super::compiled::BegunGrammar;
use crate::grammar::{Grammar, GrammarRun};
use crate::request::{AnswerMinimum, AnswerVocabulary, GenerateRequest};
use crate::sampling::Penalties;
use std::sync::Arc;

/// Subtracted from the logit of a forbidden token, so that it weighs nothing. It is finite, since shaders
/// need not know infinity.
const FORBIDDEN_LOSS: f32 = 3e38;

/// Added to the logit of a token that must come next.
const FORCED_GAIN: f32 = 3e38;

/// What changes the logits of a request, kept up to date as tokens are drawn.
pub(super) struct Shaping {
    penalties: Option<Penalties>,
    grammar: Option<GrammarRun>,
    /// The first tokens of the output, each with the bits of the f32 that its logit loses.
    forced: Vec<[u32; 2]>,
    minimum: Option<AnswerMinimum>,
    vocabulary: Option<MaskedVocabulary>,
    /// Number of tokens of the model.
    tokens: u32,
    /// The tokens that must not come next, in order.
    forbidden: Vec<u32>,
    /// Each token once, with the bits of the f32 that its logit loses, unless only penalties change logits.
    entries: Option<Vec<[u32; 2]>>,
    /// Why no token can be drawn.
    failed: Option<String>,
}

/// The tokens that an answer may have, by those that it may not have.
struct MaskedVocabulary {
    /// Tokens that are never drawn, in order.
    outside: Vec<u32>,
    bad_words: Vec<Arc<[u32]>>,
}

impl MaskedVocabulary {
    fn new(wanted: &AnswerVocabulary, tokens: u32) -> Self {
        let AnswerVocabulary { allowed_ids, bad_words } = wanted;
        let is_outside = |id: &u32| allowed_ids.binary_search(id).is_err();
        let outside = if allowed_ids.is_empty() { 0..0 } else { 0..tokens };
        MaskedVocabulary { outside: outside.filter(is_outside).collect(), bad_words: bad_words.clone() }
    }

    /// The tokens that must not follow `output`.
    fn masked<'a>(&'a self, output: &'a [u32]) -> impl Iterator<Item = u32> + 'a {
        let completes = move |word: &&'a Arc<[u32]>| output.ends_with(&word[..word.len() - 1]);
        let last = self.bad_words.iter().filter(completes).filter_map(|word| word.last());
        self.outside.iter().chain(last).copied()
    }
}

impl Shaping {
    /// What changes the logits of a request whose output is empty, for a model of `tokens` tokens; none if
    /// nothing does. `begun` is the beginning of its grammar, if it has one.
    pub(super) fn new(wanted: &GenerateRequest, begun: Option<BegunGrammar>, tokens: u32) -> Option<Self> {
        // an answer does without a grammar that it need not have
        let optional = wanted.grammar.as_ref().is_some_and(Grammar::is_optional);
        let begun = begun.filter(|begun| begun.is_ok() || !optional);
        let given = [&wanted.prompt_ids[..], &wanted.forced_ids].concat();
        let penalties = Penalties::new(&wanted.sampling, &given);
        let forced: Vec<_> = wanted.forced_ids.iter().map(|&id| [id, (-FORCED_GAIN).to_bits()]).collect();
        let minimum = wanted.minimum.clone();
        let vocabulary = wanted.vocabulary.as_ref().map(|wanted| MaskedVocabulary::new(wanted, tokens));
        let masks = begun.is_some() || minimum.is_some() || vocabulary.is_some();
        if penalties.is_none() && forced.is_empty() && !masks {
            return None;
        }
        let (grammar, failed) = match begun {
            Some(Ok(run)) => (Some(run), None),
            Some(Err(cause)) => (None, Some(cause)),
            None => (None, None),
        };
        let (forbidden, entries) = (Vec::new(), None);
        Some(Shaping { penalties, grammar, forced, minimum, vocabulary, tokens, forbidden, entries, failed })
    }

    /// Follows the tokens of `output`, all behind the prompt so far, that are new since the last time.
    pub(super) fn follow(&mut self, output: &[u32]) {
        let Some(output) = output.get(self.forced.len()..) else { return };
        if let Some(penalties) = &mut self.penalties {
            penalties.follow(output);
        }
        self.forbidden.clear();
        if let Some(grammar) = self.grammar.as_mut().filter(|_| self.failed.is_none()) {
            match grammar.follow(output).and_then(|()| grammar.forbidden()) {
                Ok(forbidden) => self.forbidden = forbidden,
                Err(cause) => {
                    self.failed = Some(format!("the answer cannot follow its grammar any further: {cause}"));
                    return;
                }
            }
        }
        let minimum = self.minimum.as_ref().filter(|minimum| output.len() < minimum.tokens as usize);
        self.forbidden.extend(minimum.iter().flat_map(|minimum| minimum.masked_ids.iter()));
        self.forbidden.extend(self.vocabulary.iter().flat_map(|vocabulary| vocabulary.masked(output)));
        self.forbidden.sort_unstable();
        self.forbidden.dedup();
        if self.forbidden.len() == self.tokens as usize {
            self.failed = Some("no token is left that the answer may have next".into());
            return;
        }
        if self.grammar.is_none() && self.forbidden.is_empty() {
            self.entries = None;
            return;
        }
        let loss = FORBIDDEN_LOSS.to_bits();
        let penalised = self.penalties.iter().flat_map(Penalties::entries);
        let mut entries: Vec<_> =
            penalised.filter(|entry| self.forbidden.binary_search(&entry[0]).is_err()).copied().collect();
        entries.extend(self.forbidden.iter().map(|id| [*id, loss]));
        self.entries = Some(entries);
    }

    /// Each token whose logit changes, once, with the bits of the f32 that it loses after the repetition
    /// penalty, where token number `index` of the output is drawn.
    pub(super) fn entries(&self, index: usize) -> &[[u32; 2]] {
        if let Some(forced) = self.forced.get(index..index + 1) {
            return forced;
        }
        match &self.entries {
            Some(entries) => entries,
            None => self.penalties.as_ref().map_or(&[], Penalties::entries),
        }
    }

    /// The tokens that must not come next, in order.
    pub(super) fn forbidden(&self) -> &[u32] {
        &self.forbidden
    }

    /// Why no token can be drawn, if none can.
    pub(super) fn failed(&self) -> Option<&str> {
        self.failed.as_deref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::Party;
    use crate::grammar::{GrammarClient, Grammars};
    use crate::model::builtin;
    use crate::request::{Hints, Sampling};
    use mixfleet_scheduler::fleet::PartyId;
    use std::collections::BTreeMap;

    #[test]
    fn what_is_forbidden_weighs_nothing_and_other_penalties_stay() {
        let tokenizer = builtin::tokenizer().unwrap();
        let vocab = u32::try_from(tokenizer.vocab()).unwrap();
        let grammars = Grammars::new(tokenizer.clone(), vocab, None);
        let first = |text: &str| tokenizer.encode_chat(text).unwrap()[0];
        let (yes, no, other) = (first("y"), first("n"), first("z"));
        let wanted = GenerateRequest {
            id: String::new(),
            forced_ids: Arc::default(),
            minimum: None,
            vocabulary: None,
            prompt_ids: [other].into(),
            max_tokens: 8,
            eos_ids: [1].into(),
            sampling: Sampling { logit_bias: [(no, 2.0), (other, 5.0)].into(), ..Sampling::default() },
            logprobs: None,
            grammar: Some(Grammar::one_of(["y", "n"])),
            cache_salt: None,
            party: PartyId::NONE,
            hints: Hints::default(),
        };
        let client = GrammarClient { party: &Party::Tenant("a".into()), stopped: &|| false };
        let begun = grammars.begin(wanted.grammar.as_ref().unwrap(), &wanted.eos_ids, client);
        let begun = begun.map_err(|error| error.to_string());
        let mut shaping = Shaping::new(&wanted, Some(begun), vocab).unwrap();
        shaping.follow(&[]);
        let losses: BTreeMap<u32, f32> =
            shaping.entries(0).iter().map(|[id, loss]| (*id, f32::from_bits(*loss))).collect();
        assert_eq!(losses.len(), shaping.entries(0).len(), "a token is named once");
        assert_eq!((losses.get(&yes), losses.get(&no)), (None, Some(&-2.0)));
        // logits are far below this
        assert!((0..vocab).filter(|id| ![yes, no].contains(id)).all(|id| losses[&id] > 1e30));
        assert!(!shaping.forbidden().contains(&yes) && shaping.forbidden().contains(&other));
        shaping.follow(&[yes]);
        assert_eq!(
            (shaping.failed(), shaping.entries(1).len() as u32),
            (None, vocab - 1),
            "only the end is left"
        );
        shaping.follow(&[yes, other]);
        assert!(shaping.failed().is_some_and(|cause| cause.contains("grammar")));
        let without = Shaping::new(&wanted, Some(Err("no tokenizer".into())), vocab).unwrap();
        assert_eq!(without.failed(), Some("no tokenizer"));
        let plain = GenerateRequest { grammar: None, sampling: Sampling::default(), ..wanted };
        assert!(Shaping::new(&plain, None, vocab).is_none());
    }

    #[test]
    fn tokens_are_forced_first_and_ends_masked_until_the_minimum() {
        let mut wanted = GenerateRequest::greedy("a", [1, 2], 9);
        wanted.forced_ids = [7, 8].into();
        wanted.minimum = Some(AnswerMinimum { tokens: 2, masked_ids: [3, 5].into() });
        wanted.sampling = Sampling { presence_penalty: 1.0, ..Sampling::default() };
        let mut shaping = Shaping::new(&wanted, None, 10).unwrap();
        for (output, forced) in [(&[][..], 7), (&[7], 8)] {
            shaping.follow(output);
            let [[id, loss]] = shaping.entries(output.len()) else { panic!("{output:?}") };
            assert!(*id == forced && f32::from_bits(*loss) < -1e30, "{output:?}");
        }
        for output in [&[7, 8][..], &[7, 8, 4]] {
            shaping.follow(output);
            assert_eq!(shaping.forbidden(), [3, 5], "{output:?}");
            let masked =
                shaping.entries(output.len()).iter().filter(|[_, loss]| f32::from_bits(*loss) > 1e30);
            assert_eq!(masked.map(|[id, _]| *id).collect::<Vec<_>>(), [3, 5]);
        }
        shaping.follow(&[7, 8, 4, 4]);
        assert_eq!((shaping.forbidden(), shaping.entries(4)), (&[][..], &[[4, 1.0f32.to_bits()]][..]));
    }

    #[test]
    fn words_end_nowhere_and_an_answer_without_tokens_fails() {
        let mut wanted = GenerateRequest::greedy("a", [1, 2], 9);
        let bad_words = vec![[4].into(), [1, 3].into(), [2, 1, 5].into()];
        wanted.vocabulary = Some(AnswerVocabulary { allowed_ids: Arc::default(), bad_words });
        let mut shaping = Shaping::new(&wanted, None, 6).unwrap();
        for (output, forbidden) in
            [(&[][..], &[4][..]), (&[1], &[3, 4]), (&[2, 1], &[3, 4, 5]), (&[2, 1, 0], &[4])]
        {
            shaping.follow(output);
            assert_eq!(shaping.forbidden(), forbidden, "after {output:?}");
            assert_eq!(shaping.entries(output.len()).len(), forbidden.len());
        }
        wanted.vocabulary.as_mut().unwrap().allowed_ids = [3, 4].into();
        let mut shaping = Shaping::new(&wanted, None, 6).unwrap();
        shaping.follow(&[]);
        assert_eq!((shaping.forbidden(), shaping.failed()), (&[0, 1, 2, 4, 5][..], None));
        shaping.follow(&[1]);
        assert!(shaping.failed().is_some_and(|cause| cause.contains("no token")), "{:?}", shaping.failed());
    }
}

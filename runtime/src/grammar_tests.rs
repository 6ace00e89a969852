use super::*;
use crate::model::builtin;
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::random::Stream;
use serde_json::{Value, json};

fn grammars() -> (Grammars, Tokenizer) {
    let tokenizer = builtin::tokenizer().unwrap();
    let vocab = to_u32(tokenizer.vocab());
    (Grammars::new(tokenizer.clone(), vocab, None), tokenizer)
}

const END: u32 = 1;

fn begin(grammars: &Grammars, grammar: &Grammar) -> Result<GrammarRun, GrammarError> {
    let client = GrammarClient { party: &Party::Tenant("a".into()), stopped: &|| false };
    grammars.begin(grammar, &[END].into(), client)
}

/// A text of at most `tokens_max` tokens, each drawn from the allowed ones, and whether it ended.
fn drawn(run: &mut GrammarRun, tokenizer: &Tokenizer, seed: u64, tokens_max: usize) -> (String, bool) {
    let mut stream = Stream::new(seed);
    let mut output = Vec::new();
    while output.len() < tokens_max {
        run.follow(&output).unwrap();
        let forbidden = run.forbidden().unwrap();
        assert!(forbidden.is_sorted(), "seed {seed}");
        let allowed: Vec<u32> =
            (0..to_u32(tokenizer.vocab())).filter(|id| forbidden.binary_search(id).is_err()).collect();
        assert!(!allowed.is_empty(), "seed {seed}: nothing can follow {output:?}");
        let id = allowed[stream.below(allowed.len() as u64) as usize];
        if id == END {
            return (text(tokenizer, &output), true);
        }
        output.push(id);
    }
    (text(tokenizer, &output), false)
}

fn text(tokenizer: &Tokenizer, ids: &[u32]) -> String {
    let bytes: Vec<u8> = ids.iter().flat_map(|id| tokenizer.token_bytes(*id)).collect();
    String::from_utf8(bytes).expect("only whole characters are allowed")
}

fn schema(value: &Value) -> Grammar {
    Grammar::JsonSchema(value.to_string().into())
}

#[test]
fn whatever_is_drawn_from_the_allowed_tokens_is_of_the_grammar() {
    let (grammars, tokenizer) = grammars();
    let kinds = json!({"type": "object", "properties": {"kind": {"enum": ["cat", "dog"]}, "legs": {"type": "integer",
        "minimum": 0, "maximum": 99}, "good": {"type": "boolean"}}, "required": ["kind", "legs", "good"],
        "additionalProperties": false});
    let mut ended = 0;
    for seed in 0..50 {
        let mut run = begin(&grammars, &schema(&kinds)).unwrap();
        let (text, whole) = drawn(&mut run, &tokenizer, seed, 400);
        if !whole {
            continue; // white space between parts has no bound
        }
        ended += 1;
        let value: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("seed {seed}: {e}: {text}"));
        let object = value.as_object().unwrap();
        assert_eq!(object.keys().collect::<Vec<_>>(), ["kind", "legs", "good"], "seed {seed}: {text}");
        assert!(["cat", "dog"].contains(&value["kind"].as_str().unwrap()), "seed {seed}: {text}");
        assert!(value["legs"].as_u64().unwrap() < 100 && value["good"].is_boolean(), "seed {seed}: {text}");
    }
    assert!(ended > 10, "{ended} of 50 answers ended");
    let texts = ["a.b", "a|b (c)", "naïve\n\"x\"\\", ""];
    for seed in 0..50 {
        let mut run = begin(&grammars, &Grammar::one_of(texts)).unwrap();
        let (text, whole) = drawn(&mut run, &tokenizer, seed, 100);
        assert!(whole && texts.contains(&text.as_str()), "seed {seed}: {text:?}");
    }
    for seed in 0..50 {
        let mut run = begin(&grammars, &Grammar::Regex("[0-9]{3}-[a-c]+x".into())).unwrap();
        let (text, whole) = drawn(&mut run, &tokenizer, seed, 200);
        assert!(
            whole && text.len() >= 6 && text.as_bytes()[3] == b'-' && text.ends_with('x'),
            "seed {seed}: {text:?}"
        );
    }
    let lark = Grammar::Lark("start: \"(\" start \")\" | \"()\"".into());
    for seed in 0..20 {
        let mut run = begin(&grammars, &lark).unwrap();
        let (text, whole) = drawn(&mut run, &tokenizer, seed, 500);
        let open = text.matches('(').count();
        assert!(whole && text == "(".repeat(open) + &")".repeat(open), "seed {seed}: {text:?}");
    }
}

#[test]
fn an_answer_goes_on_from_its_tokens_and_grammars_do_not_mix() {
    let (grammars, tokenizer) = grammars();
    let grammar = Grammar::one_of(["abcabc", "abd"]);
    let mut first = begin(&grammars, &grammar).unwrap();
    let begun: Vec<u32> = tokenizer.encode_chat("ab").unwrap();
    first.follow(&begun).unwrap();
    // another request with the same grammar is at its own place
    let mut second = begin(&grammars, &grammar).unwrap();
    assert_ne!(second.forbidden().unwrap(), first.forbidden().unwrap());
    second.follow(&begun).unwrap();
    assert_eq!(second.forbidden().unwrap(), first.forbidden().unwrap());
    let mut whole = begun.clone();
    whole.extend(tokenizer.encode_chat("d").unwrap());
    first.follow(&whole).unwrap();
    let only_the_end: Vec<u32> = (0..to_u32(tokenizer.vocab())).filter(|id| *id != END).collect();
    assert_eq!(first.forbidden().unwrap(), only_the_end, "the answer is complete");
    // a token outside the grammar is reported, and does not panic
    let wrong = tokenizer.encode_chat("z").unwrap();
    assert!(second.follow(&[&begun[..], &wrong[..]].concat()).is_err());
    assert!(second.forbidden().is_err());
}

#[test]
fn special_tokens_are_never_text() {
    let (grammars, tokenizer) = grammars();
    let mut run = begin(&grammars, &Grammar::Regex("(.|\n)*".into())).unwrap();
    let forbidden = run.forbidden().unwrap();
    for id in 0..to_u32(tokenizer.vocab()) {
        let is_text = !tokenizer.is_special(id) && std::str::from_utf8(&tokenizer.token_bytes(id)).is_ok();
        if is_text || id == END {
            assert!(!forbidden.contains(&id), "{id}: {:?}", tokenizer.token_text(id));
        } else if tokenizer.is_special(id) {
            assert!(forbidden.contains(&id), "{id}: {:?}", tokenizer.token_text(id));
        }
    }
}

#[test]
fn what_is_no_grammar_is_told_in_a_line() {
    let (grammars, _) = grammars();
    let long = format!("{{\"const\": \"{}\"}}", "x".repeat(GRAMMAR_BYTES_MAX));
    for grammar in [
        Grammar::JsonSchema("{".into()),
        Grammar::JsonSchema("[]".into()),
        schema(&json!({"type": "elephant"})),
        schema(&json!({"$ref": "#/nowhere"})),
        schema(&json!({"type": "string", "minLength": 5, "maxLength": 2})),
        Grammar::Regex("(a".into()),
        Grammar::Regex("(?=x)".into()),
        Grammar::Lark("start: nothing".into()),
        Grammar::Lark("".into()),
        Grammar::JsonSchema(long.into()),
    ] {
        let said = begin(&grammars, &grammar).map(drop).err();
        let said = said.unwrap_or_else(|| panic!("a grammar: {grammar:.100?}")).to_string();
        assert!(!said.is_empty() && said.len() <= 600 && !said.contains('\n'), "{said}");
        assert!(!said.contains("panic"), "{said}");
    }
}

#[test]
fn random_schemas_and_texts_end_in_an_answer_or_an_error() {
    let (grammars, _) = grammars();
    let words = [
        "{",
        "}",
        "\"type\":",
        "\"object\"",
        "[",
        "]",
        ",",
        "(",
        ")",
        "*",
        "+",
        "|",
        "a",
        "start:",
        "\\",
        "^",
        "\"",
    ];
    for seed in 0..200 {
        let mut stream = Stream::new(seed);
        let mut text = String::new();
        for _ in 0..stream.below(30) {
            text.push_str(words[stream.below(words.len() as u64) as usize]);
        }
        for grammar in [
            Grammar::JsonSchema(text.as_str().into()),
            Grammar::Regex(text.as_str().into()),
            Grammar::Lark(text.as_str().into()),
        ] {
            if let Ok(mut run) = begin(&grammars, &grammar) {
                run.forbidden().unwrap_or_else(|e| panic!("seed {seed}: {grammar:?}: {e}"));
            }
        }
    }
}

/// Trials with preset results, and a counter.
struct Told {
    end: TrialEnd,
    count: Arc<std::sync::atomic::AtomicUsize>,
}

impl Trials for Told {
    fn run(&self, _: &[u8], _: &dyn Fn() -> bool) -> TrialEnd {
        self.count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        self.end.clone()
    }
}

fn told(end: TrialEnd) -> (Grammars, Arc<std::sync::atomic::AtomicUsize>) {
    let tokenizer = builtin::tokenizer().unwrap();
    let vocab = to_u32(tokenizer.vocab());
    let count = Arc::default();
    let trials = Told { end, count: Arc::clone(&count) };
    (Grammars::new(tokenizer, vocab, Some(Box::new(trials))), count)
}

fn of_party(grammars: &Grammars, party: &str, at: usize) -> Result<GrammarRun, GrammarError> {
    let client = GrammarClient { party: &Party::Tenant(party.into()), stopped: &|| false };
    grammars.begin(&Grammar::Regex(format!("a{at}").into()), &[END].into(), client)
}

#[test]
fn a_grammar_is_tried_once_and_its_refusal_is_remembered() {
    let (grammars, count) = told(TrialEnd::passed(1000));
    (0..3).for_each(|_| drop(of_party(&grammars, "a", 0).unwrap()));
    assert_eq!(count.load(std::sync::atomic::Ordering::Relaxed), 1);
    let (grammars, count) = told(TrialEnd::Crashed);
    for _ in 0..3 {
        assert!(matches!(of_party(&grammars, "a", 0), Err(GrammarError::Refused(_))));
    }
    assert_eq!(count.load(std::sync::atomic::Ordering::Relaxed), 1);
    let (grammars, count) = told(TrialEnd::Killed);
    assert!(matches!(of_party(&grammars, "a", 0), Err(GrammarError::Busy(_))));
    assert_eq!(count.load(std::sync::atomic::Ordering::Relaxed), TRIES as usize, "someone killed it");
    let (grammars, count) = told(TrialEnd::Deadline);
    for _ in 0..3 {
        assert!(matches!(of_party(&grammars, "a", 0), Err(GrammarError::Busy(_))));
    }
    assert_eq!(count.load(std::sync::atomic::Ordering::Relaxed), 3, "it may do better next time");
}

#[test]
fn a_party_has_half_of_the_memory_of_grammars() {
    let (grammars, _) = told(TrialEnd::passed(COMPILED_BYTES_MAX as u64 / 8));
    let held: Vec<_> = (0..4).map(|at| of_party(&grammars, "a", at).unwrap()).collect();
    let said = of_party(&grammars, "a", 4).map(drop).unwrap_err();
    assert!(matches!(&said, GrammarError::Busy(cause) if cause.contains("this key")), "{said}");
    // another party has the other half, and its own copy
    let others: Vec<_> = (0..4).map(|at| of_party(&grammars, "b", at).unwrap()).collect();
    let said = of_party(&grammars, "c", 0).map(drop).unwrap_err();
    assert!(matches!(&said, GrammarError::Busy(cause) if !cause.contains("this key")), "{said}");
    drop(others);
    // unused grammars make room
    drop(of_party(&grammars, "c", 0).unwrap());
    drop(held);
    drop(of_party(&grammars, "a", 5).unwrap());
    assert!(grammars.memory.left() < COMPILED_BYTES_MAX, "compiled grammars stay charged");
}

#[test]
fn a_grammar_that_begins_with_a_mark_leaves_the_text_before_it_free() {
    let tokenizer = crate::model::builtin::tokenizer().unwrap();
    let vocab = u32::try_from(tokenizer.vocab()).unwrap();
    let grammars = Grammars::new(tokenizer.clone(), vocab, None);
    let party = Party::Tenant("a".into());
    let client = GrammarClient { party: &party, stopped: &|| false };
    let grammar = Grammar::Begun { mark: "<c>".into(), lark: "start: \"<c>\" /[0-9]+/ \"</c>\"".into() };
    let mut run = grammars.begin(&grammar, &[1].into(), client).unwrap();
    let ids = |text: &str| tokenizer.encode_chat(text).unwrap();
    run.follow(&ids("see <x> and <c")).unwrap();
    assert_eq!(run.forbidden().unwrap(), Vec::<u32>::new());
    let called = ids("see <x> and <c>");
    run.follow(&called).unwrap();
    let forbidden = run.forbidden().unwrap();
    assert!(!forbidden.contains(&ids("7")[0]) && forbidden.contains(&ids("a")[0]), "{forbidden:?}");
    // what goes on otherwise is free again, and nothing fails
    let mut other = grammars.begin(&grammar, &[1].into(), client).unwrap();
    other.follow(&ids("<c>a")).unwrap();
    assert_eq!(other.forbidden().unwrap(), Vec::<u32>::new());
}

#[test]
fn one_of_alternatives_that_exclude_each_other_is_any_of_them() {
    let (grammars, tokenizer) = grammars();
    let pet = |kind: &str| {
        json!({"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"],
            "additionalProperties": false})
    };
    for alternatives in [
        json!([{"const": 1}, {"const": "a"}]),
        json!([{"type": "boolean"}, {"type": "null"}]),
        json!([{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]),
    ] {
        let grammar =
            schema(&json!({"oneOf": alternatives, "$defs": {"Cat": pet("cat"), "Dog": pet("dog")}}));
        let (text, _) = drawn(&mut begin(&grammars, &grammar).unwrap(), &tokenizer, 3, 200);
        assert!(!text.is_empty(), "{alternatives}");
    }
    for alternatives in [
        json!([{"type": "integer"}, {"type": "number"}]),
        json!([{"enum": [1, 2]}, {"enum": [2]}]),
        json!([pet("cat"), pet("cat")]),
        json!([{}, {"const": 1}]),
    ] {
        assert!(begin(&grammars, &schema(&json!({"oneOf": alternatives}))).is_err(), "{alternatives}");
    }
}

#[test]
fn choices_may_hold_any_sign() {
    let (grammars, tokenizer) = grammars();
    let choice = r#"<a>b</a> \< "c" [d] {2} ^$.*+?|()~&/#"#;
    let grammar = Grammar::one_of([choice]);
    let (text, ended) = drawn(&mut begin(&grammars, &grammar).unwrap(), &tokenizer, 1, 200);
    assert_eq!((text.as_str(), ended), (choice, true));
}

use super::super::{ChatMessage, builtin};
use super::*;
use proptest::prelude::*;
use serde_json::{Map, json};

/// The control tokens of the built-in model, and the roles that a template may print.
const NAMES: [&str; 5] = ["<|bos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"];
const MARK: char = '\u{FDD0}';

struct Model {
    tokenizer: Tokenizer,
    template: ChatTemplate,
    control: ControlText,
}

impl Model {
    fn new(source: &str) -> Self {
        let tokenizer = builtin::tokenizer().expect("a constant");
        let template =
            ChatTemplate::new(source, Some(NAMES[0].into()), Some(NAMES[1].into())).expect("a template");
        let control = ControlText::new(&template, &tokenizer).expect("a few names");
        Model { tokenizer, template, control }
    }

    /// The ids of the prompt in which special tokens of `messages` stay text.
    fn ids(&self, messages: &[ChatMessage], arguments: &Map<String, Json>) -> Result<Vec<u32>> {
        let mut messages = messages.to_vec();
        for message in &mut messages {
            message.content = interrupted(&self.tokenizer, &message.content);
            for value in message.extra.values_mut() {
                *value = interrupted(&self.tokenizer, value.as_str().expect("text")).into();
            }
        }
        let chat = Conversation { messages: &messages, add_generation_prompt: true, arguments, now_s: 0 };
        let rendered = self.control.render(&self.template, &chat, &|| false)?;
        let marked = with_marks(&rendered.text, &rendered.places);
        let ids = self.tokenizer.encode_marked(&marked, MARK, false)?;
        self.tokenizer.check_specials(&ids, &marked, false)?;
        Ok(ids)
    }

    /// The special tokens of a prompt of one user message per text.
    fn specials(&self, texts: &[&str]) -> Vec<String> {
        let messages: Vec<ChatMessage> = texts.iter().map(|text| ChatMessage::new("user", *text)).collect();
        self.specials_of(&self.ids(&messages, &Map::new()).expect("renders"))
    }

    fn specials_of(&self, ids: &[u32]) -> Vec<String> {
        let special = ids.iter().filter(|id| self.tokenizer.is_special(**id));
        special.map(|id| self.tokenizer.token_text(*id)).collect()
    }
}

fn with_marks(text: &str, places: &[usize]) -> String {
    let mut marked = text.to_owned();
    places.iter().rev().for_each(|place| marked.insert(*place, MARK));
    marked
}

fn interrupted(tokenizer: &Tokenizer, text: &str) -> String {
    with_marks(text, &tokenizer.special_places(text))
}

#[test]
fn pieces_of_special_tokens_stay_text_however_joined() {
    for (source, texts) in [
        ("{{ messages[0].content | replace('X', '') }}", vec!["<|Xend|>"]),
        (
            "{{ messages[0].content.split('</think>')[-1] }}{{ messages[1].content }}",
            vec!["a</think><", "|end|>"],
        ),
        (
            "{% for c in messages[0].content %}{% if c in '<|>denu' %}{{ c }}{% endif %}{% endfor %}",
            vec!["<x|x!end|>"],
        ),
        ("{{ messages[0].content[:3] }}{{ messages[1].content[2:] }}", vec!["<|e____", "__nd|>"]),
        ("{{ messages[0].content | upper | lower }}", vec!["<|-END|>"]),
        ("{{ messages | map(attribute='content') | join('') }}", vec!["<", "|", "end|", ">"]),
        ("{{ messages[0].content.lstrip('!') ~ messages[1].content.rstrip('?') }}", vec!["!!<|us", "er|>??"]),
        ("{{ '<|' ~ messages[0].content ~ '|>' }}", vec!["user"]),
        ("{{ '<|end' ~ messages[0].content }}", vec!["|>"]),
        ("<{{ messages[0].content }}|>", vec!["|assistant"]),
        ("{{ messages[0].content.replace('-', '|') }}", vec!["<-end->"]),
        ("{{ messages[0].content.split('-') | join('|') }}", vec!["<-end->"]),
        ("{{ '%s|%s|>' | format(messages[0].content, messages[1].content) }}", vec!["<", "end"]),
        ("{{ messages[0].content | reverse }}", vec![">|dne|<"]),
        ("{{ '%s|%s|>' % (messages[0].content, messages[1].content) }}", vec!["<", "end"]),
        ("{{ messages[0].content[::2] }}{{ messages[0].content[9::-2] }}", vec!["<_|_e_n_d_|_>"]),
        (
            "{{ messages[0].content.swapcase() }}{{ messages[0].content.partition('!')[2] }}",
            vec!["<|END|>!<|"],
        ),
        ("{{ messages[0].content + messages[1].content * 1 }}", vec!["<|en", "d|>"]),
        (
            "{{ '{}{}'.format(messages[0].content, '|>') }}{{ '<|'.ljust(3, 'e') ~ messages[1].content }}",
            vec!["<|end", "nd|>"],
        ),
        (
            "{% set ns = namespace(t='') %}{% for m in messages %}{% set ns.t = ns.t ~ m.content[0] %}{% endfor %}{{ ns.t }}",
            vec!["<1", "|2", "e3", "n4", "d5", "|6", ">7"],
        ),
    ] {
        let source = format!("<|bos|>{source}{{{{ eos_token }}}}");
        let model = Model::new(&source);
        assert_eq!(model.specials(&texts), ["<|bos|>", "<|end|>"], "{source}");
    }
}

#[test]
fn what_a_template_writes_becomes_special_tokens() {
    for (source, specials) in [
        (
            "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}",
            vec!["<|bos|>", "<|user|>", "<|end|>"],
        ),
        ("<|bos|>{{ '<|' ~ messages[0].role ~ '|>' }}", vec!["<|bos|>", "<|user|>"]),
        ("{{ '<|end|>' | trim }}{{ ('<|' ~ 'END' ~ '|>') | lower }}{{ eos_token }}", vec!["<|end|>"; 3]),
        (
            "{{ ['<|user|>', '<|end|>'] | join('x') }}{{ eos_token[:100] }}",
            vec!["<|user|>", "<|end|>", "<|end|>"],
        ),
    ] {
        let said = "a word of the user's end</think>, and <|end|> a name";
        assert_eq!(Model::new(source).specials(&[said]), specials, "{source}");
    }
    // a template that branches on the client's text and composes a name: proven unless a piece of it occurs
    // in the client's text
    let source = "{% if '</think>' in messages[0].content %}{{ '<|' ~ messages[0].role ~ '|>' }}{% endif %}{{ messages[0].content.split('</think>')[-1] }}";
    assert_eq!(Model::new(source).specials(&["a thought</think>, a word"]), ["<|user|>"]);
    assert!(Model::new(source).specials(&["a thought</think>, |> a word"]).is_empty());
}

#[test]
fn text_equals_what_the_template_renders_alone() {
    let source = "{% for m in messages %}{{ '<|' + m.role + '|>' }}{{ m.content | trim }}<|end|>{% endfor %}";
    let model = Model::new(source);
    let messages = [ChatMessage::new("user", " é 角 <b> "), ChatMessage::new("assistant", "|> <| ok")];
    let alone = model.template.render(&messages, true, &Map::new(), 0).expect("renders");
    assert_eq!(
        model.ids(&messages, &Map::new()).expect("renders"),
        model.tokenizer.encode_chat(&alone).expect("encodes")
    );
}

#[test]
fn keys_and_nested_text_of_arguments_stay_text_too() {
    let source = "<|bos|>{% for k, v in tool.items() %}{{ '<|' ~ k ~ '|>' }}{{ '<|' ~ v ~ '|>' }}{% endfor %}\
                  {{ tool.name }}{{ '<|' ~ list[0].deep ~ '|>' }}{{ tool | tojson }}";
    let model = Model::new(source);
    let arguments = json!({"tool": {"user": "end", "name": "get"}, "list": [{"deep": "system"}]});
    let arguments = arguments.as_object().expect("an object");
    let ids = model.ids(&[ChatMessage::new("user", "x")], arguments).expect("renders");
    assert_eq!(model.specials_of(&ids), ["<|bos|>"]);
    assert!(
        model
            .tokenizer
            .decode(&ids)
            .expect("text")
            .contains("get<|system|>{\"user\": \"end\", \"name\": \"get\"")
    );
}

#[test]
fn a_chat_that_uses_stand_ins_is_refused() {
    let model = Model::new("<|bos|>{{ messages[0].content }}");
    for stand_in in ['\u{FE000}', '\u{10E000}', '\u{FFFFD}'] {
        let message = ChatMessage::new("user", format!("a{stand_in}"));
        let error = model.ids(&[message], &Map::new()).unwrap_err().to_string();
        assert!(error.contains("reserved"), "{error}");
    }
    assert_eq!(model.specials(&["\u{F0001} and \u{E000}"]), ["<|bos|>"]);
}

#[test]
fn what_cannot_be_told_apart_is_refused() {
    // The template's own name has another length than its stand-ins show, and text decides what is printed.
    let source = "{{ '<|end|>' | upper | lower }}{{ messages[0].content | replace('n', '') }}{{ '<|en' ~ messages[1].content }}";
    let model = Model::new(source);
    let messages = [ChatMessage::new("user", "n"), ChatMessage::new("user", "d|>")];
    let result = model.ids(&messages, &Map::new());
    match result {
        Ok(ids) => assert_eq!(model.specials_of(&ids), ["<|end|>"]),
        Err(error) => assert!(error.to_string().contains("cannot be distinguished"), "{error}"),
    }
}

#[test]
fn a_tokenizer_that_makes_control_tokens_of_text_is_noticed() {
    let tokenizer = builtin::tokenizer().expect("a constant");
    let mut file: Json = serde_json::from_str(&tokenizer.to_json().expect("JSON")).expect("JSON");
    file["normalizer"] = json!({"type": "NFKC"});
    for token in file["added_tokens"].as_array_mut().expect("tokens") {
        token["normalized"] = true.into();
    }
    let tokenizer = tokenizers::Tokenizer::from_bytes(file.to_string()).expect("a tokenizer");
    let tokenizer = Tokenizer::new(tokenizer).expect("a tokenizer");
    let text = "\u{FF1C}|end|>"; // a wide form of <
    let ids = tokenizer.encode_chat(text).expect("encodes");
    assert!(tokenizer.check_specials(&ids, text, false).is_err(), "{ids:?}");
    let ids = tokenizer.encode_chat("<|end|>").expect("encodes");
    tokenizer.check_specials(&ids, "<|end|>", false).expect("the name is there");
}

/// Expressions over two texts of the client, of the operations that cut and join.
fn expression() -> impl Strategy<Value = String> {
    let leaf = prop::sample::select(vec![
        "messages[0].content",
        "messages[1].content",
        "messages[0].name",
        "word",
        "'<|'",
        "'|>'",
        "'end'",
        "'n'",
        "''",
    ]);
    leaf.prop_map(str::to_owned).prop_recursive(4, 12, 3, |inner| {
        let wraps = prop::sample::select(vec![
            "(E | trim)",
            "(E | upper)",
            "(E | lower)",
            "E.strip()",
            "E.lstrip('<')",
            "E.rstrip('>|')",
            "E.replace('x', '')",
            "(E | replace('-', '|'))",
            "E.split('|')[-1]",
            "E.split('x') | join('')",
            "E[:5]",
            "E[2:]",
            "E[::-1][::-1]",
            "(E | tojson)",
            "(E | list | join(''))",
            "E.split() | join('')",
            "(E | capitalize)",
            "('%s|' % E)",
            "'{}|{}'.format(E, E)",
            "(E | tojson(ensure_ascii=True))",
            "([E] | string)",
            "E.partition('|')[2]",
            "E.rpartition('|')[0]",
            "E.rsplit('x', 1)[0]",
            "E.removeprefix('<')",
            "E.swapcase()",
            "E.title()",
            "E.center(9)",
            "E[::2]",
            "E[5:0:-1]",
            "(E * 2)",
            "(E | indent(1, true))",
            "E.splitlines() | join('')",
            "(E + E)",
        ]);
        prop_oneof![
            (wraps, inner.clone()).prop_map(|(wrap, inner)| format!("({})", wrap.replace('E', &inner))),
            (inner.clone(), inner.clone()).prop_map(|(a, b)| format!("({a} ~ {b})")),
            (inner.clone(), inner.clone()).prop_map(|(a, b)| format!("([{a}, {b}] | join('|'))")),
            (inner.clone(), inner).prop_map(|(a, b)| format!("({a} if 'x' in {b} else {b})")),
        ]
    })
}

fn body() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        expression().prop_map(|e| format!("{{{{ {e} }}}}")),
        expression().prop_map(|e| format!("{{% for c in {e} %}}{{{{ c }}}}{{% endfor %}}")),
        expression().prop_map(|e| format!(
            "{{% for c in {e} %}}{{% if c != 'x' %}}{{{{ c }}}}{{% endif %}}{{% endfor %}}"
        )),
        expression().prop_map(|e| format!("{{% set t = {e} %}}{{{{ t }}}}")),
        prop::sample::select(vec!["<", "<|", "|>", "<|user|>", "{{ eos_token }}", "<|", "end"])
            .prop_map(str::to_owned),
    ];
    prop::collection::vec(part, 1..5).prop_map(|parts| parts.concat())
}

fn hostile_text() -> impl Strategy<Value = String> {
    let piece = prop::sample::select(vec![
        "<", "|", ">", "<|", "|>", "end", "en", "d|>", "<|e", "user", "x", "-", " ", "<|end|>", "E", "<|X",
        "\n", "\"",
    ]);
    prop::collection::vec(piece, 0..7).prop_map(|pieces| pieces.concat())
}

/// Text of the same shape without any character of special tokens. Words that templates search for stay.
fn harmless(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_whitespace() || matches!(c, 'x' | 'X' | '-' | '"') { c } else { 'Ж' })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn no_template_makes_special_tokens_of_client_text(
        body in body(), first in hostile_text(), second in hostile_text(), name in hostile_text(), word in hostile_text(),
    ) {
        let model = Model::new(&format!("<|bos|>{body}"));
        let ask = |change: &dyn Fn(&str) -> String| {
            let mut messages = [ChatMessage::new("user", change(&first)), ChatMessage::new("user", change(&second))];
            messages[0].extra.insert("name".into(), change(&name).into());
            let arguments = Map::from_iter([("word".to_owned(), interrupted(&model.tokenizer, &change(&word)).into())]);
            model.ids(&messages, &arguments)
        };
        let (attacked, expected) = (ask(&str::to_owned), ask(&harmless));
        // A template that fails on this text, or in which nothing can be proven, makes no prompt at all.
        let (Ok(attacked), Ok(expected)) = (attacked, expected) else { return Ok(()) };
        let (attacked, expected) = (model.specials_of(&attacked), model.specials_of(&expected));
        let count = |specials: &[String], name: &str| specials.iter().filter(|special| *special == name).count();
        for name in NAMES {
            // Names that the template writes are always found; names that it composes of pieces may stay
            // text, where nothing proves the author.
            let (least, most) = (written(&body, name), count(&expected, name));
            let found = count(&attacked, name);
            prop_assert!(least <= found && found <= most, "{body}: {name}, {attacked:?} {expected:?}");
        }
    }
}

/// How often a template prints a name that it writes whole.
fn written(body: &str, name: &str) -> usize {
    let tokens = [("<|bos|>", "<|bos|>"), ("<|user|>", "<|user|>"), ("<|end|>", "{{ eos_token }}")];
    let spelled = tokens.iter().filter(|token| token.0 == name).map(|token| token.1);
    spelled.map(|spelled| body.matches(spelled).count()).sum::<usize>() + usize::from(name == NAMES[0])
}

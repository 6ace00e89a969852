use super::*;
use crate::model::ListMarks;
use proptest::prelude::*;

const BARE: ToolStyle = ToolStyle::Bare { parameters: true };
const STYLES: [ToolStyle; 25] = [
    ToolStyle::Tagged,
    BARE,
    ToolStyle::Bare { parameters: false },
    ToolStyle::Listed(ListMarks::Mistral),
    ToolStyle::Listed(ListMarks::Granite),
    ToolStyle::Listed(ListMarks::Nemotron),
    ToolStyle::Listed(ListMarks::MiniMax),
    ToolStyle::Named,
    ToolStyle::Pythonic { marked: false },
    ToolStyle::Pythonic { marked: true },
    ToolStyle::KeysAndValues,
    ToolStyle::FunctionTags { seed: false },
    ToolStyle::FunctionTags { seed: true },
    ToolStyle::Invoked,
    ToolStyle::InvokedDsml { calls: true },
    ToolStyle::DeepSeek { fenced: true },
    ToolStyle::DeepSeek { fenced: false },
    ToolStyle::Kimi,
    ToolStyle::Listed(ListMarks::Cohere),
    ToolStyle::Listed(ListMarks::Action),
    ToolStyle::NamedObjects,
    ToolStyle::Listed(ListMarks::Functools),
    ToolStyle::JsonInTag,
    ToolStyle::Gemma,
    ToolStyle::Harmony,
];

fn parse(body: &Value) -> Result<Option<Tools>, ApiError> {
    let body = body.to_string();
    Tools::parse(&mut Fields::parse(body.as_bytes()).unwrap())
}

fn tool(name: &str) -> Value {
    json!({"type": "function", "function": {"name": name, "parameters":
        {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}}})
}

fn tools(further: &Value) -> Tools {
    let mut body = json!({"tools": [tool("look"), tool("add")]});
    body.as_object_mut().unwrap().extend(further.as_object().unwrap().clone());
    parse(&body).unwrap().unwrap()
}

/// Text and calls of an answer that arrives in these pieces.
pub(super) fn read(tools: &Tools, style: ToolStyle, pieces: &[&str]) -> (String, Vec<ToolCall>) {
    read_by(tools.reader(style, false), pieces)
}

pub(super) fn read_by(mut reader: ToolReader, pieces: &[&str]) -> (String, Vec<ToolCall>) {
    let (mut text, mut calls) = (String::new(), Vec::new());
    let mut take = |pieces: ToolPieces| {
        text.push_str(&pieces.text);
        pieces.calls.into_iter().for_each(|piece| piece.add_to(&mut calls));
        pieces.ended
    };
    for piece in pieces {
        if take(reader.push(piece)) {
            break;
        }
    }
    take(reader.finish());
    assert_eq!(reader.calls(), calls.len());
    (text, calls)
}

fn called(name: &str, arguments: &str) -> ToolCall {
    ToolCall { name: name.into(), arguments: arguments.into() }
}

#[test]
fn calls_are_found_and_all_else_stays_text() {
    let tools = tools(&json!({}));
    let look = "<tool_call>\n{\"name\": \"look\", \"arguments\": {\"x\": 1}}\n</tool_call>";
    let add = "<tool_call>{\"name\": \"add\", \"arguments\": {}}</tool_call>";
    let (one, two) = (called("look", "{\"x\": 1}"), called("add", "{}"));
    let of = |text: &str| read(&tools, ToolStyle::Tagged, &[text]);
    assert_eq!(of(look), (String::new(), vec![one.clone()]));
    assert_eq!(of(&format!("\n{look}\n{add}\n")), (String::new(), vec![one.clone(), two.clone()]));
    assert_eq!(of(&format!("I look. {look}")), ("I look. ".into(), vec![one.clone()]));
    for text in ["\n\n no call \n", "a <tool_call", "<tool_call>{\"name\": \"look\"", " ", "", "x\n\n"] {
        assert_eq!(of(text), (text.into(), vec![]), "{text:?}");
    }
    for inner in
        ["{\"name\": \"other\", \"arguments\": {}}", "{", "{\"name\": \"look\", \"arguments\": \"x\"}", "[]"]
    {
        let text = format!("<tool_call>{inner}</tool_call>");
        assert_eq!(of(&text), (text.clone(), vec![]));
    }
    let of = |text: &str| read(&tools, BARE, &[text]);
    let bare = "{\"name\": \"look\", \"parameters\": {\"x\": 1}}";
    assert_eq!(of(bare), (String::new(), vec![one.clone()]));
    assert_eq!(of(&format!(" {bare}; {{\"name\": \"add\"}}")), (String::new(), vec![one.clone(), two]));
    assert_eq!(of(&format!("[{bare}]")), (String::new(), vec![one]));
    for text in ["a {}", "{\"a\": 1}", "{\"name\": \"look\"} and more", "[]", "{", " ", ""] {
        assert_eq!(of(text), (text.into(), vec![]), "{text:?}");
    }
}

#[test]
fn one_call_ends_an_answer_that_may_have_no_other() {
    let tools = tools(&json!({"parallel_tool_calls": false}));
    let call = "<tool_call>{\"name\": \"add\", \"arguments\": {}}</tool_call>";
    let mut reader = tools.reader(ToolStyle::Tagged, false);
    let pieces = reader.push(&format!("{call}{call}"));
    assert_eq!((pieces.calls.len(), pieces.ended, pieces.text), (1, true, String::new()));
    assert_eq!(read(&tools, BARE, &["{\"name\":\"add\"};{\"name\":\"add\"}"]).1.len(), 1);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn what_is_found_does_not_depend_on_the_pieces(
        parts in prop::collection::vec(
            prop::sample::select(vec![
                "<tool_call>", "</tool_call>", "{\"name\": \"add\", \"arguments\": {}}", "\n", " ", "text", "<tool", "{", ";", "é",
            ]),
            0..12,
        ),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
        bare: bool,
    ) {
        let tools = tools(&json!({}));
        let style = if bare { BARE } else { ToolStyle::Tagged };
        let text: String = parts.concat();
        let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(text.len() + 1)).collect();
        at.retain(|at| text.is_char_boundary(*at));
        at.extend([0, text.len()]);
        at.sort_unstable();
        let pieces: Vec<&str> = at.windows(2).map(|cut| &text[cut[0]..cut[1]]).collect();
        let whole = read(&tools, style, &[&text]);
        let cut = read(&tools, style, &pieces);
        prop_assert_eq!(&cut.1, &whole.1, "{:?} in {:?}", text, pieces);
        prop_assert_eq!(cut.0.trim(), whole.0.trim(), "{:?} in {:?}", text, pieces);
        if whole.1.is_empty() {
            prop_assert_eq!(&whole.0, &text, "text is lost");
        }
    }
}

#[test]
fn what_must_be_called_is_a_grammar_and_the_rest_is_not() {
    let grammar = |further: Value, style| tools(&further).grammar(style, &|_| false);
    assert_eq!(grammar(json!({"tool_choice": "auto"}), BARE), None, "calls have no mark");
    for (style, begins) in
        [(ToolStyle::Tagged, "<tool_call>"), (ToolStyle::Kimi, "<|tool_calls_section_begin|>")]
    {
        let Some(Grammar::Begun { mark, lark }) = grammar(json!({}), style) else { panic!("no grammar") };
        assert!(&*mark == begins && lark.contains("add") && lark.contains("look"), "{mark}: {lark}");
    }
    assert_eq!(parse(&json!({"tools": [tool("a")], "tool_choice": "none"})).unwrap(), None);
    assert_eq!(parse(&json!({"tools": [], "parallel_tool_calls": true})).unwrap(), None);
    let named = json!({"tool_choice": {"type": "function", "function": {"name": "add"}}});
    let Some(Grammar::Lark(text)) = grammar(named, BARE) else { panic!("no grammar") };
    assert!(text.contains("add") && !text.contains("look") && text.contains("parameters"), "{text}");
    for style in STYLES {
        let Some(Grammar::Lark(text)) = grammar(json!({"tool_choice": "required"}), style) else {
            panic!("no grammar")
        };
        assert!(text.contains("add") && text.contains("look"), "{text}");
    }
}

#[test]
fn what_is_no_tool_is_refused_by_its_place() {
    let cases = [
        (json!({"tools": 1}), "tools"),
        (json!({"tools": [{"type": "retrieval"}]}), "tools[0]"),
        (json!({"tools": [tool("a"), {"type": "function"}]}), "tools[1]"),
        (json!({"tools": [tool("a b")]}), "tools[0]"),
        (json!({"tools": [{"type": "function", "function": {"name": "a", "parameters": 1}}]}), "tools[0]"),
        (json!({"tools": vec![tool("a"); 129]}), "tools"),
        (json!({"tools": [tool("a")], "tool_choice": "maybe"}), "tool_choice"),
        (
            json!({"tools": [tool("a")], "tool_choice": {"type": "function", "function": {"name": "b"}}}),
            "tool_choice",
        ),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (json!({"tools": [], "tool_choice": "required"}), "tool_choice"),
        (json!({"tools": [tool("a")], "parallel_tool_calls": 1}), "parallel_tool_calls"),
    ];
    for (body, field) in cases {
        let error: Value = serde_json::from_str(&parse(&body).unwrap_err().to_json()).unwrap();
        assert_eq!(error["error"]["param"], field, "{error}");
    }
}

#[test]
fn calls_of_earlier_messages_are_read_for_the_template() {
    let read = |value: Value| past_calls("calls", &serde_json::value::to_raw_value(&value).unwrap(), &mut 0);
    let call = |arguments: Value| json!([{"id": "1", "type": "function", "function": {"name": "a", "arguments": arguments}}]);
    assert_eq!(read(call(json!("{\"x\": 1}"))).unwrap()[0]["function"]["arguments"], json!({"x": 1}));
    assert_eq!(read(call(json!({"x": 1}))).unwrap()[0]["function"]["arguments"], json!({"x": 1}));
    assert_eq!(read(json!([])).unwrap(), Vec::<Value>::new());
    for wrong in [json!(1), json!([{}]), json!([{"function": {"name": 1}}])] {
        assert!(read(wrong.clone()).is_err(), "{wrong}");
    }
}

#[test]
fn arguments_of_past_calls_that_were_cut_or_empty_are_objects() {
    for (given, seen) in [
        (Value::Null, json!({})),
        (json!(""), json!({})),
        (json!(" \n"), json!({})),
        (json!("null"), json!({})),
        (json!("{"), json!({})),
        (json!("{\"a\": \"b"), json!({"a": "b"})),
        (json!("{\"a\": [1, {\"c\": tr"), json!({"a": [1, {}]})),
        (json!("{\"a\": 1, \"b"), json!({"a": 1})),
        (json!("{\"a\": \"x, {\\"), json!({"a": "x, {"})),
        (json!("{\"z\": 1, \"a\": 2}"), json!({"z": 1, "a": 2})),
        (json!("nonsense"), json!({})),
        (json!("{\"a\": 1} and text"), json!({"a": 1})),
        (json!("{'a': None}"), json!({"a": null})),
        (json!({"a": 1}), json!({"a": 1})),
    ] {
        assert_eq!(past_arguments(given.clone()), seen, "{given}");
    }
}

/// A call of `look` and one of `add` as a model of each style writes them.
fn written(style: ToolStyle) -> String {
    match style {
        ToolStyle::Tagged => "<tool_call>\n{\"name\": \"look\", \"arguments\": {\"x\": 1}}\n</tool_call>\n<tool_call>\n{\"name\": \"add\", \"arguments\": {}}\n</tool_call>",
        ToolStyle::Bare { parameters: true } => {
            "<|python_tag|>{\"name\": \"look\", \"parameters\": {\"x\": 1}}; {\"name\": \"add\", \"parameters\": {}}"
        }
        ToolStyle::Bare { parameters: false } => "{\"name\": \"look\", \"arguments\": {\"x\": 1}}\n{\"name\": \"add\"}",
        ToolStyle::Listed(ListMarks::Cohere) => "<|START_ACTION|>[\n    {\"tool_call_id\": \"0\", \"tool_name\": \"look\", \"parameters\": {\"x\": 1}},\n    {\"tool_call_id\": \"1\", \"tool_name\": \"add\", \"parameters\": {}}\n]<|END_ACTION|>",
        ToolStyle::Listed(ListMarks::Action) => "Action:\n```json\n[\n    {\n        \"tool_name\": \"look\",\n        \"parameters\": {\"x\": 1}\n    },\n    {\n        \"tool_name\": \"add\",\n        \"parameters\": {}\n    }\n]```",
        ToolStyle::NamedObjects => "<|tools_prefix|>[{\"look\": {\"x\": 1}}, {\"add\": {}}]<|tools_suffix|>",
        ToolStyle::JsonInTag => "<function=look>{\"x\": 1}</function><function=add>{}</function>",
        ToolStyle::Gemma => "<|tool_call>call:look{x:1}<tool_call|><|tool_call>call:add{}<tool_call|>",
        ToolStyle::Harmony => "<|channel|>commentary to=functions.look <|constrain|>json<|message|>{\"x\": 1}<|call|><|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{}<|call|>",
        ToolStyle::Listed(marks) => {
            let (open, close) = (style.marks().open, style.marks().close);
            let list = "[{\"name\": \"look\", \"arguments\": {\"x\": 1}}, {\"name\": \"add\", \"arguments\": {}}]";
            let lines = "\n{\"name\": \"look\", \"arguments\": {\"x\": 1}}\n{\"name\": \"add\", \"arguments\": {}}\n";
            return format!("{open}{}{close}", if marks == ListMarks::MiniMax { lines } else { list });
        }
        ToolStyle::Named => "[TOOL_CALLS]look[ARGS]{\"x\": 1}[TOOL_CALLS]add[CALL_ID]123456789[ARGS]{}",
        ToolStyle::Pythonic { marked: false } => "[look(x=1), add()]",
        ToolStyle::Pythonic { marked: true } => "<|tool_call_start|>[look(x=1), add()]<|tool_call_end|>",
        ToolStyle::KeysAndValues => "<tool_call>look\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n<tool_call>add</tool_call>",
        ToolStyle::FunctionTags { seed: false } => "<tool_call>\n<function=look>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=add>\n</function>\n</tool_call>",
        ToolStyle::FunctionTags { seed: true } => "<seed:tool_call>\n<function=look>\n<parameter=x>1</parameter>\n</function>\n<function=add>\n</function>\n</seed:tool_call>",
        ToolStyle::Invoked => "<minimax:tool_call>\n<invoke name=\"look\">\n<parameter name=\"x\">1</parameter>\n</invoke>\n<invoke name=\"add\">\n</invoke>\n</minimax:tool_call>",
        ToolStyle::InvokedDsml { .. } => {
            let (open, close) = (style.marks().open, style.marks().close);
            return format!("{open}\n<｜DSML｜invoke name=\"look\">\n<｜DSML｜parameter name=\"x\" string=\"false\">1</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name=\"add\">\n</｜DSML｜invoke>\n{close}");
        }
        ToolStyle::DeepSeek { fenced: true } => "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{\"x\": 1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ToolStyle::DeepSeek { fenced: false } => "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{\"x\": 1}<｜tool▁call▁end｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ToolStyle::Kimi => "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{\"x\": 1}<|tool_call_end|><|tool_call_begin|>functions.add:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    }
    .to_owned()
}

#[test]
fn calls_of_every_style_are_read_whole_and_in_pieces() {
    let all = tools(&json!({}));
    let one = tools(&json!({"parallel_tool_calls": false}));
    for style in STYLES {
        let text = written(style);
        let (said, calls) = read(&all, style, &[&text]);
        let of: Vec<(&str, Value)> =
            calls.iter().map(|call| (&*call.name, serde_json::from_str(&call.arguments).unwrap())).collect();
        assert_eq!(of, [("look", json!({"x": 1})), ("add", json!({}))], "{style:?}: {said:?}");
        assert_eq!(said, "", "{style:?}");
        let letters: Vec<String> = text.chars().map(String::from).collect();
        let letters: Vec<&str> = letters.iter().map(String::as_str).collect();
        assert_eq!(read(&all, style, &letters), (said, calls), "{style:?} by letters");
        assert_eq!(read(&one, style, &letters).1.len(), 1, "{style:?}");
        if style == ToolStyle::Harmony {
            continue;
        }
        // text before a call, where a mark separates them
        if text.starts_with(['<', '[']) && text.starts_with(style.marks().open) {
            let (said, calls) = read(&all, style, &[&format!("I look.\n{text}")]);
            assert_eq!((said.trim(), calls.len()), ("I look.", 2), "{style:?}");
        }
        // a truncated call stays text, and nothing is lost
        let cut = &text[..text.find("look").unwrap() + 5];
        assert_eq!(read(&all, style, &[cut]), (cut.to_owned(), vec![]), "{style:?}");
    }
}

/// Styles whose calls are streamed in pieces.
#[test]
fn streamed_calls_begin_with_their_names_and_go_on_with_arguments() {
    let (all, one) = (tools(&json!({})), tools(&json!({"parallel_tool_calls": false})));
    for style in STYLES {
        let text = written(style);
        let letters: Vec<String> = text.chars().map(String::from).collect();
        let letters: Vec<&str> = letters.iter().map(String::as_str).collect();
        let whole = read(&all, style, &[&text]);
        assert_eq!(read_by(all.reader(style, true), &letters), whole, "{style:?}");
        assert_eq!(read_by(all.reader(style, true), &[&text]), whole, "{style:?} at once");
        assert_eq!(read_by(one.reader(style, true), &letters).1.len(), 1, "{style:?}");
        let (mut reader, mut pieces) = (all.reader(style, true), Vec::new());
        letters.iter().for_each(|letter| pieces.extend(reader.push(letter).calls));
        if matches!(
            style,
            ToolStyle::Tagged | BARE | ToolStyle::Listed(_) | ToolStyle::Named | ToolStyle::Kimi
        ) {
            let name = CallPiece { index: 0, name: Some("look".into()), arguments: String::new() };
            assert_eq!(pieces[0], name, "{style:?}");
            let of_first = pieces.iter().filter(|piece| piece.index == 0).count();
            assert_eq!(of_first, 1 + "{\"x\": 1}".len(), "{style:?}: a piece for each letter");
        }
    }
}

#[test]
fn a_streamed_call_that_is_cut_stays_one() {
    let tools = tools(&json!({}));
    let begun = "so<tool_call>{\"name\": \"look\", \"arguments\": {\"x\": \"</too";
    let (text, calls) = read_by(tools.reader(ToolStyle::Tagged, true), &[begun]);
    assert_eq!((text.as_str(), calls), ("so", vec![called("look", "{\"x\": \"</too")]));
}

#[test]
fn closing_marks_within_texts_end_no_call() {
    let text = json!({"type": "function", "function": {"name": "say", "parameters": {"type": "object",
        "properties": {"t": {"type": "string"}}}}});
    let tools = parse(&json!({"tools": [text]})).unwrap().unwrap();
    let said = "a </tool_call> b </arg_value> c </parameter> d";
    let json = json!({"t": said}).to_string();
    for (style, written) in [
        (ToolStyle::Tagged, format!("<tool_call>{{\"name\": \"say\", \"arguments\": {json}}}</tool_call>")),
        (
            ToolStyle::KeysAndValues,
            format!("<tool_call>say<arg_key>t</arg_key><arg_value>{said}</arg_value></tool_call>"),
        ),
        (
            ToolStyle::FunctionTags { seed: false },
            format!(
                "<tool_call>\n<function=say>\n<parameter=t>\n{said}\n</parameter>\n</function>\n</tool_call>"
            ),
        ),
    ] {
        let letters: Vec<String> = written.chars().map(String::from).collect();
        let letters: Vec<&str> = letters.iter().map(String::as_str).collect();
        let (text, calls) = read(&tools, style, &letters);
        assert_eq!((text.as_str(), calls.len()), ("", 1), "{style:?}");
        assert_eq!(
            serde_json::from_str::<Value>(&calls[0].arguments).unwrap(),
            json!({"t": said}),
            "{style:?}"
        );
    }
}

#[test]
fn arguments_of_python_calls_are_json() {
    let tools = tools(&json!({}));
    let text = "[look(x=-1.5, s='it\\'s \"q\"', b=[True, None, (1, 2)], m={'k': {'z': 1, 'a': 2}},)]";
    let (_, calls) = read(&tools, ToolStyle::Pythonic { marked: false }, &[text]);
    let arguments =
        "{\"x\":-1.5,\"s\":\"it's \\\"q\\\"\",\"b\":[true,null,[1,2]],\"m\":{\"k\":{\"z\":1,\"a\":2}}}";
    assert_eq!(calls, [called("look", arguments)]);
    for text in ["[look(x=1]", "[look(1)]", "[other()]", "look", "[look(x=y)]"] {
        assert_eq!(
            read(&tools, ToolStyle::Pythonic { marked: false }, &[text]),
            (text.into(), vec![]),
            "{text}"
        );
    }
}

#[test]
fn schemas_with_definitions_can_be_called() {
    use crate::budget::Party;
    use crate::grammar::{GrammarClient, Grammars};
    let tokenizer = crate::model::builtin::tokenizer().unwrap();
    let vocab = u32::try_from(tokenizer.vocab()).unwrap();
    let grammars = Grammars::new(tokenizer, vocab, None);
    let client = GrammarClient { party: &Party::Tenant("a".into()), stopped: &|| false };
    for parameters in [
        json!({"properties": {"a": {"$ref": "#/$defs/A"}}, "required": ["a"], "$defs": {"A": {"enum": ["q", 1]}}}),
        json!({"type": "object", "properties": {"a": {"$ref": "#/definitions/A"}}, "definitions": {"A": {"type": "object",
            "properties": {"more": {"$ref": "#/definitions/A"}}}}}),
        json!({"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}}}),
        json!({"type": "object", "properties": {"when": {"type": "string", "format": "calendar-week"}}}),
        json!({}),
        Value::Null,
    ] {
        let tool = json!({"type": "function", "function": {"name": "f", "parameters": parameters}});
        for choice in [json!("required"), json!({"type": "function", "function": {"name": "f"}})] {
            let tools = parse(&json!({"tools": [tool], "tool_choice": choice})).unwrap().unwrap();
            for style in STYLES {
                let grammar = tools.grammar(style, &|_| false).unwrap();
                let begun = grammars.begin(&grammar, &[1].into(), client);
                assert!(begun.is_ok(), "{style:?}, {parameters}: {:?}\n{}", begun.err(), grammar.text());
            }
        }
    }
}

/// Whether an answer may be `text`, in tokens of one byte.
fn lets_through(grammar: &Grammar, text: &str) -> Result<(), String> {
    use crate::budget::Party;
    use crate::grammar::{GrammarClient, Grammars};
    const END: u32 = 1;
    let tokenizer = crate::model::builtin::tokenizer().unwrap();
    let vocab = u32::try_from(tokenizer.vocab()).unwrap();
    let of_byte = |byte: u8| (0..vocab).find(|id| tokenizer.token_bytes(*id) == [byte]).unwrap();
    let grammars = Grammars::new(tokenizer.clone(), vocab, None);
    let client = GrammarClient { party: &Party::Tenant("a".into()), stopped: &|| false };
    let mut run = grammars.begin(grammar, &[END].into(), client).map_err(|error| format!("{error:?}"))?;
    let mut output = Vec::new();
    for id in text.bytes().map(of_byte).chain([END]) {
        run.follow(&output).map_err(|error| format!("{error:?}"))?;
        if run.forbidden().map_err(|error| format!("{error:?}"))?.binary_search(&id).is_ok() {
            return Err(format!("{id} is forbidden behind {:?}", &text[..output.len()]));
        }
        output.push(id);
    }
    Ok(())
}

#[test]
fn texts_end_and_obey_their_schemas() {
    let properties = json!({"code": {"type": "string"}, "pick": {"enum": ["x", 2]}, "maybe": {"type": ["string", "null"]},
        "name": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 3}, "any": {}});
    let parameters = json!({"type": "object", "properties": properties, "required": ["code", "pick", "maybe", "name", "any"]});
    let function = json!({"type": "function", "function": {"name": "f", "parameters": parameters}});
    let body = json!({"tools": [function], "tool_choice": "required", "parallel_tool_calls": false});
    let tools = parse(&body).unwrap().unwrap();
    let code = "<b>\n</b> </par";
    type Write = fn(&str, &str) -> String;
    let styles: [(ToolStyle, Write, [&str; 2]); 4] = [
        (
            ToolStyle::FunctionTags { seed: false },
            |name, value| format!("<parameter={name}>\n{value}\n</parameter>\n"),
            ["<tool_call>\n<function=f>\n", "</function>\n</tool_call>"],
        ),
        (
            ToolStyle::KeysAndValues,
            |name, value| format!("<arg_key>{name}</arg_key>\n<arg_value>{value}</arg_value>\n"),
            ["<tool_call>f\n", "</tool_call>"],
        ),
        (
            ToolStyle::Invoked,
            |name, value| format!("<parameter name=\"{name}\">{value}</parameter>\n"),
            ["<minimax:tool_call>\n<invoke name=\"f\">\n", "</invoke>\n</minimax:tool_call>"],
        ),
        (
            ToolStyle::InvokedDsml { calls: true },
            |name, value| {
                let is_text = matches!(name, "code" | "name" | "any");
                format!(
                    "<｜DSML｜parameter name=\"{name}\" string=\"{is_text}\">{value}</｜DSML｜parameter>\n"
                )
            },
            [
                "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n",
                "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
            ],
        ),
    ];
    for (style, write, [before, after]) in styles {
        let grammar = tools.grammar(style, &|_| false).unwrap();
        let call = |pick: &str, name: &str| {
            let values = [("code", code), ("pick", pick), ("maybe", "null"), ("name", name), ("any", "q")];
            let values: String = values.map(|(name, value)| write(name, value)).concat();
            format!("{before}{values}{after}")
        };
        let right = call("2", "ab");
        assert_eq!(lets_through(&grammar, &right), Ok(()), "{style:?}: {}", grammar.text());
        let (text, calls) = read(&tools, style, &[&right]);
        let arguments: Value = serde_json::from_str(&calls[0].arguments).unwrap();
        assert_eq!(text, "", "{style:?}");
        assert_eq!(arguments["code"], code, "{style:?}");
        assert_eq!((&arguments["pick"], &arguments["name"]), (&json!(2), &json!("ab")), "{style:?}");
        for wrong in [call("\"y\"", "ab"), call("y", "ab"), call("2", "abcd"), call("2", "a1")] {
            assert!(lets_through(&grammar, &wrong).is_err(), "{style:?}: {wrong}");
        }
    }
}

#[test]
fn python_values_are_read_as_python_reads_them() {
    let tools = tools(&json!({}));
    let text = r#"[look(a=.5, b=2., c=1_000, d="\x41\ud83d\ude00", e="""a "b" c""", f='a' 'b', g='')]"#;
    let (_, calls) = read(&tools, ToolStyle::Pythonic { marked: false }, &[text]);
    let expected = json!({"a": 0.5, "b": 2.0, "c": 1000, "d": "A😀", "e": "a \"b\" c", "f": "ab", "g": ""});
    assert_eq!(serde_json::from_str::<Value>(&calls[0].arguments).unwrap(), expected);
}

#[test]
fn marks_within_arguments_and_text_behind_calls_are_kept() {
    let tools = tools(&json!({}));
    let said = json!({"x": "[TOOL_CALLS]add[ARGS]{}"}).to_string();
    let text = format!("[TOOL_CALLS]look[ARGS]{said}[TOOL_CALLS]add[ARGS]{{}}");
    let expected = vec![called("look", &said), called("add", "{}")];
    assert_eq!(read(&tools, ToolStyle::Named, &[&text]), (String::new(), expected));
    let text = "{\"name\": \"look\", \"parameters\": {\"x\": 1}} I hope";
    let expected = ("I hope".to_owned(), vec![called("look", "{\"x\": 1}")]);
    assert_eq!(read(&tools, BARE, &[text]), expected);
    assert_eq!(read_by(tools.reader(BARE, true), &[text]), expected);
}

#[test]
fn whatever_a_grammar_of_calls_lets_through_is_calls() {
    use crate::budget::Party;
    use crate::grammar::{GrammarClient, Grammars};
    use mixfleet_hal::random::Stream;
    const END: u32 = 1;
    let tokenizer = crate::model::builtin::tokenizer().unwrap();
    let vocab = u32::try_from(tokenizer.vocab()).unwrap();
    let grammars = Grammars::new(tokenizer.clone(), vocab, None);
    let client = GrammarClient { party: &Party::Tenant("a".into()), stopped: &|| false };
    for style in STYLES {
        for further in [
            json!({"tool_choice": "required"}),
            json!({"tool_choice": "required", "parallel_tool_calls": false}),
        ] {
            let tools = tools(&further);
            let grammar = tools.grammar(style, &|_| false).unwrap();
            let mut ended = 0;
            for seed in 0..10 {
                let mut run = grammars.begin(&grammar, &[END].into(), client).unwrap();
                let mut stream = Stream::new(seed);
                let mut output = Vec::new();
                while output.len() < 2000 && output.last() != Some(&END) {
                    run.follow(&output).unwrap();
                    let forbidden = run.forbidden().unwrap();
                    let allowed: Vec<u32> =
                        (0..vocab).filter(|id| forbidden.binary_search(id).is_err()).collect();
                    output.push(allowed[stream.below(allowed.len() as u64) as usize]);
                }
                if output.pop() != Some(END) {
                    continue; // white space within JSON has no bound
                }
                ended += 1;
                let bytes: Vec<u8> = output.iter().flat_map(|id| tokenizer.token_bytes(*id)).collect();
                let answer = String::from_utf8(bytes).unwrap();
                let (text, calls) = read(&tools, style, &[&answer]);
                assert!(
                    text.is_empty() && !calls.is_empty(),
                    "{style:?}, seed {seed}: {answer:?} leaves {text:?}"
                );
                for call in calls {
                    assert!(call.arguments.contains("\"x\""), "{style:?}, seed {seed}: {answer:?}");
                }
            }
            assert!(ended > 2, "{style:?}, {further}: {ended} of 10 ended");
        }
    }
}

#[test]
fn tools_and_calls_take_no_more_memory_than_they_may() {
    let long = "x".repeat(TOOLS_BYTES_MAX);
    let tools = json!({"tools": [{"type": "function", "function": {"name": "a", "description": long}}]});
    assert!(parse(&tools).unwrap_err().to_json().contains("larger than"));
    let calls = json!([{"function": {"name": "a", "arguments": {"x": "y".repeat(TOOLS_BYTES_MAX / 2)}}}]);
    let (calls, mut bytes) = (serde_json::value::to_raw_value(&calls).unwrap(), 0);
    assert!(past_calls("calls", &calls, &mut bytes).is_ok());
    assert!(past_calls("calls", &calls, &mut bytes).unwrap_err().to_json().contains("larger than"));
}

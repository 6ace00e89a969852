//! Grammars of answers that must call tools, in each style.

use serde_json::Value;
use std::fmt::Write;

use super::tool_bodies::CalledFunction;
use super::tool_schema::{Argument, WrittenForm, arguments};
use crate::grammar::Grammar;
use crate::model::{ListMarks, ToolStyle};

/// A grammar in Lark's format of one call, or of `several`.
pub(super) fn calls(
    style: ToolStyle,
    functions: &[&CalledFunction],
    several: bool,
    is_special: &dyn Fn(&str) -> bool,
) -> String {
    let writer = CallWriter { style, is_special };
    let (before, between, after) = writer.around();
    let mut grammar = format!("start: {before} call");
    if several {
        let _ = write!(grammar, " ({between} call)*");
    }
    let names: Vec<String> = (0..functions.len()).map(|at| format!("call_{at}")).collect();
    let _ = write!(grammar, " {after}\ncall: {}\n", names.join(" | "));
    for ((name, schema), rule) in functions.iter().zip(&names) {
        grammar.push_str(&writer.call(rule, name, schema));
    }
    grammar
}

/// Like `required`'s grammar, for answers that may call tools, from the mark that begins the first call; none
/// where a style has no such mark.
pub(super) fn begun_calls(
    style: ToolStyle,
    functions: &[&CalledFunction],
    several: bool,
    is_special: &dyn Fn(&str) -> bool,
) -> Option<Grammar> {
    let marks = style.marks();
    let mark = match style {
        ToolStyle::Tagged
        | ToolStyle::KeysAndValues
        | ToolStyle::FunctionTags { .. }
        | ToolStyle::Invoked
        | ToolStyle::InvokedDsml { .. }
        | ToolStyle::JsonInTag
        | ToolStyle::Gemma
        | ToolStyle::NamedObjects
        | ToolStyle::Listed(ListMarks::Nemotron | ListMarks::Cohere) => marks.open,
        ToolStyle::DeepSeek { .. } | ToolStyle::Kimi => marks.around.first()?,
        _ => return None,
    };
    let in_grammar = !CallWriter { style, is_special }.mark(mark).is_empty();
    let lark = || calls(style, functions, several, is_special).into();
    in_grammar.then(|| Grammar::Begun { mark: mark.into(), lark: lark() })
}

struct CallWriter<'a> {
    style: ToolStyle,
    is_special: &'a dyn Fn(&str) -> bool,
}

/// The end of a value that is written as text.
struct ValueEnd<'a> {
    /// The mark, which no text holds.
    mark: &'a str,
    /// The mark and what follows it, in Lark's format.
    written: String,
}

/// Rules of a value and the text behind it. The end of a free text is part of the text's terminal: apart from
/// it, the terminal would take the end as more text.
fn written_value(rule: &str, forms: &[WrittenForm], end: &ValueEnd<'_>) -> String {
    let is_literal = end.written.starts_with('"');
    let (mut ways, mut rules) = (Vec::new(), String::new());
    for (at, form) in forms.iter().enumerate() {
        let (name, terminal) = (format!("{rule}_{at}"), format!("{}_{at}", rule.to_uppercase()));
        let _ = match form {
            WrittenForm::Text(limits) => {
                let mark = Grammar::one_of([end.mark]);
                let without = mark.text().replace('\n', "\\n");
                let limits: String = limits.iter().map(|limit| format!(" & {limit}")).collect();
                let inner = format!("{terminal}_TEXT: /(?s:.*)/ & ~/(?s:.*){without}(?s:.*)/{limits}");
                let inside = if is_literal { end.written.as_str() } else { "" };
                writeln!(rules, "{terminal}: {terminal}_TEXT {inside}\n{inner}")
            }
            WrittenForm::Constant(text) if text.is_empty() => writeln!(rules, "{name}: {}", end.written),
            WrittenForm::Constant(text) => writeln!(rules, "{name}: {} {}", literal(text), end.written),
            WrittenForm::Json(schema) => {
                writeln!(rules, "{name}_json: %json {schema}\n{name}: {name}_json {}", end.written)
            }
        };
        ways.push(match form {
            WrittenForm::Text(_) if is_literal => terminal,
            WrittenForm::Text(_) => format!("{terminal} {}", end.written),
            _ => name,
        });
    }
    format!("{rule}: {}\n{rules}", ways.join(" | "))
}

/// A text as a literal of Lark's format.
fn literal(text: &str) -> String {
    Value::from(text).to_string()
}

impl CallWriter<'_> {
    /// A mark: a token of its own, or text. One whose name cannot be written in Lark's format is left out,
    /// and readers do not need it.
    fn mark(&self, mark: &str) -> String {
        match (self.is_special)(mark) {
            false => literal(mark),
            true if mark.starts_with('<') && mark.ends_with('>') => mark.to_owned(),
            true => String::new(),
        }
    }

    /// Text before, between and after calls.
    fn around(&self) -> (String, String, String) {
        let marks = self.style.marks();
        let list = |open: String, close: String| {
            (format!("{open} \"[\""), "\", \"".into(), format!("\"]\" {close}"))
        };
        match self.style {
            ToolStyle::Tagged | ToolStyle::KeysAndValues | ToolStyle::FunctionTags { .. } => {
                (String::new(), "\"\\n\"".into(), String::new())
            }
            ToolStyle::JsonInTag | ToolStyle::Gemma | ToolStyle::Harmony => {
                (String::new(), String::new(), String::new())
            }
            ToolStyle::Bare { .. } => (String::new(), "\";\"".into(), String::new()),
            ToolStyle::Named if !self.mark(marks.open).is_empty() => {
                (String::new(), String::new(), String::new())
            }
            ToolStyle::Named
            | ToolStyle::NamedObjects
            | ToolStyle::Listed(_)
            | ToolStyle::Pythonic { .. } => {
                let close = if marks.close.is_empty() { String::new() } else { self.mark(marks.close) };
                let open = if self.has_optional_mark() { String::new() } else { self.mark(marks.open) };
                list(open, close)
            }
            ToolStyle::Invoked | ToolStyle::InvokedDsml { .. } => {
                let (open, close) = (self.mark(marks.open), self.mark(marks.close));
                (format!("{open} \"\\n\""), "\"\\n\"".into(), format!("\"\\n\" {close}"))
            }
            ToolStyle::DeepSeek { .. } | ToolStyle::Kimi => {
                let around: Vec<String> = marks.around.iter().map(|mark| self.mark(mark)).collect();
                let (begin, end) = (around.first().cloned(), around.last().cloned());
                (begin.unwrap_or_default(), String::new(), end.unwrap_or_default())
            }
        }
    }

    /// Whether answers that begin with a call need no mark, and the mark may be a token.
    fn has_optional_mark(&self) -> bool {
        let marks = self.style.marks();
        marks.close.is_empty() && self.mark(marks.open).starts_with('"') || self.mark(marks.open).is_empty()
    }

    fn call(&self, rule: &str, name: &str, schema: &Value) -> String {
        let marks = self.style.marks();
        let json = format!("{rule}_json");
        let with_json = |parts: &[&str]| format!("{rule}: {}\n{json}: %json {schema}\n", parts.join(" "));
        let key = self.style.arguments();
        let before = match self.style {
            ToolStyle::Listed(ListMarks::Cohere) => "\"tool_call_id\": \"0\", \"tool_name\"",
            ToolStyle::Listed(ListMarks::Action) => "\"tool_name\"",
            _ => "\"name\"",
        };
        let object =
            [literal(&format!("{{{before}: {}, \"{key}\": ", literal(name))), json.clone(), literal("}")];
        let [head, middle, tail] = object.each_ref().map(String::as_str);
        let (open, close) = (self.mark(marks.open), self.mark(marks.close));
        match self.style {
            ToolStyle::Tagged => with_json(&[&open, "\"\\n\"", head, middle, tail, "\"\\n\"", &close]),
            ToolStyle::Bare { .. } | ToolStyle::Listed(_) => with_json(&[head, middle, tail]),
            ToolStyle::NamedObjects => {
                with_json(&[&literal(&format!("{{{}: ", literal(name))), &json, "\"}\""])
            }
            ToolStyle::Named if open.is_empty() => with_json(&[head, middle, tail]),
            ToolStyle::Named => {
                let name = literal(name);
                let inner = self.mark("[ARGS]");
                with_json(&[&open, &name, &inner, &json])
            }
            ToolStyle::Kimi => {
                let name = literal(&format!("functions.{name}:"));
                let middle = self.mark("<|tool_call_argument_begin|>");
                with_json(&[&open, &name, "/[0-9]/", &middle, &json, &close])
            }
            ToolStyle::DeepSeek { fenced } => {
                let between = self.mark("<｜tool▁sep｜>");
                match fenced {
                    true => {
                        let name = literal(&format!("{name}\n```json\n"));
                        with_json(&[&open, "\"function\"", &between, &name, &json, "\"\\n```\"", &close])
                    }
                    false => with_json(&[&open, &literal(name), &between, &json, &close]),
                }
            }
            ToolStyle::KeysAndValues => self.keys_and_values(rule, name, schema),
            ToolStyle::FunctionTags { .. } => {
                let head = [open, literal(&format!("\n<function={name}>\n"))].join(" ");
                let tail = [literal("</function>\n"), close].join(" ");
                let end = ValueEnd { mark: "</parameter>", written: literal("\n</parameter>\n") };
                let before = |argument: &Argument| literal(&format!("<parameter={}>\n", argument.name));
                fields(rule, schema, [&head, &tail], &before, &plain(&end))
            }
            ToolStyle::Invoked => {
                let head = literal(&format!("<invoke name=\"{name}\">\n"));
                let end = ValueEnd { mark: "</parameter>", written: literal("</parameter>\n") };
                let before =
                    |argument: &Argument| literal(&format!("<parameter name=\"{}\">", argument.name));
                fields(rule, schema, [&head, &literal("</invoke>")], &before, &plain(&end))
            }
            ToolStyle::JsonInTag => {
                with_json(&[&literal(&format!("<function={name}>")), &json, &literal("</function>")])
            }
            ToolStyle::Harmony => with_json(&[&self.harmony_head(name), &json]),
            ToolStyle::Gemma => self.gemma(rule, name, schema),
            ToolStyle::InvokedDsml { .. } => CallWriter::dsml(rule, name, schema),
            ToolStyle::Pythonic { .. } => self.pythonic(rule, name, schema),
        }
    }

    fn keys_and_values(&self, rule: &str, name: &str, schema: &Value) -> String {
        let marks = self.style.marks();
        let (open, close) = (self.mark(marks.open), self.mark(marks.close));
        let head = [open, literal(&format!("{name}\n"))].join(" ");
        let written = [self.mark("</arg_value>"), literal("\n")].join(" ");
        let end = ValueEnd { mark: "</arg_value>", written };
        let before = |argument: &Argument| {
            let key = [self.mark("<arg_key>"), literal(&argument.name), self.mark("</arg_key>")];
            [key.join(" "), literal("\n"), self.mark("<arg_value>")].join(" ")
        };
        fields(rule, schema, [&head, &close], &before, &plain(&end))
    }

    /// A call that says of each value whether it is a text or JSON.
    fn dsml(rule: &str, name: &str, schema: &Value) -> String {
        let head = literal(&format!("<｜DSML｜invoke name=\"{name}\">\n"));
        let mark = "</｜DSML｜parameter>";
        let end = ValueEnd { mark, written: literal(&format!("{mark}\n")) };
        let before = |argument: &Argument| {
            literal(&format!("<｜DSML｜parameter name=\"{}\" string=\"", argument.name))
        };
        let value = |rule: &str, argument: &Argument| {
            let is_text = |form: &&WrittenForm| matches!(form, WrittenForm::Text(_));
            let texts: Vec<WrittenForm> = argument.forms.iter().filter(is_text).cloned().collect();
            let json = [WrittenForm::Json(argument.schema.clone())];
            let ways = [("true", !texts.is_empty(), &texts[..]), ("false", !argument.is_text, &json[..])];
            let ways = ways.iter().filter(|(_, may_be, _)| *may_be);
            let (names, rules): (Vec<String>, Vec<String>) = ways
                .map(|(kind, _, forms)| {
                    let inner = format!("{rule}_{kind}");
                    let begin = literal(&format!("{kind}\">"));
                    (format!("{begin} {inner}"), written_value(&inner, forms, &end))
                })
                .unzip();
            format!("{rule}: {}\n{}", names.join(" | "), rules.concat())
        };
        fields(rule, schema, [&head, &literal("</｜DSML｜invoke>")], &before, &value)
    }

    /// Text before the arguments of a call in gpt-oss's format.
    fn harmony_head(&self, name: &str) -> String {
        let recipient = literal(&format!("commentary to=functions.{name} "));
        let [channel, constrain, message] =
            ["<|channel|>", "<|constrain|>", "<|message|>"].map(|mark| self.mark(mark));
        [channel, recipient, constrain, literal("json"), message].join(" ")
    }

    /// Arguments by name in Gemma's format, with JSON's numbers, lists and objects: the required ones, then
    /// any of the others, or at most one where none is required.
    fn gemma(&self, rule: &str, name: &str, schema: &Value) -> String {
        let marks = self.style.marks();
        let (open, close) = (self.mark(marks.open), self.mark(marks.close));
        let quote = self.mark("<|\"|>");
        let (mut required, mut others, mut values) = (Vec::new(), Vec::new(), String::new());
        for (at, argument) in arguments(schema).into_iter().enumerate() {
            let value = format!("{rule}_{at}");
            match argument.is_text {
                true => {
                    let end = ValueEnd { mark: "<|\"|>", written: quote.clone() };
                    let _ = writeln!(values, "{value}: {quote} {value}_text");
                    values += &written_value(&format!("{value}_text"), &argument.forms, &end);
                }
                false => {
                    let _ = writeln!(values, "{value}: %json {}", argument.schema);
                }
            }
            let written = format!("{} {value}", literal(&format!("{}:", argument.name)));
            if argument.is_required { required.push(written) } else { others.push(written) }
        }
        let inside = match (required.is_empty(), others.is_empty()) {
            (true, true) => String::new(),
            (true, false) => format!("({})?", others.join(" | ")),
            (false, _) => {
                let others: String = others.iter().map(|other| format!(" (\",\" {other})?")).collect();
                format!("{}{others}", required.join(" \",\" "))
            }
        };
        format!("{rule}: {open} {} {inside} \"}}\" {close}\n{values}", literal(&format!("call:{name}{{")))
    }

    /// Arguments by name, with JSON values, which Python's calls may have too: the required ones, then any of
    /// the others, or at most one where none is required.
    fn pythonic(&self, rule: &str, name: &str, schema: &Value) -> String {
        let (mut required, mut others, mut values) = (Vec::new(), Vec::new(), String::new());
        for (at, argument) in arguments(schema).into_iter().enumerate() {
            let value = format!("{rule}_{at}");
            let _ = writeln!(values, "{value}: %json {}", argument.schema);
            let written = format!("{} {value}", literal(&format!("{}=", argument.name)));
            if argument.is_required { required.push(written) } else { others.push(written) }
        }
        let inside = match (required.is_empty(), others.is_empty()) {
            (true, true) => String::new(),
            (true, false) => format!("({})?", others.join(" | ")),
            (false, _) => {
                let others: String = others.iter().map(|other| format!(" (\", \" {other})?")).collect();
                format!("{}{others}", required.join(" \", \" "))
            }
        };
        format!("{rule}: {} {inside} \")\"\n{values}", literal(&format!("{name}(")))
    }
}

/// The rules of a value, given their name and the argument.
type ValueRules<'a> = dyn Fn(&str, &Argument) -> String + 'a;

/// The rules of values that end alike.
fn plain<'a>(end: &'a ValueEnd<'_>) -> impl Fn(&str, &Argument) -> String + 'a {
    move |rule, argument| written_value(rule, &argument.forms, end)
}

/// A call with an element for each argument: the required ones, then any of the others. `before` is written
/// before a value, and `around` the call's own text.
fn fields(
    rule: &str,
    schema: &Value,
    around: [&str; 2],
    before: &dyn Fn(&Argument) -> String,
    value_rules: &ValueRules<'_>,
) -> String {
    let [head, tail] = around;
    let (mut call, mut values) = (format!("{rule}: {head}"), String::new());
    for (at, argument) in arguments(schema).iter().enumerate() {
        let (begin, value) = (before(argument), format!("{rule}_{at}"));
        values += &value_rules(&value, argument);
        let _ = match argument.is_required {
            true => write!(call, " {begin} {value}"),
            false => write!(call, " ({begin} {value})?"),
        };
    }
    format!("{call} {tail}\n{values}")
}

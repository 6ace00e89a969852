//! Styles of tool calls, as chat templates show them.

/// The style of a model's tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolStyle {
    /// Each call between `<tool_call>` and `</tool_call>`, a JSON object with `name` and `arguments`
    /// (Hermes, Qwen 2.5 and 3, Granite 4).
    Tagged,
    /// The whole answer is a JSON object with `name` and arguments, several separated by `;`, or an array
    /// of such objects (Llama 3).
    Bare {
        /// Whether arguments are called `parameters` instead of `arguments`.
        parameters: bool,
    },
    /// An array of such objects, behind or between marks (Mistral up to v7, Granite 3, Nemotron 2, MiniMax
    /// M1).
    Listed(ListMarks),
    /// `[TOOL_CALLS]name[ARGS]{..}` (Mistral from v11).
    Named,
    /// Python calls in brackets (Llama 4), or between marks too (LFM2).
    Pythonic {
        /// Whether `<|tool_call_start|>` and `<|tool_call_end|>` enclose them.
        marked: bool,
    },
    /// `<tool_call>name`, then `<arg_key>` and `<arg_value>` in turn (GLM 4.5 and later).
    KeysAndValues,
    /// `<function=name>` and `<parameter=key>` between tags (Qwen3-Coder, Nemotron 3, Seed-OSS).
    FunctionTags {
        /// Whether the outer tag is `seed:tool_call` instead of `tool_call`.
        seed: bool,
    },
    /// `<invoke name="..">` and `<parameter name="..">` between tags of MiniMax M2.
    Invoked,
    /// Like `Invoked`, between tags of DeepSeek V3.2 and V4.
    InvokedDsml {
        /// Whether the outer tag is `tool_calls` instead of `function_calls`.
        calls: bool,
    },
    /// Between DeepSeek's marks: the name and arguments.
    DeepSeek {
        /// Whether arguments are in a fenced block (V3, R1), or plain (V3.1).
        fenced: bool,
    },
    /// Between Kimi K2's marks: `functions.name:0` and arguments.
    Kimi,
    /// `<function=name>{..}</function>` (Functionary 3.1).
    JsonInTag,
    /// `call:name{key:value}` between Gemma 4's marks.
    Gemma,
    /// A list of objects with the function's name as their only key, between `<|tools_prefix|>` and
    /// `<|tools_suffix|>` (Apertus).
    NamedObjects,
    /// A message of gpt-oss to `functions.name`.
    Harmony,
}

/// Marks around a list of calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListMarks {
    /// `[TOOL_CALLS]` before it.
    Mistral,
    /// `<|tool_call|>` before it.
    Granite,
    /// `<TOOLCALL>` and `</TOOLCALL>`.
    Nemotron,
    /// `<|START_ACTION|>` and `<|END_ACTION|>`, with `tool_name` and `parameters` (Command R7B and A).
    Cohere,
    /// A fenced block behind `Action:`, with `tool_name` and `parameters` (Command R+).
    Action,
    /// `functools` before it (FireFunction v2).
    Functools,
    /// `<tool_calls>` and `</tool_calls>`; calls may follow each other without brackets.
    MiniMax,
}

/// Format of call ids in a template.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CallIds {
    /// Any.
    #[default]
    Any,
    /// Nine letters and digits.
    Nine,
    /// `functions.name:number`, counted through the conversation.
    Kimi,
}

/// The marks of a style.
#[derive(Clone, Copy, Debug)]
pub struct CallMarks {
    /// Beginning of a call, or of a list of calls.
    pub open: &'static str,
    /// End of a call or list; the end of the answer where it is empty.
    pub close: &'static str,
    /// Marks around all calls that are not text.
    pub around: &'static [&'static str],
}

impl ToolStyle {
    /// The key of a call's arguments.
    pub fn arguments(self) -> &'static str {
        match self {
            ToolStyle::Bare { parameters: true }
            | ToolStyle::Listed(ListMarks::Cohere | ListMarks::Action) => "parameters",
            _ => "arguments",
        }
    }

    /// The marks around calls.
    pub fn marks(self) -> CallMarks {
        let (open, close) = match self {
            ToolStyle::Tagged | ToolStyle::KeysAndValues | ToolStyle::FunctionTags { seed: false } => {
                ("<tool_call>", "</tool_call>")
            }
            ToolStyle::FunctionTags { seed: true } => ("<seed:tool_call>", "</seed:tool_call>"),
            ToolStyle::Bare { .. } => ("<|python_tag|>", ""),
            ToolStyle::Listed(ListMarks::Mistral) | ToolStyle::Named => ("[TOOL_CALLS]", ""),
            ToolStyle::Listed(ListMarks::Granite) => ("<|tool_call|>", ""),
            ToolStyle::Listed(ListMarks::Nemotron) => ("<TOOLCALL>", "</TOOLCALL>"),
            ToolStyle::Listed(ListMarks::Cohere) => ("<|START_ACTION|>", "<|END_ACTION|>"),
            ToolStyle::Listed(ListMarks::Action) => ("Action:\n```json", "```"),
            ToolStyle::NamedObjects => ("<|tools_prefix|>", "<|tools_suffix|>"),
            ToolStyle::Listed(ListMarks::Functools) => ("functools", ""),
            ToolStyle::JsonInTag => ("<function=", "</function>"),
            ToolStyle::Gemma => ("<|tool_call>", "<tool_call|>"),
            ToolStyle::Harmony => ("<|channel|>", ""),
            ToolStyle::Listed(ListMarks::MiniMax) => ("<tool_calls>", "</tool_calls>"),
            ToolStyle::Pythonic { marked: true } => ("<|tool_call_start|>", "<|tool_call_end|>"),
            ToolStyle::Pythonic { marked: false } => ("<|python_start|>", ""),
            ToolStyle::Invoked => ("<minimax:tool_call>", "</minimax:tool_call>"),
            ToolStyle::InvokedDsml { calls: false } => {
                ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>")
            }
            ToolStyle::InvokedDsml { calls: true } => ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
            ToolStyle::DeepSeek { .. } => ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
            ToolStyle::Kimi => ("<|tool_call_begin|>", "<|tool_call_end|>"),
        };
        let around: &[&str] = match self {
            ToolStyle::DeepSeek { .. } => &["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"],
            ToolStyle::Kimi => &["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"],
            ToolStyle::Pythonic { marked: false } => &["<|python_end|>"],
            _ => &[],
        };
        CallMarks { open, close, around }
    }

    /// Marks that may be special tokens, which answers otherwise hide.
    pub fn shown(self) -> Vec<&'static str> {
        let CallMarks { open, close, around } = self.marks();
        let inner: &[&str] = match self {
            ToolStyle::Named => &["[ARGS]", "[CALL_ID]"],
            ToolStyle::DeepSeek { .. } => &["<｜tool▁sep｜>"],
            ToolStyle::Kimi => &["<|tool_call_argument_begin|>"],
            ToolStyle::KeysAndValues => &["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
            ToolStyle::InvokedDsml { .. } => &["｜DSML｜"],
            ToolStyle::Gemma => &["<|\"|>"],
            ToolStyle::Harmony => {
                &["<|start|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"]
            }
            _ => &[],
        };
        let marks = [open, close].into_iter().chain(around.iter().copied()).chain(inner.iter().copied());
        marks.filter(|mark| !mark.is_empty()).collect()
    }

    /// The style of a template; none if it has no tools, or an unknown style.
    pub(super) fn of(source: &str) -> Option<Self> {
        let has = |text: &str| source.contains(text);
        if !has("tools") {
            return None;
        }
        if has("<|channel|>") && has("<|call|>") {
            return Some(ToolStyle::Harmony);
        }
        if has("<|START_ACTION|>") {
            return (has("<|END_ACTION|>") && has("tool_name"))
                .then_some(ToolStyle::Listed(ListMarks::Cohere));
        }
        if has("Action:") && has("```json") && has("\"tool_name\"") {
            return Some(ToolStyle::Listed(ListMarks::Action));
        }
        if has("<|tools_prefix|>") && has("<|tools_suffix|>") {
            return Some(ToolStyle::NamedObjects);
        }
        if has("<|tool_call>") && has("<tool_call|>") {
            return has("call:").then_some(ToolStyle::Gemma);
        }
        if has("｜DSML｜") {
            return Some(ToolStyle::InvokedDsml {
                calls: has("tool_calls>") || has("tool_calls_block_name"),
            });
        }
        if has("<｜tool▁call▁begin｜>") {
            return Some(ToolStyle::DeepSeek { fenced: has("```json") });
        }
        if has("<|tool_call_begin|>") && has("<|tool_call_argument_begin|>") {
            return Some(ToolStyle::Kimi);
        }
        if has("minimax:tool_call") && !has("ns_token") {
            return Some(ToolStyle::Invoked);
        }
        if has("<arg_key>") {
            return has("<tool_call>").then_some(ToolStyle::KeysAndValues);
        }
        if has("<function=") && has("<parameter=") {
            let seed = has("<seed:tool_call>");
            return (seed || has("<tool_call>")).then_some(ToolStyle::FunctionTags { seed });
        }
        if has("[TOOL_CALLS]") {
            return Some(if has("[ARGS]") {
                ToolStyle::Named
            } else {
                ToolStyle::Listed(ListMarks::Mistral)
            });
        }
        // some templates of LFM2 render no past calls
        if has("<|tool_call_start|>") || has("List of tools: ") && has("<|im_start|>") {
            return Some(ToolStyle::Pythonic { marked: true });
        }
        let listed = [
            ("<|tool_call|>", ListMarks::Granite),
            ("<TOOLCALL>", ListMarks::Nemotron),
            ("<tool_calls>", ListMarks::MiniMax),
            ("functools[", ListMarks::Functools),
        ];
        if let Some((_, marks)) = listed.into_iter().find(|(mark, _)| has(mark)) {
            return Some(ToolStyle::Listed(marks));
        }
        if has("<tool_call>") {
            return (!has("<invoke")).then_some(ToolStyle::Tagged);
        }
        if has("func_name1(") || has("<|python_start|>") {
            return Some(ToolStyle::Pythonic { marked: false });
        }
        if has("<function=") {
            return has("</function>").then_some(ToolStyle::JsonInTag);
        }
        (has("\"parameters\":") && !has("tool_name")).then_some(ToolStyle::Bare { parameters: true })
    }

    /// The format of call ids in a template with this source.
    pub fn ids(self) -> CallIds {
        match self {
            ToolStyle::Listed(ListMarks::Mistral) | ToolStyle::Named => CallIds::Nine,
            ToolStyle::Kimi => CallIds::Kimi,
            _ => CallIds::Any,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_style_is_told_by_all_of_its_marks() {
        let cases = [
            ("<tool_call>\n{\"name\": ..}</tool_call>", Some(ToolStyle::Tagged)),
            ("<tool_call>{name}<arg_key>", Some(ToolStyle::KeysAndValues)),
            ("<arg_key> alone", None),
            ("<tool_call><function=f><parameter=p>", Some(ToolStyle::FunctionTags { seed: false })),
            ("<seed:tool_call><function=f><parameter=p>", Some(ToolStyle::FunctionTags { seed: true })),
            ("[TOOL_CALLS] [", Some(ToolStyle::Listed(ListMarks::Mistral))),
            ("[TOOL_CALLS]f[ARGS]{}", Some(ToolStyle::Named)),
            ("{\"name\": f, \"parameters\": {}}", Some(ToolStyle::Bare { parameters: true })),
            ("<｜tool▁call▁begin｜>function\n```json", Some(ToolStyle::DeepSeek { fenced: true })),
            ("<｜tool▁call▁begin｜>", Some(ToolStyle::DeepSeek { fenced: false })),
            ("<|tool_call_begin|>id<|tool_call_argument_begin|>", Some(ToolStyle::Kimi)),
            ("<minimax:tool_call>", Some(ToolStyle::Invoked)),
            ("<tool_call> with <invoke name=", None),
            (
                "<|START_ACTION|>[{\"tool_name\": f, \"parameters\":}]<|END_ACTION|>",
                Some(ToolStyle::Listed(ListMarks::Cohere)),
            ),
            ("Action: [{\"tool_name\": f, \"parameters\":}]", None),
            (
                "Action:\n```json\n[{\"tool_name\": f, \"parameters\":}]```",
                Some(ToolStyle::Listed(ListMarks::Action)),
            ),
            ("<|tools_prefix|>[{\"f\": {}}]<|tools_suffix|>", Some(ToolStyle::NamedObjects)),
            ("<|im_start|>system\nList of tools: [", Some(ToolStyle::Pythonic { marked: true })),
            (">>>f\n{}", None),
            ("<|tool_call>call:f{}<tool_call|>", Some(ToolStyle::Gemma)),
            ("to=functions.f<|channel|>commentary json<|message|>{}<|call|>", Some(ToolStyle::Harmony)),
            (" functools[{}]", Some(ToolStyle::Listed(ListMarks::Functools))),
            ("<function=f>{}</function>", Some(ToolStyle::JsonInTag)),
            ("<minimax:tool_call> render_tool_namespace", Some(ToolStyle::Invoked)),
            (
                "<TOOLCALL>[{\"name\": \"tool_name1\"}]</TOOLCALL>",
                Some(ToolStyle::Listed(ListMarks::Nemotron)),
            ),
            ("nothing", None),
        ];
        for (source, style) in cases {
            assert_eq!(ToolStyle::of(&format!("{{% if tools %}}{source}")), style, "{source}");
        }
        assert_eq!(ToolStyle::of("<tool_call>"), None, "without the word for tools");
    }
}

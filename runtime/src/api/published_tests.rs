//! The styles of calls of published templates: told right, and read from what the template itself writes.

use super::super::fields::Fields;
use super::tests::{read, read_by};
use super::*;
use crate::model::{ChatMessage, ChatTemplate};
use std::path::PathBuf;

/// The templates of llama-cpp-python 0.3.36 with their styles; none where `tools` are refused.
const PUBLISHED: [(&str, &str); 70] = [
    ("Apertus-8B-Instruct", "NamedObjects"),
    ("Apriel-1.6-15b-Thinker-fixed", "Listed(MiniMax)"),
    ("Bielik-11B-v3.0-Instruct", "Tagged"),
    ("ByteDance-Seed-OSS", "FunctionTags { seed: true }"),
    ("Cohere2MoE", "Listed(Cohere)"),
    ("CohereForAI-c4ai-command-r-plus-tool_use", "Listed(Action)"),
    ("CohereForAI-c4ai-command-r7b-12-2024-tool_use", "Listed(Cohere)"),
    ("GLM-4.6", "KeysAndValues"),
    ("GLM-4.7-Flash", "KeysAndValues"),
    ("GigaChat3-10B-A1.8B", "none"),
    ("GigaChat3.1-10B-A1.8B", "none"),
    ("HuggingFaceTB-SmolLM3-3B", "none"),
    ("Kimi-K2-Instruct", "Kimi"),
    ("Kimi-K2-Thinking", "Kimi"),
    ("Kimi-K3", "none"),
    ("LFM2-8B-A1B", "Pythonic { marked: true }"),
    ("LFM2.5-8B-A1B", "Pythonic { marked: true }"),
    ("LFM2.5-Instruct", "Pythonic { marked: true }"),
    ("MiMo-VL", "Tagged"),
    ("MiniMax-M1", "Listed(MiniMax)"),
    ("MiniMax-M2", "Invoked"),
    ("MiniMax-M3", "none"),
    ("Mistral-Small-3.2-24B-Instruct-2506", "Named"),
    ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "FunctionTags { seed: false }"),
    ("NVIDIA-Nemotron-Nano-v2", "Listed(Nemotron)"),
    ("NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", "Tagged"),
    ("NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "Tagged"),
    ("Qwen-QwQ-32B", "Tagged"),
    ("Qwen-Qwen2.5-7B-Instruct", "Tagged"),
    ("Qwen-Qwen3-0.6B", "Tagged"),
    ("Qwen3-Coder", "FunctionTags { seed: false }"),
    ("Qwen3.5-4B", "FunctionTags { seed: false }"),
    ("Reka-Edge", "Tagged"),
    ("Spark2.5", "KeysAndValues"),
    ("StepFun3.5-Flash", "FunctionTags { seed: false }"),
    ("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "none"),
    ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "none"),
    ("deepseek-ai-DeepSeek-V3.1", "none"),
    ("deepseek-ai-DeepSeek-V3.2", "InvokedDsml { calls: false }"),
    ("deepseek-ai-DeepSeek-V4", "InvokedDsml { calls: true }"),
    ("deepseek-ai-DeepSeek-V4-Flash-0731", "InvokedDsml { calls: true }"),
    ("fireworks-ai-llama-3-firefunction-v2", "Listed(Functools)"),
    ("google-gemma-2-2b-it", "none"),
    ("google-gemma-4-31B-it", "Gemma"),
    ("google-gemma-4-31B-it-interleaved", "Gemma"),
    ("ibm-granite-granite-3.3-2B-Instruct", "Listed(Granite)"),
    ("ibm-granite-granite-4.0", "Tagged"),
    ("ibm-granite-granite-4.1", "Tagged"),
    ("inclusionai-ling-3.0-flash", "KeysAndValues"),
    ("llama-cpp-deepseek-r1", "DeepSeek { fenced: true }"),
    ("llama-cpp-rwkv-world", "none"),
    ("meetkai-functionary-medium-v3.1", "JsonInTag"),
    ("meetkai-functionary-medium-v3.2", "none"),
    ("meta-llama-Llama-3.1-8B-Instruct", "Bare { parameters: true }"),
    ("meta-llama-Llama-3.2-3B-Instruct", "Bare { parameters: true }"),
    ("meta-llama-Llama-3.3-70B-Instruct", "Bare { parameters: true }"),
    ("microsoft-Phi-3.5-mini-instruct", "none"),
    ("mistralai-Ministral-3-14B-Reasoning-2512", "Named"),
    ("mistralai-Mistral-Nemo-Instruct-2407", "Listed(Mistral)"),
    ("moonshotai-Kimi-K2", "Kimi"),
    ("muse-glimmer", "none"),
    ("openai-gpt-oss-120b", "Harmony"),
    ("openbmb-MiniCPM5-1B", "none"),
    ("poolside-Laguna-S-2.1", "KeysAndValues"),
    ("poolside-Laguna-XS-2.1", "KeysAndValues"),
    ("poolside-Laguna-XS.2", "KeysAndValues"),
    ("tencent-Hy3", "none"),
    ("unsloth-Apriel-1.5", "Listed(MiniMax)"),
    ("unsloth-mistral-Devstral-Small-2507", "Named"),
    ("upstage-Solar-Open-100B", "none"),
];

/// Text with which a message ends, behind its calls.
const ENDS: [&str; 9] = [
    "</s>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|return|>",
    "<|end_of_text|>",
    "<|END_OF_TURN_TOKEN|>",
    "[e~[",
    "<|im_middle|>",
];

/// The folder of the templates, which hwtests/templates.sh downloads.
fn folder() -> PathBuf {
    let root = std::env::var_os("TEMPLATES_DIR").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../target/templates")),
        PathBuf::from,
    );
    root.join("llama_cpp_python-0.3.36/vendor/llama.cpp/models/templates")
}

/// Templates that do not render this conversation: they append to a list, which the sandbox refuses, or join
/// text with what is undefined. Their styles are compared, and their calls are not read.
const UNRENDERED: [&str; 4] = [
    "CohereForAI-c4ai-command-r-plus-tool_use",
    "Kimi-K2-Instruct",
    "Kimi-K2-Thinking",
    "fireworks-ai-llama-3-firefunction-v2",
];

fn weather() -> Value {
    let properties = json!({"city": {"type": "string"}, "days": {"type": "integer"}});
    json!([{"type": "function", "function": {"name": "get_weather", "description": "The weather",
        "parameters": {"type": "object", "properties": properties, "required": ["city"]}}}])
}

/// What the template writes for an answer that is this call, from its first mark to its end.
fn written(template: &ChatTemplate, style: ToolStyle) -> Result<String, String> {
    let arguments = json!({"tools": weather()});
    let arguments = arguments.as_object().unwrap();
    let mut messages = vec![ChatMessage::new("user", "weather?")];
    let render = |messages: &[ChatMessage], prompt| template.render(messages, prompt, arguments, 0);
    let before = render(&messages, true).map_err(|error| error.to_string())?;
    let call = json!([{"id": "abcdefgh1", "type": "function", "function":
        {"name": "get_weather", "arguments": {"city": "Zürich", "days": 3}}}]);
    let mut answer = ChatMessage::new("assistant", "");
    answer.extra.insert("tool_calls".into(), call.clone());
    messages.push(answer);
    let whole = match render(&messages, false) {
        Ok(whole) => whole,
        // some templates take the arguments as text only
        Err(_) => {
            let mut call = call;
            call[0]["function"]["arguments"] = json!("{\"city\": \"Zürich\", \"days\": 3}");
            messages[1].extra.insert("tool_calls".into(), call);
            render(&messages, false).map_err(|error| error.to_string())?
        }
    };
    let common: usize =
        before.chars().zip(whole.chars()).take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum();
    let answer = match style {
        ToolStyle::Harmony => &whole[common..],
        _ => {
            let from = whole[..common].rfind(['\n', '>', ']']).map_or(0, |at| at + 1);
            &whole[whole.floor_char_boundary(from.saturating_sub(24))..]
        }
    };
    let marks = style.marks();
    let first = marks.around.iter().copied().chain([marks.open]).filter_map(|mark| answer.find(mark)).min();
    let start =
        if style == ToolStyle::Harmony { Some(0) } else { first.or_else(|| answer.find("{\"name\"")) };
    let mut text = &answer[start.ok_or_else(|| format!("no call in {answer:?}"))?..];
    while let Some(shorter) = ENDS.iter().find_map(|end| text.trim_end().strip_suffix(end)) {
        text = shorter;
    }
    Ok(text.trim_end().to_owned())
}

#[test]
fn published_templates_have_these_styles_and_their_calls_are_read() {
    let folder = folder();
    if !folder.is_dir() {
        eprintln!("SKIPPED: {} is not there: hwtests/templates.sh downloads it", folder.display());
        return;
    }
    let body = json!({"tools": weather()}).to_string();
    let tools = Tools::parse(&mut Fields::parse(body.as_bytes()).unwrap()).unwrap().unwrap();
    let mut faults = Vec::new();
    for (name, expected) in PUBLISHED {
        let source = std::fs::read_to_string(folder.join(format!("{name}.jinja"))).unwrap();
        let template = ChatTemplate::new(&source, Some("<s>".into()), Some("</s>".into())).unwrap();
        let style = template.tool_style();
        let told = style.map_or("none".into(), |style| format!("{style:?}"));
        if told != expected {
            faults.push(format!("{name}: {told}, not {expected}"));
        }
        let Some(style) = style else { continue };
        let text = match written(&template, style) {
            Ok(text) => text,
            // LFM2's templates render no calls
            Err(_) if !source.contains("tool_calls") || UNRENDERED.contains(&name) => continue,
            Err(error) => {
                faults.push(format!("{name}: {error}"));
                continue;
            }
        };
        let letters: Vec<String> = text.chars().map(String::from).collect();
        let letters: Vec<&str> = letters.iter().map(String::as_str).collect();
        for (said, calls) in [read(&tools, style, &[&text]), read_by(tools.reader(style, true), &letters)] {
            let arguments = calls.first().map(|call| serde_json::from_str::<Value>(&call.arguments));
            let is_right = calls.len() == 1
                && calls[0].name == "get_weather"
                && matches!(arguments, Some(Ok(read)) if read == json!({"city": "Zürich", "days": 3}));
            if !is_right {
                faults.push(format!("{name} ({style:?}): {calls:?} and {said:?} in {text:?}"));
            }
        }
    }
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
}

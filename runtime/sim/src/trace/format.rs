//! Detection of a file's format from its first line.

use serde_json::Value;

/// The supported formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Mooncake's JSONL, with prefix hashes.
    Mooncake,
    /// Alibaba's Qwen traces (Bailian): Mooncake's keys with seconds and blocks of 16 tokens, JSONL.
    Bailian,
    /// Azure's LLM inference traces, CSV.
    Azure,
    /// BurstGPT's traces, CSV.
    BurstGpt,
    /// Hours synthesised by ServeGen, CSV.
    ServeGen,
    /// Sessions of agents, JSONL.
    Agentic,
    /// Per-request logs of vLLM or LLMServingSim, JSONL.
    RequestLog,
}

impl Format {
    /// All formats.
    pub const ALL: [Format; 7] = [
        Format::Mooncake,
        Format::Bailian,
        Format::Azure,
        Format::BurstGpt,
        Format::ServeGen,
        Format::Agentic,
        Format::RequestLog,
    ];

    /// The format's name in documents.
    pub const fn name(self) -> &'static str {
        match self {
            Format::Mooncake => "mooncake",
            Format::Bailian => "bailian",
            Format::Azure => "azure",
            Format::BurstGpt => "burstgpt",
            Format::ServeGen => "servegen",
            Format::Agentic => "agentic",
            Format::RequestLog => "request-log",
        }
    }

    /// An example line.
    pub const fn example(self) -> &'static str {
        match self {
            Format::Mooncake => {
                r#"{"timestamp": 3000, "input_length": 1100, "output_length": 52, "hash_ids": [0, 7, 8]} (ms; one id for each 512 tokens)"#
            }
            Format::Bailian => {
                r#"{"chat_id": 2, "parent_chat_id": -1, "timestamp": 61.9, "input_length": 40, "output_length": 20, "hash_ids": [8, 9, 10]} (s; one id for each 16 tokens)"#
            }
            Format::Azure => {
                "2023-11-16 18:15:46.6805900,374,44 under TIMESTAMP,ContextTokens,GeneratedTokens"
            }
            Format::BurstGpt => "5,ChatGPT,472,18 under Timestamp,Model,Request tokens,Response tokens",
            Format::ServeGen => "0.039,104,571,15 under t_s,client,input_tokens,output_tokens",
            Format::Agentic => {
                r#"{"block_size": 64, "reqs": [{"t": 0.0, "in": 300, "out": 20, "api": 1.5, "think": 0.0, "h": [[1, 4]]}]}"#
            }
            Format::RequestLog => {
                r#"{"input_toks": 358, "output_toks": 31, "arrival_time": 1787267980.08} (or arrival_time_ns)"#
            }
        }
    }

    /// All formats, one per line.
    pub(super) fn list() -> String {
        let lines = Format::ALL.map(|format| format!("  {:<12} {}", format.name(), format.example()));
        lines.join("\n")
    }

    /// The format of a file that starts with `line`, or the mismatch.
    pub(super) fn detect(line: &[u8]) -> Result<Format, String> {
        if line.first() == Some(&b'{') {
            return Format::detect_json(line);
        }
        let text = std::str::from_utf8(line).map_err(|_| "its first line is not text".to_string())?;
        if text.starts_with('[') {
            let cause = "it is a JSON array, as ShareGPT's conversations, without a request per line";
            return Err(format!("{cause}: '{}'", shortened(text)));
        }
        let columns = super::table::columns(text);
        let has = |names: [&str; 3]| names.iter().all(|name| columns.iter().any(|column| column == name));
        if has(["timestamp", "contexttokens", "generatedtokens"]) {
            Ok(Format::Azure)
        } else if has(["timestamp", "request tokens", "response tokens"]) {
            Ok(Format::BurstGpt)
        } else if has(["t_s", "input_tokens", "output_tokens"]) {
            Ok(Format::ServeGen)
        } else {
            Err(format!("its first line is '{}'", shortened(text)))
        }
    }

    fn detect_json(line: &[u8]) -> Result<Format, String> {
        let value: Value =
            serde_json::from_slice(line).map_err(|cause| format!("its first line is not JSON: {cause}"))?;
        let has = |names: &[&str]| names.iter().all(|name| value.get(name).is_some());
        if has(&["timestamp", "input_length", "chat_id", "parent_chat_id"]) {
            Ok(Format::Bailian)
        } else if has(&["timestamp", "input_length"]) {
            Ok(Format::Mooncake)
        } else if has(&["reqs"]) {
            Ok(Format::Agentic)
        } else if has(&["input_toks"]) {
            Ok(Format::RequestLog)
        } else {
            let keys = value.as_object().into_iter().flatten().map(|(key, _)| key.as_str());
            let keys: Vec<&str> = keys.take(12).collect();
            Err(format!("its first line has the keys {}", shortened(&keys.join(", "))))
        }
    }
}

impl std::fmt::Display for Format {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

fn shortened(text: &str) -> String {
    const CHARACTERS_MAX: usize = 80;
    let mut short: String = text.chars().take(CHARACTERS_MAX).flat_map(char::escape_default).collect();
    if text.chars().count() > CHARACTERS_MAX {
        short.push_str("...");
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_example_is_recognised() {
        for format in Format::ALL {
            let example = format.example();
            let line = match example.split_once(" under ") {
                Some((_, header)) => header,
                None => example.split_once(" (").map_or(example, |(line, _)| line),
            };
            assert_eq!(Format::detect(line.as_bytes()), Ok(format), "{line}");
        }
    }

    #[test]
    fn what_is_unknown_is_shown_shortened() {
        for (line, part) in [
            (&b"{\"a\": 1}"[..], "the keys a"),
            (b"{\"a\": ", "not JSON"),
            (b"[1, 2]", "'[1, 2]'"),
            (b"num_prefill_tokens,num_decode_tokens", "num_prefill"),
            (b"\xff\xfe", "not text"),
        ] {
            let cause = Format::detect(line).expect_err("unknown");
            assert!(cause.contains(part), "{cause}");
        }
        assert!(Format::detect(&[b'x'; 5000]).expect_err("unknown").len() < 200);
    }
}

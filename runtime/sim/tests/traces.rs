//! Every reader on a real trace, and on malformed files.

use crate::common::shared;
use mixfleet_hal::units::Seconds;
use mixfleet_sim::trace::{Format, ReadOptions, Repairs, Request, Trace, TraceError, key_of};
use std::collections::HashMap;

fn read(text: &str) -> (Vec<Request>, Option<TraceError>) {
    match Trace::from_reader("t", std::io::Cursor::new(text.to_string()), ReadOptions::default()) {
        Ok(trace) => drain(trace),
        Err(error) => (Vec::new(), Some(error)),
    }
}

fn drain(trace: impl Iterator<Item = Result<Request, TraceError>>) -> (Vec<Request>, Option<TraceError>) {
    let (mut requests, mut error) = (Vec::new(), None);
    for item in trace {
        assert!(error.is_none(), "nothing follows an error");
        match item {
            Ok(request) => requests.push(request),
            Err(cause) => error = Some(cause),
        }
    }
    (requests, error)
}

/// Reads a whole real trace, with the checks that hold for every trace.
fn whole(path: &str, format: Format) -> Option<(Vec<Request>, Repairs, Option<u32>)> {
    let mut trace = Trace::open(&shared(path)?, ReadOptions::default()).expect("a readable trace");
    assert_eq!(trace.format(), format);
    let requests: Vec<Request> = trace.by_ref().map(|request| request.expect("a good line")).collect();
    assert!(requests.iter().enumerate().all(|(place, request)| request.id == place as u64));
    assert!(requests.windows(2).all(|pair| pair[0].at <= pair[1].at));
    assert!(requests.iter().all(|r| r.at >= Seconds::ZERO && r.prompt_tokens > 0 && r.output_tokens > 0));
    let progress = trace.progress();
    assert_eq!(Some(progress.bytes()), progress.total(), "the whole file was read");
    Some((requests, trace.repairs(), trace.block_tokens()))
}

fn tokens(requests: &[Request]) -> (u64, u64) {
    let sum = |tokens: fn(&Request) -> u32| requests.iter().map(|request| u64::from(tokens(request))).sum();
    (sum(|request| request.prompt_tokens), sum(|request| request.output_tokens))
}

#[test]
fn the_mooncake_conversation() {
    let Some((requests, repairs, block)) = whole("traces/mooncake-conversation.jsonl.zst", Format::Mooncake)
    else {
        return;
    };
    assert_eq!((requests.len(), repairs, block), (12_031, Repairs::default(), Some(512)));
    assert_eq!(requests[0].chain.len(), 14);
    assert_eq!(requests[1].chain[..2], [key_of(0), key_of(14)]);
    assert!(requests.iter().all(|r| r.chain.len() == r.prompt_tokens.div_ceil(512) as usize));
    assert_eq!(requests.last().map(|request| request.at), Some(Seconds(3536.999)));
}

#[test]
fn the_azure_conversation() {
    let Some((requests, repairs, block)) =
        whole("traces/AzureLLMInferenceTrace_conv_2023.csv.zst", Format::Azure)
    else {
        return;
    };
    assert_eq!((requests.len(), repairs, block), (19_366, Repairs::default(), None));
    assert_eq!((requests[1].prompt_tokens, requests[1].output_tokens), (396, 109));
    assert!((requests[1].at.0 - 4.314_579).abs() < 1e-9, "{:?}", requests[1].at);
    // 18:15:46.6805900 to 19:14:08.4025270.
    assert!((requests[19_365].at.0 - 3_501.721_937).abs() < 1e-6);
}

#[test]
fn the_hours_of_servegen() {
    for (path, count, client) in [
        ("traces/servegen-m-large-1h.csv.zst", 36_722, "104"),
        ("traces/servegen-r1-1h.csv.zst", 14_759, "56"),
    ] {
        let Some((requests, repairs, block)) = whole(path, Format::ServeGen) else { return };
        assert_eq!((requests.len(), repairs, block), (count, Repairs::default(), None));
        assert_eq!(requests[0].class.as_deref(), Some(client));
    }
}

#[test]
fn the_log_of_a_vllm_run() {
    let path = "measured/rtx4090-llama-3.1-8b/requests.jsonl";
    let Some((requests, repairs, block)) = whole(path, Format::RequestLog) else { return };
    assert_eq!((requests.len(), repairs, block), (300, Repairs::default(), None));
    assert_eq!(requests[0].at, Seconds::ZERO);
    assert!((requests[1].at.0 - 0.265_091).abs() < 1e-5, "{:?}", requests[1].at);
}

#[test]
fn the_sessions_of_agents() {
    let Some((requests, repairs, block)) = whole("traces/agentic-claude-code.jsonl.zst", Format::Agentic)
    else {
        return;
    };
    // There are 25,784 calls of agents and 432 of their sub-agents, 17 without an answer.
    assert_eq!((requests.len(), block), (26_216, Some(64)));
    assert_eq!((repairs.empty_outputs, repairs.reordered), (17, 0));
    assert!(requests.iter().all(|r| r.chain.len() == (r.prompt_tokens / 64) as usize));
    let mut firsts = 0;
    for request in &requests {
        let session = request.session.expect("each belongs to a session");
        let Some(after) = session.after else {
            firsts += 1;
            assert_eq!(request.at, Seconds(60.0 * session.id as f64), "sessions start every minute");
            continue;
        };
        let before = &requests[after as usize];
        assert!(before.id < request.id && before.at <= request.at);
        assert_eq!(before.session.map(|before| before.id), Some(session.id));
    }
    assert_eq!(firsts, 397);
    // Sessions share no block, since their ids are local: all start with the ids of a session's first block.
    let mut owners = HashMap::new();
    for request in &requests {
        let session = request.session.map(|session| session.id);
        let ends = request.chain.first().into_iter().chain(request.chain.last());
        assert!(ends.into_iter().all(|key| *owners.entry(*key).or_insert(session) == session));
    }
    let (prompt, output) = tokens(&requests);
    assert!(prompt > 25_784 * 100_000 && output > 25_784 * 400, "{prompt} {output}");
}

#[test]
fn a_file_may_be_called_anything() {
    let Some(path) = shared("traces/mooncake-conversation.jsonl.zst") else { return };
    let bytes = std::fs::read(path).expect("a readable file");
    let trace = Trace::from_reader("trace.csv.gz", std::io::Cursor::new(bytes), ReadOptions::default());
    assert_eq!(trace.expect("a trace").count(), 12_031);
}

#[test]
fn dates_count_from_the_first_request_and_other_units_are_refused() {
    let read = |text: &str| -> Result<Vec<f64>, String> {
        let trace = Trace::from_reader("t", std::io::Cursor::new(text.to_owned()), ReadOptions::default());
        let requests = trace.map_err(|error| error.to_string())?;
        requests
            .map(|request| request.map(|request| request.at.0).map_err(|error| error.to_string()))
            .collect()
    };
    let mooncake = |at: u64| format!("{{\"timestamp\": {at}, \"input_length\": 9, \"output_length\": 1}}\n");
    let day = 86_400_000;
    let dates = [1_700_000_000_000, 1_700_000_001_500].map(mooncake).concat();
    assert_eq!(read(&dates), Ok(vec![0.0, 1.5]));
    let weeks = [0, 20 * day].map(mooncake).concat();
    assert_eq!(read(&weeks), Ok(vec![0.0, 20.0 * 86_400.0]), "a long trace is no date");
    let seconds = read(&mooncake(1_700_000_000)).unwrap_err();
    assert!(seconds.contains("Unix time in seconds"), "{seconds}");
    let log = "{\"input_toks\": 9, \"output_toks\": 1, \"arrival_time\": 1787267980080}\n";
    let error = read(log).unwrap_err();
    assert!(error.contains("line 1") && error.contains("milliseconds"), "{error}");
}

#[test]
fn a_few_lines_out_of_order_are_sorted_and_counted() {
    let line = |at: u32| format!("{{\"input_toks\": {at}, \"output_toks\": 1, \"arrival_time\": {at}}}\n");
    let text: String = [10, 12, 11, 12, 9].map(line).concat();
    let mut trace = Trace::from_reader("t", std::io::Cursor::new(text), ReadOptions::default()).unwrap();
    let found: Vec<(f64, u32)> =
        trace.by_ref().map(|r| r.unwrap()).map(|r| (r.at.0, r.prompt_tokens)).collect();
    assert_eq!(found, [(0.0, 9), (1.0, 10), (2.0, 11), (3.0, 12), (3.0, 12)]);
    assert_eq!(trace.repairs().reordered, 2);
}

#[test]
fn what_is_far_out_of_order_is_an_error_with_its_line() {
    let line = |at: u32| format!("{{\"timestamp\": {at}, \"input_length\": 1, \"output_length\": 1}}\n");
    let text: String = (1..=1500).chain([0]).map(line).collect();
    let (requests, error) = read(&text);
    assert_eq!(requests.len(), 1500);
    let error = error.expect("an error").to_string();
    assert!(error.starts_with("t, line 1501: ") && error.contains("sort the file"), "{error}");
}

/// The file, the line of the error, and a part of its message.
const MALFORMED: &[(&str, u64, &str)] = &[
    ("{\"timestamp\": 0, \"input_length\": 5, \"output_length\": 1}\n{\"timestamp\": 1", 2, "EOF"),
    ("{\"timestamp\": 0, \"input_length\": 5}", 1, "output_length"),
    ("{\"timestamp\": 0, \"input_length\": 0, \"output_length\": 1}", 1, "no token"),
    ("{\"timestamp\": 0, \"input_length\": -3, \"output_length\": 1}", 1, "-3"),
    ("{\"timestamp\": 0, \"input_length\": 3, \"output_length\": 1.5}", 1, "1.5"),
    ("{\"timestamp\": 0, \"input_length\": 99999999, \"output_length\": 1}", 1, "beyond"),
    ("{\"timestamp\": 0, \"input_length\": 3, \"output_length\": 99999999999}", 1, "beyond"),
    ("{\"timestamp\": -1, \"input_length\": 3, \"output_length\": 1}", 1, "not a time"),
    ("{\"timestamp\": \"x\", \"input_length\": 3, \"output_length\": 1}", 1, "string"),
    (
        "{\"timestamp\": 0, \"input_length\": 512, \"output_length\": 1, \"hash_ids\": [1, 2]}",
        1,
        "2 hash_ids",
    ),
    ("{\"timestamp\": 0, \"input_length\": 9, \"output_length\": 1, \"hash_ids\": [-1]}", 1, "-1"),
    // guidellm writes seconds, aiperf turns and fractions of a millisecond, all under Mooncake's keys
    ("{\"timestamp\": 0.0, \"input_length\": 10, \"output_length\": 5, \"hash_ids\": [0]}", 1, "in seconds"),
    (
        "{\"timestamp\": 0, \"input_length\": 10, \"output_length\": 5}\n{\"timestamp\": 1787267980.0, \"input_length\": 10, \"output_length\": 5}",
        2,
        "in seconds",
    ),
    (
        "{\"timestamp\": 0, \"input_length\": 10, \"output_length\": 5}\n{\"delay\": 500, \"input_length\": 16, \"output_length\": 4}",
        2,
        "aiperf",
    ),
    (
        "{\"timestamp\": 0, \"input_length\": 4096, \"output_length\": 5, \"hash_ids\": [0, 1]}",
        1,
        "--block-tokens",
    ),
    (
        "{\"chat_id\": 1, \"parent_chat_id\": -1, \"timestamp\": 0.5, \"input_length\": 4096, \"output_length\": 5, \"hash_ids\": [0]}",
        1,
        "blocks of 16",
    ),
    (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\nx,ChatGPT,4,1,5,API log\n",
        2,
        "not a time",
    ),
    ("\n\n{\"timestamp\": 0, \"input_length\": 0, \"output_length\": 1}", 3, "no token"),
    ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,3\n", 2, "2 fields under 3"),
    ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 25:15:46,3,4\n", 2, "not a date"),
    ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,3.5,4\n", 2, "'3.5' is not a number"),
    ("t_s,client,input_tokens,output_tokens\n1,0,3,4\nNaN,0,3,4\n", 3, "'NaN' is not a time"),
    ("t_s,client,input_tokens,output_tokens\n-1,0,3,4\n", 2, "'-1' is not a time"),
    ("t_s,client,input_tokens,output_tokens\n1,0,,4\n", 2, "'' is not a number"),
    ("{\"input_toks\": 1, \"output_toks\": 1}", 1, "neither arrival_time"),
    ("{\"input_toks\": 1, \"output_toks\": 1, \"arrival_time\": -5}", 1, "not a time"),
    ("{\"block_size\": 0, \"reqs\": []}", 1, "block_size is 0"),
    ("{\"reqs\": []}", 1, "block_size"),
    ("{\"block_size\": 64, \"reqs\": [{\"t\": 0}]}", 1, "no 'in' and 'out'"),
    ("{\"block_size\": 64, \"reqs\": [{\"t\": -1, \"in\": 9, \"out\": 1}]}", 1, "t = -1"),
    ("{\"block_size\": 64, \"reqs\": [{\"t\": 0, \"in\": 64, \"out\": 1, \"h\": [[1, 2]]}]}", 1, "block ids"),
    (
        "{\"block_size\": 64, \"reqs\": [{\"t\": 0, \"in\": 64, \"out\": 1, \"h\": [[1, 18446744073709551615]]}]}",
        1,
        "block ids",
    ),
    (
        "{\"block_size\": 64, \"reqs\": [{\"t\": 0, \"in\": 9, \"out\": 1}]}\n{\"block_size\": 32, \"reqs\": []}",
        2,
        "blocks of 32",
    ),
];

#[test]
fn a_malformed_line_is_named_with_what_was_expected() {
    for &(text, line, part) in MALFORMED {
        let (_, error) = read(text);
        let error = error.unwrap_or_else(|| panic!("accepted: {text}"));
        assert!(matches!(error, TraceError::Line { line: found, .. } if found == line), "{text}: {error}");
        let message = error.to_string();
        assert!(message.contains(part) && message.contains("a line of "), "{message}");
    }
}

#[test]
fn what_comes_before_a_malformed_line_is_read() {
    let good = "{\"timestamp\": 0, \"input_length\": 5, \"output_length\": 1}\n";
    let (requests, error) = read(&format!("{good}{good}{{"));
    assert_eq!(requests.len(), 2);
    assert!(matches!(error, Some(TraceError::Line { line: 3, .. })));
}

#[test]
fn nothing_and_the_unknown_are_errors() {
    for text in ["", "\n\n", "t_s,client,input_tokens,output_tokens\n", "{\"block_size\": 64, \"reqs\": []}"]
    {
        assert!(matches!(read(text).1, Some(TraceError::Empty { .. })), "{text}");
    }
    let error = read("num_prefill_tokens,num_decode_tokens\n3772,54\n").1.expect("unknown").to_string();
    for format in Format::ALL {
        assert!(error.contains(format.name()), "{error}");
    }
    let missing = Trace::open("no/such/file".as_ref(), ReadOptions::default()).err().expect("no file");
    assert!(missing.to_string().contains("no/such/file"), "{missing}");
}

#[test]
fn burst_gpt_has_seconds_and_a_model_in_both_of_its_forms() {
    let first = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\r\n5,ChatGPT,472,18,490,Conversation log\r\n45,GPT-4,1087,0,1087,API log\r\n";
    let second = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n5.0,,0.4,ChatGPT,472,18,490,Conversation log\n45.0,7,1,GPT-4,1087,0,1087,API log\n";
    for text in [first, second] {
        let (requests, error) = read(text);
        assert!(error.is_none(), "{error:?}");
        let found: Vec<_> = requests.iter().map(|r| (r.at.0, r.prompt_tokens, r.output_tokens)).collect();
        assert_eq!(found, [(5.0, 472, 18), (45.0, 1087, 1)]);
        assert_eq!(requests[1].class.as_deref(), Some("GPT-4"));
    }
}

#[test]
fn files_without_arrivals_or_lengths_are_named() {
    for (text, part) in [
        (
            r#"[{"id":"a","conversations":[{"from":"human","value":"hi"},{"from":"gpt","value":"yo"}]}]"#,
            "ShareGPT",
        ),
        ("[\n  {\"id\": \"a\"}\n]\n", "ShareGPT"),
        (r#"{"session_id": "a", "turns": [{"text": "hi", "delay": 5}]}"#, "the keys session_id, turns"),
        (r#"{"timestamp": 0, "text_input": "hello", "output_length": 5}"#, "the keys timestamp, text_input"),
        (r#"{"resourceSpans": []}"#, "the keys resourceSpans"),
    ] {
        let error = read(text).1.expect("unknown").to_string();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn an_agents_calls_form_chains() {
    let text = r#"{"block_size": 4, "model": "m", "reqs": [
        {"t": 0.0, "in": 8, "out": 2, "api": 1.0, "think": 0.0, "h": [[5, 2]]},
        {"t": 3.0, "type": "subagent", "sub": [
            {"t": 0.0, "in": 4, "out": 1, "api": 1.0, "think": 0.0, "h": [[9, 1]]},
            {"t": 2.0, "in": 4, "out": 1, "api": 1.0, "think": 0.5, "h": [[9, 1]]}]},
        {"t": 4.0, "in": 12, "out": 0, "api": null, "think": 2.5, "h": [[5, 2], [7, 1]]},
        {"t": 9.0, "in": 12, "out": 1, "api": 2.0, "think": 7.5, "h": []}]}"#;
    let text = text.replace('\n', " ");
    let mut trace =
        Trace::from_reader("t", std::io::Cursor::new(format!("{text}\n{text}")), ReadOptions::default())
            .unwrap();
    let requests: Vec<Request> = trace.by_ref().map(|r| r.unwrap()).collect();
    let found: Vec<(f64, Option<u64>, f64)> = requests[..5]
        .iter()
        .map(|request| (request.at.0, request.session.unwrap().after, request.session.unwrap().think.0))
        .collect();
    assert_eq!(
        found,
        [
            (0.0, None, 0.0),
            // The sub-agent starts 3 s after the first call, whose answer took 1 s.
            (3.0, Some(0), 2.0),
            (4.0, Some(0), 2.5),
            (5.0, Some(1), 0.5),
            // The end of the previous answer is unknown, so this is the gap between arrivals.
            (9.0, Some(2), 5.0),
        ]
    );
    assert_eq!(requests[5].session.map(|session| (session.id, session.after)), Some((1, None)));
    assert_eq!(requests[5].at, Seconds(60.0));
    assert_eq!(requests[0].chain[..], requests[2].chain[..2]);
    assert_ne!(requests[0].chain, requests[5].chain);
    assert_eq!(requests[0].class.as_deref(), Some("m"));
    assert_eq!(trace.repairs(), Repairs { reordered: 0, empty_outputs: 2, unknown_thinks: 2 });
}

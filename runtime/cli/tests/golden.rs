//! Whole models against what they must say: the fixture checkpoints' golden outputs, and generated
//! checkpoints of every family against the float64 forward pass, through the binary and the library.

#![allow(clippy::print_stdout, reason = "a test says what it saw")]

mod bound;

use crate::common;
use crate::common::{
    Generate, devices, fixtures, generate, golden, ids, mixfleet, refused_fixtures, unserved,
};
use mixfleet_hal::{Backend, DType, Device};
use mixfleet_runtime::model::draws::DrawInput;
use mixfleet_runtime::model::graph::{Forward, StepInput, StepShape};
use mixfleet_runtime::model::variants::{styled_variants, tiny_variants};
use mixfleet_runtime::model::{ChatMessage, ChatTemplate, Checkpoint, ModelConfig, Oracle, Tokenizer};
use mixfleet_scheduler::cost::Prefill;
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Every way to split a request over the devices at hand.
fn placements() -> Vec<(String, String)> {
    let names: Vec<String> = devices().iter().map(|d| d.info().id.clone()).collect();
    let all = names.iter().flat_map(|a| names.iter().map(|b| (a.clone(), b.clone())));
    all.chain([("cpu@0".to_string(), "cpu".to_string())]).collect()
}

/// A wgpu device, where this machine has one.
fn wgpu() -> Option<Arc<dyn Device>> {
    match mixfleet_wgpu::WgpuBackend.probe() {
        Ok(_) => Some(mixfleet_wgpu::WgpuBackend.open("wgpu").unwrap()),
        Err(absent) => {
            println!("SKIPPED: wgpu placements: {absent}");
            None
        }
    }
}

/// Placements with a wgpu device: alone, and split with the cores.
fn wgpu_placements() -> Vec<(String, String)> {
    let pairs = [("wgpu:0", "wgpu:0"), ("cpu", "wgpu:0"), ("wgpu:0", "cpu")];
    if wgpu().is_some() { pairs.map(|(a, b)| (a.to_string(), b.to_string())).to_vec() } else { Vec::new() }
}

fn open(directory: &Path) -> Checkpoint {
    Checkpoint::open(directory, &mixfleet_cpu::host::Mapper).unwrap()
}

/// In f32 a logit is off by less than this on every device.
const LOGIT_ERROR_MAX: f64 = 5e-5;

/// Where two experts' logits are closer than this, rounding may choose another one.
const ROUTER_MARGIN_MIN: f64 = 2.0 * LOGIT_ERROR_MAX;

/// Whether every case is to run on every placement, as at night. Otherwise the cases share the placements
/// out, so that each fixture meets each placement once: every case starts a process for every placement.
fn all_pairs() -> bool {
    std::env::var("MIXFLEET_GOLDEN").is_ok_and(|level| level == "full")
}

/// Whether this case runs on this one of the devices: each fixture runs on each device, and at night all of
/// its cases do.
fn is_turn_of(device: usize, case: usize, devices: usize) -> bool {
    all_pairs() || case % devices == device
}

#[test]
fn fixtures_give_their_golden_tokens_on_every_placement() {
    let (placements, wgpu) = (placements(), wgpu_placements());
    // Mesa's lavapipe compiles a model's kernels anew in each process: a fixture's first three cases take one
    // of the three placements each, which shows every pair of a fixture and a placement once
    let full = std::env::var("MIXFLEET_WGPU_LEVEL").is_ok_and(|level| level == "full");
    let mut undecided = 0;
    for fixture in fixtures() {
        for (number, case) in golden(&fixture)["cases"].as_array().unwrap().iter().enumerate() {
            let close = Close::of(&fixture, case);
            undecided += usize::from(close.is_some());
            let extra = wgpu.iter().enumerate().filter(|(i, _)| full || *i == number).map(|(_, pair)| pair);
            let turns = placements.len();
            let own = placements.iter().enumerate().filter(|(i, _)| all_pairs() || *i == number % turns);
            for (prefill, decode) in own.map(|(_, pair)| pair).chain(extra) {
                if is_refused(&fixture, &[prefill, decode]) {
                    continue;
                }
                let answer = generate(&Generate {
                    model: &fixture,
                    prompt_ids: &ids(&case["prompt_ids"]),
                    max_tokens: 48,
                    prefill,
                    decode,
                    further: &[],
                });
                let place = format!("{} on {prefill} -> {decode}: {}", fixture.display(), case["text"]);
                let (answered, expected) = (ids(&answer["ids"]), ids(&case["greedy_ids"]));
                match &close {
                    None => assert_eq!(answered, expected, "{place}"),
                    Some(close) => close.check(&answered, &expected, &place),
                }
                assert_eq!(answer["placement"]["prefill"], *prefill, "{place}");
                assert_eq!(answer["placement"]["decode"], *decode, "{place}");
            }
        }
    }
    println!("{undecided} cases with a margin below twice the logits' error: compared by logits");
}

/// Whether latent attention is refused there, with a message: it cannot run on separate devices.
fn is_refused(fixture: &Path, places: &[&str]) -> bool {
    let cannot = |place: &&str| place.contains("attn:");
    let has_latents = || ModelConfig::open(fixture).is_ok_and(|config| config.latent.is_some());
    let refused = places.iter().any(cannot) && has_latents();
    if refused {
        println!("SKIPPED: {} on {}", fixture.display(), places.join(" -> "));
    }
    refused
}

/// Several devices as one instance: of equal and of unlike sizes of shares and kinds of devices, that divide
/// the model or its layers, or attend for the first one.
fn divided() -> Vec<(String, Option<&'static str>)> {
    let others: Vec<String> =
        devices().into_iter().skip(1).chain(wgpu()).map(|device| device.info().id.clone()).collect();
    let mut all = vec![("tp:cpu@0,cpu@1".to_owned(), None), ("tp:cpu,cpu@0,cpu@1".to_owned(), None)];
    all.extend(others.iter().map(|device| (format!("tp:cpu,{device}"), None)));
    all.push(("pp:cpu@0,cpu@1".to_owned(), None));
    all.push(("pp:(tp:cpu@0,cpu@1),cpu".to_owned(), None));
    all.extend(others.iter().map(|device| (format!("pp:{device},cpu"), None)));
    all.extend(others.iter().map(|device| (format!("pp:(tp:cpu@0,cpu@1),(tp:{device},cpu)"), None)));
    all.extend(others.iter().map(|device| (format!("attn:{device},cpu"), None)));
    all.push(("attn:cpu@0,cpu@1".to_owned(), None));
    let mixture = format!("attn:cpu,cpu@0,{}", others.join(","));
    for split in ["head", "request", "range"] {
        all.push(("attn:cpu,cpu@0,cpu@1".to_owned(), Some(split)));
        // the device with the weights attends as well
        all.push(("attn:cpu@0,cpu@0,cpu@1".to_owned(), Some(split)));
        all.extend((!others.is_empty()).then(|| (mixture.clone(), Some(split))));
    }
    all
}

/// Whether a fixture runs on a placement of several devices: every fourth fixture on each, and at night all.
fn takes_turn(fixture: usize, placement: usize) -> bool {
    all_pairs() || (fixture + placement).is_multiple_of(4)
}

#[test]
fn fixtures_give_their_golden_tokens_on_several_devices_as_one_instance() {
    for (at, fixture) in fixtures().into_iter().enumerate() {
        let placements = divided().into_iter().enumerate();
        for (turn, (devices, split)) in placements.filter(|(turn, _)| takes_turn(at, *turn)) {
            gives_golden_tokens(&fixture, (turn, 2), (&devices, &devices), split);
        }
    }
}

#[test]
fn fixtures_give_their_golden_tokens_where_kv_moves_between_one_device_and_several() {
    let attending = "attn:cpu@0-1,cpu@0,cpu@1";
    let moves = [
        ("tp:cpu@0,cpu@1", "cpu", None),
        ("cpu", "tp:cpu@0,cpu@1", None),
        ("pp:cpu@0,cpu@1", "tp:cpu,cpu@0-1", None),
        ("cpu", attending, Some("head")),
        ("cpu", attending, Some("request")),
        ("cpu", attending, Some("range")),
        // prefill devices also run attention for decode devices
        ("cpu@1", "attn:cpu@0,cpu@0,cpu@1", Some("request")),
        (attending, "cpu", Some("range")),
    ];
    let fixtures = fixtures();
    for (turn, (prefill, decode, split)) in moves.into_iter().enumerate() {
        gives_golden_tokens(&fixtures[turn % fixtures.len()], (turn, 1), (prefill, decode), split);
    }
}

/// Members have whole experts, in equal and unequal numbers, or another kind of device has some.
#[test]
fn mixtures_give_their_golden_tokens_on_devices_that_divide_their_experts() {
    let others = devices().into_iter().skip(1).map(|device| format!("ep:cpu,{}", device.info().id));
    let own = ["ep:cpu@0,cpu@1", "ep:cpu,cpu@0,cpu@1", "pp:(ep:cpu@0,cpu@1),cpu"].map(str::to_owned);
    let placements: Vec<String> = own.into_iter().chain(others).collect();
    let is_mixture =
        |fixture: &std::path::PathBuf| ModelConfig::open(fixture).is_ok_and(|c| c.experts.is_some());
    for fixture in fixtures().into_iter().filter(is_mixture) {
        for (turn, devices) in placements.iter().enumerate() {
            gives_golden_tokens(&fixture, (turn, 2), (devices, devices), None);
        }
    }
}

/// Heads are divided, and every member keeps all latents: the first sends them, all get them.
#[test]
fn latents_give_their_golden_tokens_on_devices_that_divide_heads_and_where_they_move() {
    let has_latents =
        |fixture: &std::path::PathBuf| ModelConfig::open(fixture).is_ok_and(|c| c.latent.is_some());
    let Some(fixture) = fixtures().into_iter().find(has_latents) else {
        return println!("SKIPPED: no fixture with latents");
    };
    let [two, three] = ["tp:cpu@0,cpu@1", "tp:cpu,cpu@0,cpu@1"];
    let staged = "pp:(tp:cpu,cpu@1),cpu@0-1";
    let moves = [(two, two), (three, three), (two, "cpu"), ("cpu", two), ("cpu@0", staged)];
    for (turn, places) in moves.into_iter().enumerate() {
        gives_golden_tokens(&fixture, (turn, 2), places, None);
    }
}

/// Members in processes of their own, which serve one engine after the other.
#[cfg(feature = "fleet")]
#[test]
fn fixtures_give_their_golden_tokens_with_members_in_processes_of_their_own() {
    let start = common::members::MemberProcess::start;
    let members = ["cpu@0", "cpu@1"].map(|device| start(device, &[]));
    let [first, second] = members.each_ref().map(|member| member.selector.clone());
    let both = format!("attn:cpu,{first},{second}");
    let data = common::scratch("shared");
    let paths = ["first", "second"].map(|name| format!("unix:{}", data.join(name).display()));
    let sharing =
        ["cpu@0", "cpu@1"].iter().zip(&paths).map(|(device, path)| start(device, &["--listen", path]));
    let sharing: Vec<_> = if cfg!(target_os = "linux") { sharing.collect() } else { Vec::new() };
    let near = sharing.iter().map(|member| member.selector.as_str()).collect::<Vec<_>>();
    let placements = [
        (format!("tp:cpu@0,{second}"), None),
        (format!("tp:{first},{second}"), None),
        (format!("pp:cpu@0,{second}"), None),
        (both.clone(), Some("head")),
        (both.clone(), Some("request")),
        (both.clone(), Some("range")),
    ];
    // over shared memory, the same, and with one of either kind
    let over_pages: Vec<(String, Option<&str>)> = match near[..] {
        [one, two] => vec![
            (format!("tp:{one},{two}"), None),
            (format!("pp:{one},{second}"), None),
            (format!("attn:cpu,{one},{two}"), Some("head")),
            (format!("attn:cpu,{one},{two}"), Some("request")),
            (format!("attn:cpu,{one},{two}"), Some("range")),
        ],
        _ => Vec::new(),
    };
    let placements: Vec<_> = placements.into_iter().chain(over_pages).collect();
    for (at, fixture) in fixtures().into_iter().enumerate() {
        let turns = placements.iter().enumerate().filter(|(turn, _)| takes_turn(at, *turn));
        for (turn, (devices, split)) in turns {
            gives_golden_tokens(&fixture, (turn, 1), (devices, devices), *split);
        }
        // another instance computes the prompt
        if takes_turn(at, 0) {
            gives_golden_tokens(&fixture, (0, 1), ("cpu@0", &both), Some("range"));
        }
    }
    std::fs::remove_dir_all(data).unwrap();
}

/// Generates the tokens of a case of a fixture, by its turn, so often, and holds them to the golden ones.
fn gives_golden_tokens(
    fixture: &Path,
    (turn, times): (usize, usize),
    (prefill, decode): (&str, &str),
    split: Option<&str>,
) {
    if is_refused(fixture, &[prefill, decode]) {
        return;
    }
    // its rows are one super-block, which cannot be cut
    if fixture.ends_with("model-q4_k.gguf") && [prefill, decode].iter().any(|place| place.contains("tp:")) {
        return println!("SKIPPED: {} on {prefill} -> {decode}", fixture.display());
    }
    let golden = golden(fixture);
    let cases = golden["cases"].as_array().unwrap();
    let case = &cases[turn % cases.len()];
    let further = split.map_or_else(Vec::new, |split| vec!["--attn-split", split]);
    let request = Generate {
        model: fixture,
        prompt_ids: &ids(&case["prompt_ids"]),
        max_tokens: 48,
        prefill,
        decode,
        further: &further,
    };
    let answer = generate(&request);
    let place = format!("{} on {prefill} -> {decode} by {split:?}: {}", fixture.display(), case["text"]);
    let (answered, expected) = (ids(&answer["ids"]), ids(&case["greedy_ids"]));
    match Close::of(fixture, case) {
        None => assert_eq!(answered, expected, "{place}"),
        Some(close) => close.check(&answered, &expected, &place),
    }
    for (role, devices) in [("prefill", prefill), ("decode", decode)] {
        // where there are two cores, these are all, and have that name
        let is_named = answer["placement"][role] == *devices || devices.contains("cpu@0-1");
        assert!(is_named, "{place}: {}", answer["placement"]);
    }
    for _ in 1..times {
        assert_eq!(ids(&generate(&request)["ids"]), answered, "{place}");
    }
}

#[test]
fn what_several_devices_as_one_instance_cannot_do_is_refused_in_words() {
    let refused = |args: &[&str]| {
        let output = mixfleet().args(["generate", "--prompt-ids", "1"]).args(args).output().unwrap();
        assert!(!output.status.success(), "{args:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(refused(&["--device", "tp:cpu@0"]).contains("two devices or more"));
    assert!(refused(&["--device", "pp:cpu@0"]).contains("as in 'pp:cpu@0,cpu@1'"));
    assert!(refused(&["--device", "pp:(tp:cpu@0),cpu@1"]).contains("as in 'tp:cpu@0,cpu@1'"));
    assert!(refused(&["--device", "pp:(attn:cpu@0,cpu@1),cpu"]).contains("no stage"));
    assert!(refused(&["--device", "tp:(tp:cpu@0,cpu@1),cpu"]).contains("no stage"));
    assert!(refused(&["--device", "pp:(tp:cpu,cpu@0),cpu@0"]).contains("named twice"));
    assert!(refused(&["--device", "attn:cpu@0"]).contains("as in 'attn:cpu@0,cpu@1'"));
    assert!(refused(&["--device", "attn:cpu@0,cpu@0"]).contains("named twice"));
    assert!(refused(&["--device", "attn:cpu@0,cpu@0,cpu@0"]).contains("named twice"));
    assert!(refused(&["--device", "attn:cpu@0,cpu@1,cpu@1"]).contains("named twice"));
    let twice = ["--device", "attn:cpu@0,cpu@1", "--device", "attn:cpu@0,cpu"];
    assert!(refused(&twice).contains("'cpu@0' is named twice"));
    assert!(refused(&["--device", "cpu@0", "--attn-split", "head"]).contains("'attn:DEV,DEV'"));
    assert!(refused(&["--device", "attn:cpu@0,cpu@1", "--attn-split", "layer"]).contains("known: head"));
    assert!(refused(&["--device", "tp:cpu@0,cpu@0"]).contains("named twice"));
    assert!(refused(&["--device", "tp:cpu,cpu@0", "--device", "cpu@0"]).contains("named twice"));
    assert!(
        refused(&["--device", "tp:cpu@0,cpu=prefil", "--device", "cpu@1=decode"]).contains("known: prefill")
    );
}

/// A case whose best two logits are so close somewhere that an error within bounds changes its tokens.
struct Close {
    oracle: Oracle,
    prompt: Vec<u32>,
}

impl Close {
    fn of(fixture: &Path, case: &Value) -> Option<Self> {
        if let Some(gap) = case["min_router_margin"].as_f64().filter(|gap| *gap < ROUTER_MARGIN_MIN) {
            println!("NEAR TIE of experts: {}: {}: {gap:e}", fixture.display(), case["text"]);
        }
        if case["min_margin"].as_f64().unwrap() > 2.0 * LOGIT_ERROR_MAX {
            return None;
        }
        let checkpoint = open(fixture);
        let (prompt, greedy) = (ids(&case["prompt_ids"]), ids(&case["greedy_ids"]));
        let sequence = [prompt.clone(), greedy].concat();
        let oracle = Oracle::new(&checkpoint);
        let vocab = checkpoint.config.vocab as usize;
        let exact = oracle.logits(&sequence); // [tokens, vocab]
        let error = |device: &Arc<dyn Device>| {
            let rows = logits(&**device, &checkpoint, &sequence, &[prompt.len()], DType::F32).concat();
            let errors = rows.iter().zip(&exact[(prompt.len() - 1) * vocab..]);
            errors.map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max)
        };
        let error = devices().iter().map(error).fold(0.0, f64::max);
        println!("{}: {}: logits off by {error:e}", fixture.display(), case["text"]);
        assert!(error < LOGIT_ERROR_MAX, "{}: logits off by {error:e}", fixture.display());
        (2.0 * error > case["min_margin"].as_f64().unwrap()).then_some(Close { oracle, prompt })
    }

    /// Where the answer leaves the golden one, the two tokens' logits are as close as two errors allow.
    fn check(&self, answered: &[u32], expected: &[u32], place: &str) {
        assert_eq!(answered.len(), expected.len(), "{place}");
        let Some(at) = (0..expected.len()).find(|&at| answered[at] != expected[at]) else { return };
        let logits = self.oracle.last_logits(&[&self.prompt, &expected[..at]].concat());
        let gap = logits[expected[at] as usize] - logits[answered[at] as usize];
        assert!(gap < 2.0 * LOGIT_ERROR_MAX, "{place}: token {at} is {gap:e} below the golden one");
    }
}

#[test]
fn fixtures_of_families_that_are_not_served_are_refused_in_words() {
    let made = unserved(&common::scratch("unserved"));
    for fixture in refused_fixtures().into_iter().map(|(path, _)| path).chain([made]) {
        let name = fixture.display();
        let output =
            mixfleet().args(["generate", "--prompt-ids", "1", "--model"]).arg(&fixture).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{name}: {said}");
        assert!(said.contains("not supported; supported:"), "{name}: {said}");
    }
}

#[test]
fn generated_checkpoints_give_the_oracles_tokens_on_every_placement() {
    for (number, (name, random)) in tiny_variants().into_iter().chain(styled_variants()).enumerate() {
        let model = common::scratch(name);
        random.write(&model, 2).unwrap();
        let oracle = Oracle::new(&open(&model));
        let prompt_ids: Vec<u32> = (0..37).map(|i| (i * 7 + 3) % 256).collect();
        let placements = placements();
        let own = [0, 1 + number % (placements.len() - 1)];
        let turns = placements.into_iter().enumerate().filter(|(i, _)| all_pairs() || own.contains(i));
        for (_, (prefill, decode)) in turns {
            let request = Generate {
                model: &model,
                prompt_ids: &prompt_ids,
                max_tokens: 24,
                prefill: &prefill,
                decode: &decode,
                further: &[],
            };
            let mut sequence = prompt_ids.clone();
            for token in ids(&generate(&request)["ids"]) {
                let logits = oracle.last_logits(&sequence);
                let best = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let gap = best - logits[token as usize];
                assert!(gap < 1e-4, "{name} on {prefill} -> {decode}: token {token} is {gap} below the best");
                sequence.push(token);
            }
            assert_eq!(sequence.len(), prompt_ids.len() + 24);
        }
        std::fs::remove_dir_all(model).unwrap();
    }
}

/// Logits of every position from the end of a prompt on: the prompt in chunks of these ends, then token by
/// token.
fn logits(
    device: &dyn Device,
    checkpoint: &Checkpoint,
    sequence: &[u32],
    chunks: &[usize],
    dtype: DType,
) -> Vec<Vec<f32>> {
    let config = Arc::new(checkpoint.config.clone());
    let weights = checkpoint.place(device, &mut |_, _| {}).unwrap();
    let block_tokens = device.limits().kv_page_tokens;
    let blocks = (sequence.len() as u32).div_ceil(block_tokens);
    let tokens_max = sequence.len() as u32;
    let shape =
        StepShape { tokens_max, sequences_max: 1, blocks, block_tokens, activations: dtype, kv: dtype };
    let forward = Forward::new(device, config.clone(), weights, shape).unwrap();
    let pages: Vec<u32> = (0..blocks).rev().collect();
    let mut queue = device.queue().unwrap();
    let mut run = |start: usize, end: usize| {
        let part = StepInput {
            start: start as u32,
            tokens: &sequence[start..end],
            pages: &pages,
            draw: Some(DrawInput::GREEDY),
        };
        let pass = forward.begin(device, &[part]).unwrap();
        let ticket = queue.submit(&forward.whole(&pass).unwrap()).unwrap();
        queue.wait(ticket, Duration::from_secs(600)).unwrap(); // some compile kernels at first use
        let mut row = vec![0f32; config.vocab as usize];
        device.read(&forward.logits(&pass), bytemuck::cast_slice_mut(&mut row)).unwrap();
        row
    };
    let mut end = 0;
    let of_chunks = chunks.iter().map(|&next| run(std::mem::replace(&mut end, next), next));
    let mut rows: Vec<_> = of_chunks.last().into_iter().collect();
    rows.extend((end..sequence.len()).map(|at| run(at, at + 1)));
    rows
}

/// A prompt over latents, the same over expanded keys, and in chunks: the second attends to latents, as it is
/// short, and the third to keys expanded from those of all chunks.
#[test]
fn latents_give_their_golden_logits_and_tokens_absorbed_expanded_and_in_turn() {
    let devices: Vec<_> = devices().into_iter().chain(wgpu()).collect();
    for fixture in fixtures() {
        let whole = open(&fixture);
        let Some(latent) = whole.config.latent.as_ref().map(|latent| latent.lengths) else { continue };
        let mut absorbing = open(&fixture);
        absorbing.config.latent.as_mut().unwrap().lengths.expanded_tokens = 0;
        let golden = golden(&fixture);
        let case =
            golden["cases"].as_array().unwrap().iter().max_by_key(|case| ids(&case["prompt_ids"]).len());
        let case = case.expect("a case");
        let (prompt, greedy) = (ids(&case["prompt_ids"]), ids(&case["greedy_ids"]));
        let sequence = [prompt.clone(), greedy.clone()].concat();
        let chunks = [60, 64, prompt.len()];
        let ways = [0, 60, 64].iter().zip(chunks).map(|(&from, to)| {
            latent.expands(&[Prefill { context: from, tokens: to as u32 - from, last: false }], 16)
        });
        assert_eq!(ways.collect::<Vec<_>>(), [true, false, true]);
        for device in &devices {
            for (way, checkpoint, chunks) in [
                ("absorbed", &absorbing, &chunks[2..]),
                ("expanded", &whole, &chunks[2..]),
                ("in turn", &whole, &chunks[..]),
            ] {
                let rows = logits(&**device, checkpoint, &sequence, chunks, DType::F32);
                let place = format!("{} on {}, {way}", fixture.display(), device.info().id);
                for (name, row) in [("first_logits", &rows[0]), ("last_logits", &rows[48])] {
                    let expected = case[name].as_array().unwrap().iter().map(|x| x.as_f64().unwrap());
                    let errors = row.iter().zip(expected).map(|(a, b)| (f64::from(*a) - b).abs());
                    let error = errors.fold(0.0, f64::max);
                    assert!(error < LOGIT_ERROR_MAX, "{place}: {name} off by {error:e}");
                }
                let best =
                    |row: &Vec<f32>| (0..row.len()).fold(0, |b, i| if row[i] > row[b] { i } else { b });
                let chosen: Vec<u32> = rows[..48].iter().map(|row| best(row) as u32).collect();
                assert_eq!(chosen, greedy, "{place}");
            }
        }
    }
}

#[test]
fn f32_logits_of_the_fixtures_are_golden() {
    let devices: Vec<_> = devices().into_iter().chain(wgpu()).collect();
    for fixture in fixtures() {
        let checkpoint = open(&fixture);
        for (at, device) in devices.iter().enumerate() {
            if is_refused(&fixture, &[&device.info().id]) {
                continue;
            }
            let golden = golden(&fixture);
            let cases = golden["cases"].as_array().unwrap().iter().enumerate();
            for (_, case) in cases.filter(|(number, _)| is_turn_of(at, *number, devices.len())) {
                let prompt = ids(&case["prompt_ids"]);
                let sequence = [prompt.clone(), ids(&case["greedy_ids"])].concat();
                let rows = logits(&**device, &checkpoint, &sequence, &[prompt.len()], DType::F32);
                for (name, row) in [("first_logits", &rows[0]), ("last_logits", &rows[48])] {
                    let expected = case[name].as_array().unwrap().iter().map(|x| x.as_f64().unwrap());
                    let errors = row.iter().zip(expected).map(|(a, b)| (f64::from(*a) - b).abs());
                    let error = errors.fold(0.0, f64::max);
                    let place = format!("{} on {}", fixture.display(), device.info().id);
                    assert!(error < LOGIT_ERROR_MAX, "{place}: {name} off by {error:e}");
                }
            }
        }
    }
}

#[test]
fn chat_templates_of_the_fixtures_render_and_tokenise_as_golden() {
    for fixture in fixtures() {
        let chat = &golden(&fixture)["chat"];
        let messages: Vec<ChatMessage> = serde_json::from_value(chat["messages"].clone()).unwrap();
        let template = ChatTemplate::open(&fixture).unwrap().expect("the fixture has a template");
        let rendered = template.render(&messages, true, &serde_json::Map::new(), 0).unwrap();
        assert_eq!(rendered, chat["rendered"].as_str().unwrap());
        let tokens = Tokenizer::open(&fixture).unwrap().encode_chat(&rendered).unwrap();
        assert_eq!(tokens, ids(&chat["ids"]));
    }
}

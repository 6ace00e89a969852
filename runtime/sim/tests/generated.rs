//! Generated traces have the requested properties.

use mixfleet_hal::units::Seconds;
use mixfleet_sim::trace::generate::{
    Arrivals, GenerateError, GenerateOptions, Generator, Output, Preset, write_line,
};
use mixfleet_sim::trace::stats::{Stats, StatsOptions, TraceTally};
use mixfleet_sim::trace::{Format, ReadOptions, Request, Trace};
use std::io::Write;

fn options(requests: u64, rate: f64) -> GenerateOptions {
    GenerateOptions { requests, rate, seed: 11, arrivals: Arrivals::Poisson }
}

fn written(mut generator: Generator, name: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut output = Output::new(&mut bytes, name.as_ref()).expect("memory");
    let (mut line, mut ids) = (Vec::new(), Vec::new());
    while let Some(request) = generator.advance(&mut ids) {
        line.clear();
        write_line(&mut line, &request, &ids);
        output.write_all(&line).expect("memory");
    }
    output.finish().expect("memory");
    bytes
}

fn stats(generator: Generator) -> Stats {
    let options =
        StatsOptions { block_tokens: 512, capacities_blocks: vec![], policies: vec![], prefill: None };
    let mut tally = TraceTally::new(options);
    generator.for_each(|request| tally.add(&request));
    tally.finish("generated", Default::default())
}

#[test]
fn what_is_written_is_read_again() {
    for name in ["t.jsonl", "t.jsonl.zst", "t.gz"] {
        let generator = || Generator::new(Preset::Conversation.model(), options(3_000, 5.0)).unwrap();
        let bytes = written(generator(), name);
        assert_eq!(bytes, written(generator(), name), "same seed, same bytes");
        let mut trace =
            Trace::from_reader(name, std::io::Cursor::new(bytes), ReadOptions::default()).unwrap();
        assert_eq!(trace.format(), Format::Mooncake);
        let read: Vec<Request> = trace.by_ref().map(|request| request.unwrap()).collect();
        // The format has no sessions.
        let made: Vec<Request> = generator().map(|request| Request { session: None, ..request }).collect();
        assert_eq!(read, made);
        assert_eq!(trace.repairs(), Default::default());
    }
}

#[test]
fn another_seed_gives_other_requests() {
    let of = |seed| {
        let options = GenerateOptions { seed, ..options(100, 5.0) };
        Generator::new(Preset::Conversation.model(), options).unwrap().collect::<Vec<_>>()
    };
    assert_ne!(of(1), of(2));
}

/// The conversation trace has 3.40 requests/s, prompts of 12,035 / 6,909 / 85,401 tokens (mean, p50, p99),
/// answers of 343 / 350 / 1,120, and 37.4 % of all tokens hit.
#[test]
fn a_conversation_is_like_its_source() {
    let made = stats(Generator::new(Preset::Conversation.model(), options(40_000, 3.4)).unwrap());
    let near = |found: f64, expected: f64, tolerance: f64| {
        assert!((found / expected - 1.0).abs() < tolerance, "{found} for {expected}: {made:#?}");
    };
    near(made.requests_per_s.unwrap(), 3.4, 0.05);
    near(made.input_tokens.mean, 12_035.0, 0.1);
    near(made.input_tokens.p50.into(), 6_909.0, 0.15);
    near(made.input_tokens.p99.into(), 85_401.0, 0.15);
    near(made.output_tokens.mean, 343.0, 0.05);
    near(made.output_tokens.p50.into(), 350.0, 0.05);
    near(made.output_tokens.p99.into(), 1_120.0, 0.1);
    near(made.prefix_hit.infinite.token, 0.374, 0.15);
}

/// The agentic trace has prompts of 115,984 tokens on average, 96 % of which are hit in blocks of 64.
#[test]
fn agents_are_like_their_source() {
    let made = stats(Generator::new(Preset::Agentic.model(), options(20_000, 2.0)).unwrap());
    assert!((made.input_tokens.mean / 116_000.0 - 1.0).abs() < 0.15, "{made:#?}");
    assert!((made.output_tokens.mean / 439.0 - 1.0).abs() < 0.1, "{made:#?}");
    assert!((made.requests_per_s.unwrap() / 2.0 - 1.0).abs() < 0.15, "{made:#?}");
    assert!(made.prefix_hit.infinite.token > 0.9, "{made:#?}");
}

#[test]
fn a_batch_shares_nothing() {
    let made = stats(Generator::new(Preset::Batch.model(), options(20_000, 100.0)).unwrap());
    assert_eq!(made.prefix_hit.infinite.token, 0.0);
    assert!((made.input_tokens.mean / 2_588.0 - 1.0).abs() < 0.05, "{made:#?}");
    assert!((made.output_tokens.mean / 291.0 - 1.0).abs() < 0.05, "{made:#?}");
    assert!((made.requests_per_s.unwrap() / 100.0 - 1.0).abs() < 0.03, "{made:#?}");
}

#[test]
fn hits_are_what_was_asked_for() {
    let model = Preset::Conversation.model();
    for target in [0.1, 0.5, 0.8] {
        let generator = Generator::with_hit_target(model, options(20_000, 10.0), target).unwrap();
        let found = stats(generator).prefix_hit.infinite.token;
        assert!((found - target).abs() < 0.002, "{found} for {target}");
    }
    // A larger trace of the same duration has the same hit rate.
    let large = Generator::with_hit_target(model, options(60_000, 30.0), 0.5).unwrap();
    let found = stats(large).prefix_hit.infinite.token;
    assert!((found - 0.5).abs() < 0.01, "{found}");
    // These are less than the system prompt alone gives, and more than 100 s can give.
    for (target, requests, rate) in [(0.001, 200, 0.1), (0.9, 2_000, 20.0)] {
        let error = Generator::with_hit_target(model, options(requests, rate), target).err();
        assert!(matches!(error, Some(GenerateError::Hits { .. })), "{target}: {error:?}");
    }
    for target in [0.0, 1.0, -1.0, f64::NAN] {
        let error = Generator::with_hit_target(model, options(200, 10.0), target).err();
        assert!(matches!(error, Some(GenerateError::Share(_))), "{target}: {error:?}");
    }
}

#[test]
fn a_rate_must_be_one() {
    for rate in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let error = Generator::new(Preset::Batch.model(), options(1, rate)).err();
        assert!(matches!(error, Some(GenerateError::Rate(_))), "{rate}");
    }
}

#[test]
fn sessions_are_chains_of_growing_prompts() {
    let requests: Vec<Request> =
        Generator::new(Preset::Conversation.model(), options(5_000, 5.0)).unwrap().collect();
    assert!(requests.windows(2).all(|pair| pair[0].at <= pair[1].at && pair[0].id + 1 == pair[1].id));
    let mut chained = 0;
    for request in &requests {
        let session = request.session.expect("a session");
        assert_eq!(request.chain.len(), request.prompt_tokens.div_ceil(512) as usize);
        let Some(after) = session.after else { continue };
        let before = &requests[after as usize];
        assert_eq!(before.session.map(|before| before.id), Some(session.id));
        assert!(request.at >= before.at + session.think - Seconds(2e-3));
        let full = (before.prompt_tokens / 512) as usize;
        // A context that starts over shares only the system prompt.
        if request.prompt_tokens > before.prompt_tokens + before.output_tokens {
            assert_eq!(before.chain[..full], request.chain[..full]);
            chained += 1;
        }
    }
    assert!(chained > 1_000, "{chained}");
}

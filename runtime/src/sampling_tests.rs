use super::*;
use mixfleet_hal::random::Stream;
use proptest::prelude::*;
use std::sync::Arc;

fn greedy() -> Sampling {
    Sampling { temperature: 0.0, ..Sampling::default() }
}

fn id(logits: &[f32], sampling: &Sampling, output: &[u32]) -> u32 {
    sample(logits, sampling, History { prompt: &[], output }, &[], None).expect("a token").id
}

/// The probability of each token by the documented rules, with a sort and whole distributions.
fn naive(logits: &[f32], s: &Sampling, history: History, forbidden: &[u32]) -> Vec<f64> {
    let mut l: Vec<f64> = logits.iter().map(|l| f64::from(*l)).collect();
    for (id, logit) in l.iter_mut().enumerate() {
        let id = id as u32;
        let count = history.output.iter().filter(|other| **other == id).count();
        if count > 0 || history.prompt.contains(&id) {
            let r = f64::from(s.repetition_penalty);
            *logit = if *logit > 0.0 { *logit / r } else { *logit * r };
        }
        if count > 0 {
            *logit -= f64::from(s.presence_penalty) + f64::from(s.frequency_penalty) * count as f64;
        }
        let bias = s.logit_bias.iter().find(|(token, _)| *token == id);
        *logit += bias.map_or(0.0, |(_, bias)| f64::from(*bias));
        if forbidden.contains(&id) {
            *logit = f64::NEG_INFINITY;
        }
    }
    let mut order: Vec<usize> = (0..l.len()).collect();
    order.sort_by(|a, b| l[*b].total_cmp(&l[*a]).then(a.cmp(b)));
    if s.temperature == 0.0 {
        return (0..l.len()).map(|id| f64::from(u8::from(id == order[0]))).collect();
    }
    let best = l[order[0]];
    let mut p: Vec<f64> = l.iter().map(|l| ((l - best) / f64::from(s.temperature)).exp()).collect();
    let normalise = |p: &mut Vec<f64>| {
        let sum: f64 = p.iter().sum();
        p.iter_mut().for_each(|p| *p /= sum);
    };
    if s.top_k > 0 {
        order.iter().skip(s.top_k as usize).for_each(|id| p[*id] = 0.0);
    }
    normalise(&mut p);
    let mut cumulated = 0.0;
    for id in &order {
        if cumulated >= f64::from(s.top_p) && s.top_p < 1.0 {
            p[*id] = 0.0;
        }
        cumulated += p[*id];
    }
    let floor = f64::from(s.min_p) * p[order[0]];
    p.iter_mut().filter(|p| **p < floor).for_each(|p| *p = 0.0);
    normalise(&mut p);
    p
}

fn some_sampling() -> impl Strategy<Value = Sampling> {
    let penalties = (
        prop_oneof![Just(1.0f32), 0.5f32..2.0],
        prop_oneof![Just(0.0f32), -2f32..2.0],
        prop_oneof![Just(0.0f32), -2f32..2.0],
    );
    let truncation = (
        prop_oneof![Just(1.0f32), 0.0f32..1.0],
        prop_oneof![Just(0u32), 1u32..80],
        prop_oneof![Just(0.0f32), 0.0f32..0.5],
    );
    let temperature = prop_oneof![Just(0.0f32), Just(1.0f32), 0.05f32..3.0];
    (temperature, truncation, penalties, any::<u64>()).prop_map(
        |(temperature, (top_p, top_k, min_p), (r, p, f), seed)| Sampling {
            temperature,
            top_p,
            top_k,
            min_p,
            repetition_penalty: r,
            presence_penalty: p,
            frequency_penalty: f,
            logit_bias: Arc::default(),
            seed,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn draws_follow_the_rules(
        logits in prop::collection::vec(-12f32..12.0, 1..200),
        sampling in some_sampling(),
        prompt in prop::collection::vec(0u32..220, 0..20),
        output in prop::collection::vec(0u32..220, 0..20),
        bias in prop_oneof![Just(Vec::new()), prop::collection::vec((0u32..220, -5f32..5.0), 0..10)],
        forbidden in prop_oneof![Just(Vec::new()), prop::collection::vec(0u32..220, 0..250)],
    ) {
        let history = History { prompt: &prompt, output: &output };
        let bias: std::collections::BTreeMap<u32, f32> = bias.into_iter().collect();
        let sampling = Sampling { logit_bias: bias.into_iter().collect(), ..sampling };
        let sampled = sample(&logits, &sampling, history, &forbidden, None);
        if (0..logits.len() as u32).all(|id| forbidden.contains(&id)) {
            prop_assert_eq!(sampled, Err(SamplingError::Empty));
            return Ok(());
        }
        let p = naive(&logits, &sampling, history, &forbidden);
        let sampled = sampled.expect("a token");
        prop_assert!(!forbidden.contains(&sampled.id), "{} is forbidden", sampled.id);
        // The draw, by hand: the token's interval of the cumulated distribution holds the uniform number.
        let below: f64 = p[..sampled.id as usize].iter().sum();
        let above = below + p[sampled.id as usize];
        prop_assert!(p[sampled.id as usize] > 0.0, "{} was cut off", sampled.id);
        if sampling.temperature > 0.0 {
            let uniform = unit(sampling.seed, output.len() as u64);
            prop_assert!((below - 1e-5..above + 1e-5).contains(&uniform), "{below} {uniform} {above}");
        }
    }

    #[test]
    fn logprobs_are_of_the_raw_distribution(logits in prop::collection::vec(-30f32..30.0, 1..100), top in 0u32..120, seed: u64) {
        let sampling = Sampling { temperature: 0.3, top_k: 2, repetition_penalty: 1.5, seed, ..Sampling::default() };
        let sampled = sample(&logits, &sampling, History { prompt: &[0, 1], output: &[2] }, &[], Some(top)).expect("a token");
        let logprobs = sampled.logprobs.expect("asked for");
        let sum: f64 = logits.iter().map(|l| f64::from(*l).exp()).sum();
        let exact = |id: u32| f64::from(logits[id as usize]) - sum.ln();
        prop_assert!((f64::from(logprobs.chosen) - exact(sampled.id)).abs() < 1e-5);
        prop_assert_eq!(logprobs.top.len(), logits.len().min(top as usize));
        prop_assert!(logprobs.top.iter().all(|(id, p)| (f64::from(*p) - exact(*id)).abs() < 1e-5));
        prop_assert!(logprobs.top.is_sorted_by(|a, b| a.1 > b.1 || (a.1 == b.1 && a.0 < b.0) || logits[a.0 as usize] > logits[b.0 as usize]));
        let listed = |id: u32| logprobs.top.iter().any(|(other, _)| *other == id);
        let worst = logprobs.top.last().map_or(f32::INFINITY, |(id, _)| logits[*id as usize]);
        prop_assert!((0..logits.len() as u32).all(|id| listed(id) || logits[id as usize] <= worst));
    }

    #[test]
    fn any_input_gives_a_token_or_an_error(
        logits in prop::collection::vec(any::<f32>(), 0..40),
        sampling in some_sampling(),
        odd in prop::collection::vec(any::<f32>(), 6),
    ) {
        let wild = Sampling { temperature: odd[0], top_p: odd[1], min_p: odd[2], repetition_penalty: odd[3],
            presence_penalty: odd[4], frequency_penalty: odd[5], ..sampling.clone() };
        for sampling in [sampling, wild] {
            if let Ok(sampled) = sample(&logits, &sampling, History { prompt: &[1], output: &[2] }, &[], Some(3)) {
                prop_assert!((sampled.id as usize) < logits.len());
            }
        }
    }
}

#[test]
fn greedy_takes_the_lowest_of_equal_logits() {
    assert_eq!(id(&[1.0, 3.0, 3.0, 2.0], &greedy(), &[]), 1);
    assert_eq!(id(&[f32::NEG_INFINITY, -0.0, 0.0], &greedy(), &[]), 1);
    let penalised = Sampling { repetition_penalty: 2.0, ..greedy() };
    assert_eq!(id(&[1.0, 3.0, 2.9, 2.0], &penalised, &[1]), 2);
}

#[test]
fn equal_logits_are_cut_by_id() {
    let logits = [0.0; 50];
    let drawn = |sampling: &Sampling| {
        let mut seen: Vec<u32> =
            (0..400).map(|seed| id(&logits, &Sampling { seed, ..sampling.clone() }, &[])).collect();
        seen.sort_unstable();
        seen.dedup();
        seen
    };
    assert_eq!(drawn(&Sampling { top_k: 3, ..Sampling::default() }), [0, 1, 2]);
    assert_eq!(drawn(&Sampling { top_p: 0.08, ..Sampling::default() }), [0, 1, 2, 3]);
    assert_eq!(drawn(&Sampling { top_p: 0.0, ..Sampling::default() }), [0]);
}

#[test]
fn draws_depend_on_the_seed_and_the_place_alone() {
    let logits = [0.0; 1000];
    let sampling = Sampling { seed: 5, ..Sampling::default() };
    assert_eq!(id(&logits, &sampling, &[1, 2]), id(&logits, &sampling, &[8, 9]));
    assert_ne!(id(&logits, &sampling, &[1, 2]), id(&logits, &sampling, &[1, 2, 3]));
    assert_ne!(id(&logits, &sampling, &[]), id(&logits, &Sampling { seed: 6, ..sampling.clone() }, &[]));
}

#[test]
fn frequencies_are_those_of_the_softmax() {
    let logits = [0.0, 1.0, 2.0, -40.0];
    let weights = logits.map(|l: f32| f64::from(l).exp());
    let sum: f64 = weights.iter().sum();
    let mut counts = [0.0; 4];
    for seed in 0..20_000 {
        counts[id(&logits, &Sampling { seed, ..Sampling::default() }, &[]) as usize] += 1.0;
    }
    for (count, weight) in counts.iter().zip(weights) {
        // Five standard deviations of a binomial proportion.
        let p = weight / sum;
        assert!((count / 20_000.0 - p).abs() <= 5.0 * (p * (1.0 - p) / 20_000.0).sqrt() + 1e-9);
    }
}

#[test]
fn large_vocabularies_agree_with_the_sorted_rules() {
    let mut random = Stream::new(3);
    let logits: Vec<f32> = (0..128_256).map(|_| random.next_normal() as f32 * 2.0).collect();
    for (seed, (top_k, top_p)) in (0..).zip([(0, 0.9), (0, 0.1), (40, 1.0), (1000, 0.5), (0, 1.0)]) {
        let sampling = Sampling { top_k, top_p, seed, ..Sampling::default() };
        let p = naive(&logits, &sampling, History::default(), &[]);
        let drawn = id(&logits, &sampling, &[]) as usize;
        let below: f64 = p[..drawn].iter().sum();
        let uniform = unit(seed, 0);
        assert!(below - 1e-6 <= uniform && uniform <= below + p[drawn] + 1e-6, "{top_k} {top_p}");
    }
}

#[test]
fn garbage_is_an_error() {
    let draw = |logits: &[f32]| sample(logits, &Sampling::default(), History::default(), &[], None);
    assert_eq!(draw(&[0.0, f32::NAN]), Err(SamplingError::NotFinite(1)));
    assert_eq!(draw(&[f32::INFINITY]), Err(SamplingError::NotFinite(0)));
    assert_eq!(draw(&[f32::NEG_INFINITY; 3]), Err(SamplingError::Empty));
    assert_eq!(draw(&[]), Err(SamplingError::Empty));
    assert_eq!(draw(&[f32::NEG_INFINITY, -5.0]).map(|s| s.id), Ok(1));
}

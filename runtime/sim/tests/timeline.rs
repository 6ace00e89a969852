//! The samples of an observer agree with the run's results.

use crate::common::fleet_from;
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::fleet::{Action, Admission, Policy};
use mixfleet_sim::simulate::{AnswerTimes, Choices, Observer, Results, Sample, Setup, run};
use mixfleet_sim::trace::Request;
use mixfleet_sim::trace::generate::{Arrivals, GenerateOptions, Generator, Preset};

/// One prefill and one decode instance: 1 ms per prompt token, 20 ms per step and 10 us more per KV token in
/// it.
const SPLIT: &str = r#"
version = 1
[model]
layers = 32
kv_bytes_per_token = 131072
[kv]
block_tokens = 512
[engine]
max_batched_tokens = 8192
max_prefill_tokens_beside_decode = 8192
max_sequences = 256
[slo]
ttft_s = 5.0
tbt_s = 0.1
[[pool]]
name = "p"
role = "prefill"
usd_per_hour = 1.0
cache_tokens = 2_000_000
calibration = { prefill_s = { overhead = 0.0, per_token = 1e-3, per_token_squared = 0.0 }, decode_s = { base = 0.02, per_sequence = 0.0, per_kv_token = 0.0 } }
[[pool]]
name = "d"
role = "decode"
usd_per_hour = 1.0
cache_tokens = 2_000_000
calibration = { prefill_s = { overhead = 0.0, per_token = 1e-3, per_token_squared = 0.0 }, decode_s = { base = 0.02, per_sequence = 0.0, per_kv_token = 1e-5 } }
"#;

#[derive(Default)]
struct Seen {
    interval_s: Option<f64>,
    samples: Vec<Sample>,
    answers: Vec<AnswerTimes>,
    arrived: u64,
    placed: u64,
}

impl Observer for Seen {
    fn arrived(&mut self, _: f64, requests: u64) {
        self.arrived = requests;
    }

    fn decided(&mut self, _: f64, action: &Action) {
        self.placed += u64::from(matches!(action, Action::Place { .. }));
    }

    fn finished(&mut self, _: f64, answer: &AnswerTimes) {
        self.answers.push(*answer);
    }

    fn interval_s(&self) -> Option<f64> {
        self.interval_s
    }

    fn sampled(&mut self, sample: &Sample) {
        self.samples.push(sample.clone());
    }
}

fn request(id: u64, at_s: f64, prompt_tokens: u32, output_tokens: u32) -> Request {
    let mut made = Generator::new(
        Preset::Conversation.model(),
        GenerateOptions { requests: 1, rate: 1.0, seed: 1, arrivals: Arrivals::Poisson },
    )
    .unwrap();
    let template = made.next().unwrap();
    Request { id, at: Seconds(at_s), prompt_tokens, output_tokens, chain: Vec::new(), ..template }
}

fn play(setup: &Setup, requests: Vec<Request>, interval_s: f64) -> (Results, Seen) {
    let mut seen = Seen { interval_s: Some(interval_s), ..Seen::default() };
    let results = run(setup, requests.into_iter().map(Ok), &mut seen).unwrap();
    (results, seen)
}

fn busy(requests: u64) -> Vec<Request> {
    let options = GenerateOptions { requests, rate: 0.4, seed: 9, arrivals: Arrivals::Poisson };
    Generator::new(Preset::Conversation.model(), options).unwrap().collect()
}

#[test]
fn a_request_alone_is_seen_where_it_is() {
    let setup = Setup::new(&fleet_from(SPLIT), Choices { admission: Admission::None, ..Choices::default() });
    // The prompt takes 2 s; the 100 steps after the first token take 20 ms and 10 us x about 2050 each.
    let (results, seen) = play(&setup, vec![request(1, 0.5, 2000, 101)], 1.0);
    let [p, d]: [Vec<&Sample>; 2] =
        [0, 1].map(|pool| seen.samples.iter().filter(|s| s.pool == pool).collect());
    assert_eq!((p[0].time_s, p[0].prefilling, p[0].fleet_arrived), (1.0, 1, 1));
    // 0.5 s of its 2 s have passed.
    assert!((p[0].prefill_load - 1.5 / 5.0).abs() < 1e-9, "{:?}", p[0]);
    assert!((p[0].prefill_utilisation - 0.5).abs() < 1e-9, "{:?}", p[0]);
    assert!((p[1].prefill_load - 0.5 / 5.0).abs() < 1e-9 && (p[1].prefill_utilisation - 1.0).abs() < 1e-9);
    // Its room is reserved where it will decode.
    assert_eq!((p[1].used_tokens, d[1].used_tokens), (2048, 2048));
    assert_eq!((d[1].receiving, d[1].decoding), (1, 0));
    let decoding = d[3];
    assert_eq!((decoding.time_s, decoding.decoding), (4.0, 1));
    // Some 37 of its steps have passed, with a context of 2000.
    assert!((decoding.decode_load - 0.0403 / 0.1).abs() < 0.002, "{decoding:?}");
    assert!((decoding.decode_utilisation - 1.0).abs() < 1e-6, "{decoding:?}");
    assert_eq!(d.iter().map(|s| s.completed).sum::<u64>(), 1);
    assert_eq!(seen.samples.last().map(|s| s.time_s), Some(results.simulated_s));
    assert!((seen.answers[0].ttft_s - 2.0).abs() < 1e-9 && seen.answers.len() == 1);
}

#[test]
fn samples_add_up_to_the_results() {
    for (admission, interval_s) in [(Admission::EarlyRejection, 10.0), (Admission::Prediction, 0.7)] {
        let setup = Setup::new(&fleet_from(SPLIT), Choices { admission, ..Choices::default() });
        let (results, seen) = play(&setup, busy(600), interval_s);
        let sum = |of: fn(&Sample) -> u64| seen.samples.iter().map(of).sum::<u64>();
        let rejected: u64 = results.rejected.values().sum();
        assert!(rejected > 0 && results.completed > 100, "{results:?}");
        assert_eq!(sum(|s| s.completed), results.completed);
        assert_eq!(
            (sum(|s| s.fleet_rejected), sum(|s| s.fleet_arrived)),
            (2 * rejected, 2 * results.requests)
        );
        assert_eq!((seen.arrived, seen.placed), (results.requests, results.completed + results.dropped));
        assert_eq!(seen.answers.len() as u64, results.completed);
        for (at, pool) in results.pools.iter().enumerate() {
            let of_pool = || seen.samples.iter().filter(|s| s.pool == at as u32);
            let prefill_s: f64 = of_pool().map(|s| s.prefill_utilisation * s.interval_s).sum();
            let decode_s: f64 = of_pool().map(|s| s.decode_utilisation * s.interval_s).sum();
            assert!(
                (prefill_s - pool.prefill_device_s).abs() < 1e-6 * results.simulated_s,
                "{prefill_s} {pool:?}"
            );
            assert!(
                (decode_s - pool.decode_device_s).abs() < 1e-6 * results.simulated_s,
                "{decode_s} {pool:?}"
            );
            for sample in of_pool() {
                let share = sample.prefill_utilisation + sample.decode_utilisation;
                assert!((-1e-9..=1.0 + 1e-9).contains(&share), "{sample:?}");
                assert!(sample.used_tokens + sample.cached_tokens <= 2_000_000, "{sample:?}");
            }
        }
    }
}

#[test]
fn of_a_time_without_requests_only_the_first_and_the_last_sample_come() {
    let setup = Setup::new(&fleet_from(SPLIT), Choices { admission: Admission::None, ..Choices::default() });
    let (_, seen) = play(&setup, vec![request(1, 0.0, 100, 1), request(2, 1e9 + 0.5, 100, 1)], 1.0);
    let times: Vec<f64> = seen.samples.iter().filter(|s| s.pool == 0).map(|s| s.time_s).collect();
    assert_eq!(times[..2], [1.0, 1e9]);
    assert!((times[2] - 1e9 - 0.6).abs() < 1e-6 && times.len() == 3, "{times:?}");
}

#[test]
fn late_requests_are_dropped_and_their_prefill_is_wasted_only_if_asked_for() {
    let choices = Choices { admission: Admission::None, policy: Policy::LeastLoaded, ..Choices::default() };
    let mut setup = Setup::new(&fleet_from(SPLIT), choices);
    let (kept, _) = play(&setup, busy(600), 10.0);
    assert_eq!((kept.dropped, kept.prefill_wasted_s, kept.completed), (0, 0.0, 600));
    setup.fleet.drop_at_decode = true;
    let (late, seen) = play(&setup, busy(600), 10.0);
    assert!(late.dropped > 0 && late.completed > 0, "{late:?}");
    assert_eq!(late.completed + late.dropped, 600);
    assert_eq!(seen.samples.iter().map(|s| s.dropped).sum::<u64>(), late.dropped);
    assert!(late.prefill_wasted_s > 0.0 && late.prefill_wasted_s < late.prefill_device_s);
    assert!(late.tbt_s.p99 < kept.tbt_s.p99, "{late:?} {kept:?}");
}

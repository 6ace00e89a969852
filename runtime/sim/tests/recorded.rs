//! Simulations compared with recorded runs.

use crate::common::{at_random, fleet_from};
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::fleet::Admission;
use mixfleet_sim::against::RunErrors;
use mixfleet_sim::simulate::{AnswerTimes, Choices, Observer, Setup, run};
use mixfleet_sim::trace::{RecordedRun, TraceError};
use std::path::Path;

/// A prompt takes 1 ms a token, a step 10 ms.
const FLEET: &str = "version = 1\n[model]\nlayers = 32\nkv_bytes_per_token = 131072\n\
     [[pool]]\nname = \"one\"\ncache_tokens = 100000\n\
     calibration = { prefill_s = { overhead = 0.0, per_token = 1e-3, per_token_squared = 0.0 }, \
     decode_s = { base = 0.01, per_sequence = 0.0, per_kv_token = 0.0 } }\n";

#[derive(Default)]
struct Answers(Vec<AnswerTimes>);

impl Observer for Answers {
    fn finished(&mut self, _: f64, answer: &AnswerTimes) {
        self.0.push(*answer);
    }
}

fn recorded(text: &str) -> Result<RecordedRun, TraceError> {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("recorded");
    std::fs::create_dir_all(&directory).unwrap();
    let file = directory.join(format!("{:?}.jsonl", std::thread::current().id()));
    std::fs::write(&file, text).unwrap();
    RecordedRun::read(&file)
}

#[test]
fn a_run_that_was_recorded_by_the_simulator_has_no_errors() {
    let setup = Setup::new(&fleet_from(FLEET), Choices { admission: Admission::None, ..Choices::default() });
    let mut first = Answers::default();
    let requests = at_random(3, 4.0, 5.0, |random| (50 + random.below(250), 1 + random.below(40)));
    let count = requests.len();
    run(&setup, requests.into_iter().map(Ok), &mut first).unwrap();
    let lines: Vec<String> = first
        .0
        .iter()
        .map(|answer| {
            let (input, output, at) = (answer.prompt_tokens, answer.output_tokens, answer.arrived_s);
            let (first, last) = (at + answer.ttft_s, at + answer.e2e_s);
            format!(
                "{{\"input_toks\": {input}, \"output_toks\": {output}, \"arrival_time\": {at}, \"queued_ts\": {at}, \
                 \"first_token_ts\": {first}, \"last_token_ts\": {last}}}"
            )
        })
        .collect();
    let log = recorded(&lines.join("\n")).unwrap();
    let mut again = Answers::default();
    run(&setup, log.trace(), &mut again).unwrap();
    let errors = RunErrors::new(&log, &again.0);
    assert_eq!((errors.requests, errors.answered), (count, count));
    for times in [errors.ttft, errors.tpot, errors.e2e] {
        assert!(
            times.error_p90 < 1e-9 && times.mean_off.abs() < 1e-9 && times.recorded_mean_s > 0.0,
            "{times:?}"
        );
    }
}

#[test]
fn a_log_without_times_is_no_recorded_run() {
    let error = |text: &str| recorded(text).unwrap_err().to_string();
    let times = r#"{"input_toks": 1, "output_toks": 2, "arrival_time": 5.0"#;
    assert!(error(&format!("{times}}}")).contains("no first_token_ts"));
    assert!(
        error(&format!("{times}, \"first_token_ts\": 4.0, \"last_token_ts\": 6.0}}"))
            .contains("after it was queued")
    );
    assert!(error("\n").contains("holds no request"));
    let both = format!("{times}, \"first_token_ts\": 5.5, \"last_token_ts\": 7.5}}");
    let run = recorded(&both).unwrap();
    assert_eq!(
        (run.requests[0].ttft_s, run.requests[0].tpot_s, run.requests[0].at),
        (0.5, Some(2.0), Seconds(0.0))
    );
}

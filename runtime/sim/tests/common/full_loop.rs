//! The rate of a fleet that is always full: tokens of the time in which all clients of a closed loop decode.
//!
//! A run as a whole has a time in which it fills and one in which it drains, in which steps have fewer
//! sequences and take almost as long. A plan's rate is that of full steps.

use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::fleet::Admission;
use mixfleet_sim::fleet_file::FleetFile;
use mixfleet_sim::simulate::{AnswerTimes, Choices, Observer, Setup, run};
use mixfleet_sim::trace::ClosedLoop;

/// Answers of each client; the first and the last are only partly in the counted time.
const ROUNDS: u64 = 6;

/// Clients that ask for the same again and again.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FullLoop {
    pub(crate) clients: u32,
    /// Tokens of a prompt, and of an answer.
    pub(crate) input_tokens: u32,
    pub(crate) output_tokens: u32,
    /// About the time of an answer, over which the first ones begin: answers that begin together end
    /// together, and leave the instance without work.
    pub(crate) answer: Seconds,
}

/// The first and the last token of each answer, by client.
struct Answers(Vec<Vec<[f64; 2]>>);

impl Observer for Answers {
    fn finished(&mut self, _: f64, times: &AnswerTimes) {
        let span = [times.ttft_s, times.e2e_s].map(|after_s| times.arrived_s + after_s);
        // the requests of a client are numbered one after the other
        self.0[(times.request / ROUNDS) as usize].push(span);
    }
}

impl FullLoop {
    /// Tokens of decode steps per second of the time in which all clients decode.
    pub(crate) fn tokens_per_s(self, file: &FleetFile) -> f64 {
        let load = ClosedLoop {
            clients: self.clients,
            requests: u64::from(self.clients) * ROUNDS,
            prompt_tokens: [self.input_tokens; 2],
            output_tokens: [self.output_tokens; 2],
            think: Seconds::ZERO,
            ramp: self.answer,
            seed: 7,
        };
        let setup = Setup::new(file, Choices { admission: Admission::None, ..Choices::default() });
        let mut answers = Answers(vec![Vec::new(); self.clients as usize]);
        let results = run(&setup, load.requests(), &mut answers).unwrap();
        assert_eq!(results.completed, load.requests, "all are served");
        let all = answers.0;
        let begin_s = all.iter().map(|own| own[0][0]).fold(0.0, f64::max);
        let end_s = all.iter().map(|own| own[own.len() - 1][1]).fold(f64::INFINITY, f64::min);
        assert!(end_s - begin_s > 2.0 * self.answer.0, "all decode together from {begin_s} to {end_s} s");
        let tokens = |&[first_s, last_s]: &[f64; 2]| {
            let within = (last_s.min(end_s) - first_s.max(begin_s)).max(0.0);
            within / (last_s - first_s) * f64::from(self.output_tokens - 1)
        };
        all.iter().flatten().map(tokens).sum::<f64>() / (end_s - begin_s)
    }
}

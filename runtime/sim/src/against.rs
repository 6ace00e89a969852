//! How far a simulation is off a recorded run, request by request.

use crate::simulate::AnswerTimes;
use crate::trace::RecordedRun;
use serde::Serialize;

/// The errors of a simulation of a recorded run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunErrors {
    /// Number of recorded requests.
    pub requests: usize,
    /// Number of these that the simulation answered; only they are compared.
    pub answered: usize,
    /// Arrival to first token.
    pub ttft: TimeErrors,
    /// Mean time per token after the first; answers of one token have none.
    pub tpot: TimeErrors,
    /// Arrival to last token.
    pub e2e: TimeErrors,
}

/// The errors of one kind of time. A request's error is `predicted / recorded - 1`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct TimeErrors {
    /// Number of requests that have such a time.
    pub count: usize,
    /// Mean of the recorded times.
    pub recorded_mean_s: f64,
    /// Mean of the predicted times.
    pub predicted_mean_s: f64,
    /// How far the mean is off: `predicted_mean_s / recorded_mean_s - 1`.
    pub mean_off: f64,
    /// Mean of the requests' errors without their signs.
    pub error_mean: f64,
    /// Median of these.
    pub error_p50: f64,
    /// Their 90th percentile.
    pub error_p90: f64,
    /// Mean of the requests' errors with their signs; below 0, predictions are too fast.
    pub bias: f64,
}

impl RunErrors {
    /// Compares the answers of a simulation of [`RecordedRun::trace`] with the run.
    pub fn new(run: &RecordedRun, answers: &[AnswerTimes]) -> Self {
        let index = |request: u64| usize::try_from(request).ok();
        let known = |answer: &AnswerTimes| Some((*run.requests.get(index(answer.request)?)?, *answer));
        let pairs: Vec<_> = answers.iter().filter_map(known).collect();
        RunErrors {
            requests: run.requests.len(),
            answered: pairs.len(),
            ttft: TimeErrors::of(pairs.iter().map(|(recorded, answer)| (recorded.ttft_s, answer.ttft_s))),
            tpot: TimeErrors::of(pairs.iter().filter_map(|(a, b)| a.tpot_s.zip(b.tpot_s))),
            e2e: TimeErrors::of(pairs.iter().map(|(recorded, answer)| (recorded.e2e_s, answer.e2e_s))),
        }
    }
}

impl TimeErrors {
    /// Of pairs of a recorded time and a predicted one.
    fn of(pairs: impl Iterator<Item = (f64, f64)>) -> Self {
        let pairs: Vec<(f64, f64)> = pairs.filter(|(recorded, _)| *recorded > 0.0).collect();
        let count = pairs.len();
        if count == 0 {
            return TimeErrors::default();
        }
        let mean = |of: &dyn Fn(&(f64, f64)) -> f64| pairs.iter().map(of).sum::<f64>() / count as f64;
        let off = |(recorded, predicted): &(f64, f64)| predicted / recorded - 1.0;
        let mut sorted: Vec<f64> = pairs.iter().map(|pair| off(pair).abs()).collect();
        sorted.sort_by(f64::total_cmp);
        // nearest rank
        let at = |percent: usize| sorted[(percent * count).div_ceil(100).max(1) - 1];
        let (recorded_mean_s, predicted_mean_s) = (mean(&|pair| pair.0), mean(&|pair| pair.1));
        TimeErrors {
            count,
            recorded_mean_s,
            predicted_mean_s,
            mean_off: predicted_mean_s / recorded_mean_s - 1.0,
            error_mean: mean(&|pair| off(pair).abs()),
            error_p50: at(50),
            error_p90: at(90),
            bias: mean(&off),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::RecordedRequest;
    use mixfleet_hal::units::Seconds;

    #[test]
    fn errors_are_those_of_the_requests_that_were_answered() {
        let recorded = |output_tokens: u32, ttft_s: f64, e2e_s: f64| RecordedRequest {
            at: Seconds::ZERO,
            prompt_tokens: 10,
            output_tokens,
            ttft_s,
            tpot_s: (output_tokens > 1).then(|| (e2e_s - ttft_s) / f64::from(output_tokens - 1)),
            e2e_s,
        };
        let run = RecordedRun {
            requests: vec![recorded(1, 1.0, 1.0), recorded(11, 2.0, 3.0), recorded(5, 1.0, 9.0)],
        };
        let answer = |request: u64, ttft_s: f64, tpot_s: Option<f64>, e2e_s: f64| AnswerTimes {
            request,
            prompt_tokens: 10,
            output_tokens: 1,
            arrived_s: 0.0,
            ttft_s,
            tpot_s,
            tbt_s: tpot_s,
            e2e_s,
        };
        let answers = [answer(1, 1.0, Some(0.2), 3.0), answer(0, 1.1, None, 1.1)];
        let errors = RunErrors::new(&run, &answers);
        assert_eq!((errors.requests, errors.answered, errors.tpot.count), (3, 2, 1));
        let close = |got: f64, want: f64| assert!((got - want).abs() < 1e-12, "{got} {want}");
        // +10 % and -50 %
        close(errors.ttft.error_mean, 0.3);
        close(errors.ttft.bias, -0.2);
        close(errors.ttft.error_p50, 0.1);
        close(errors.ttft.error_p90, 0.5);
        close(errors.ttft.mean_off, 2.1 / 3.0 - 1.0);
        close(errors.tpot.bias, 1.0);
        close(errors.e2e.error_mean, 0.05);
        assert_eq!(RunErrors::new(&run, &[]).ttft, TimeErrors::default());
    }
}

//! The requests of a run one by one: the file of `--requests-out`, and the table of `--against`.

use mixfleet_sim::against::{RunErrors, TimeErrors};
use mixfleet_sim::simulate::AnswerTimes;
use serde_json::json;
use std::fmt::Write as _;
use std::io::{BufWriter, Write};
use std::path::Path;

/// Writes a line for each answer in the format `request-log`, with the times that `--against` reads, in the
/// order of the requests.
pub(super) fn write_log(path: &Path, answers: &mut [AnswerTimes]) -> std::io::Result<()> {
    answers.sort_by_key(|answer| answer.request);
    let mut out = BufWriter::new(std::fs::File::create(path)?);
    for answer in answers {
        let AnswerTimes { request, prompt_tokens, output_tokens, arrived_s, ttft_s, e2e_s, .. } = *answer;
        let line = json!({
            "request_id": request,
            "input_toks": prompt_tokens,
            "output_toks": output_tokens,
            "arrival_time": arrived_s,
            "queued_ts": arrived_s,
            "first_token_ts": arrived_s + ttft_s,
            "last_token_ts": arrived_s + e2e_s,
        });
        writeln!(out, "{line}")?;
    }
    out.flush()
}

/// The errors as a table.
pub(super) fn errors_table(errors: &RunErrors) -> String {
    let RunErrors { requests, answered, .. } = errors;
    let mut text = format!("against the recorded run: {answered} of {requests} requests\n");
    let columns = ["recorded mean", "predicted", "off", "error mean", "p50", "p90", "bias"];
    let [recorded, predicted, off, mean, p50, p90, bias] = columns;
    let _ =
        writeln!(text, "  {:<8}{recorded:>15}{predicted:>12}{off:>8}{mean:>12}{p50:>8}{p90:>8}{bias:>8}", "");
    for (name, errors) in [("TTFT", &errors.ttft), ("TPOT", &errors.tpot), ("latency", &errors.e2e)] {
        let TimeErrors { recorded_mean_s, predicted_mean_s, .. } = errors;
        let [off, mean, p50, p90, bias] =
            [errors.mean_off, errors.error_mean, errors.error_p50, errors.error_p90, errors.bias]
                .map(|x| 100.0 * x);
        let _ = writeln!(
            text,
            "  {name:<8}{recorded_mean_s:>13.4} s{predicted_mean_s:>10.4} s{off:>+7.1}%{mean:>11.1}%{p50:>7.1}%{p90:>7.1}%{bias:>+7.1}%"
        );
    }
    text
}

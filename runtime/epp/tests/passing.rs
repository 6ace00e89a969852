//! Bodies pass unchanged, and what passes is learned from.

use crate::double::*;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response;
use proptest::prelude::*;

const ANSWER: &str = concat!(
    "data: {\"model\":\"m\",\"choices\":[{\"index\":0,\"text\":\"a\"}]}\n\n",
    "data: {\"model\":\"m\",\"choices\":[{\"index\":0,\"text\":\"b\",\"finish_reason\":\"stop\"}]}\n\n",
    "data: {\"model\":\"m\",\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":2}}\n\n",
    "data: [DONE]\n\n",
);

/// The pieces of a text between cuts.
fn cut<'a>(text: &'a [u8], cuts: &[prop::sample::Index]) -> Vec<&'a [u8]> {
    let mut ends: Vec<usize> = cuts.iter().map(|cut| cut.index(text.len() + 1)).collect();
    ends.extend([0, text.len()]);
    ends.sort_unstable();
    ends.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect()
}

/// Sends a request and an answer in pieces; returns what of both is passed on.
async fn passed(world: &World, request: &[&[u8]], answer: &[&[u8]], kind: &str) -> (Vec<u8>, Vec<u8>) {
    let mut passing = world.proxy().await.begin().await;
    passing.send(Request::RequestHeaders(message_headers(&HEADERS, false)), None);
    for (at, text) in request.iter().enumerate() {
        passing.send(Request::RequestBody(piece(text, at + 1 == request.len())), None);
    }
    destinations(&passing.answer().await);
    let mut both = (Vec::new(), Vec::new());
    for at in 0..request.len() {
        let (text, is_last) = passing.passed().await;
        both.0.extend(text);
        assert_eq!(is_last, at + 1 == request.len());
    }
    let headers = [(":status", "200"), ("content-type", kind)];
    passing.send(Request::ResponseHeaders(message_headers(&headers, false)), None);
    assert!(matches!(passing.answer().await, Response::ResponseHeaders(_)));
    for (at, text) in answer.iter().enumerate() {
        // each piece comes back before the next one is sent: nothing of an answer is held
        passing.send(Request::ResponseBody(piece(text, at + 1 == answer.len())), None);
        let (text, is_last) = passing.passed().await;
        both.1.extend(text);
        assert_eq!(is_last, at + 1 == answer.len());
    }
    both
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn bodies_pass_unchanged_in_any_pieces(
        request in prop_oneof![Just(BODY.as_bytes().to_vec()), prop::collection::vec(any::<u8>(), 0..300)],
        answer in prop_oneof![Just(ANSWER.as_bytes().to_vec()), prop::collection::vec(any::<u8>(), 0..300)],
        is_stream in any::<bool>(),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
        more in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let kind = if is_stream { "text/event-stream; charset=utf-8" } else { "application/json" };
        let both = runtime.block_on(async {
            let world = World::new(PickerSetup::of(&[0.1])).await;
            passed(&world, &cut(&request, &cuts), &cut(&answer, &more), kind).await
        });
        prop_assert_eq!(both, (request, answer));
    }
}

#[tokio::test]
async fn a_complete_answer_is_counted_with_its_lengths() {
    let world = World::new(PickerSetup::of(&[0.1])).await;
    let (request, answer) =
        passed(&world, &[BODY.as_bytes()], &[ANSWER.as_bytes()], "text/event-stream").await;
    assert_eq!((request.as_slice(), answer.as_slice()), (BODY.as_bytes(), ANSWER.as_bytes()));
    assert!(world.counts("mixfleet_requests_total{endpoint=\"completions\",outcome=\"success\"} 1"));
    assert!(world.counts("mixfleet_prompt_tokens_total{class=\"default\"} 7"));
    assert!(world.counts("mixfleet_generation_tokens_total{class=\"default\"} 2"));
    let whole = br#"{"model":"m","choices":[{"index":0,"text":"ab","finish_reason":"stop"}],"usage":{"prompt_tokens":5,"completion_tokens":3}}"#;
    let body = BODY.replace("true", "false");
    passed(&world, &[body.as_bytes()], &[whole], "application/json").await;
    assert!(world.counts("mixfleet_requests_total{endpoint=\"completions\",outcome=\"success\"} 2"));
    assert!(world.counts("mixfleet_prompt_tokens_total{class=\"default\"} 12"));
}

#[tokio::test]
async fn an_answer_cut_short_or_a_fault_counts_as_failed() {
    let world = World::new(PickerSetup::of(&[0.1])).await;
    let half = &ANSWER.as_bytes()[..80];
    passed(&world, &[BODY.as_bytes()], &[half], "text/event-stream").await;
    assert!(world.counts("mixfleet_requests_total{endpoint=\"completions\",outcome=\"failed\"} 1"));
    let (mut passing, _) = world.proxy().await.asked(&HEADERS, None).await;
    passing.passed().await;
    let headers = [(":status", "500"), ("content-type", "application/json")];
    passing.send(Request::ResponseHeaders(message_headers(&headers, true)), None);
    passing.answer().await;
    assert!(world.counts("mixfleet_requests_total{endpoint=\"completions\",outcome=\"failed\"} 2"));
    assert!(world.counts("mixfleet_engine_faults_total{device=\"e0\",kind=\"failed\"} 2"));
}

#[tokio::test]
async fn first_tokens_that_pass_correct_predictions() {
    let world = World::new(PickerSetup::of(&[0.000_1])).await;
    let corrected = |world: &World| {
        let metrics = world.metrics.encode();
        let line = metrics.lines().find(|line| {
            line.starts_with("mixfleet_prediction_correction") && line.contains("kind=\"prefill\"")
        });
        line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
    };
    assert_eq!(corrected(&world), None);
    for _ in 0..4 {
        let (mut passing, _) = world.proxy().await.asked(&HEADERS, None).await;
        passing.passed().await;
        // far more than the predicted 0.1 ms, whatever the machine does
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        let headers = [(":status", "200"), ("content-type", "text/event-stream")];
        passing.send(Request::ResponseHeaders(message_headers(&headers, false)), None);
        passing.answer().await;
        passing.send(Request::ResponseBody(piece(ANSWER.as_bytes(), true)), None);
        passing.passed().await;
    }
    assert!(corrected(&world).unwrap() > 2.0, "{:?}", corrected(&world));
}

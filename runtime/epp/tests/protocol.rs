//! What the Endpoint Picker Protocol asks for.

use crate::double::*;
use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::processing_mode::BodySendMode;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response;
use envoy_types::pb::envoy::service::ext_proc::v3::{HttpTrailers, ProcessingRequest, ProtocolConfiguration};
use envoy_types::pb::google::protobuf::value::Kind;
use tonic::transport::Channel;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

fn header(refusal: &envoy_types::pb::envoy::service::ext_proc::v3::ImmediateResponse, name: &str) -> String {
    let set = &refusal.headers.as_ref().unwrap().set_headers;
    let mut headers = set.iter().filter_map(|option| option.header.as_ref());
    let found = headers.find(|header| header.key == name).map(|header| header.raw_value.clone());
    String::from_utf8(found.unwrap_or_default()).unwrap()
}

fn status(refusal: &envoy_types::pb::envoy::service::ext_proc::v3::ImmediateResponse) -> i32 {
    refusal.status.as_ref().unwrap().code
}

#[tokio::test]
async fn header_and_metadata_name_the_placement_and_its_runners_up() {
    let world = World::new(PickerSetup::of(&[0.3, 0.1, 0.2, 0.4])).await;
    let mut passing = world.proxy().await.begin().await;
    passing.send(Request::RequestHeaders(message_headers(&HEADERS, false)), None);
    passing.send(Request::RequestBody(piece(BODY.as_bytes(), true)), None);
    let message = passing.message().await.unwrap().unwrap();
    let expected = [1, 2, 0].map(address).join(",");
    assert_eq!(destinations(message.response.as_ref().unwrap()), expected);
    let balancer = &message.dynamic_metadata.unwrap().fields["envoy.lb"];
    let Some(Kind::StructValue(inner)) = &balancer.kind else { panic!("no struct: {balancer:?}") };
    let told = inner.fields["x-gateway-destination-endpoint"].kind.clone();
    assert_eq!(told, Some(Kind::StringValue(expected)));
    let explanation = world.placements.explain("r1", |_| true).unwrap();
    let candidates = explanation["candidates"].as_array().unwrap();
    let chosen = candidates.iter().find(|one| one["outcome"]["outcome"] == "chosen").unwrap();
    assert_eq!(chosen["decode_device"], "e1");
    assert_eq!(passing.passed().await, (BODY.as_bytes().to_vec(), true));
    assert!(world.counts("mixfleet_picks_total{outcome=\"placed\"} 1"));
}

#[tokio::test]
async fn only_offered_endpoints_are_picked() {
    let world = World::new(PickerSetup::of(&[0.3, 0.1, 0.2])).await;
    let mut proxy = world.proxy().await;
    let offered = [address(0), address(2)];
    let hint = subset(&[&offered[0], &offered[1], "10.9.9.9:1"]);
    let (_passing, answer) = proxy.asked(&HEADERS, Some(hint)).await;
    assert_eq!(destinations(&answer), [2, 0].map(address).join(","));
    let explanation = world.placements.explain("r1", |_| true).unwrap();
    assert_eq!((&explanation["left_out"][0], &explanation["failed"]), (&"e1".into(), &serde_json::json!([])));
    // an address without a port is all of its ports
    let (_passing, answer) = proxy.asked(&HEADERS, Some(subset(&["10.0.0.1"]))).await;
    assert_eq!(destinations(&answer), address(0));
    for none in [&["10.9.9.9:1"][..], &[]] {
        let (_passing, answer) = proxy.asked(&HEADERS, Some(subset(none))).await;
        let refusal = refusal(answer);
        assert_eq!(status(&refusal), 503);
        assert!(String::from_utf8(refusal.body).unwrap().contains("none of the endpoints"));
    }
}

#[tokio::test]
async fn nothing_ready_is_503_and_readiness_follows_the_pool() {
    let world = World::empty().await;
    let health = |address, service: &'static str| async move {
        let mut client = HealthClient::new(
            Channel::from_shared(format!("http://{address}")).unwrap().connect().await.unwrap(),
        );
        let mut states =
            client.watch(HealthCheckRequest { service: service.into() }).await.unwrap().into_inner();
        (states.message().await.unwrap().unwrap().status(), states)
    };
    let (_passing, answer) = world.proxy().await.asked(&HEADERS, None).await;
    let refusal = refusal(answer);
    assert_eq!((status(&refusal), header(&refusal, "content-type").as_str()), (503, "application/json"));
    let document: serde_json::Value = serde_json::from_slice(&refusal.body).unwrap();
    assert_eq!(document["error"]["code"], "no_endpoint");
    const PROCESSOR: &str = "envoy.service.ext_proc.v3.ExternalProcessor";
    for address in [world.health, world.processing] {
        // the first caller may find that nothing is known yet
        let (mut now, mut states) = health(address, "liveness").await;
        while now != ServingStatus::Serving {
            now = states.message().await.unwrap().unwrap().status();
        }
        assert_ne!(health(address, "readiness").await.0, ServingStatus::Serving);
    }
    let (before, mut states) = health(world.health, PROCESSOR).await;
    assert_ne!(before, ServingStatus::Serving);
    world.take(PickerSetup::of(&[0.1])).await;
    while states.message().await.unwrap().unwrap().status() != ServingStatus::Serving {}
    let (_passing, answer) = world.proxy().await.asked(&HEADERS, None).await;
    assert_eq!(destinations(&answer), address(0));
}

#[tokio::test]
async fn refused_admission_is_429_with_a_time_to_retry() {
    let world = World::new(PickerSetup { requests_max: 1, ..PickerSetup::of(&[0.1]) }).await;
    let mut proxy = world.proxy().await;
    let (first, answer) = proxy.asked(&HEADERS, None).await;
    assert_eq!(destinations(&answer), address(0));
    let (_passing, answer) = proxy.asked(&HEADERS, None).await;
    let full = refusal(answer);
    assert_eq!(status(&full), 429);
    assert!(header(&full, "retry-after").parse::<u32>().unwrap() >= 1);
    assert!(full.details.contains("rate_limit_exceeded"), "{}", full.details);
    // a client that leaves gives its place back
    drop(first);
    loop {
        let (_passing, answer) = proxy.asked(&HEADERS, None).await;
        if matches!(answer, Response::RequestHeaders(_)) {
            break;
        }
    }
    let world = World::new(PickerSetup { ttft_slo_s: Some(0.05), ..PickerSetup::of(&[0.1]) }).await;
    let (_passing, answer) = world.proxy().await.asked(&HEADERS, None).await;
    assert_eq!(status(&refusal(answer)), 429);
}

#[tokio::test]
async fn a_negative_priority_is_refused_before_others_wait() {
    let setup = PickerSetup { objectives: "{batch: -1, chat: 5}", ..PickerSetup::of(&[5.0]) };
    let world = World::new(setup).await;
    let mut proxy = world.proxy().await;
    let with = |name: &'static str, objective| [&HEADERS[..], &[(name, objective)]].concat();
    let batch = with("x-llm-d-inference-objective", "batch");
    let (_alone, answer) = proxy.asked(&batch, None).await;
    assert_eq!(destinations(&answer), address(0), "nothing waits yet");
    let (_passing, answer) = proxy.asked(&batch, None).await;
    let shed = refusal(answer);
    assert_eq!(status(&shed), 429);
    assert!(String::from_utf8(shed.body).unwrap().contains("priority is below 0"));
    for headers in [with("x-gateway-inference-objective", "chat"), HEADERS.to_vec()] {
        let (_passing, answer) = proxy.asked(&headers, None).await;
        assert_eq!(destinations(&answer), address(0));
    }
    assert!(world.counts("mixfleet_picks_total{outcome=\"shed\"} 1"));
}

#[tokio::test]
async fn who_really_served_is_counted_and_explained() {
    let world = World::new(PickerSetup::of(&[0.1, 10.0])).await;
    let mut proxy = world.proxy().await;
    let answered = [(":status", "200"), ("content-type", "text/event-stream")];
    for (served_by, choice) in [(0, "first"), (1, "fallback")] {
        let (mut passing, answer) = proxy.asked(&HEADERS, None).await;
        assert_eq!(destinations(&answer), [0, 1].map(address).join(","));
        passing.passed().await;
        let headers = Request::ResponseHeaders(message_headers(&answered, false));
        passing.send(headers, Some(served(&address(served_by))));
        assert!(matches!(passing.answer().await, Response::ResponseHeaders(_)));
        let line = format!("mixfleet_picks_served_total{{device=\"e{served_by}\",choice=\"{choice}\"}} 1");
        assert!(world.counts(&line), "{line}");
    }
    let explanation = world.placements.explain("r1", |_| true).unwrap();
    assert_eq!(explanation["failed"], serde_json::json!(["e0"]));
}

#[tokio::test]
async fn a_prompt_is_computed_elsewhere_where_that_is_worth_it() {
    const PREFILLER: &str = "x-prefiller-host-port";
    let world = World::new(PickerSetup { prefill: 1, ..PickerSetup::of(&[0.1, 5.0, 6.0]) }).await;
    let mut proxy = world.proxy().await;
    let (mut passing, answer) = proxy.asked(&HEADERS, None).await;
    let prefiller = set_header(&answer, PREFILLER);
    assert_eq!((destinations(&answer), prefiller), ([1, 2].map(address).join(","), Some(address(0))));
    let explanation = world.placements.explain("r1", |_| true).unwrap();
    let candidates = explanation["candidates"].as_array().unwrap();
    let chosen = candidates.iter().find(|one| one["outcome"]["outcome"] == "chosen").unwrap();
    assert_eq!((&chosen["prefill_device"], &chosen["decode_device"]), (&"e0".into(), &"e1".into()));
    // the destination answers, and the pair's places are free again
    passing.passed().await;
    let answered = [(":status", "200"), ("content-type", "text/event-stream")];
    passing.send(Request::ResponseHeaders(message_headers(&answered, false)), Some(served(&address(1))));
    passing.answer().await;
    let event =
        b"data: {\"choices\":[{\"index\":0,\"text\":\"a\",\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n";
    passing.send(Request::ResponseBody(piece(event, true)), None);
    passing.passed().await;
    let success = "mixfleet_requests_total{endpoint=\"completions\",outcome=\"success\"} 1";
    assert!(world.counts(success), "{}", world.metrics.encode());
    // one endpoint does all of it, whatever the client says
    let world = World::new(PickerSetup { prefill: 1, ..PickerSetup::of(&[5.0, 0.1]) }).await;
    let named = [&HEADERS[..], &[(PREFILLER, "10.9.9.9:1")]].concat();
    let (_passing, answer) = world.proxy().await.asked(&named, None).await;
    assert_eq!((destinations(&answer), set_header(&answer, PREFILLER)), (address(1), None));
    assert_eq!(removed(&answer), [PREFILLER]);
}

#[tokio::test]
async fn a_request_without_a_body_or_with_trailers_is_placed() {
    let world = World::new(PickerSetup::of(&[0.1])).await;
    let mut proxy = world.proxy().await;
    let mut models = proxy.begin().await;
    let headers = [(":method", "GET"), (":path", "/v1/models?x=1")];
    models.send(Request::RequestHeaders(message_headers(&headers, true)), None);
    assert_eq!(destinations(&models.answer().await), address(0));
    let mut passing = proxy.begin().await;
    passing.send(Request::RequestHeaders(message_headers(&HEADERS, false)), None);
    passing.send(Request::RequestBody(piece(BODY.as_bytes(), false)), None);
    passing.send(Request::RequestTrailers(HttpTrailers::default()), None);
    assert_eq!(destinations(&passing.answer().await), address(0));
    assert_eq!(passing.passed().await, (BODY.as_bytes().to_vec(), false));
    assert!(matches!(passing.answer().await, Response::RequestTrailers(_)));
}

#[tokio::test]
async fn a_filter_that_sends_bodies_otherwise_is_told_what_to_set() {
    let world = World::new(PickerSetup::of(&[0.1])).await;
    let mut passing = world.proxy().await.begin().await;
    passing.send_whole(ProcessingRequest {
        request: Some(Request::RequestHeaders(message_headers(&HEADERS, false))),
        protocol_config: Some(ProtocolConfiguration {
            request_body_mode: BodySendMode::Buffered.into(),
            ..ProtocolConfiguration::default()
        }),
        ..ProcessingRequest::default()
    });
    let refused = passing.message().await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::FailedPrecondition);
    assert!(refused.message().contains("request_body_mode"), "{}", refused.message());
}

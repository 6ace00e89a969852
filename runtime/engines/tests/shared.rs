//! Requests that two vLLM engines share, with the description of a prompt's KV by a real vLLM 0.32.0
//! (`data/`).

use crate::fake::{FakeEngine, Mood};
use mixfleet_engines::{EngineKind, HttpEngine};
use mixfleet_hal::outside::{
    BegunAnswer, EngineAnswer, EngineCall, EngineEndpoint, EngineFaultKind, EngineHandOff, EngineShare,
    OutsideEngine, PassedPath,
};
use serde_json::{Value, json};

/// The whole answer to a prompt of 200 tokens, whose KV a connector kept.
const PROMPT: &str = include_str!("data/vllm-0.32.0/prompt.json");

fn run<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

fn engine(kind: EngineKind, fake: &FakeEngine) -> HttpEngine {
    HttpEngine::new(kind, fake.url().parse().unwrap(), None, None).unwrap()
}

fn call(body: &Value, share: EngineShare) -> EngineCall {
    EngineCall {
        endpoint: if body["messages"].is_null() { EngineEndpoint::Completions } else { EngineEndpoint::Chat },
        body: body.to_string().into_bytes().into(),
        stream: body["stream"] == true,
        begun: None,
        tokens_max: None,
        trace: None,
        share,
    }
}

fn chat() -> Value {
    json!({"model": "m", "messages": [{"role": "user", "content": "a b c"}], "max_tokens": 5, "stream": true,
        "stop": ["never"], "tools": [{"type": "function"}]})
}

/// The request to keep a prompt's KV.
fn parameters() -> Value {
    let recorded: Value = serde_json::from_str(PROMPT).unwrap();
    recorded["kv_transfer_params"].clone()
}

fn handed_off(engine: &HttpEngine, call: &EngineCall) -> EngineHandOff {
    match run(engine.ask(call)).unwrap() {
        EngineAnswer::HandedOff { hand_off, usage } => {
            assert!(usage.is_some());
            hand_off
        }
        _ => panic!("nothing is handed over"),
    }
}

#[test]
fn what_one_engine_says_of_the_prompt_goes_to_the_other_one_as_it_is() {
    let (first, second) = (FakeEngine::start("vllm", "m"), FakeEngine::start("vllm", "m"));
    assert!(!run(engine(EngineKind::Vllm, &first).probe()).unwrap().hands_off);
    *first.shared.hands_over.lock().unwrap() = parameters();
    assert!(run(engine(EngineKind::Vllm, &first).probe()).unwrap().hands_off);
    let hand_off = handed_off(&engine(EngineKind::Vllm, &first), &call(&chat(), EngineShare::Prompt));
    let body = first.asked().pop().unwrap().body;
    assert_eq!(
        (&body["max_tokens"], &body["stream"], &body["stop"]),
        (&json!(1), &json!(false), &Value::Null)
    );
    assert_eq!(body["kv_transfer_params"], json!({"do_remote_decode": true, "do_remote_prefill": false}));
    assert_eq!((&body["tools"], &body["messages"]), (&chat()["tools"], &chat()["messages"]));
    assert_eq!(serde_json::from_str::<Value>(&hand_off.0).unwrap(), parameters());

    let answers = call(&chat(), EngineShare::Answer(hand_off));
    let answer = run(engine(EngineKind::Vllm, &second).ask(&answers)).unwrap();
    assert!(matches!(answer, EngineAnswer::Stream(_)));
    let mut expected = chat();
    expected["kv_transfer_params"] = parameters();
    expected["stream_options"] = json!({"include_usage": true});
    assert_eq!(second.asked().pop().unwrap().body, expected);
}

#[test]
fn the_recorded_answer_is_read() {
    let fake = FakeEngine::start("vllm", "m");
    fake.set(Mood::Say(PROMPT.into()));
    let hand_off = handed_off(&engine(EngineKind::Vllm, &fake), &call(&chat(), EngineShare::Prompt));
    let recorded = serde_json::from_str::<Value>(&hand_off.0).unwrap();
    assert_eq!((&recorded["remote_num_tokens"], &recorded["transfer_mode"]), (&json!(200), &json!("pull")));
    assert_eq!(recorded["remote_block_ids"][0].as_array().unwrap().len(), 7);
}

#[test]
fn a_begun_answer_is_shared_with_what_there_is_of_it() {
    let fake = FakeEngine::start("vllm", "m");
    *fake.shared.hands_over.lock().unwrap() = parameters();
    let mut body = chat();
    body.as_object_mut().unwrap().remove("tools");
    let mut call = call(&body, EngineShare::Prompt);
    call.begun = Some(BegunAnswer { text: "w0 w1 ".into(), ..BegunAnswer::default() });
    handed_off(&engine(EngineKind::Vllm, &fake), &call);
    let body = fake.asked().pop().unwrap().body;
    assert_eq!(body["messages"][1], json!({"role": "assistant", "content": "w0 w1 "}));
    assert_eq!((&body["max_tokens"], &body["continue_final_message"]), (&json!(1), &json!(true)));
}

#[test]
fn what_cannot_be_shared_is_not_asked_and_what_is_not_kept_is_said() {
    let fake = FakeEngine::start("vllm", "m");
    let vllm = engine(EngineKind::Vllm, &fake);
    let fault = |engine: &HttpEngine, body: &Value| {
        run(engine.ask(&call(body, EngineShare::Prompt))).err().expect("a fault")
    };
    let mut two = chat();
    two["n"] = json!(2);
    assert_eq!(fault(&vllm, &two).kind, EngineFaultKind::NotTaken);
    assert_eq!(fault(&engine(EngineKind::LlamaCpp, &fake), &chat()).kind, EngineFaultKind::NotTaken);
    assert!(fake.asked().is_empty());
    // neither an engine without a connector, nor one whose description would end the other engine
    let refused = fault(&vllm, &chat());
    assert_eq!(refused.kind, EngineFaultKind::NotHandedOff, "{refused}");
    for wrong in [json!(7), json!({"do_remote_prefill": true}), json!([])] {
        *fake.shared.hands_over.lock().unwrap() = wrong.clone();
        assert_eq!(fault(&vllm, &chat()).kind, EngineFaultKind::NotHandedOff, "{wrong}");
    }
    fake.set(Mood::Status(400, json!({"error": {"message": "too long"}}).to_string()));
    let answer = run(vllm.ask(&call(&chat(), EngineShare::Prompt))).unwrap();
    assert!(matches!(answer, EngineAnswer::Refused { status: 400, .. }));
}

#[test]
fn a_client_names_no_kv_to_be_taken_over() {
    let fake = FakeEngine::start("vllm", "m");
    let vllm = engine(EngineKind::Vllm, &fake);
    let mut body = chat();
    body["kv_transfer_params"] = parameters();
    match run(vllm.ask(&call(&body, EngineShare::Whole))).unwrap() {
        EngineAnswer::Refused { status: 400, body } => {
            assert!(String::from_utf8(body).unwrap().contains("kv_transfer_params"));
        }
        _ => panic!("not refused"),
    }
    let passed = run(vllm.pass(PassedPath::Responses, body.to_string().as_bytes())).unwrap();
    assert_eq!(passed.status, 400);
    assert!(fake.shared.came.lock().unwrap().is_empty());
}

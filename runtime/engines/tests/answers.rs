//! What an engine's answers become, good ones and bad ones.

use crate::fake::{FakeEngine, Mood};
use mixfleet_engines::{EngineAddress, EngineKind, HttpEngine, NameLookup, system_lookup};
use mixfleet_hal::outside::{
    BegunAnswer, EngineAnswer, EngineCall, EngineChunk, EngineEndpoint, EngineFault, EngineFaultKind,
    EngineShare, EngineUsage, OutsideEngine, PassedPath,
};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

fn run<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

fn engine(kind: EngineKind, fake: &FakeEngine, model: Option<&str>) -> HttpEngine {
    HttpEngine::new(kind, fake.url().parse().unwrap(), Some("k3y"), model.map(str::to_owned)).unwrap()
}

fn call(body: &Value, endpoint: EngineEndpoint) -> EngineCall {
    let stream = body["stream"] == true;
    EngineCall {
        endpoint,
        body: body.to_string().into_bytes().into(),
        stream,
        begun: None,
        tokens_max: None,
        trace: None,
        share: EngineShare::Whole,
    }
}

fn chat(stream: bool) -> Value {
    json!({"model": "m", "messages": [{"role": "user", "content": "a b c"}], "max_tokens": 5, "stream": stream})
}

/// All chunks up to the end or a fault.
async fn drained(
    engine: &HttpEngine,
    call: &EngineCall,
) -> Result<(Vec<EngineChunk>, Option<EngineFault>), EngineFault> {
    let mut stream = match engine.ask(call).await? {
        EngineAnswer::Stream(stream) => stream,
        _ => panic!("not a stream"),
    };
    let mut chunks = Vec::new();
    loop {
        match stream.next().await {
            Some(Ok(chunk)) => chunks.push(chunk),
            Some(Err(fault)) => {
                assert!(stream.next().await.is_none(), "nothing comes after a fault");
                return Ok((chunks, Some(fault)));
            }
            None => return Ok((chunks, None)),
        }
    }
}

fn text(chunks: &[EngineChunk]) -> String {
    chunks.iter().map(|chunk| chunk.text.as_str()).collect()
}

#[test]
fn an_engine_tells_of_itself() {
    let fake = FakeEngine::start("vllm", "m");
    *fake.shared.queue.lock().unwrap() = (3, 2);
    let state = run(engine(EngineKind::Vllm, &fake, None).probe()).unwrap();
    assert_eq!((state.version.as_deref(), state.running, state.waiting), (Some("0.32.0"), Some(3), Some(2)));
    assert_eq!((state.kv_tokens, state.block_tokens, state.kv_usage), (Some(16_000), Some(16), Some(0.25)));
    assert_eq!((state.models[0].name.as_str(), state.models[0].context), ("m", Some(4096)));
    assert!(state.missing.is_empty(), "{:?}", state.missing);
    assert!(fake.shared.came.lock().unwrap().iter().all(|came| came.headers.contains("Bearer k3y")));

    let fake = FakeEngine::start("llamacpp", "file.gguf");
    let state = run(engine(EngineKind::LlamaCpp, &fake, None).probe()).unwrap();
    assert_eq!(
        (state.kv_tokens, state.sequences_max, state.models[0].context),
        (Some(2048), Some(4), Some(512))
    );
    let missing = run(engine(EngineKind::Vllm, &fake, None).probe()).unwrap().missing;
    assert_eq!(missing.len(), 2, "{missing:?}");
    fake.die();
    let fault = run(engine(EngineKind::LlamaCpp, &fake, None).probe()).unwrap_err();
    assert_eq!(fault.kind, EngineFaultKind::Cut, "its port takes connections and closes them");
}

#[test]
fn this_program_is_an_engine_too() {
    let fake = FakeEngine::start("mixfleet", "m");
    *fake.shared.queue.lock().unwrap() = (3, 2);
    let state = run(engine(EngineKind::Mixfleet, &fake, None).probe()).unwrap();
    assert_eq!((state.version.as_deref(), state.running, state.waiting), (Some("0.32.0"), Some(3), Some(2)));
    assert_eq!((state.kv_tokens, state.block_tokens, state.hands_off), (Some(4096), Some(16), false));
    assert!(state.missing.is_empty(), "{:?}", state.missing);
}

#[test]
fn each_address_that_a_name_stands_for_is_an_engine() {
    let fakes = [1, 2].map(|last| FakeEngine::at("vllm", "m", &format!("127.0.0.{last}:0")));
    let addresses = fakes.each_ref().map(|fake| fake.address.parse::<SocketAddr>().unwrap());
    let listed = Arc::new(Mutex::new(Ok::<_, &str>(vec![addresses[0]])));
    let told = listed.clone();
    let lookup: NameLookup = Arc::new(move |name| {
        assert_eq!(name, "engines.test:80");
        let told = told.lock().unwrap().clone();
        Box::pin(async move { told.map_err(std::io::Error::other) })
    });
    let address: EngineAddress = "http://engines.test".parse().unwrap();
    let key = Some("k3y");
    let engines = HttpEngine::behind_name(EngineKind::Vllm, &address, key, None, 2, lookup).unwrap();
    assert_eq!(engines[1].name(), "vllm:engines.test#2");
    let tell = |now: Result<Vec<SocketAddr>, &'static str>| {
        *listed.lock().unwrap() = now;
        // longer than an answer is used
        std::thread::sleep(Duration::from_secs(1));
    };
    let engines: &[HttpEngine; 2] = engines.as_slice().try_into().unwrap();
    let kinds = || {
        engines
            .each_ref()
            .map(|engine| run(engine.probe()).map(|state| state.leaving).map_err(|fault| fault.kind))
    };
    assert_eq!(kinds(), [Ok(false), Err(EngineFaultKind::Vacant)]);
    let body = json!({"model": "m", "prompt": "a", "max_tokens": 2});
    let asked = run(engines[0].ask(&call(&body, EngineEndpoint::Completions)));
    assert!(matches!(asked, Ok(EngineAnswer::Whole(_))) && fakes[0].asked().len() == 1);
    assert_eq!(
        run(engines[1].ask(&call(&body, EngineEndpoint::Completions))).err().unwrap().kind,
        EngineFaultKind::Vacant
    );
    tell(Ok(addresses.to_vec()));
    assert_eq!(kinds(), [Ok(false), Ok(false)]);
    tell(Err("no such name"));
    assert_eq!(kinds(), [Ok(false), Ok(false)], "a name that is not answered for ends no engine");
    tell(Ok(vec![addresses[1]]));
    assert_eq!(kinds(), [Ok(true), Ok(false)], "it ends its answers and gets no more");
    fakes[0].die();
    assert_eq!(kinds()[0], Err(EngineFaultKind::Cut));
    assert_eq!(kinds(), [Err(EngineFaultKind::Vacant), Ok(false)]);
    let third = FakeEngine::at("vllm", "m", "127.0.0.3:0");
    tell(Ok(vec![addresses[1], third.address.parse().unwrap(), "127.0.0.9:9".parse().unwrap()]));
    let missing = run(engines[0].probe()).unwrap().missing;
    assert!(missing[0].contains("resolves to 1 more engines than instances=2"), "{missing:?}");
    let secure = "https://engines.test".parse::<EngineAddress>();
    if let Ok(secure) = secure {
        let none = || system_lookup();
        assert!(HttpEngine::behind_name(EngineKind::Vllm, &secure, key, None, 2, none()).is_err());
    }
}

#[test]
fn an_engine_says_the_ids_of_prompts_that_are_text_alone() {
    let fake = FakeEngine::start("vllm", "own");
    let asked = |body: Value, endpoint| {
        run(engine(EngineKind::Vllm, &fake, Some("own")).prompt_tokens(&call(&body, endpoint)))
    };
    let completion = |body: Value| asked(body, EngineEndpoint::Completions);
    assert_eq!(completion(json!({"model": "m", "prompt": "a b c", "odd": 7})), Ok(Some(vec![0, 1, 2])));
    let came = fake.shared.came.lock().unwrap().clone();
    let paths: Vec<&str> = came.iter().map(|came| came.path.as_str()).collect();
    assert_eq!(paths, ["/v1/completions/render", "/tokenize"]);
    assert_eq!((&came[0].body["odd"], &came[0].body["model"]), (&json!(7), &json!("own")));
    assert_eq!(came[1].body, json!({"model": "own", "prompt": "a b c"}));
    assert_eq!(completion(json!({"model": "m", "prompt": [5, 6]})), Ok(Some(vec![5, 6])));
    for other in [
        json!({"model": "m", "prompt": ["a", "b"]}),
        json!({"model": "m", "prompt": "a", "cache_salt": "s"}),
        json!({"model": "m"}),
    ] {
        assert_eq!(completion(other), Ok(None));
    }
    let image = json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]);
    assert_eq!(asked(json!({"model": "m", "messages": image}), EngineEndpoint::Chat), Ok(None));
    // an adapter's KV is not that of the tokens alone
    let engine = engine(EngineKind::Vllm, &fake, None);
    *fake.shared.parent.lock().unwrap() = json!("base");
    let body = json!({"model": "own", "prompt": "a"});
    let ids = run(async {
        engine.probe().await.unwrap();
        engine.prompt_tokens(&call(&body, EngineEndpoint::Completions)).await
    });
    assert_eq!(ids, Ok(None));
}

#[test]
fn bodies_and_answers_pass_through() {
    let fake = FakeEngine::start("llamacpp", "file.gguf");
    let engine = engine(EngineKind::LlamaCpp, &fake, Some("file.gguf"));
    let mut body = chat(false);
    body["tools"] = json!([{"type": "function", "function": {"name": "f"}}]);
    body["response_format"] = json!({"type": "json_schema", "json_schema": {"schema": {}}});
    body["never_seen"] = json!({"deep": [1, 2.5]});
    let EngineAnswer::Whole(answer) = run(engine.ask(&call(&body, EngineEndpoint::Chat))).unwrap() else {
        panic!("not a whole answer")
    };
    let document: Value = serde_json::from_slice(&answer.body).unwrap();
    assert_eq!(document["choices"][0]["message"]["content"], "w0 w1 w2 w3 w4 ");
    assert_eq!((&document["model"], &document["odd"]), (&json!("m"), &json!(1.5)));
    let usage = EngineUsage { prompt_tokens: 3, completion_tokens: 5, cached_tokens: None };
    assert_eq!(answer.usage, Some(usage));
    body["model"] = json!("file.gguf");
    assert_eq!(fake.asked()[0].body, body, "only the model's name is another one");
}

#[test]
fn what_is_passed_on_is_not_read() {
    let fake = FakeEngine::start("llamacpp", "file.gguf");
    let engine = engine(EngineKind::LlamaCpp, &fake, Some("file.gguf"));
    let body = json!({"model": "m", "input": [1, {"deep": 1.5}]});
    for (status, document) in [(200, "{\"odd\": 1.50}"), (422, "not JSON")] {
        fake.set(Mood::Status(status, document.into()));
        let bytes = body.to_string().into_bytes();
        let (answer, pieces) = run(async {
            let mut answer = engine.pass(PassedPath::Embeddings, &bytes).await.unwrap();
            let mut pieces = Vec::new();
            while let Some(piece) = answer.body.next().await {
                pieces.extend(piece.unwrap());
            }
            (answer, pieces)
        });
        assert_eq!((answer.status, answer.length), (status, Some(document.len() as u64)));
        assert_eq!(answer.content_type.as_deref(), Some("application/json"));
        assert_eq!(pieces, document.as_bytes());
    }
    let came = fake.shared.came.lock().unwrap();
    assert_eq!((came[0].path.as_str(), &came[0].body["model"]), ("/v1/embeddings", &json!("file.gguf")));
    assert_eq!(came[0].body["input"], body["input"]);
}

#[test]
fn a_stream_comes_in_order_and_ends() {
    let fake = FakeEngine::start("vllm", "m");
    let engine = engine(EngineKind::Vllm, &fake, None);
    for (endpoint, body) in [
        (EngineEndpoint::Chat, chat(true)),
        (
            EngineEndpoint::Completions,
            json!({"model": "m", "prompt": "a b", "max_tokens": 5, "stream": true}),
        ),
    ] {
        let (chunks, fault) = run(drained(&engine, &call(&body, endpoint))).unwrap();
        assert_eq!((text(&chunks).as_str(), fault), ("w0 w1 w2 w3 w4 ", None));
        let last = chunks.last().unwrap();
        assert!(last.usage.is_some() && last.data.is_none(), "the client did not ask for lengths");
        assert!(chunks.iter().any(|chunk| chunk.ends_choice));
    }
}

#[test]
fn a_bad_answer_is_a_fault_and_never_an_answer() {
    use EngineFaultKind::{Busy, Cut, Failed, Malformed};
    let fake = FakeEngine::start("vllm", "m");
    let engine = engine(EngineKind::Vllm, &fake, None);
    let error = json!({"error": {"message": "cuda is gone", "type": "x", "code": 500}}).to_string();
    let say = |text: &str| Mood::Say(text.into());
    for (mood, whole, streamed) in [
        (Mood::Status(500, error.clone()), Failed, Failed),
        (Mood::Status(503, String::new()), Busy, Busy),
        (Mood::Status(429, String::new()), Busy, Busy),
        (Mood::Status(404, error.clone()), Failed, Failed),
        (Mood::Status(302, String::new()), Malformed, Malformed),
        (say("<html>"), Malformed, Malformed),
        (say("[]"), Malformed, Malformed),
        (say(r#"{"model":"m","choices":[]}"#), Malformed, Cut),
        (say(&error), Failed, Failed),
        (Mood::WrongModel, Malformed, Malformed),
        (Mood::CutAfter(2), Cut, Cut),
        (Mood::EndAfter(2), Cut, Cut),
        (Mood::ErrorAfter(2), Cut, Failed),
    ] {
        fake.set(mood.clone());
        for (stream, expected) in [(false, whole), (true, streamed)] {
            let call = call(&chat(stream), EngineEndpoint::Chat);
            let fault = match run(engine.ask(&call)) {
                Err(fault) => fault,
                Ok(EngineAnswer::Stream(_)) => run(drained(&engine, &call)).unwrap().1.expect("a fault"),
                Ok(_) => panic!("{mood:?} became an answer"),
            };
            assert_eq!(fault.kind, expected, "{mood:?}, stream {stream}: {fault}");
        }
    }
    fake.set(Mood::Status(500, error));
    let fault = run(engine.ask(&call(&chat(false), EngineEndpoint::Chat))).err().unwrap();
    assert_eq!(fault.detail, "status 500: cuda is gone");
}

#[test]
fn a_client_at_fault_is_told_in_the_engines_words() {
    let fake = FakeEngine::start("vllm", "m");
    let engine = engine(EngineKind::Vllm, &fake, None);
    let words = json!({"error": {"message": "too long", "code": 400}}).to_string();
    for (said, expected) in [(words.clone(), "too long"), ("<nope>".into(), "<nope>")] {
        fake.set(Mood::Status(400, said));
        match run(engine.ask(&call(&chat(true), EngineEndpoint::Chat))).unwrap() {
            EngineAnswer::Refused { status, body } => {
                let document: Value = serde_json::from_slice(&body).unwrap();
                assert_eq!((status, &document["error"]["message"]), (400, &json!(expected)));
            }
            _ => panic!("not refused"),
        }
    }
}

#[test]
fn what_another_engine_began_is_continued() {
    let fake = FakeEngine::start("vllm", "m");
    let engine = engine(EngineKind::Vllm, &fake, None);
    let begun = BegunAnswer { text: "w0 w1 w2 ".into(), id: "\"first\"".into(), created: "1".into() };
    let mut body = chat(true);
    body["stream_options"] = json!({"include_usage": true});
    let mut call = call(&body, EngineEndpoint::Chat);
    call.begun = Some(begun.clone());
    let (chunks, fault) = run(drained(&engine, &call)).unwrap();
    assert_eq!((text(&chunks).as_str(), fault), ("w3 w4 ", None));
    let shown: Vec<Value> =
        chunks.iter().filter_map(|c| serde_json::from_slice(c.data.as_deref()?).ok()).collect();
    assert!(shown.iter().all(|chunk| chunk["id"] == "first" && chunk["created"] == 1), "{shown:?}");
    assert!(shown.iter().all(|chunk| chunk["choices"][0]["delta"]["role"].is_null()), "{shown:?}");
    let usage = &shown.last().unwrap()["usage"];
    assert_eq!((&usage["prompt_tokens"], &usage["completion_tokens"]), (&json!(3), &json!(5)));

    call.begun = Some(BegunAnswer { text: String::new(), ..begun });
    let (chunks, _) = run(drained(&engine, &call)).unwrap();
    assert_eq!(text(&chunks), "w0 w1 w2 w3 w4 ", "nothing was said yet");

    let mut seeded = chat(true);
    seeded["seed"] = json!(7);
    call.body = seeded.to_string().into_bytes().into();
    call.begun = Some(BegunAnswer { text: "w0 ".into(), ..BegunAnswer::default() });
    let refused = run(drained(&engine, &call)).unwrap_err();
    assert_eq!(refused.kind, EngineFaultKind::NotContinued);
    assert!(refused.detail.contains("'seed'"), "{refused}");
}

#[test]
fn dropping_an_answer_cancels_it() {
    let fake = FakeEngine::start("vllm", "m");
    fake.set(Mood::StallAfter(1));
    let engine = engine(EngineKind::Vllm, &fake, None);
    run(async {
        let call = call(&chat(true), EngineEndpoint::Chat);
        let Ok(EngineAnswer::Stream(mut stream)) = engine.ask(&call).await else { panic!("no stream") };
        assert!(stream.next().await.unwrap().is_ok());
        drop(stream);
        while fake.shared.left.load(Ordering::SeqCst) == 0 {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    });
}

#[test]
fn a_bound_is_the_only_length_that_an_engine_of_any_kind_gets() {
    for (kind, name) in [(EngineKind::Vllm, "vllm"), (EngineKind::LlamaCpp, "llamacpp")] {
        let fake = FakeEngine::start(name, "m");
        let engine = engine(kind, &fake, None);
        for (given, expected) in [
            (json!({}), 3),
            (json!({"max_completion_tokens": 2}), 2),
            (json!({"max_tokens": 2, "max_completion_tokens": 99}), 2),
            (json!({"max_tokens": 2, "n_predict": -1}), 2),
            (json!({"n_predict": 99, "extra_body": {"max_tokens": 99}, "best_of": 9}), 3),
        ] {
            let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "a"}]});
            body.as_object_mut().unwrap().extend(given.as_object().unwrap().clone());
            let mut call = call(&body, EngineEndpoint::Chat);
            call.tokens_max = Some(3);
            assert!(run(engine.ask(&call)).is_ok());
            let asked = fake.asked().last().unwrap().body.clone();
            let names: Vec<&str> = asked.as_object().unwrap().keys().map(String::as_str).collect();
            assert_eq!(
                (asked["max_tokens"].as_u64(), names.len()),
                (Some(expected), 3),
                "{given}: {names:?}"
            );
        }
    }
}

//! Where an engine tells what it has cached, in the words of vLLM's configuration.

use serde::Deserialize;
use std::collections::BTreeMap;

/// Maximum data-parallel ranks of an engine.
const RANKS_MAX: u32 = 1024;

/// What is known of where an engine's KV events come from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum KvEventsAt {
    /// The engine is asked.
    #[default]
    Asked,
    /// They are not wanted.
    Off,
    /// The operator said.
    Given(Vec<KvSource>),
}

/// Where the events of one rank come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvSource {
    pub(crate) rank: u32,
    pub(crate) events: EventsFrom,
    /// Where missed ones are asked for.
    pub(crate) replay: Option<String>,
}

/// Who opens the connection for events; addresses are `HOST:PORT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum EventsFrom {
    /// This process, to the engine.
    Engine(String),
    /// The engine, to this process, if the address is one of its own and is free. Else the engine is there:
    /// it tells the port that it got as if it were one to connect to.
    HereOrEngine(String),
}

/// What `/kv_event_sources` answers, by rank.
#[derive(Deserialize)]
struct Sources(BTreeMap<u32, Source>);

#[derive(Deserialize)]
struct Source {
    #[serde(default)]
    enable_kv_cache_events: bool,
    #[serde(default)]
    publisher: Option<String>,
    endpoint: String,
    #[serde(default)]
    replay_endpoint: Option<String>,
}

impl KvEventsAt {
    /// What the operator says of an engine at `host`: `events` and `replay` as they stand in the engine's
    /// `--kv-events-config`, for rank 0; the ports of further ranks follow. `events` may be `off`.
    ///
    /// # Errors
    /// What is wrong with the words.
    pub fn given(host: &str, events: &str, replay: Option<&str>, ranks: u32) -> Result<Self, String> {
        if events == "off" {
            return Ok(KvEventsAt::Off);
        }
        if !(1..=RANKS_MAX).contains(&ranks) {
            return Err(format!("kv-ranks is a number from 1 to {RANKS_MAX}"));
        }
        let source = |rank| KvSource::new(host, rank, events, replay, rank);
        (0..ranks).map(source).collect::<Result<_, _>>().map(KvEventsAt::Given)
    }
}

/// Reads the answer of an engine at `host` to `/kv_event_sources`.
///
/// # Errors
/// Why no events come from there.
pub(crate) fn told(host: &str, document: &[u8]) -> Result<Vec<KvSource>, String> {
    let Sources(sources) =
        serde_json::from_slice(document).map_err(|error| format!("/kv_event_sources: {error}"))?;
    let tells = |source: &Source| {
        source.enable_kv_cache_events && source.publisher.as_deref().is_none_or(|kind| kind == "zmq")
    };
    let read = |(rank, source): (u32, Source)| {
        KvSource::new(host, rank, &source.endpoint, source.replay_endpoint.as_deref(), 0)
    };
    let sources: Vec<KvSource> = sources
        .into_iter()
        .filter(|(_, source)| tells(source))
        .take(RANKS_MAX as usize)
        .map(read)
        .collect::<Result<_, _>>()?;
    if sources.is_empty() {
        return Err("it tells no KV events".into());
    }
    Ok(sources)
}

impl KvSource {
    /// `ports_up` is added to the ports.
    fn new(host: &str, rank: u32, events: &str, replay: Option<&str>, ports_up: u32) -> Result<Self, String> {
        let (events_host, port) = endpoint(events, ports_up)?;
        let at = |name: &str, port: u16| {
            let is_any = matches!(name, "*" | "0.0.0.0" | "[::]");
            format!("{}:{port}", if is_any { host } else { name })
        };
        let is_bound_there = events.contains('*') || events.contains("::");
        let address = at(events_host, port);
        let events =
            if is_bound_there { EventsFrom::Engine(address) } else { EventsFrom::HereOrEngine(address) };
        let replay = replay.map(|replay| endpoint(replay, ports_up).map(|(name, port)| at(name, port)));
        Ok(KvSource { rank, events, replay: replay.transpose()? })
    }
}

/// Host and port of `tcp://HOST:PORT`.
fn endpoint(text: &str, ports_up: u32) -> Result<(&str, u16), String> {
    let wrong = || format!("'{text}' is no place of KV events: write tcp://HOST:PORT or tcp://*:PORT");
    let (host, port) =
        text.strip_prefix("tcp://").and_then(|rest| rest.rsplit_once(':')).ok_or_else(wrong)?;
    let port = port.parse::<u16>().ok().and_then(|port| u32::from(port).checked_add(ports_up));
    let port = port.and_then(|port| u16::try_from(port).ok()).filter(|port| *port > 0).ok_or_else(wrong)?;
    if host.is_empty() || host.contains(['/', ' ']) {
        return Err(wrong());
    }
    Ok((host, port))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(rank: u32, events: EventsFrom, replay: Option<&str>) -> KvSource {
        KvSource { rank, events, replay: replay.map(str::to_owned) }
    }

    #[test]
    fn the_engine_says_who_connects() {
        use EventsFrom::{Engine, HereOrEngine};
        let document = br#"{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557",
            "replay_endpoint":"tcp://127.0.0.1:5558","buffer_steps":10000,"hwm":100000,"topic":"kv"},
            "1":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://10.0.0.9:5558","replay_endpoint":null}}"#;
        let expected = vec![
            source(0, Engine("h:5557".into()), Some("127.0.0.1:5558")),
            source(1, HereOrEngine("10.0.0.9:5558".into()), None),
        ];
        assert_eq!(told("h", document), Ok(expected));
        for nothing in [
            &b"{}"[..],
            br#"{"0":{"enable_kv_cache_events":false,"publisher":"null","endpoint":"tcp://*:5557"}}"#,
            br#"{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"ipc:///tmp/x"}}"#,
            b"{\"detail\":\"Not Found\"}",
            b"x",
        ] {
            assert!(told("h", nothing).is_err());
        }
    }

    #[test]
    fn the_operator_may_say_it_for_several_ranks() {
        use EventsFrom::{Engine, HereOrEngine};
        let KvEventsAt::Given(sources) =
            KvEventsAt::given("h", "tcp://*:5557", Some("tcp://*:6000"), 2).unwrap()
        else {
            panic!("not given")
        };
        let expected = [
            source(0, Engine("h:5557".into()), Some("h:6000")),
            source(1, Engine("h:5558".into()), Some("h:6001")),
        ];
        assert_eq!(sources, expected);
        let here = KvEventsAt::given("h", "tcp://127.0.0.1:5", None, 1).unwrap();
        assert_eq!(here, KvEventsAt::Given(vec![source(0, HereOrEngine("127.0.0.1:5".into()), None)]));
        assert_eq!(KvEventsAt::given("h", "off", None, 1), Ok(KvEventsAt::Off));
        for wrong in ["", "tcp://h", "tcp://h:0", "tcp://:5", "tcp://*:65536", "ipc:///x:5", "h:5"] {
            assert!(KvEventsAt::given("h", wrong, None, 1).is_err(), "{wrong}");
        }
        assert!(KvEventsAt::given("h", "tcp://*:65535", None, 2).is_err());
        assert!(KvEventsAt::given("h", "tcp://*:1", None, 0).is_err());
    }
}

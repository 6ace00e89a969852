//! Where an engine publishes its KV events, in the terms of vLLM's configuration.

use serde::Deserialize;
use std::collections::BTreeMap;
use std::net::IpAddr;

/// Maximum data-parallel ranks of an engine, by its operator's word.
const RANKS_MAX: u32 = 1024;
/// Maximum number of ranks that an engine may report: each is a connection that this process opens. An
/// operator with more ranks behind one address sets `kv-ranks`.
const TOLD_RANKS_MAX: usize = 32;

/// How to find an engine's KV events.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum KvEventsAt {
    /// The engine reports them.
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
    /// The address from which missed events are requested.
    pub(crate) replay: Option<String>,
}

/// Which side opens the connection for events; addresses are `HOST:PORT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum EventsFrom {
    /// This process, to the engine.
    Engine(String),
    /// The engine connects to this process, if the address is one of this host's and is free. Otherwise the
    /// engine listens there: it reports the port that it got as if it were one to connect to.
    HereOrEngine(String),
}

/// What `/kv_event_sources` answers, by rank.
#[derive(Deserialize)]
struct Sources(BTreeMap<u32, KvEventSource>);

#[derive(Deserialize)]
struct KvEventSource {
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
    /// The fault of the text.
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

/// Reads the answer of an engine at `host` to `/kv_event_sources`. An engine may only name ports of its own
/// host, and this process connects to them: it opens no port on an engine's request.
///
/// # Errors
/// Why no events come from there.
pub(crate) fn told(host: &str, document: &[u8]) -> Result<Vec<KvSource>, String> {
    let Sources(sources) =
        serde_json::from_slice(document).map_err(|error| format!("/kv_event_sources: {error}"))?;
    let tells = |source: &KvEventSource| {
        source.enable_kv_cache_events && source.publisher.as_deref().is_none_or(|kind| kind == "zmq")
    };
    let telling: Vec<(u32, KvEventSource)> =
        sources.into_iter().filter(|(_, source)| tells(source)).collect();
    if telling.len() > TOLD_RANKS_MAX {
        let count = telling.len();
        return Err(format!("it reports {count} sources of KV events; at most {TOLD_RANKS_MAX} are used"));
    }
    let mut read: Vec<KvSource> = Vec::new();
    for (rank, source) in telling {
        let events = own_endpoint(host, &source.endpoint)?;
        let replay =
            source.replay_endpoint.as_deref().map(|replay| own_endpoint(host, replay)).transpose()?;
        let events = EventsFrom::Engine(events);
        if read.iter().any(|other| other.events == events) {
            return Err("it reports one source of KV events for several ranks".into());
        }
        read.push(KvSource { rank, events, replay });
    }
    if read.is_empty() {
        return Err("it reports no KV events".into());
    }
    Ok(read)
}

/// An endpoint that an engine at `host` names, as this process connects to it.
fn own_endpoint(host: &str, text: &str) -> Result<String, String> {
    let (name, port) = endpoint(text, 0)?;
    let bare = name.trim_start_matches('[').trim_end_matches(']');
    let is_any_or_loopback = bare == "*"
        || bare == "localhost"
        || bare.parse::<IpAddr>().is_ok_and(|address| address.is_unspecified() || address.is_loopback());
    match is_any_or_loopback || name == host {
        // its loopback is reached from here only if it is this host's too
        true => Ok(format!("{host}:{port}")),
        false => Err(format!("it reports KV events at a host other than its own, {name}")),
    }
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
    fn an_engine_names_ports_of_its_own_host() {
        use EventsFrom::Engine;
        let document = br#"{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557",
            "replay_endpoint":"tcp://127.0.0.1:5558","buffer_steps":10000,"hwm":100000,"topic":"kv"},
            "1":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://h:5559","replay_endpoint":null}}"#;
        let expected = vec![
            source(0, Engine("h:5557".into()), Some("h:5558")),
            source(1, Engine("h:5559".into()), None),
        ];
        assert_eq!(told("h", document), Ok(expected));
        for (name, at) in [("[::]", "h:1"), ("0.0.0.0", "h:1"), ("[::1]", "h:1"), ("localhost", "h:1")] {
            assert_eq!(own_endpoint("h", &format!("tcp://{name}:1")), Ok(at.to_owned()));
        }
        for other in ["10.0.0.9", "169.254.169.254", "db.internal", "h.evil", "[fe80::1]"] {
            assert!(own_endpoint("h", &format!("tcp://{other}:80")).is_err(), "{other}");
        }
    }

    #[test]
    fn an_engine_has_no_more_sources_than_are_believed() {
        let document = |count: usize, port: fn(usize) -> usize| {
            let source = |rank| {
                format!(
                    "\"{rank}\":{{\"enable_kv_cache_events\":true,\"endpoint\":\"tcp://*:{}\"}}",
                    port(rank)
                )
            };
            format!("{{{}}}", (0..count).map(source).collect::<Vec<_>>().join(","))
        };
        let apart = |rank| 5000 + rank;
        assert_eq!(told("h", document(TOLD_RANKS_MAX, apart).as_bytes()).unwrap().len(), TOLD_RANKS_MAX);
        for refused in [document(200, apart), document(TOLD_RANKS_MAX + 1, apart), document(2, |_| 5000)] {
            assert!(told("h", refused.as_bytes()).is_err());
        }
    }

    #[test]
    fn what_tells_no_source_is_an_error() {
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

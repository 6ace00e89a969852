//! The file that lists the endpoints of a pool, in the format of llm-d's file discovery with additional
//! labels.

use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

/// Maximum number of endpoints of a pool.
pub(crate) const ENDPOINTS_MAX: usize = 1024;
/// Prefix of mixfleet's labels.
pub(crate) const OWN_LABEL: &str = "mixfleet.dev/";
/// Labels that equal an argument of `--worker-engine`, with the argument.
const LABEL_WORDS: [(&str, &str); 12] = [
    ("usd-per-hour", "usd"),
    ("part", "part"),
    ("tp", "tp"),
    ("shape", "shape"),
    ("stored", "stored"),
    ("profile", "profile"),
    ("key-file", "key-file"),
    ("kv-events", "kv-events"),
    ("kv-replay", "kv-replay"),
    ("kv-ranks", "kv-ranks"),
    ("nic-gb-per-s", "nic-gb-per-s"),
    ("model", "model"),
];

/// The endpoints of a pool, and the priorities of objectives.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EndpointPool {
    /// The endpoints, in the order of the file.
    pub endpoints: Vec<PoolEndpoint>,
    /// Priorities by the name of an inference objective.
    pub objectives: BTreeMap<String, i32>,
}

/// A model server of a pool.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PoolEndpoint {
    /// Name in the file.
    pub name: String,
    /// Address in the proxies' configuration.
    pub address: SocketAddr,
    /// The engine as an argument of `--worker-engine`: `KIND:http://HOST:PORT[=ROLE][,WORD=VALUE...]`.
    pub engine: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct PoolFile {
    endpoints: Vec<PoolEntry>,
    #[serde(default)]
    objectives: BTreeMap<String, i32>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct PoolEntry {
    name: String,
    #[serde(default)]
    namespace: Option<String>,
    address: IpAddr,
    port: PortText,
    #[serde(default)]
    metrics_host: Option<String>,
    #[serde(default)]
    labels: BTreeMap<String, String>,
}

/// A port as text, as in llm-d's file, or as a number.
#[derive(Deserialize)]
#[serde(untagged)]
enum PortText {
    Number(u16),
    Text(String),
}

impl PortText {
    fn number(&self) -> Option<u16> {
        let port = match self {
            PortText::Number(port) => *port,
            PortText::Text(text) => text.parse().ok()?,
        };
        (port > 0).then_some(port)
    }
}

impl EndpointPool {
    /// Parses the file's text, YAML or JSON.
    ///
    /// # Errors
    /// The fault of the file.
    pub fn read(text: &str) -> Result<Self, String> {
        let PoolFile { endpoints, objectives } =
            serde_saphyr::from_str(text).map_err(|error| error.to_string())?;
        if endpoints.is_empty() {
            return Err("it lists no endpoints".into());
        }
        if endpoints.len() > ENDPOINTS_MAX {
            return Err(format!("it lists {} endpoints; expected at most {ENDPOINTS_MAX}", endpoints.len()));
        }
        let read =
            |entry: &PoolEntry| entry.endpoint().map_err(|why| format!("endpoint '{}': {why}", entry.name));
        let endpoints = endpoints.iter().map(read).collect::<Result<Vec<_>, _>>()?;
        let (mut names, mut addresses) = (BTreeSet::new(), BTreeSet::new());
        for endpoint in &endpoints {
            if !names.insert(&endpoint.name) {
                return Err(format!("two endpoints have the name '{}'", endpoint.name));
            }
            if !addresses.insert(endpoint.address) {
                return Err(format!("two endpoints have the address {}", endpoint.address));
            }
        }
        Ok(EndpointPool { endpoints, objectives })
    }
}

impl PoolEntry {
    fn endpoint(&self) -> Result<PoolEndpoint, String> {
        let port = self.port.number().ok_or("its port is not a number from 1 to 65535")?;
        let address = SocketAddr::new(self.address, port);
        if let Some(metrics) = self.metrics_host.as_ref().filter(|host| **host != address.to_string()) {
            return Err(format!("metricsHost '{metrics}': metrics are read at {address} only; leave it out"));
        }
        let name = match &self.namespace {
            Some(namespace) => format!("{namespace}/{}", self.name),
            None => self.name.clone(),
        };
        PoolEndpoint::labelled(name, address, &self.labels)
    }
}

impl PoolEndpoint {
    /// The endpoint at an address, described by labels.
    ///
    /// # Errors
    /// The label that is wrong.
    pub(crate) fn labelled(
        name: String,
        address: SocketAddr,
        labels: &BTreeMap<String, String>,
    ) -> Result<Self, String> {
        let own = |name: &str| labels.get(&format!("{OWN_LABEL}{name}"));
        let kind = own("engine").map_or("vllm", String::as_str);
        let mut engine = format!("{kind}:http://{address}={}", endpoint_role(labels)?);
        for (label, value) in labels {
            let Some(name) = label.strip_prefix(OWN_LABEL) else { continue };
            if matches!(name, "engine" | "role") {
                continue;
            }
            let Some((_, word)) = LABEL_WORDS.iter().find(|(known, _)| *known == name) else {
                let known = LABEL_WORDS.map(|(known, _)| known).join(", ");
                return Err(format!("unknown label '{label}'; known: engine, role, {known}"));
            };
            if value.contains(',') {
                return Err(format!("label '{label}': '{value}' has a comma"));
            }
            engine = format!("{engine},{word}={value}");
        }
        // llm-d's label, which its picker compares with the models that the server lists
        if let Some(model) = labels.get("model").filter(|_| own("model").is_none()) {
            if model.contains(',') {
                return Err(format!("label 'model': '{model}' has a comma"));
            }
            engine = format!("{engine},model={model}");
        }
        Ok(PoolEndpoint { name, address, engine })
    }
}

/// The role, by mixfleet's label or by llm-d's.
fn endpoint_role(labels: &BTreeMap<String, String>) -> Result<&str, String> {
    let label = |name: &str| labels.get(name).map(String::as_str);
    match label("mixfleet.dev/role").or_else(|| label("llm-d.ai/role")) {
        None | Some("auto" | "both" | "prefill-decode") => Ok("auto"),
        Some(role @ ("prefill" | "decode")) => Ok(role),
        Some(other) => {
            Err(format!("unknown role '{other}'; known: prefill, decode, both, prefill-decode, auto"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LLM_D: &str = "
endpoints:
  - name: vllm-0
    address: 10.0.0.1
    port: \"8000\"
    labels:
      model: Qwen3-32B
";

    #[test]
    fn a_file_of_llm_d_is_read_as_it_is() {
        let pool = EndpointPool::read(LLM_D).unwrap();
        let engine = "vllm:http://10.0.0.1:8000=auto,model=Qwen3-32B".into();
        let address = "10.0.0.1:8000".parse().unwrap();
        assert_eq!(pool.endpoints, [PoolEndpoint { name: "vllm-0".into(), address, engine }]);
        let json = r#"{"endpoints":[{"name":"a","namespace":"ns","address":"::1","port":8000}]}"#;
        let pool = EndpointPool::read(json).unwrap();
        assert_eq!(pool.endpoints[0].engine, "vllm:http://[::1]:8000=auto");
        assert_eq!(pool.endpoints[0].name, "ns/a");
    }

    #[test]
    fn labels_say_what_an_endpoint_is_and_objectives_what_matters() {
        let text = "
endpoints:
  - name: a
    address: 10.0.0.1
    port: \"8000\"
    metricsHost: 10.0.0.1:8000
    labels:
      app: other
      llm-d.ai/role: decode
      mixfleet.dev/part: H100-SXM-80GB
      mixfleet.dev/shape: llama-3.1-8b
      mixfleet.dev/usd-per-hour: \"2.5\"
objectives:
  batch: -10
  chat: 5
";
        let pool = EndpointPool::read(text).unwrap();
        let engine = "vllm:http://10.0.0.1:8000=decode,part=H100-SXM-80GB,shape=llama-3.1-8b,usd=2.5";
        assert_eq!(pool.endpoints[0].engine, engine);
        assert_eq!(pool.objectives, BTreeMap::from([("batch".into(), -10), ("chat".into(), 5)]));
    }

    #[test]
    fn what_is_wrong_with_a_pool_is_named() {
        let entry = |more: &str| format!("{{endpoints: [{{name: a, address: 10.0.0.1, port: 80{more}}}]}}");
        for (text, part) in [
            ("endpoints: []".into(), "no endpoints"),
            ("endpoints: [{name: a, address: example.com, port: 80}]".into(), "IP address"),
            ("endpoints: [{name: a, address: 10.0.0.1, port: web}]".into(), "65535"),
            (entry(", colour: red"), "colour"),
            (entry(", metricsHost: '10.0.0.1:81'"), "metricsHost"),
            (entry(", labels: {mixfleet.dev/colour: red}"), "unknown label"),
            (entry(", labels: {mixfleet.dev/part: 'a,b'}"), "comma"),
            (entry(", labels: {llm-d.ai/role: king}"), "unknown role"),
            (
                "endpoints: [{name: a, address: 10.0.0.1, port: 1}, {name: a, address: 10.0.0.2, port: 1}]"
                    .into(),
                "two endpoints have the name",
            ),
            (
                "endpoints: [{name: a, address: 10.0.0.1, port: 1}, {name: b, address: 10.0.0.1, port: 1}]"
                    .into(),
                "two endpoints have the address",
            ),
        ] {
            let why = EndpointPool::read(&text).unwrap_err();
            assert!(why.contains(part), "{text}: {why}");
        }
    }
}

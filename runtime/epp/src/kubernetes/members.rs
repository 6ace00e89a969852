//! Endpoints from the objects of a cluster.

use crate::pool::{ENDPOINTS_MAX, EndpointPool, OWN_LABEL, PoolEndpoint};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

/// Annotation of a pool with the priorities of objectives, a YAML or JSON map.
const OBJECTIVES: &str = "mixfleet.dev/objectives";

/// An `InferencePool`'s name in its namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolName {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

/// The kind `InferencePool`, version v1.
pub(super) fn inference_pool() -> ApiResource {
    ApiResource::from_gvk(&GroupVersionKind::gvk("inference.networking.k8s.io", "v1", "InferencePool"))
}

/// The specification of an `InferencePool`, as far as a picker needs it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PoolSpec {
    /// Labels that every member has.
    selector: BTreeMap<String, String>,
    ports: Vec<u16>,
    objectives: BTreeMap<String, i32>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WrittenSpec {
    selector: WrittenSelector,
    target_ports: Vec<WrittenPort>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WrittenSelector {
    match_labels: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct WrittenPort {
    number: u16,
}

impl PoolSpec {
    /// Reads an object.
    ///
    /// # Errors
    /// The fault of the object.
    pub(super) fn read(object: &DynamicObject) -> Result<Self, String> {
        let spec = object.data.get("spec").cloned().unwrap_or_default();
        let WrittenSpec { selector, target_ports } =
            serde_json::from_value(spec).map_err(|error| format!("its spec: {error}"))?;
        if selector.match_labels.is_empty() || target_ports.is_empty() {
            return Err("its spec has no selector, or no target port".into());
        }
        let objectives = object.annotations().get(OBJECTIVES);
        let objectives = objectives.map_or(Ok(BTreeMap::new()), |text| {
            serde_saphyr::from_str(text).map_err(|error| format!("annotation '{OBJECTIVES}': {error}"))
        })?;
        let ports = target_ports.iter().map(|port| port.number).collect();
        Ok(PoolSpec { selector: selector.match_labels, ports, objectives })
    }

    /// The selector, as a list of pods takes it.
    pub(super) fn selector(&self) -> String {
        let pairs: Vec<String> =
            self.selector.iter().map(|(label, value)| format!("{label}={value}")).collect();
        pairs.join(",")
    }

    /// The pool of the ready pods among `pods`, with the reasons why pods are left out.
    pub(super) fn members<'a>(&self, pods: impl Iterator<Item = &'a Pod>) -> (EndpointPool, Vec<String>) {
        let (mut endpoints, mut reasons) = (Vec::new(), Vec::new());
        let mut addresses = BTreeSet::new();
        for pod in pods.filter(|pod| is_pod_ready(pod)) {
            match self.endpoints(pod) {
                // a pod that has just ended may still be listed with an address that another one has now
                Ok(of_pod) => {
                    endpoints.extend(of_pod.into_iter().filter(|one| addresses.insert(one.address)))
                }
                Err(why) => reasons.push(format!("pod '{}': {why}", pod.name_any())),
            }
        }
        if endpoints.len() > ENDPOINTS_MAX {
            reasons.push(format!("{} endpoints are more than {ENDPOINTS_MAX}", endpoints.len()));
            endpoints.truncate(ENDPOINTS_MAX);
        }
        (EndpointPool { endpoints, objectives: self.objectives.clone() }, reasons)
    }

    /// The endpoints of a pod, one for each port.
    fn endpoints(&self, pod: &Pod) -> Result<Vec<PoolEndpoint>, String> {
        let address = pod.status.as_ref().and_then(|status| status.pod_ip.as_deref()).unwrap_or_default();
        let address: IpAddr =
            address.parse().map_err(|_| format!("its address '{address}' is not an IP address"))?;
        // a value with a slash or a colon is an annotation: labels cannot have it
        let told = pod.annotations().iter().filter(|(name, _)| name.starts_with(OWN_LABEL));
        let mut labels: BTreeMap<String, String> =
            told.map(|(name, value)| (name.clone(), value.clone())).collect();
        labels.extend(pod.labels().iter().map(|(name, value)| (name.clone(), value.clone())));
        let endpoint = |port: &u16| {
            let name = match self.ports.len() {
                1 => pod.name_any(),
                _ => format!("{}:{port}", pod.name_any()),
            };
            PoolEndpoint::labelled(name, SocketAddr::new(address, *port), &labels)
        };
        self.ports.iter().map(endpoint).collect()
    }
}

/// Whether a pod gets requests: ready, and not being deleted.
fn is_pod_ready(pod: &Pod) -> bool {
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_ref());
    let is_ready =
        conditions.is_some_and(|all| all.iter().any(|one| one.type_ == "Ready" && one.status == "True"));
    is_ready && pod.metadata.deletion_timestamp.is_none()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn pool(more: Value) -> DynamicObject {
        let mut whole = json!({
            "apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePool",
            "metadata": {"name": "p", "annotations": {"mixfleet.dev/objectives": "{batch: -1}"}},
            "spec": {"selector": {"matchLabels": {"app": "vllm", "tier": "a"}}, "targetPorts": [{"number": 8000}],
                     "endpointPickerRef": {"name": "mixfleet-epp", "port": {"number": 9002}}},
        });
        for (key, value) in more.as_object().unwrap() {
            whole["spec"][key] = value.clone();
        }
        serde_json::from_value(whole).unwrap()
    }

    fn pod(name: &str, ip: &str, labels: Value, ready: &str) -> Pod {
        serde_json::from_value(json!({
            "metadata": {"name": name, "labels": labels, "annotations": {"mixfleet.dev/kv-events": "tcp://*:5557"}},
            "status": {"podIP": ip, "conditions": [{"type": "Ready", "status": ready}]},
        }))
        .unwrap()
    }

    #[test]
    fn ready_pods_are_endpoints_by_port() {
        let spec = PoolSpec::read(&pool(json!({}))).unwrap();
        assert_eq!((spec.selector(), spec.objectives["batch"]), ("app=vllm,tier=a".into(), -1));
        let mut ending = pod("d", "10.0.0.4", json!({}), "True");
        ending.metadata.deletion_timestamp = serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap();
        let pods = [
            pod("a", "10.0.0.1", json!({"mixfleet.dev/usd-per-hour": "2.5"}), "True"),
            pod("b", "10.0.0.2", json!({}), "False"),
            pod("c", "10.0.0.3", json!({"mixfleet.dev/colour": "red"}), "True"),
            ending,
            pod("e", "", json!({}), "True"),
            pod("f", "10.0.0.1", json!({}), "True"),
        ];
        let (found, reasons) = spec.members(pods.iter());
        let engine = "vllm:http://10.0.0.1:8000=auto,kv-events=tcp://*:5557,usd=2.5".into();
        let address = "10.0.0.1:8000".parse().unwrap();
        assert_eq!(found.endpoints, [PoolEndpoint { name: "a".into(), address, engine }]);
        assert_eq!(reasons.len(), 2, "{reasons:?}");
        assert!(reasons[0].contains("pod 'c'") && reasons[0].contains("colour"), "{reasons:?}");
        assert!(reasons[1].contains("pod 'e'"), "{reasons:?}");
        let two = PoolSpec::read(&pool(json!({"targetPorts": [{"number": 1}, {"number": 2}]}))).unwrap();
        let names: Vec<String> =
            two.members(pods[..1].iter()).0.endpoints.into_iter().map(|one| one.name).collect();
        assert_eq!(names, ["a:1", "a:2"]);
    }

    #[test]
    fn a_faulty_pool_object_is_explained() {
        for (more, part) in [
            (json!({"targetPorts": []}), "no target port"),
            (json!({"targetPorts": [{"number": 70000}]}), "spec"),
            (json!({"selector": {}}), "matchLabels"),
        ] {
            let why = PoolSpec::read(&pool(more)).unwrap_err();
            assert!(why.contains(part), "{why}");
        }
    }
}

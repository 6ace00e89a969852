//! A double of an API server: it lists and watches pods and a pool, keeps leases, and allows what a Role
//! does.

use bytes::Bytes;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use mixfleet_epp::ClusterAccess;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::net::TcpListener;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

type Answer = Response<BoxBody<Bytes, Infallible>>;

/// A rule of a Role.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct RoleRule {
    api_groups: Vec<String>,
    resources: Vec<String>,
    #[serde(default)]
    resource_names: Vec<String>,
    verbs: Vec<String>,
}

/// A request in the terms of a Role.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct RoleAccess {
    group: String,
    resource: String,
    verb: String,
    name: Option<String>,
}

impl RoleRule {
    fn allows(&self, access: &RoleAccess) -> bool {
        let is_named = self.resource_names.is_empty()
            || access.name.as_ref().is_some_and(|name| self.resource_names.contains(name));
        is_named
            && self.api_groups.contains(&access.group)
            && self.resources.contains(&access.resource)
            && self.verbs.contains(&access.verb)
    }
}

#[derive(Default)]
struct ClusterState {
    version: u64,
    /// Watches from a version before this one have ended.
    oldest: u64,
    /// Objects by resource and name.
    objects: BTreeMap<(String, String), Value>,
    /// Events by version and resource.
    events: Vec<(u64, String, Value)>,
    watches: Vec<(String, UnboundedSender<Value>)>,
    lists: BTreeMap<String, u32>,
    is_down: bool,
    rules: Vec<RoleRule>,
    used: BTreeSet<(usize, String)>,
}

/// The API server.
#[derive(Clone)]
pub(crate) struct Cluster {
    state: Arc<Mutex<ClusterState>>,
    url: String,
}

/// The Role that the deployment gives the picker.
fn rules() -> Vec<RoleRule> {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/deploy/kubernetes/picker/rbac.yaml");
    let text = std::fs::read_to_string(file).expect("the deployment has a Role");
    let documents: Vec<Value> = serde_saphyr::from_multiple(&text).expect("YAML");
    let role = documents.iter().find(|one| one["kind"] == "Role").expect("a Role");
    serde_json::from_value(role["rules"].clone()).expect("rules")
}

impl Cluster {
    pub(crate) async fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let url = format!("http://{}", listener.local_addr().expect("it is bound"));
        let state = ClusterState { rules: rules(), ..ClusterState::default() };
        let cluster = Cluster { state: Arc::new(Mutex::new(state)), url };
        let serving = cluster.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let cluster = serving.clone();
                let answer = service_fn(move |request| {
                    let cluster = cluster.clone();
                    async move { Ok::<_, Infallible>(cluster.answer(request).await) }
                });
                let served =
                    hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), answer);
                tokio::spawn(served);
            }
        });
        cluster
    }

    pub(crate) fn access(&self) -> ClusterAccess {
        ClusterAccess::at(&self.url).expect("a URL")
    }

    fn lock(&self) -> MutexGuard<'_, ClusterState> {
        self.state.lock().expect("no panic before")
    }

    /// Creates or changes an object.
    pub(crate) fn put(&self, resource: &str, mut object: Value) {
        let mut state = self.lock();
        state.version += 1;
        object["metadata"]["resourceVersion"] = state.version.to_string().into();
        object["metadata"]["namespace"] = "ns".into();
        let name = object["metadata"]["name"].as_str().expect("a name").to_owned();
        let known = state.objects.insert((resource.into(), name), object.clone());
        state.tell(resource, if known.is_some() { "MODIFIED" } else { "ADDED" }, object);
    }

    pub(crate) fn delete(&self, resource: &str, name: &str) {
        let mut state = self.lock();
        state.version += 1;
        let mut object = state.objects.remove(&(resource.into(), name.into())).expect("it exists");
        object["metadata"]["resourceVersion"] = state.version.to_string().into();
        state.tell(resource, "DELETED", object);
    }

    pub(crate) fn get(&self, resource: &str, name: &str) -> Option<Value> {
        self.lock().objects.get(&(resource.into(), name.into())).cloned()
    }

    /// Ends all watches without notice.
    pub(crate) fn cut(&self) {
        self.lock().watches.clear();
    }

    /// Forgets all events, and ends watches with 410 Gone.
    pub(crate) fn compact(&self) {
        let mut state = self.lock();
        state.version += 1;
        state.oldest = state.version;
        state.events.clear();
        for (_, watch) in std::mem::take(&mut state.watches) {
            let _ = watch.send(json!({"type": "ERROR", "object": gone()}));
        }
    }

    /// Whether requests fail.
    pub(crate) fn set_down(&self, is_down: bool) {
        self.lock().is_down = is_down;
    }

    /// How often a resource was listed.
    pub(crate) fn lists(&self, resource: &str) -> u32 {
        self.lock().lists.get(resource).copied().unwrap_or(0)
    }

    /// Grants of the Role that were never used.
    pub(crate) fn unused(&self) -> Vec<String> {
        let state = self.lock();
        let rules = state.rules.iter().enumerate();
        let all = rules.flat_map(|(at, rule)| rule.verbs.iter().map(move |verb| (at, verb.clone())));
        let unused = all.filter(|one| !state.used.contains(one));
        unused.map(|(at, verb)| format!("{verb} {:?}", state.rules[at].resources)).collect()
    }

    async fn answer(&self, request: Request<Incoming>) -> Answer {
        let (parts, body) = request.into_parts();
        let body = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
        let query: BTreeMap<String, String> = parts
            .uri
            .query()
            .unwrap_or_default()
            .split('&')
            .filter_map(|pair| pair.split_once('='))
            .map(|(name, value)| (name.to_owned(), value.replace("%3D", "=").replace("%2C", ",")))
            .collect();
        let path: Vec<&str> = parts.uri.path().trim_matches('/').split('/').collect();
        let (group, rest) = match path[..] {
            ["api", "v1", ref rest @ ..] => ("", rest),
            ["apis", group, _, ref rest @ ..] => (group, rest),
            _ => return failed(StatusCode::NOT_FOUND, "no such path"),
        };
        let (["namespaces", "ns", resource], name) = (match rest {
            [a, b, c] => ([*a, *b, *c], None),
            [a, b, c, name] => ([*a, *b, *c], Some((*name).to_owned())),
            _ => return failed(StatusCode::NOT_FOUND, "no such path"),
        }) else {
            return failed(StatusCode::FORBIDDEN, "another namespace");
        };
        let is_watch = query.get("watch").is_some_and(|watch| watch == "true" || watch == "1");
        let verb = match (&parts.method, &name) {
            (&Method::GET, Some(_)) => "get",
            (&Method::GET, None) if is_watch => "watch",
            (&Method::GET, None) => "list",
            (&Method::POST, _) => "create",
            (&Method::PUT, _) => "update",
            _ => return failed(StatusCode::METHOD_NOT_ALLOWED, "no such verb"),
        };
        let field = query.get("fieldSelector").and_then(|field| field.strip_prefix("metadata.name="));
        let access = RoleAccess {
            group: group.into(),
            resource: resource.into(),
            verb: verb.into(),
            name: name.clone().or_else(|| field.map(str::to_owned)),
        };
        let mut state = self.lock();
        if state.is_down {
            return failed(StatusCode::SERVICE_UNAVAILABLE, "down");
        }
        let Some(at) = state.rules.iter().position(|rule| rule.allows(&access)) else {
            return failed(StatusCode::FORBIDDEN, &format!("the Role does not allow {access:?}"));
        };
        state.used.insert((at, verb.into()));
        match verb {
            "list" => state.list(resource, &query),
            "watch" => state.watch(resource, &query),
            _ => state.lease(verb, name, &body),
        }
    }
}

impl ClusterState {
    fn tell(&mut self, resource: &str, kind: &str, object: Value) {
        let event = json!({"type": kind, "object": object});
        self.events.push((self.version, resource.into(), event.clone()));
        for (_, watch) in self.watches.iter().filter(|(of, _)| of == resource) {
            let _ = watch.send(event.clone());
        }
    }

    fn list(&mut self, resource: &str, query: &BTreeMap<String, String>) -> Answer {
        *self.lists.entry(resource.into()).or_default() += 1;
        let labels: Vec<(&str, &str)> = query
            .get("labelSelector")
            .into_iter()
            .flat_map(|all| all.split(','))
            .filter_map(|one| one.split_once('='))
            .collect();
        let is_meant = |object: &&Value| {
            labels.iter().all(|(label, value)| object["metadata"]["labels"][*label] == **value)
        };
        let of = self.objects.iter().filter(|((of, _), _)| of == resource).map(|(_, object)| object);
        let items: Vec<&Value> = of.filter(is_meant).collect();
        let metadata = json!({"resourceVersion": self.version.to_string()});
        whole(
            StatusCode::OK,
            &json!({"apiVersion": "v1", "kind": "List", "metadata": metadata, "items": items}),
        )
    }

    fn watch(&mut self, resource: &str, query: &BTreeMap<String, String>) -> Answer {
        let from: u64 = query.get("resourceVersion").and_then(|from| from.parse().ok()).unwrap_or(0);
        let (to, mut events) = unbounded_channel();
        if from < self.oldest {
            let _ = to.send(json!({"type": "ERROR", "object": gone()}));
        } else {
            for (_, _, event) in self.events.iter().filter(|(at, of, _)| *at > from && of == resource) {
                let _ = to.send(event.clone());
            }
            self.watches.push((resource.into(), to));
        }
        let lines = futures_util::stream::poll_fn(move |context| {
            events.poll_recv(context).map(|event| {
                event.map(|event| Ok::<_, Infallible>(Frame::data(Bytes::from(format!("{event}\n")))))
            })
        });
        Response::new(BodyExt::boxed(StreamBody::new(lines)))
    }

    /// Reads or writes a lease, unless another one wrote since it was read.
    fn lease(&mut self, verb: &str, name: Option<String>, body: &[u8]) -> Answer {
        let mut object: Value =
            if body.is_empty() { Value::Null } else { serde_json::from_slice(body).expect("JSON") };
        let name = name.unwrap_or_else(|| object["metadata"]["name"].as_str().expect("a name").to_owned());
        let key = ("leases".to_owned(), name);
        let known = self.objects.get(&key);
        match (verb, known) {
            ("get", Some(lease)) => return whole(StatusCode::OK, lease),
            ("get" | "update", None) => return failed(StatusCode::NOT_FOUND, "no such lease"),
            ("create", Some(_)) => return failed(StatusCode::CONFLICT, "it exists"),
            ("update", Some(lease))
                if lease["metadata"]["resourceVersion"] != object["metadata"]["resourceVersion"] =>
            {
                return failed(StatusCode::CONFLICT, "it has changed");
            }
            _ => {}
        }
        self.version += 1;
        object["metadata"]["resourceVersion"] = self.version.to_string().into();
        self.objects.insert(key, object.clone());
        whole(StatusCode::OK, &object)
    }
}

fn gone() -> Value {
    json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Expired", "code": 410,
           "message": "too old resource version", "metadata": {}})
}

fn whole(status: StatusCode, document: &Value) -> Answer {
    let mut answer = Response::new(BodyExt::boxed(Full::new(Bytes::from(document.to_string()))));
    *answer.status_mut() = status;
    answer
}

fn failed(status: StatusCode, why: &str) -> Answer {
    let reason = status.canonical_reason().unwrap_or_default().replace(' ', "");
    let document = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": why, "reason": reason,
                          "code": status.as_u16(), "metadata": {}});
    whole(status, &document)
}

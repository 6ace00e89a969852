//! The connection to an engine: HTTP/1, with limits on what it may make this process wait for or hold.

use crate::kind::EngineKind;
use crate::kv_source::KvEventsAt;
use crate::replicas::{NameLookup, ReplicaSeat};
use crate::tls;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use hyper::http::uri::{Authority, Scheme};
use hyper::{Method, Request, Response, StatusCode, Uri};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use mixfleet_hal::outside::{EngineFault, EngineFaultKind};
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Time for a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for a short document.
const SHORT_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum size of a short document.
const SHORT_BYTES_MAX: usize = 8 << 20;

/// How an engine is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineAddress {
    scheme: Scheme,
    authority: Authority,
    /// What stands before the paths of the API; without a slash at its end.
    prefix: String,
    /// Trusted authorities for its certificate, as PEM; by default the system's.
    authorities: Option<String>,
}

impl std::str::FromStr for EngineAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = |cause: &str| format!("'{text}' {cause}; write http://HOST:PORT or https://HOST:PORT");
        let uri: Uri = text.parse().map_err(|error| wrong(&format!("is no address: {error}")))?;
        let scheme = uri.scheme().filter(|scheme| [&Scheme::HTTP, &Scheme::HTTPS].contains(scheme));
        let scheme = scheme.ok_or_else(|| wrong("does not begin with http:// or https://"))?;
        if *scheme == Scheme::HTTPS {
            tls::is_built()?;
        }
        if uri.query().is_some() {
            return Err(wrong("has a query"));
        }
        let authority = uri.authority().cloned().ok_or_else(|| wrong("names no host"))?;
        if authority.as_str().contains('@') {
            return Err(wrong("has a user in it: keys are read from a file"));
        }
        let prefix = uri.path().trim_end_matches('/').trim_end_matches("/v1").to_owned();
        Ok(EngineAddress { scheme: scheme.clone(), authority, prefix, authorities: None })
    }
}

impl std::fmt::Display for EngineAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}://{}{}", self.scheme, self.authority, self.prefix)
    }
}

impl EngineAddress {
    /// The host, as it stands before a port.
    pub fn host(&self) -> &str {
        self.authority.host()
    }

    /// The same address, with these authorities alone as trusted, PEM.
    ///
    /// # Errors
    /// When it is not reached by https, which authorities are for.
    pub fn believed_from(self, authorities: String) -> Result<Self, String> {
        match self.is_https() {
            true => Ok(EngineAddress { authorities: Some(authorities), ..self }),
            false => Err("certificates are for engines that are reached by https://".into()),
        }
    }

    fn is_https(&self) -> bool {
        self.scheme == Scheme::HTTPS
    }
}

/// An engine that is reached over HTTP.
pub struct HttpEngine {
    pub(crate) name: String,
    pub(crate) kind: EngineKind,
    pub(crate) address: EngineAddress,
    authorization: Option<HeaderValue>,
    /// The engine's own name of the model, where that is not the one that clients use.
    pub(crate) model: Option<String>,
    /// Names that it last reported as accepted.
    pub(crate) listed: Mutex<Vec<String>>,
    /// The names that are adapters of another model, whose KV they do not share.
    pub(crate) adapters: Mutex<Vec<String>>,
    pub(crate) kv_events: KvEventsAt,
    /// Its place behind a name that stands for several engines.
    pub(crate) seat: Option<ReplicaSeat>,
    /// Whether it said that it does not tell token ids by the paths that are meant for that.
    pub(crate) renders_not: AtomicBool,
    client: Client<tls::Connector, Full<Bytes>>,
}

impl std::fmt::Debug for HttpEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HttpEngine").field("name", &self.name).finish_non_exhaustive()
    }
}

impl HttpEngine {
    /// An engine of this kind. `key` is sent as bearer token; `model` is what it calls the model, where that
    /// is not the name that clients use.
    ///
    /// # Errors
    /// When the key has characters that no header may have, or there are no certificates of authorities.
    pub fn new(
        kind: EngineKind,
        address: EngineAddress,
        key: Option<&str>,
        model: Option<String>,
    ) -> Result<Self, String> {
        let bearer = |key: &str| {
            let mut value = HeaderValue::from_str(&format!("Bearer {key}"))
                .map_err(|_| "the key of an engine has characters that no header may have".to_owned())?;
            value.set_sensitive(true);
            Ok::<_, String>(value)
        };
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
        connector.set_nodelay(true);
        let client = Client::builder(TokioExecutor::new())
            // A connection that the engine closes just then would break a request that may have begun.
            .pool_max_idle_per_host(0)
            .build(tls::connector(connector, address.is_https(), address.authorities.as_deref())?);
        Ok(HttpEngine {
            name: format!("{kind}:{}{}", address.authority, address.prefix),
            kind,
            authorization: key.map(bearer).transpose()?,
            address,
            model,
            listed: Mutex::default(),
            adapters: Mutex::default(),
            kv_events: KvEventsAt::default(),
            seat: None,
            renders_not: AtomicBool::new(false),
            client,
        })
    }

    /// Engines of this kind behind one name, which `lookup` resolves: at most this many, those that answer
    /// when probed. Otherwise as [`new`](Self::new).
    ///
    /// # Errors
    /// As [`new`](Self::new), and when they are reached by https, whose certificates are for names.
    pub fn behind_name(
        kind: EngineKind,
        address: &EngineAddress,
        key: Option<&str>,
        model: Option<&str>,
        count: usize,
        lookup: NameLookup,
    ) -> Result<Vec<Self>, String> {
        if address.is_https() {
            return Err("engines behind one name are reached by http:// alone: name each".into());
        }
        let port = address.authority.port_u16().unwrap_or(80);
        let name = format!("{}:{port}", address.host());
        let seats = ReplicaSeat::all(&name, count, lookup).into_iter();
        let engine = |seat: ReplicaSeat| {
            let engine = HttpEngine::new(kind, address.clone(), key, model.map(str::to_owned))?;
            Ok(HttpEngine { name: format!("{}#{}", engine.name, seat.number()), seat: Some(seat), ..engine })
        };
        seats.map(engine).collect()
    }

    /// The host and port that it is reached at.
    fn authority(&self) -> Result<Authority, EngineFault> {
        let Some(seat) = &self.seat else { return Ok(self.address.authority.clone()) };
        let wrong = |cause: &str| EngineFault::new(EngineFaultKind::Vacant, cause);
        let address = seat.address().ok_or_else(|| wrong("no engine has this place"))?;
        address.to_string().parse().map_err(|_| wrong("its address cannot be used"))
    }

    /// Its host, as it stands before a port.
    pub(crate) fn host(&self) -> String {
        self.authority().map_or_else(|_| self.address.host().to_owned(), |at| at.host().to_owned())
    }

    /// The same engine, with the known source of its KV events.
    #[must_use]
    pub fn with_kv_events(self, kv_events: KvEventsAt) -> Self {
        HttpEngine { kv_events, ..self }
    }

    pub(crate) fn listed(&self) -> Vec<String> {
        self.listed.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sends a request, as part of the span that `trace` names, and waits for the head of the answer.
    pub(crate) async fn send(
        &self,
        method: Method,
        path: &str,
        body: Vec<u8>,
        trace: Option<&str>,
    ) -> Result<Response<Incoming>, EngineFault> {
        let (EngineAddress { scheme, prefix, .. }, authority) = (&self.address, self.authority()?);
        let uri = format!("{scheme}://{authority}{prefix}{path}");
        let mut request = Request::builder().method(method).uri(uri);
        if !body.is_empty() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        if let Some(authorization) = &self.authorization {
            request = request.header(AUTHORIZATION, authorization);
        }
        if let Some(trace) = trace {
            request = request.header("traceparent", trace);
        }
        let request = request.body(Full::new(Bytes::from(body)));
        let request = request.map_err(|error| {
            EngineFault::new(EngineFaultKind::Failed, format!("its address cannot be used: {error}"))
        })?;
        self.client.request(request).await.map_err(|error| {
            let (kind, cause) = match error.is_connect() {
                true => (EngineFaultKind::Unreachable, "it cannot be reached"),
                false => (EngineFaultKind::Cut, "its connection broke"),
            };
            let why = tls::words(&error, self.address.host()).unwrap_or_else(|| causes(&error));
            EngineFault::new(kind, format!("{cause}: {why}"))
        })
    }

    /// Requests a short document.
    pub(crate) async fn short(
        &self,
        method: Method,
        path: &str,
        body: Vec<u8>,
    ) -> Result<(StatusCode, Vec<u8>), EngineFault> {
        let asked = async {
            let response = self.send(method, path, body, None).await?;
            let status = response.status();
            Ok((status, read(response.into_body(), SHORT_BYTES_MAX).await?))
        };
        let late = |_| {
            let detail = format!("{path} was not answered within {} s", SHORT_TIMEOUT.as_secs());
            EngineFault::new(EngineFaultKind::Unreachable, detail)
        };
        tokio::time::timeout(SHORT_TIMEOUT, asked).await.map_err(late)?
    }
}

/// The body of an answer, of limited size.
pub(crate) async fn read(body: Incoming, bytes_max: usize) -> Result<Vec<u8>, EngineFault> {
    let collected = Limited::new(body, bytes_max).collect().await.map_err(|error| {
        if error.is::<http_body_util::LengthLimitError>() {
            let detail = format!("its answer is longer than {bytes_max} bytes");
            return EngineFault::new(EngineFaultKind::Malformed, detail);
        }
        EngineFault::new(EngineFaultKind::Cut, format!("its answer broke off: {}", causes(&*error)))
    })?;
    Ok(collected.to_bytes().into())
}

/// When the engine wants to be asked again.
pub(crate) fn retry_after(response: &Response<Incoming>) -> Option<Duration> {
    let seconds = response.headers().get(RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds))
}

/// An error with its causes, each once.
pub(crate) fn causes(error: &dyn std::error::Error) -> String {
    let (mut text, mut next) = (error.to_string(), error.source());
    while let Some(cause) = next {
        let words = cause.to_string();
        if !text.contains(&words) {
            text = format!("{text}: {words}");
        }
        next = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_host_and_perhaps_a_path() {
        let address = |text: &str| text.parse::<EngineAddress>();
        let plain = address("http://10.0.0.3:8000").unwrap();
        assert_eq!((plain.authority.as_str(), plain.prefix.as_str()), ("10.0.0.3:8000", ""));
        assert_eq!(address("http://10.0.0.3:8000/v1/"), Ok(plain));
        assert_eq!(address("http://[::1]:8000/a/v1").unwrap().prefix, "/a");
        for wrong in ["10.0.0.3:8000", "ftp://h", "http://u:p@h", "http://h/?q", "http://", "x y"] {
            assert!(address(wrong).is_err(), "{wrong}");
        }
        let told = address("http://h").unwrap().believed_from(String::new());
        assert!(told.unwrap_err().contains("https://"));
        match address("https://h:1/v1") {
            Ok(secure) => assert!(cfg!(feature = "tls") && secure.is_https() && secure.host() == "h"),
            Err(why) => assert!(!cfg!(feature = "tls") && why.contains("the feature tls"), "{why}"),
        }
    }

    #[test]
    fn a_key_is_not_shown() {
        let address: EngineAddress = "http://h:1".parse().unwrap();
        let engine = HttpEngine::new(EngineKind::Vllm, address.clone(), Some("secret-key"), None).unwrap();
        assert!(!format!("{engine:?}").contains("secret"));
        assert_eq!(engine.name, "vllm:h:1");
        assert!(HttpEngine::new(EngineKind::Vllm, address, Some("a\nb"), None).is_err());
    }
}

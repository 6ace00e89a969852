//! Host names under which this server may be requested, and origins of web pages that may request it.
//!
//! A browser inside a private network sends whatever a page from outside makes it send. A page cannot choose
//! two headers: `Host` is the name under which the server was looked up, which exposes a name that an
//! attacker resolves to this address (DNS rebinding); `Origin` is the origin of the page. Programs other than
//! browsers send no `Origin`. The server's own page has an origin equal to the requested host, under an
//! address or a name that no attacker can point to this server.

use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderValue, Method, Request, StatusCode, header};
use axum::response::{IntoResponse, Response};
use std::net::IpAddr;

use super::errors::ApiError;

/// Wildcard for all names or origins.
const ANY: &str = "*";
/// Seconds for which a browser may cache the answer to a preflight request.
const PREFLIGHT_S: u32 = 600;

/// The host names and origins that are allowed. The default allows any name, and no page.
#[derive(Clone, Debug, Default)]
pub struct Origins {
    /// Allowed host names besides this machine's own; none allows any name.
    hosts: Option<Vec<String>>,
    pages: Vec<String>,
}

impl Origins {
    /// A server reachable only from this machine is requested by this machine's names and `hosts`; any other
    /// by `hosts` too, or by any name if there are none. Web pages of `origins` are allowed. `*` stands for
    /// all.
    ///
    /// # Errors
    /// The reason, when an entry is not a valid name or origin.
    pub fn new(is_loopback: bool, hosts: &[String], origins: &[String]) -> Result<Self, String> {
        let hosts = hosts.iter().map(|host| checked_host(host)).collect::<Result<Vec<_>, _>>()?;
        let pages = origins.iter().map(|origin| checked_origin(origin)).collect::<Result<_, _>>()?;
        let any = hosts.iter().any(|host| host == ANY) || (hosts.is_empty() && !is_loopback);
        Ok(Origins { hosts: (!any).then_some(hosts), pages })
    }

    /// The response to a preflight request; none for other requests, which proceed.
    ///
    /// # Errors
    /// When the request's host name or origin is not allowed.
    pub(super) fn check<B>(&self, request: &Request<B>) -> Result<Option<Response>, ApiError> {
        let asked = request.headers().get_all(header::HOST).into_iter();
        let asked = asked.map(|host| host.to_str().unwrap_or(""));
        // A client that sends neither header is not a browser.
        let absolute = request.uri().authority().map(Authority::as_str);
        if let Some(host) = asked.chain(absolute).find(|host| !self.admits_host(host)) {
            return Err(ApiError::foreign_host(&host.chars().take(128).collect::<String>()));
        }
        let Some(origin) = request.headers().get(header::ORIGIN) else { return Ok(None) };
        if !self.admits_page(origin) && !self.is_own_page(origin, request.headers()) {
            return Err(ApiError::foreign_origin());
        }
        let asks = request.headers().contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
        Ok((asks && request.method() == Method::OPTIONS).then(preflight))
    }

    /// Allows the page to read the response.
    pub(super) fn share(&self, origin: Option<&HeaderValue>, headers: &mut HeaderMap) {
        let Some(origin) = origin.filter(|origin| self.admits_page(origin)) else { return };
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone());
        headers.insert(header::VARY, HeaderValue::from_static("origin"));
    }

    fn admits_host(&self, host: &str) -> bool {
        let Some(allowed) = &self.hosts else { return true };
        let Ok(authority) = host.parse::<Authority>() else { return false };
        let name = bare(authority.host());
        is_own(&name) || allowed.contains(&name)
    }

    /// Whether a page came from this server.
    fn is_own_page(&self, origin: &HeaderValue, headers: &HeaderMap) -> bool {
        let mut hosts = headers.get_all(header::HOST).into_iter();
        let (Some(Ok(host)), None) = (hosts.next().map(HeaderValue::to_str), hosts.next()) else {
            return false;
        };
        let Some((_, page)) = origin.to_str().ok().and_then(|origin| origin.split_once("://")) else {
            return false;
        };
        let Ok(authority) = host.parse::<Authority>() else { return false };
        let name = bare(authority.host());
        let is_listed = self.hosts.as_ref().is_some_and(|listed| listed.contains(&name));
        page.eq_ignore_ascii_case(host) && (is_own(&name) || is_listed || name.parse::<IpAddr>().is_ok())
    }

    fn admits_page(&self, origin: &HeaderValue) -> bool {
        let is = |page: &String| page == ANY || page.as_bytes().eq_ignore_ascii_case(origin.as_bytes());
        self.pages.iter().any(is)
    }
}

fn preflight() -> Response {
    let headers = [
        (header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST")),
        (
            header::ACCESS_CONTROL_ALLOW_HEADERS,
            HeaderValue::from_static("authorization, content-type, x-request-id"),
        ),
        (header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from(PREFLIGHT_S)),
    ];
    (StatusCode::NO_CONTENT, headers).into_response()
}

/// A host name, normalised for comparison.
fn bare(host: &str) -> String {
    let name = host.trim_start_matches('[').trim_end_matches(']').trim_end_matches('.');
    name.to_ascii_lowercase()
}

/// Whether a name always means the machine itself.
fn is_own(name: &str) -> bool {
    name == "localhost"
        || name.ends_with(".localhost")
        || name.parse().is_ok_and(|address: IpAddr| address.to_canonical().is_loopback())
}

fn checked_host(host: &str) -> Result<String, String> {
    let name = bare(host);
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let is_name = !name.is_empty() && name.chars().all(plain);
    if host == ANY || is_name || name.parse::<IpAddr>().is_ok() {
        return Ok(name);
    }
    Err(format!("'{host}' is no host: give a name or an address without a port, or '*' for any"))
}

fn checked_origin(origin: &str) -> Result<String, String> {
    let rest = origin.split_once("://").map(|(_, rest)| rest);
    let is_origin = rest.is_some_and(|rest| rest.parse::<Authority>().is_ok());
    if origin == ANY || origin == "null" || is_origin {
        return Ok(origin.to_string());
    }
    Err(format!("'{origin}' is no origin: give it as https://HOST or https://HOST:PORT, or '*' for any"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machines_own_names_are_known_and_what_only_looks_so_is_not() {
        let origins = Origins::new(true, &["Models.Example".into(), "fd00::7".into()], &[]).unwrap();
        let own = [
            "localhost",
            "LOCALHOST:8000",
            "localhost.",
            "a.localhost",
            "127.0.0.1:1",
            "127.9.9.9",
            "[::1]:80",
        ];
        let given = ["models.example", "models.example.:9", "[FD00::7]:8000"];
        for host in own.into_iter().chain(given) {
            assert!(origins.admits_host(host), "{host}");
        }
        let foreign = [
            "",
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "evillocalhost",
            "0.0.0.0",
            "10.0.0.1",
            "2130706433",
            "[::2]",
            "localhost@evil.example",
            "evil.example#localhost",
            "x models.example",
            "[::1",
            "a:b:c",
        ];
        for host in foreign {
            assert!(!origins.admits_host(host), "{host}");
        }
    }

    #[test]
    fn a_server_that_others_reach_is_asked_by_any_name_unless_names_are_given() {
        let admits = |hosts: &[&str], host| {
            let hosts: Vec<String> = hosts.iter().map(|host| host.to_string()).collect();
            Origins::new(false, &hosts, &[]).unwrap().admits_host(host)
        };
        assert!(admits(&[], "anything.example") && admits(&["*"], "anything.example"));
        assert!(admits(&["a.example"], "a.example:80") && !admits(&["a.example"], "b.example"));
        assert!(Origins::new(true, &["*".into()], &[]).unwrap().admits_host("anything.example"));
    }

    #[test]
    fn what_is_no_name_or_origin_is_said() {
        for host in ["", "http://a", "a:80", "a b", "a/b"] {
            assert!(Origins::new(true, &[host.into()], &[]).unwrap_err().contains("is no host"), "{host}");
        }
        for origin in ["", "a.example", "https://", "https://a/b", "https://a b"] {
            assert!(
                Origins::new(true, &[], &[origin.into()]).unwrap_err().contains("is no origin"),
                "{origin}"
            );
        }
    }
}

//! What stands in for TLS in a build without it.

use hyper_util::client::legacy::connect::HttpConnector;

pub(crate) type Connector = HttpConnector;

/// Whether engines can be reached by https.
pub(crate) fn is_built() -> Result<(), String> {
    Err("this build has no https: build with the feature tls".into())
}

pub(crate) fn connector(http: HttpConnector, _: bool, _: Option<&str>) -> Result<Connector, String> {
    Ok(http)
}

pub(crate) fn words(_: &(dyn std::error::Error + 'static), _: &str) -> Option<String> {
    None
}

//! The page at `/`: devices, requests, dollars, placements and a chat, drawn in the browser from `/metrics`,
//! `/debug/placement` and the API. The server only answers those requests.

use axum::http::{HeaderValue, header};
use axum::response::{Html, IntoResponse, Response};

const PAGE: &str = include_str!("page.html");
/// The page loads nothing from elsewhere, connects only to its own server, and cannot be framed by other
/// pages.
const POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Answers with the page, which contains nothing specific to this server and so needs no key.
pub(super) async fn page() -> Response {
    let headers = [
        (header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY)),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
    ];
    (headers, Html(PAGE)).into_response()
}

#[cfg(test)]
mod tests {
    use super::PAGE;

    #[test]
    fn it_loads_nothing_and_writes_no_markup_of_others() {
        for foreign in ["http://", "https://", "src=", "@import", "url("] {
            assert!(!PAGE.contains(foreign), "{foreign}");
        }
        for markup in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("] {
            assert!(!PAGE.contains(markup), "{markup}");
        }
    }
}

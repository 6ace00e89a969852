//! Web pages in a browser on the server's machine cannot use the server.

use super::support::{MODEL, Play, Response, Server, Setup, run};
use mixfleet_runtime::api::Origins;
use serde_json::json;

fn setup(hosts: &[&str], origins: &[&str]) -> Setup {
    let owned = |words: &[&str]| words.iter().map(|word| word.to_string()).collect::<Vec<_>>();
    let origins = Origins::new(true, &owned(hosts), &owned(origins)).unwrap();
    Setup { origins, api_key: None, ..Setup::play(Play::say("hi")) }
}

impl Server {
    async fn with_headers(&self, method: &str, path: &str, headers: &str) -> Response {
        let body = json!({"model": MODEL, "prompt": "a"}).to_string();
        let length = body.len();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nconnection: close\r\ncontent-length: {length}\r\n{headers}\r\n"
        );
        self.exchange(format!("{head}{body}").as_bytes()).await
    }
}

#[test]
fn a_name_that_a_stranger_lets_point_here_is_refused() {
    run(setup(&["models.example"], &[]), |server| async move {
        for host in ["localhost:8000", "127.0.0.1", "[::1]:8000", "models.example"] {
            let headers = format!("host: {host}\r\n");
            assert_eq!(server.with_headers("POST", "/v1/completions", &headers).await.status, 200, "{host}");
            assert_eq!(server.with_headers("GET", "/live", &headers).await.status, 200, "{host}");
        }
        for (method, path) in
            [("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/x")]
        {
            for headers in
                ["host: evil.example\r\n", "host: localhost\r\nhost: evil.example\r\n", "host: \r\n"]
            {
                let refused = server.with_headers(method, path, headers).await;
                assert_eq!(
                    (refused.error().0, refused.error().3.as_str()),
                    (403, "host_not_allowed"),
                    "{headers}"
                );
            }
        }
        let absolute =
            server.with_headers("GET", "http://evil.example/v1/models", "host: localhost\r\n").await;
        assert_eq!(absolute.error().0, 403);
        assert_eq!(server.submissions().len(), 4);
    });
}

#[test]
fn a_page_cannot_generate_without_leave() {
    run(setup(&[], &["https://chat.example"]), |server| async move {
        let simple = "content-type: text/plain\r\n";
        for origin in
            ["https://evil.example", "null", "http://chat.example", "https://chat.example.evil.example", ""]
        {
            // These have no content type, or one for which a browser sends no preflight request.
            for kind in ["", simple, "content-type: application/json\r\n"] {
                let headers = format!("host: localhost\r\norigin: {origin}\r\n{kind}");
                let refused = server.with_headers("POST", "/v1/completions", &headers).await;
                assert_eq!(
                    (refused.error().0, refused.error().3.as_str()),
                    (403, "origin_not_allowed"),
                    "{origin}"
                );
                assert!(!refused.headers.contains_key("access-control-allow-origin"));
            }
        }
        assert!(server.submissions().is_empty());
        let headers = "host: localhost\r\norigin: https://chat.example\r\ncontent-type: application/json\r\n";
        let answered = server.with_headers("POST", "/v1/completions", headers).await;
        assert_eq!(answered.status, 200);
        assert_eq!(answered.headers["access-control-allow-origin"], "https://chat.example");
        assert_eq!(answered.headers["vary"], "origin");
    });
}

#[test]
fn the_servers_own_page_may_ask_unless_a_stranger_could_have_named_it() {
    let asked = |hosts: &'static [&str], headers: &'static str| {
        let hosts: Vec<String> = hosts.iter().map(|host| host.to_string()).collect();
        let origins = Origins::new(false, &hosts, &[]).unwrap();
        let setup = Setup { origins, api_key: None, ..Setup::play(Play::say("hi")) };
        run(setup, move |server| async move {
            let status = server.with_headers("GET", "/v1/models", headers).await.status;
            let page = server.with_headers("GET", "/", headers).await;
            assert_eq!(page.status, status, "{headers}");
            assert!(status != 200 || page.headers["content-security-policy"].contains("connect-src 'self'"));
            let wanted = if headers.contains("own") { 200 } else { 403 };
            assert_eq!(status, wanted, "{headers}");
        });
    };
    for own in [
        "host: localhost:8000\r\norigin: http://localhost:8000\r\nx-is: own\r\n",
        "host: 10.1.2.3:8000\r\norigin: http://10.1.2.3:8000\r\nx-is: own\r\n",
        "host: [fd00::7]\r\norigin: https://[FD00::7]\r\nx-is: own\r\n",
    ] {
        asked(&[], own);
    }
    asked(&["models.example"], "host: models.example\r\norigin: https://models.example\r\nx-is: own\r\n");
    for strange in [
        // a name that its owner may have pointed here
        "host: evil.example\r\norigin: http://evil.example\r\n",
        "host: localhost:8000\r\norigin: http://localhost:9000\r\n",
        "host: localhost\r\norigin: null\r\n",
        "host: localhost\r\norigin: localhost\r\n",
        "host: 10.1.2.3\r\nhost: evil.example\r\norigin: http://evil.example\r\n",
        "origin: http://localhost\r\n",
    ] {
        asked(&[], strange);
    }
}

#[test]
fn a_browser_may_ask_beforehand_and_needs_no_key_for_that() {
    let setup = Setup { api_key: Some("secret".into()), ..setup(&[], &["https://chat.example"]) };
    run(setup, |server| async move {
        let asks = |origin: &str| {
            format!(
                "host: localhost\r\norigin: {origin}\r\naccess-control-request-method: POST\r\n\
                     access-control-request-headers: authorization, content-type\r\n"
            )
        };
        let answer = server.with_headers("OPTIONS", "/v1/completions", &asks("https://chat.example")).await;
        assert_eq!(answer.status, 204);
        assert_eq!(answer.headers["access-control-allow-origin"], "https://chat.example");
        assert!(answer.headers["access-control-allow-methods"].contains("POST"));
        assert!(answer.headers["access-control-allow-headers"].contains("authorization"));
        assert_eq!(
            server.with_headers("OPTIONS", "/v1/completions", &asks("https://evil.example")).await.status,
            403
        );
        let keyless = "host: localhost\r\norigin: https://chat.example\r\n";
        assert_eq!(server.with_headers("POST", "/v1/completions", keyless).await.error().0, 401);
    });
}

#[test]
fn who_is_refused_for_its_host_or_origin_is_counted() {
    run(setup(&[], &[]), |server| async move {
        for headers in [
            "host: evil.example\r\n",
            "host: a.example\r\n",
            "host: localhost\r\norigin: https://b.example\r\n",
        ] {
            assert_eq!(server.with_headers("GET", "/v1/models", headers).await.status, 403);
        }
        assert_eq!(server.with_headers("GET", "/v1/models", "host: localhost\r\n").await.status, 200);
        let told = server.metrics.encode();
        for line in [
            "http_refused_total{code=\"host_not_allowed\"} 2\n",
            "http_refused_total{code=\"origin_not_allowed\"} 1\n",
        ] {
            assert!(told.contains(line), "{line} is not in\n{told}");
        }
    });
}

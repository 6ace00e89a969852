//! Engines behind TLS, and the errors for untrusted certificates.

use crate::authority::Authority;
use crate::fake::FakeEngine;
use mixfleet_engines::{EngineAddress, EngineKind, HttpEngine};
use mixfleet_hal::outside::{
    EngineAnswer, EngineCall, EngineEndpoint, EngineFaultKind, EngineShare, EngineState, OutsideEngine,
};
use serde_json::json;
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// Decrypts in front of an engine; the port where it does.
async fn front(engine: &FakeEngine, (certificate, key): (String, String)) -> u16 {
    let certificates = vec![CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap()];
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let config = config.with_safe_default_protocol_versions().unwrap().with_no_client_auth();
    let acceptor = TlsAcceptor::from(Arc::new(config.with_single_cert(certificates, key).unwrap()));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (port, behind) = (listener.local_addr().unwrap().port(), engine.address.clone());
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let (acceptor, behind) = (acceptor.clone(), behind.clone());
            tokio::spawn(async move {
                // a client without trusted authorities leaves here
                let Ok(mut client) = acceptor.accept(client).await else { return };
                let mut engine = TcpStream::connect(behind).await.unwrap();
                let _ = tokio::io::copy_bidirectional(&mut client, &mut engine).await;
            });
        }
    });
    port
}

/// The port of a server that speaks HTTP alone.
async fn plain() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let _ = client.read(&mut [0; 1024]).await;
            let _ = client.write_all(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n").await;
        }
    });
    port
}

fn engine(url: &str, authority: Option<&Authority>) -> Result<HttpEngine, String> {
    let mut address: EngineAddress = url.parse()?;
    if let Some(authority) = authority {
        address = address.believed_from(authority.pem())?;
    }
    HttpEngine::new(EngineKind::Vllm, address, Some("k3y"), None)
}

/// The error for an unreachable engine.
async fn fault(engine: HttpEngine) -> String {
    let fault = engine.probe().await.unwrap_err();
    assert_eq!(fault.kind, EngineFaultKind::Unreachable, "{fault}");
    fault.to_string()
}

#[tokio::test]
async fn an_engine_behind_tls_answers_who_believes_its_authority() {
    let (fake, authority) = (FakeEngine::start("vllm", "m"), Authority::new());
    let port = front(&fake, authority.signs(&["localhost", "127.0.0.1"])).await;
    for host in ["localhost", "127.0.0.1"] {
        let engine = engine(&format!("https://{host}:{port}"), Some(&authority)).unwrap();
        let EngineState { version, .. } = engine.probe().await.unwrap();
        assert_eq!(version.as_deref(), Some("0.32.0"));
        let body = json!({"model": "m", "prompt": "count", "max_tokens": 3, "stream": true}).to_string();
        let call = EngineCall {
            endpoint: EngineEndpoint::Completions,
            body: Arc::new(body.into()),
            stream: true,
            begun: None,
            tokens_max: None,
            trace: None,
            share: EngineShare::Whole,
        };
        let Ok(EngineAnswer::Stream(mut stream)) = engine.ask(&call).await else { panic!("no stream") };
        let mut text = String::new();
        while let Some(chunk) = stream.next().await {
            text += &chunk.unwrap().text;
        }
        assert_eq!(text, "w0 w1 w2 ");
    }
    let asked = fake.asked();
    assert_eq!(asked.len(), 2);
    assert!(asked.iter().all(|came| came.headers.contains("Bearer k3y")), "the key goes along");
}

#[tokio::test]
async fn an_engine_whose_certificate_is_not_believed_gets_no_key_and_the_cause_is_said() {
    let (fake, authority) = (FakeEngine::start("vllm", "m"), Authority::new());
    let port = front(&fake, authority.signs(&["localhost"])).await;
    let other = Authority::new();
    let said = fault(engine(&format!("https://localhost:{port}"), Some(&other)).unwrap()).await;
    assert!(said.contains("not signed by a trusted authority") && said.contains("ca=FILE"), "{said}");
    let said = fault(engine(&format!("https://127.0.0.1:{port}"), Some(&authority)).unwrap()).await;
    assert!(said.contains("not for '127.0.0.1'"), "{said}");
    let said =
        fault(engine(&format!("https://localhost:{}", plain().await), Some(&authority)).unwrap()).await;
    assert!(said.contains("does not speak TLS"), "{said}");
    // the system's authorities, where it has any, have not signed it either
    match engine(&format!("https://localhost:{port}"), None) {
        Ok(engine) => assert!(fault(engine).await.contains("not signed by a trusted authority")),
        Err(why) => assert!(why.contains("ca-certificates"), "{why}"),
    }
    // nothing reached it but the greeting in TLS, which is no request
    assert!(fake.shared.came.lock().unwrap().iter().all(|came| !came.headers.contains("k3y")));
    for (pem, says) in [("", "no certificate"), ("-----BEGIN CERTIFICATE-----\nx", "PEM")] {
        let address: EngineAddress = "https://localhost".parse().unwrap();
        let address = address.believed_from(pem.into()).unwrap();
        let why = HttpEngine::new(EngineKind::Vllm, address, None, None).err().unwrap();
        assert!(why.contains(says), "{why}");
    }
}

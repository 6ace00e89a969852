//! Monitoring requests are answered even if a process's threads are blocked.

use mixfleet_runtime::api::{Api, Limits, Origins, Placements, observe_api};
use mixfleet_runtime::env::{RealEnv, SharedEnv};
use mixfleet_runtime::metrics::Metrics;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, Barrier, mpsc};

const THREADS: usize = 2;

fn get(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn a_process_says_that_it_lives_while_every_thread_of_its_runtime_is_blocked() {
    let serving =
        tokio::runtime::Builder::new_multi_thread().worker_threads(THREADS).enable_all().build().unwrap();
    let env: SharedEnv = Arc::new(RealEnv::new(serving.handle().clone()));
    let api = Api::new(env, Metrics::new(), Arc::new(Placements::new(1)), Limits::default(), None::<String>);
    let watching: SharedEnv = Arc::new(RealEnv::on_own_thread("health").unwrap());
    // It listens from the runtime that is going to be blocked, as the binary does.
    let listener = serving.block_on(watching.listen("127.0.0.1:0")).unwrap();
    let address = listener.address();
    let origins = Origins::new(true, &[], &[]).unwrap();
    watching.spawn(Box::pin(observe_api(listener, watching.clone(), api, origins)));

    let (blocked, all_blocked) = mpsc::channel();
    let end = Arc::new(Barrier::new(THREADS + 1));
    for _ in 0..THREADS {
        let (blocked, end) = (blocked.clone(), end.clone());
        serving.spawn(async move {
            blocked.send(()).unwrap();
            end.wait();
        });
    }
    (0..THREADS).for_each(|_| all_blocked.recv().unwrap());
    assert!(get(&address, "/live").starts_with("HTTP/1.1 200"));
    assert!(get(&address, "/health").contains("loading"));
    assert!(get(&address, "/metrics").contains("mixfleet_instances"));
    assert!(get(&address, "/v1/models").starts_with("HTTP/1.1 404"), "nothing else is answered there");
    end.wait();
}

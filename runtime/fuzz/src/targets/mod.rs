//! One function per parser.

mod devices;
mod fleet;
mod http;
mod kv;
mod model;
mod pool;
mod remote;
mod simulator;
mod wire;

use crate::Target;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

const fn of(name: &'static str, check: fn(&[u8]) -> bool, cases: u64) -> Target {
    Target { name, check, cases }
}

pub(crate) const ALL: &[Target] = &[
    of("api_keys", http::api_keys, 3000),
    of("certificates", wire::certificates, 500),
    of("chat_body", http::chat_body, 500),
    of("chat_template", model::chat_template, 1000),
    of("completion_body", http::completion_body, 500),
    of("config_json", model::config_json, 3000),
    of("descriptor", wire::descriptor, 3000),
    of("device_profile", devices::device_profile, 1000),
    of("engine_profile", simulator::engine_profile, 1000),
    of("event_log", fleet::event_log, 1000),
    of("fleet_file", simulator::fleet_file, 300),
    of("gguf", model::gguf, 10_000),
    of("http_address", http::address, 300),
    of("http_connection", http::connection, 500),
    of("kv_write", kv::write, 500),
    of("part_file", devices::part_file, 1000),
    of("pool_files", pool::files, 1000),
    of("registry_record", fleet::registry_record, 3000),
    of("remote_device", remote::device, 500),
    of("rpc_message", fleet::rpc_message, 5000),
    of("safetensors", model::safetensors, 1000),
    of("safetensors_index", model::safetensors_index, 500),
    of("tcp_stream", wire::tcp_stream, 500),
    of("tokenizer_config", model::tokenizer_config, 500),
    of("tokenizer_json", model::tokenizer_json, 300),
    of("trace", simulator::trace, 1000),
    of("traceparent", http::trace_parent, 5000),
    of("wire_words", wire::words, 5000),
];

/// The separator between the parts of an input that has several.
const SEPARATOR: &str = "\n=====\n";

/// The `N` parts of an input; missing ones are empty.
fn parts<const N: usize>(text: &str) -> [&str; N] {
    let mut parts = text.splitn(N, SEPARATOR);
    std::array::from_fn(|_| parts.next().unwrap_or_default())
}

/// Reports that the parser refused the input, and checks that the error has a message.
fn refused(error: &dyn std::fmt::Display) -> bool {
    assert!(!error.to_string().trim().is_empty(), "an error without words");
    false
}

/// A directory with files that is removed on drop.
struct Scratch(PathBuf);

impl Scratch {
    fn with(files: &[(&str, &[u8])]) -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let name = format!("mixfleet-fuzz-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let directory = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&directory).expect("a directory for temporary files");
        for (name, bytes) in files {
            std::fs::write(directory.join(name), bytes).expect("room for a small file");
        }
        Scratch(directory)
    }

    fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

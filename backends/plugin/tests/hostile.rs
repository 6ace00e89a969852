//! A library that misbehaves causes an error that names the violation.

use crate::made::libraries;
use mixfleet_hal::{Backend, BufferUsage, Cmd, ErrorKind, OpSig};
use mixfleet_plugin::PluginBackend;
use std::process::Command;
use std::time::Duration;

/// Set for a process that this file starts: the fault that it is to meet.
const FAULT: &str = "MIXFLEET_HOSTILE";

/// Every fault that does not end the process, and a part of its error message.
const FAULTS: [(&str, &str); 18] = [
    ("null", "version 1"),
    ("version", "version 9"),
    ("short", "24 bytes"),
    ("incomplete", "no 'run'"),
    ("name", "\"No Name\""),
    ("none", "no card is plugged in"),
    ("many", "1073741824 devices"),
    ("negative", "-5 devices"),
    ("alignment", "multiples of 3"),
    ("memory", "no memory"),
    ("pages", "0 tokens"),
    ("nothing", "gives nothing"),
    ("silent", "no reason"),
    ("unended", "xxxx"),
    ("hang", "not done"),
    ("half", "all three or none"),
    ("unrecorded", "records and gives nothing"),
    ("older", "met: nothing is wrong"),
];

#[test]
fn each_lie_is_told() {
    if libraries().is_none() {
        return;
    }
    for (fault, words) in FAULTS {
        let (said, ended) = met(fault);
        assert!(ended && said.contains(words), "{fault}: {said}");
    }
    let (said, ended) = met("garbage");
    assert!(
        ended && said.contains("met: nothing is wrong"),
        "wrong results are for the suite to find: {said}"
    );
    let (said, ended) = met("crash");
    assert!(!ended, "a library that aborts ends its process: {said}");
}

/// Runs a fault in a child process; returns its output, and whether it exited by itself.
fn met(fault: &str) -> (String, bool) {
    let test = std::env::current_exe().unwrap();
    let output = Command::new(test)
        .args(["--exact", "hostile::one_fault", "--nocapture", "--include-ignored"])
        .env(FAULT, fault)
        .env(crate::made::MADE_BY_PARENT, libraries().unwrap())
        .output()
        .unwrap();
    (String::from_utf8_lossy(&output.stdout).into_owned(), output.status.success())
}

/// Run by the test above, since a library is loaded once for all of a process.
#[test]
fn one_fault() {
    if std::env::var_os(FAULT).is_none() {
        return;
    }
    let Some(folder) = libraries() else { return };
    println!("met: {}", tried(&folder.join("hostile.so")).err().unwrap_or_else(|| "nothing is wrong".into()));
}

fn tried(path: &std::path::Path) -> Result<(), String> {
    let backend = PluginBackend::load(path).map_err(|absent| absent.reason)?;
    let found = backend.probe().map_err(|absent| absent.reason)?;
    assert_eq!(found.len(), 1);
    let device = backend.open("hostile:0").map_err(|error| error.to_string())?;
    assert!(backend.open("hostile:1").is_err() && backend.open("hostile:x").is_err());
    let out = device.alloc(16, BufferUsage::Activations).map_err(|error| error.to_string())?;
    let (x, weight) = (device.alloc(16, BufferUsage::Activations), device.alloc(64, BufferUsage::Weights));
    let (x, weight) = (x.map_err(|e| e.to_string())?, weight.map_err(|e| e.to_string())?);
    let too_much = device.alloc(u64::MAX, BufferUsage::Activations).map(drop).unwrap_err();
    assert_eq!(too_much.kind, ErrorKind::OutOfMemory);
    assert!(device.write(&out, &[0; 4]).is_err(), "a length that is not the slice's");
    let f32 = mixfleet_hal::DType::F32;
    let product =
        OpSig::Gemm { m: 1, n: 4, k: 4, x: f32, weight: f32, out: f32, bias: false, accumulate: false };
    let mut queue = device.queue().map_err(|error| error.to_string())?;
    let cmd = Cmd::new(product, &[x, weight, out]).map_err(|error| error.to_string())?;
    let ticket = queue.submit(std::slice::from_ref(&cmd)).map_err(|error| error.to_string())?;
    let limit =
        Duration::from_millis(if std::env::var(FAULT).is_ok_and(|f| f == "hang") { 300 } else { 60_000 });
    queue.wait(ticket, limit).map_err(|error| error.to_string())?;
    let graph = queue.record(&[cmd]).map_err(|error| error.to_string())?;
    let later = queue.replay(&graph).map_err(|error| error.to_string())?;
    queue.wait(later, limit).map_err(|error| error.to_string())?;
    let mut other = backend.open("hostile:0").and_then(|device| device.queue()).map_err(|e| e.to_string())?;
    assert_eq!(other.replay(&graph).is_err(), device.limits().replay_pays, "a graph of another device");
    Ok(())
}

#[test]
fn what_is_no_library_is_told() {
    let folder = std::env::temp_dir();
    let text = folder.join(format!("mixfleet-no-library-{}.so", std::process::id()));
    std::fs::write(&text, "no library").unwrap();
    let told = |path: &std::path::Path| PluginBackend::load(path).map(drop).unwrap_err().reason;
    assert!(told(&text).contains("cannot be loaded"), "{}", told(&text));
    if let Some(made) = libraries() {
        // where the dynamic linker would end this process
        let whole = std::fs::read(made.join("loops.so")).unwrap();
        for bytes in [70, 500, 3000, whole.len() / 2] {
            std::fs::write(&text, &whole[..bytes]).unwrap();
            assert!(told(&text).contains("cut off"), "{bytes}: {}", told(&text));
        }
    }
    std::fs::remove_file(&text).unwrap();
    assert!(told(&text).contains("cannot be loaded"), "{}", told(&text));
}

//! What the deployment files tell `mixfleet` to do, it understands.

use crate::common;
use std::path::{Path, PathBuf};
use std::process::Output;

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/deploy")
}

/// The block lists behind `key:` in a YAML file, item by item.
fn lists(text: &str, key: &str) -> Vec<Vec<String>> {
    let indent = |line: &str| line.len() - line.trim_start().len();
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim_start().starts_with('#')).collect();
    let heads = lines.iter().enumerate().filter(|(_, line)| line.trim() == key);
    let list = |(at, head): (usize, &&str)| {
        let items = lines[at + 1..]
            .iter()
            .take_while(|line| line.trim_start().starts_with("- ") && indent(line) >= indent(head));
        items.map(|line| line.trim_start()[2..].trim().trim_matches('"').to_string()).collect()
    };
    heads.map(list).collect()
}

/// The arguments of every container that runs `mixfleet`, with the file that they are from.
fn commands() -> Vec<(String, Vec<String>)> {
    let kubernetes = directory().join("kubernetes");
    let mut found = Vec::new();
    for (file, key) in [
        (kubernetes.join("router.yaml"), "args:"),
        (kubernetes.join("worker.yaml"), "args:"),
        (kubernetes.join("gateway/gateway.yaml"), "args:"),
        (kubernetes.join("picker/picker.yaml"), "args:"),
        (directory().join("compose.yaml"), "command:"),
    ] {
        let text = std::fs::read_to_string(&file).unwrap();
        let ours =
            lists(&text, key).into_iter().filter(|list| list[0] != "etcd" && !list[0].starts_with("--"));
        found.extend(ours.map(|list| (file.display().to_string(), list)));
    }
    found
}

fn run(arguments: &[String]) -> Output {
    common::mixfleet().args(arguments).env("MIXFLEET_API_KEY", "key").output().unwrap()
}

#[test]
fn every_argument_in_the_deployment_files_is_one_that_the_program_takes() {
    let commands = commands();
    let of = |name: &str| commands.iter().filter(|(_, list)| list[0] == name).count();
    let counts = (of("router"), of("worker"), of("serve"), of("epp"), commands.len());
    assert_eq!(counts, (2, 4, 1, 1, 8), "{commands:?}");
    for (file, mut arguments) in commands {
        // Earlier fields are parsed all the same, and nothing starts.
        arguments.push("--help".into());
        let output = run(&arguments);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{file}: {arguments:?}: {said}");
        arguments.insert(1, "--no-such-flag".into());
        assert_eq!(run(&arguments).status.code(), Some(2), "{file}: {arguments:?}");
    }
}

#[test]
fn what_kubernetes_starts_gets_as_far_as_its_certificates() {
    let under_tls = commands().into_iter().filter(|(_, list)| list.iter().any(|word| word == "--tls-ca"));
    let mut checked = 0;
    for (file, arguments) in under_tls {
        // As kubelet does; and at free ports of this machine.
        let here = |word: &String| word.replace("$(POD_IP)", "127.0.0.1");
        let free = |word: String| match word.rsplit_once(':') {
            Some((host, _)) if !word.contains("//") => format!("{host}:0"),
            _ => word,
        };
        let arguments: Vec<String> = arguments.iter().map(here).map(free).collect();
        let output = run(&arguments);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{file}: {arguments:?}: {said}");
        assert!(said.contains("--tls-ca /tls/ca.crt"), "{file}: {said}");
        checked += 1;
    }
    assert_eq!(checked, 3);
}

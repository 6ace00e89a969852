//! Nothing that serves prints by itself: a print panics once its reader has left, and blocks on an unread
//! pipe.

use super::{assert_none, is_product, sources};

/// Files that may print: of commands that end with their reader, and of programs for tests.
const PRINTS: &[&str] = &[
    "backends/cpu/peers/",
    "backends/wgpu/src/plan/shaders.rs",
    "runtime/cli/src/chat",
    "runtime/cli/src/check_files.rs",
    "runtime/cli/src/compare",
    "runtime/cli/src/fleet/status.rs",
    "runtime/cli/src/generate.rs",
    "runtime/cli/src/interrupt.rs",
    "runtime/cli/src/plan",
    "runtime/cli/src/profile",
    "runtime/cli/src/simulate",
    "runtime/cli/src/topo.rs",
    "runtime/cli/src/validate",
    "runtime/fuzz/src/libfuzzer.rs",
    "runtime/src/model/testing.rs",
    "scheduler/peers/",
];

/// Line numbers of the macros in a product's source that print.
fn printing_lines(text: &str) -> Vec<usize> {
    let product = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let prints = |line: &str| {
        let code = line.split("//").next().unwrap_or_default();
        ["print!(", "println!(", "eprint!(", "eprintln!("].iter().any(|name| {
            code.match_indices(name)
                .any(|(at, _)| !code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_'))
        })
    };
    product.lines().enumerate().filter(|(_, line)| prints(line)).map(|(at, _)| at + 1).collect()
}

#[test]
fn what_serves_logs_and_does_not_print() {
    let mut errors = Vec::new();
    for (path, text) in sources() {
        let may_print = PRINTS.iter().any(|known| path.starts_with(known));
        if is_product(&path) && !may_print {
            errors.extend(printing_lines(&text).iter().map(|line| format!("{path}:{line}")));
        }
    }
    assert_none(&errors, "prints outside of PRINTS: log by tracing, or use logs::say");
    let text = "eprintln!(\"a\");\nwriteln!(f);\n// println!()\n  print!(\"b\")\n#[cfg(test)]\nmod tests {\nprintln!();";
    assert_eq!(printing_lines(text), [1, 4]);
}

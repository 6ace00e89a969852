//! `mixfleet member` as a child process.

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStderr, Stdio};

/// A process that lends a device.
pub(crate) struct MemberProcess {
    child: Child,
    log: BufReader<ChildStderr>,
    /// `remote:HOST:PORT`
    pub(crate) selector: String,
}

impl MemberProcess {
    /// Lends a device at a free port, unless `further` names one; returns once it is ready.
    pub(crate) fn start(device: &str, further: &[&str]) -> Self {
        let mut command = super::mixfleet();
        command.args(["member", "--device", device]).args(further).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let log = BufReader::new(child.stderr.take().expect("piped"));
        let mut member = MemberProcess { child, log, selector: String::new() };
        let mut seen = String::new();
        while member.selector.is_empty() {
            let mut line = String::new();
            assert_ne!(member.log.read_line(&mut line).unwrap(), 0, "the member ended: {seen}");
            seen.push_str(&line);
            if let Some((_, selector)) = line.split_once("ready: ") {
                member.selector = selector.split_whitespace().next().unwrap().to_owned();
            }
        }
        member
    }

    /// As a crash does.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for MemberProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

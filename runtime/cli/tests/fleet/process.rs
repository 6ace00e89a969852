//! Processes under test: their logs, their ends, and etcd.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

/// Only ends a test that fails.
pub(super) const LONG: Duration = Duration::from_secs(60);

/// A process whose log is read line by line.
pub(super) struct Process {
    pub(super) child: Child,
    pub(super) log: mpsc::Receiver<String>,
    seen: String,
}

impl Process {
    pub(super) fn start(command: &mut Command) -> Self {
        let mut child = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let (line, log) = mpsc::channel();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        std::thread::spawn(move || lines.map_while(Result::ok).all(|text| line.send(text).is_ok()));
        Process { child, log, seen: String::new() }
    }

    /// The first line with `text`, seen already or yet to come.
    pub(super) fn has_said(&mut self, text: &str) -> String {
        let seen = self.seen.lines().find(|line| line.contains(text)).map(str::to_owned);
        seen.unwrap_or_else(|| self.says(text))
    }

    /// The next line with `text`.
    pub(super) fn says(&mut self, text: &str) -> String {
        self.may_say(text).unwrap_or_else(|| {
            let ended = self.child.try_wait();
            panic!("'{text}' not in the log ({ended:?}): {}", self.seen)
        })
    }

    /// The next line with `text`, unless the process ends first.
    fn may_say(&mut self, text: &str) -> Option<String> {
        loop {
            let line = self.log.recv_timeout(LONG).ok()?;
            self.seen.push_str(&line);
            self.seen.push('\n');
            if line.contains(text) {
                return Some(line);
            }
        }
    }

    /// Lines with each of `texts`, in any order.
    pub(super) fn says_all(&mut self, texts: &[&str]) {
        let mut missing = texts.to_vec();
        while !missing.is_empty() {
            let line = self.says("");
            missing.retain(|text| !line.contains(text));
        }
    }

    pub(super) fn signal(&self, name: &str) {
        let status = Command::new("kill").args([name, &self.child.id().to_string()]).status();
        assert!(status.unwrap().success());
    }

    /// As `kill -9` and a crash do.
    pub(super) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// etcd that serves, and its port: a port that was free may be another process's before etcd has it.
pub(super) fn etcd_anywhere(data: &Path) -> (Process, u16) {
    let mut said = String::new();
    for _ in 0..5 {
        let port = free_port();
        let mut etcd = etcd(data, port);
        if etcd.may_say("serving client traffic").is_some() {
            return (etcd, port);
        }
        said.push_str(&etcd.seen);
    }
    panic!("etcd does not serve: {said}")
}

pub(super) fn etcd(data: &Path, port: u16) -> Process {
    let (client, peer) = (format!("http://127.0.0.1:{port}"), format!("http://127.0.0.1:{}", free_port()));
    let mut command = Command::new("etcd");
    command.arg("--data-dir").arg(data);
    command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
    command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
    command.args(["--initial-cluster", &format!("default={peer}"), "--unsafe-no-fsync", "--logger", "zap"]);
    Process::start(&mut command)
}
